import os

# Two CPU devices for shard_map; JAX reads this when it first looks for devices.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"

import contextlib
import importlib.util

import jax
import pytest
from jaxtyping import install_import_hook

# The shapes in these signatures are checked at every call; users pay nothing for them.
CHECKED_MODULES = tuple(f"jaxattn.kernels.{name}" for name in ("_blocks", "_output", "reference", "xla"))
install_import_hook(CHECKED_MODULES, "beartype.beartype")

# Each runs every case of the feature matrix; a kernel joins by its name.
IMPLEMENTATIONS = ("xla", "triton", "pallas") if importlib.util.find_spec("triton") else ("xla", "pallas")

# Compiling an interpreted Pallas kernel takes seconds, so a run without `-m` tests each feature, format and kind of
# shape with it once, all of them together in each walk, and what JAX's transformations do.
COVERING_CASES = {
    *("target_verify-plain", "decode-window", "decode-softcap", "decode-sinks", "decode-alibi"),
    *("decode-descales", "decode-output_scale", "target_verify-not_causal_window", "extend-batch_invariant"),
    *(
        "decode-everything",
        "target_verify-bfloat16-everything",
        "extend-float16-everything",
        "tree-everything",
    ),
    *("tree-two-words", "decode-bfloat16-kv-fp8", "decode-bfloat16-kv-float8_e4m3fnuz"),
    *("decode-bfloat16-kv-float8_e5m2", "extend-float32-kv-int8", "decode-q-float8_e4m3fn", "decode-q-int8"),
    *("extend-out-float8_e4m3fn", "extend-out-int8", "decode-page-1", "decode-ratio-7"),
    *("extend-width-24-40", "decode-long-among-short", "decode-empty"),
}
COVERING_TESTS = {
    "test_p60_vmap_over_a_leading_axis[0-jit of vmap-pallas]",
    "test_p60_shard_map_over_kv_heads[pallas-True]",
    "test_eval_shape",
    "test_export_keeps_int64_indices_with_x64_off",
    "test_p02_very_negative_logits_are_not_masked",
    "test_p14_a_page_id_outside_the_pool_is_masked_and_aliases_no_page",
    "test_p35_numpy_indices_beyond_int32_keep_their_value",
    "test_p61_a_tile_that_reaches_past_the_end_of_the_pool",
}


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    with quick_to_compile(request.param):
        yield request.param


@pytest.fixture(params=[name for name in IMPLEMENTATIONS if name != "xla"])
def kernels(request):
    """Name of a package of kernels, for tests of what lies beneath `implementation`."""
    with quick_to_compile(request.param):
        yield request.param


@contextlib.contextmanager
def quick_to_compile(implementation):
    """Spare most optimisations where a kernel is interpreted by Pallas: they take longer than the run."""
    interpreted = implementation == "pallas" and jax.default_backend() == "cpu"
    jax.config.update("jax_disable_most_optimizations", interpreted)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def pytest_collection_modifyitems(config, items):
    """Without a GPU its tests are skipped; with one, `-m gpu` also means the matrix compiled for it.

    What is `slow`, such as interpreted Pallas beyond what covers its features, runs where it is asked for: with
    `-m slow`, or by its name.
    """
    on_gpu = jax.default_backend() == "gpu"
    for item in items:
        name = implementation_of(item)
        if on_gpu and name in ("triton", "pallas"):
            item.add_marker(pytest.mark.gpu)
        elif not on_gpu and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        elif name == "pallas" and not covers(item):
            item.add_marker(pytest.mark.slow)
    if config.option.markexpr or any("::" in argument for argument in config.args):
        return
    left_out = [item for item in items if item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not item.get_closest_marker("slow")]


def implementation_of(item) -> str | None:
    return item.callspec.params.get("implementation") if getattr(item, "callspec", None) else None


def covers(item) -> bool:
    """Whether a test of an interpreted kernel is one that covers its features; other files choose for themselves."""
    if not item.module.__name__.startswith(("test_attention", "test_reports")):
        return True
    if item.originalname == "test_matches_the_oracle":
        return item.callspec.params["name"] in COVERING_CASES
    return bool({item.originalname, item.name} & COVERING_TESTS)
