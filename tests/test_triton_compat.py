"""jax-triton's refusals and repairs, with its lowering run on a CPU host against a stub of the native launcher."""

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import os
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jaxattn.errors import UnsupportedError

pytest.importorskip("triton")
if importlib.util.find_spec("jax_triton") is None:
    pytest.skip("jax-triton is not installed", allow_module_level=True)

import triton
import triton.language as tl

from jaxattn.kernels.triton import compat

JAX_TRITON = compat.installed_version("jax-triton")
AMD_COMPILER = importlib.import_module("triton.backends.amd.compiler")


@triton.jit
def double(x_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    tl.store(out_ptr + at, 2 * tl.load(x_ptr + at))


@dataclasses.dataclass
class Launcher:
    """Stands in for jaxlib's native launcher, and records the kernels that jax-triton hands to it."""

    arch: str = "gfx942"
    compiled: list = dataclasses.field(default_factory=list)

    def install(self, module, monkeypatch):
        def kernel(name, num_warps, *rest):
            self.compiled.append((name, num_warps))

        stub = {
            "TritonKernel": kernel,
            "TritonKernelCall": lambda *args: SimpleNamespace(to_proto=lambda *names: b"call"),
            "create_array_parameter": lambda *sizes: sizes,
            "create_scalar_parameter": lambda value, dtype: (value, dtype),
            "get_compute_capability": lambda device: 90,
            "get_serialized_metadata": lambda opaque: b"",
            "get_arch_details": lambda device: f"{self.arch}:sramecc+:xnack-",
        }
        for name, value in stub.items():
            monkeypatch.setattr(module, name, value, raising=False)


@pytest.fixture
def launcher(monkeypatch):
    """A launcher whose architecture a test sets, under a freshly imported jax_triton without repairs."""
    # compiled kernels are kept on the function, which outlives a module
    monkeypatch.setattr(double, "_jT_kernel_cache", {}, raising=False)
    kept = {
        name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "jax_triton"
    }
    monkeypatch.setattr(AMD_COMPILER.HIPBackend, "make_llir", original_make_llir())
    stub = Launcher()
    stub.install(importlib.import_module("jaxlib.gpu_triton"), monkeypatch)
    yield stub
    for name in [name for name in sys.modules if name.partition(".")[0] == "jax_triton"]:
        del sys.modules[name]
    sys.modules.update(kept)


def original_make_llir():
    return staticmethod(
        getattr(AMD_COMPILER.HIPBackend.make_llir, "__wrapped__", AMD_COMPILER.HIPBackend.make_llir)
    )


def lower(jax_triton, platform):
    """Lower a jitted call of `double` for a platform that this machine does not have."""
    out = jax.ShapeDtypeStruct((512,), jnp.float32)
    keyword = "out_type" if JAX_TRITON >= (0, 4) else "out_shape"

    def doubled(x):
        return jax_triton.triton_call(x, kernel=double, grid=(4,), num_warps=4, SIZE=128, **{keyword: out})

    return jax.jit(doubled).trace(out).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(
    ("platform", "arch"),
    [("rocm", "gfx942"), ("rocm", "gfx950"), ("cuda", "sm90")],
    ids=["gfx942", "gfx950", "sm90"],
)
def test_a_call_lowers_with_the_repairs(launcher, platform, arch):
    launcher.arch = arch
    text = lower(compat.load_jax_triton(), platform)
    assert "triton_kernel_call" in text
    assert launcher.compiled == [("double", 4)]


def test_the_repairs_mend_what_they_say(launcher):
    """Without a repair that is needed the same call does not lower, so the repair is what makes it lower."""
    jax_triton = compat.import_jax_triton()
    needed = [repair for repair in compat.REPAIRS if repair.is_needed()]
    if not needed:
        pytest.skip("this jax, jax-triton and triton need no repair")
    while needed:
        with pytest.raises((TypeError, KeyError, ValueError)):
            lower(jax_triton, "rocm")
        repair = needed.pop(0)
        repair.apply()
        assert not repair.is_needed(), f"{repair.name}: applied, and its probe still finds the fault"
    assert "triton_kernel_call" in lower(jax_triton, "rocm")


REMOVE = "upstream has mended it: delete this repair from kernels/triton/compat.py once no supported version needs it"


def test_dead_code_rule_is_still_outdated_on_jax_0_12(launcher):
    compat.import_jax_triton()
    fault = compat.dead_code_rule_is_outdated()
    if jax.__version_info__ >= (0, 12) and JAX_TRITON >= (0, 4):
        assert fault, f"jax {jax.__version__}, jax-triton {compat.dotted(JAX_TRITON)}: {REMOVE}"
    else:
        assert not fault


def test_num_ctas_is_still_missing_with_triton_3_7(launcher):
    compat.import_jax_triton()
    fault = compat.num_ctas_is_missing()
    if compat.installed_version("triton") >= (3, 7):
        assert fault, f"triton {triton.__version__}, jax-triton {compat.dotted(JAX_TRITON)}: {REMOVE}"
    else:
        assert not fault


def test_a_mended_jax_triton_is_left_alone(launcher, monkeypatch):
    """Both probes switch off against versions of jax-triton that do what the repairs do."""
    compat.import_jax_triton()
    library = importlib.import_module("jax_triton.triton_lib")
    partial_eval, primitive = compat.dead_code_table()
    monkeypatch.setitem(partial_eval.dce_rules, primitive, lambda used, *rest: rest)

    def mended(module, backend, options, *rest):
        metadata = {"num_ctas": options.num_ctas}
        return backend.make_llir(backend.make_ttir(module, metadata, options), metadata, options)

    monkeypatch.setattr(library, "compile_ttir_to_hsaco_inplace", mended)
    assert not any(repair.is_needed() for repair in compat.REPAIRS)


def test_a_mended_triton_is_left_alone(launcher, monkeypatch):
    compat.import_jax_triton()
    monkeypatch.setattr(
        AMD_COMPILER.HIPBackend, "make_llir", staticmethod(lambda module, metadata, options: module)
    )
    assert not compat.num_ctas_is_missing()


def test_repairs_are_applied_once(launcher):
    compat.load_jax_triton()
    first = AMD_COMPILER.HIPBackend.make_llir
    compat.load_jax_triton()
    assert AMD_COMPILER.HIPBackend.make_llir is first


def test_the_repair_keeps_num_ctas_of_the_caller(launcher, monkeypatch):
    seen = {}
    monkeypatch.setattr(
        AMD_COMPILER.HIPBackend,
        "make_llir",
        staticmethod(lambda module, metadata, options: seen.update(metadata)),
    )
    compat.supply_num_ctas()
    AMD_COMPILER.HIPBackend.make_llir(None, {"num_ctas": 2}, None)
    assert seen == {"num_ctas": 2}
    AMD_COMPILER.HIPBackend.make_llir(None, {}, None)
    assert seen == {"num_ctas": 1}


def test_status_names_a_jaxlib_without_gpu_support():
    if compat.has_native_launcher():
        pytest.skip("this jaxlib has GPU support")
    reason = compat.jax_triton_status()
    assert reason.startswith("jaxlib ")
    assert "no GPU support" in reason
    assert "install jax[cuda12]" in reason
    with pytest.raises(UnsupportedError, match=r"implementation 'triton': jaxlib .* no GPU support"):
        compat.load_jax_triton()


def test_status_is_none_where_everything_is_there(launcher):
    assert compat.jax_triton_status() is None


def test_status_names_a_missing_package(monkeypatch):
    def missing(package):
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert compat.jax_triton_status() == "triton is not installed; install jaxattn[triton]"


@pytest.mark.parametrize(
    ("triton_version", "jax_triton_version", "reason"),
    [
        ("3.6.0", "0.4.1", "needs triton 3.7 or newer, found 3.6.0"),
        ("3.9.0", "0.2.0", "jax-triton 0.2.0 is too old"),
        ("3.9.0+git1234", "0.4.0rc1", "has no GPU support"),
    ],
)
def test_status_names_versions_that_do_not_fit(monkeypatch, triton_version, jax_triton_version, reason):
    versions = {"triton": triton_version, "jax-triton": jax_triton_version}
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    monkeypatch.setattr(compat, "has_native_launcher", lambda: False)
    assert reason in compat.jax_triton_status()


def test_status_passes_on_an_import_error(launcher, monkeypatch):
    def broken():
        raise ImportError("no symbol")

    monkeypatch.setattr(compat, "import_jax_triton", broken)
    assert compat.jax_triton_status().endswith("does not import: no symbol")


@pytest.mark.parametrize("folder", ["/some/cache", None])
def test_importing_jax_triton_keeps_the_cache_folder(launcher, monkeypatch, folder):
    if folder:
        monkeypatch.setenv("TRITON_CACHE_DIR", folder)
    else:
        monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    compat.import_jax_triton()
    assert os.environ.get("TRITON_CACHE_DIR") == folder


@pytest.mark.parametrize("arch", ["gfx1100", "gfx1201", "gfx906"])
def test_amd_gpus_other_than_cdna_are_refused(arch):
    reason = compat.refuse_architecture(arch)
    assert reason.startswith(f"{arch} is not a CDNA GPU")
    assert "gfx90a, gfx942, gfx950" in reason


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950", "sm80", "sm90"])
def test_cdna_and_cuda_are_accepted(arch):
    assert compat.refuse_architecture(arch) is None


@pytest.mark.parametrize(
    ("capability", "arch"), [("9.0", "sm90"), ("gfx942:sramecc+:xnack-", "gfx942"), ("gfx950", "gfx950")]
)
def test_architecture_of_a_device(capability, arch):
    assert compat.device_architecture(SimpleNamespace(compute_capability=capability)) == arch
