import os

# Two CPU devices for shard_map; JAX reads this when it first looks for devices.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"

import importlib.util

import jax
import pytest
from jaxtyping import install_import_hook

# The shapes in these signatures are checked at every call; users pay nothing for them.
CHECKED_MODULES = tuple(f"jaxattn.kernels.{name}" for name in ("_blocks", "_output", "reference", "xla"))
install_import_hook(CHECKED_MODULES, "beartype.beartype")

# Each runs every case of the feature matrix; a kernel joins by its name.
IMPLEMENTATIONS = ("xla", "triton") if importlib.util.find_spec("triton") else ("xla",)


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return request.param


def pytest_collection_modifyitems(items):
    """Without a GPU its tests are skipped; with one, `-m gpu` also means the matrix compiled for it."""
    on_gpu = jax.default_backend() == "gpu"
    for item in items:
        if (
            on_gpu
            and getattr(item, "callspec", None)
            and item.callspec.params.get("implementation") == "triton"
        ):
            item.add_marker(pytest.mark.gpu)
        elif not on_gpu and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
