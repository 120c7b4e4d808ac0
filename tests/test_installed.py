"""Checks of the installed package; they pass from any folder, with the checkout or with only the wheel."""

import importlib.resources
import importlib.util
import subprocess
import sys
import textwrap


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_import_brings_no_extra():
    loaded = run("""
        import sys
        import jaxattn
        extras = ("triton", "jax_triton", "gguf", "safetensors", "tokenizers", "tqdm", "jinja2", "matplotlib")
        print(*[name for name in extras if name in sys.modules])
    """)
    assert loaded == ""


def test_every_public_name_resolves():
    run("""
        import jaxattn
        assert jaxattn.__all__
        for name in jaxattn.__all__:
            getattr(jaxattn, name)
    """)


def test_kernels_is_no_top_level_package():
    found = run("""
        import importlib.util, os, jaxattn
        os.chdir("/")
        spec = importlib.util.find_spec("kernels")
        print("" if spec is None or "jaxattn" not in str(spec.origin) else spec.origin)
    """)
    assert found == ""


def test_kernels_import_under_the_package():
    assert importlib.util.find_spec("jaxattn.kernels") is not None


def test_tables_and_draft_heads_come_along():
    folder = importlib.resources.files("jaxattn")
    for name in ("kernels/tuning/default.json", "speculative/heads/llama-30x576-49152.safetensors"):
        assert folder.joinpath(name).is_file(), name


def test_decode_attends_over_a_page():
    run("""
        import jax.numpy as jnp, numpy as np
        import jaxattn
        metadata = jaxattn.decode_metadata(
            seqused_k=np.array([3]), req_to_token=np.arange(4, 8)[None], req_pool_indices=np.array([0]),
            page_size=4, max_pages=1,
        )
        k = jnp.full((2, 4, 1, 8), jnp.nan).at[1, :3].set(0.0)
        v = jnp.full((2, 4, 1, 8), jnp.nan).at[1, :3].set(jnp.arange(3.0)[:, None, None])
        out = jaxattn.unified_attention(jnp.ones((1, 2, 8)), k, v, metadata)
        np.testing.assert_allclose(out, 1.0, rtol=1e-6)
    """)
