import os

# Two CPU devices for shard_map; JAX reads this when it first looks for devices.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"

import pytest

# Each runs every case of the feature matrix; a kernel joins by its name.
IMPLEMENTATIONS = ("xla",)


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return request.param
