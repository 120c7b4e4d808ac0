"""The Pallas package where it meets JAX: what it imports, refuses, warns of, and exports to GPUs that are not here."""

import subprocess
import sys
import textwrap
import warnings

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from jaxattn import attention, doctor
from jaxattn.attention import unified_attention
from jaxattn.errors import UnsupportedError
from jaxattn.index64 import index64
from jaxattn.kernels import pallas, tuning
from jaxattn.kernels.pallas import backend
from jaxattn.problem import AttentionProblem

H200 = tuning.Device(architecture="sm90", cores=132)


@pytest.fixture(scope="module")
def problem():
    return cases.build(cases.CASES["decode-everything"])


def test_no_triton_package_is_imported():
    """With one that cannot be imported, attention and page tables of Pallas work all the same."""
    program = """
        import sys

        class Blocked:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in ("triton", "jax_triton"):
                    raise ModuleNotFoundError(f"no module named {name}", name=name)

        sys.meta_path.insert(0, Blocked())
        import jax, jax.numpy as jnp, numpy as np
        import jaxattn
        from jaxattn.kernels.pallas import page_table

        jax.config.update("jax_disable_most_optimizations", True)
        step = jaxattn.decode_metadata(
            seqused_k=np.array([3]), page_size=2, req_pool_indices=np.array([0]), req_to_token=np.array([[4, 5, 6, 7]])
        )
        k_cache = jnp.zeros((4, 2, 1, 8))
        v_cache = jnp.broadcast_to(jnp.arange(8.0).reshape(4, 2, 1, 1), (4, 2, 1, 8))
        out = jaxattn.unified_attention(jnp.ones((1, 1, 8)), k_cache, v_cache, step, implementation="pallas")
        assert out[0, 0].tolist() == [5.0] * 8, out
        assert callable(page_table.build_page_tables)
        print("no triton:", not any(name.split(".")[0] == "triton" for name in sys.modules))
    """
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False
    )
    assert found.stdout.strip() == "no triton: True", found.stderr


def without_backend(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)


def test_a_jax_without_the_backend_is_refused_and_the_next_is_chosen(problem, monkeypatch):
    without_backend(monkeypatch)
    refusal = r"pallas: jax \S+ has no Pallas Triton backend .*deprecated since jax 0\.11; install jaxattn\[triton\]"
    with pytest.raises(UnsupportedError, match=refusal):
        cases.run(problem, "pallas")
    out, _ = cases.run(problem, ("pallas", "xla"))
    np.testing.assert_array_equal(out, cases.run(problem, "xla")[0])
    assert "no Pallas Triton backend" in attention.implementations()["pallas"]


@pytest.mark.parametrize(
    ("refused", "chosen"), [((), "triton"), (("triton",), "pallas"), (("triton", "pallas"), "xla")]
)
def test_a_gpu_gets_triton_else_pallas_else_xla_and_doctor_says_why(refused, chosen, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    reasons = dict.fromkeys(attention.IMPLEMENTATIONS) | dict.fromkeys(refused, "no such luck")
    monkeypatch.setattr(doctor, "implementations", lambda: reasons)
    lines = {line.split()[0]: line for line in doctor.implementation_lines()}
    assert [name for name, line in lines.items() if "the automatic choice" in line] == [chosen]
    assert all("not usable: no such luck" in lines[name] for name in refused)
    monkeypatch.setattr(attention, "_refusal", lambda problem, name: reasons[name])
    assert attention._choose(None, attention.candidates(None)) == chosen


def abstract(arch: str):
    """A mesh of one GPU that this machine need not have."""
    kind = {"sm90": "NVIDIA H200"}.get(arch, arch)
    device = AbstractDevice(device_kind=kind, num_cores=132, platform="gpu")
    return use_abstract_mesh(AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device))


def exported(problem, arch: str):
    leaves, structure = jax.tree.flatten(problem.metadata)

    def step(q, k_cache, v_cache, *leaves):
        metadata = jax.tree.unflatten(structure, leaves)
        return unified_attention(
            q, k_cache, v_cache, metadata, implementation="pallas", return_lse=True, **problem.options
        )

    # The target of Pallas kernels is not among those that JAX promises to keep.
    unpromised = jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")
    platform = "rocm" if arch.startswith("gfx") else "cuda"
    with abstract(arch):
        export = jax.export.export(jax.jit(step), platforms=(platform,), disabled_checks=(unpromised,))
        return export(*(jnp.asarray(x) for x in (problem.q, problem.k_cache, problem.v_cache)), *leaves)


@pytest.mark.parametrize("arch", ["gfx942", "sm90"])
def test_a_step_is_exported_for_a_gpu_that_is_not_here_and_loaded_back(arch, problem):
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        artifact = exported(problem, arch)
    assert artifact.mlir_module().count("@__gpu$xla.gpu.triton(") == 2
    pytest.importorskip("flatbuffers", reason="jax serialises with it")
    loaded = jax.export.deserialize(artifact.serialize())
    assert loaded.platforms == artifact.platforms
    assert [aval.dtype for aval in loaded.in_avals[3:6]] == [jnp.int64] * 3
    assert [aval.shape for aval in loaded.out_avals] == [problem.out.shape, problem.lse.shape]
    assert loaded.mlir_module() == artifact.mlir_module()


@pytest.mark.parametrize("arch", ["gfx942", "sm90"])
def test_8_bit_caches_are_handed_to_the_kernel_as_they_are(arch):
    """What XLA converted on the way would be a copy of the pool."""
    case = cases.build(cases.CASES["decode-bfloat16-kv-fp8"])
    module = exported(case, arch).mlir_module()
    assert "stablehlo.bitcast_convert" not in module
    flat = f"tensor<{case.k_cache.size}xf8E4M3FN>"
    signatures = [
        line.rpartition(" : (")[2] for line in module.splitlines() if "@__gpu$xla.gpu.triton(" in line
    ]
    assert [signature.count(flat) for signature in signatures] == [2, 0]


def test_the_device_of_an_abstract_mesh_chooses_the_tiles():
    with abstract("gfx950"):
        assert tuning.device() == tuning.Device(architecture="gfx950", cores=132)
    with abstract("sm90"):
        assert tuning.device() == H200
    assert tuning.device().architecture == "interpreter"


@index64
def pool(num_pages: int, dtype) -> AttentionProblem:
    cache = jax.ShapeDtypeStruct((num_pages, 16, 8, 128), jnp.dtype(dtype))
    return AttentionProblem(
        q=jax.ShapeDtypeStruct((1, 8, 128), jnp.bfloat16),
        k_cache=cache,
        v_cache=cache,
        page_table=jax.ShapeDtypeStruct((1, 4), jnp.int64),
        cu_seqlens_q=jax.ShapeDtypeStruct((2,), jnp.int64),
        seqused_k=jax.ShapeDtypeStruct((1,), jnp.int64),
        softmax_scale=1.0,
        max_seqlen_q=1,
        out_dtype=jnp.dtype(jnp.bfloat16),
    )


def test_pools_in_which_pallas_would_wrap_an_offset_are_refused():
    pages = 2**31 // (16 * 8 * 128)
    with tuning.using(H200):
        assert pallas.supports(pool(pages, jnp.int8)) is None
        assert pallas.supports(pool(pages + 1, jnp.int8)).startswith(
            "k_cache: 2147500032 elements of one byte"
        )
        assert "elements of one byte" in pallas.supports(pool(2 * pages, jnp.float8_e4m3fn))
        assert pallas.supports(pool(2 * pages + 1, jnp.int8)) is None
        assert pallas.supports(pool(2 * pages, jnp.bfloat16)) is None
    # Interpreted, every offset has 64 bits.
    assert pallas.supports(pool(pages + 1, jnp.int8)) is None


def test_a_wave_of_32_lanes_is_refused():
    with tuning.using(tuning.Device(architecture="gfx1100", cores=96)):
        assert pallas.supports(pool(1, jnp.bfloat16)).startswith("gfx1100 is not a CDNA GPU")


def test_only_the_notice_of_the_backend_is_silenced():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with backend.quiet_about_deprecation():
            warnings.warn("The Pallas Triton backend is deprecated", DeprecationWarning, stacklevel=1)
            warnings.warn("something else is deprecated", DeprecationWarning, stacklevel=1)
    assert [str(warning.message) for warning in caught] == ["something else is deprecated"]
