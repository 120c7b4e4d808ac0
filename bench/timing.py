"""Device time of a jitted function from CUPTI, and the machine's own read bandwidth and matmul rate."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds a call, over repeated runs."""

    median: float
    low: float
    high: float
    kernels: dict[str, float]

    @classmethod
    def of(cls, samples, kernels=None) -> "Timing":
        """Median, 10th and 90th percentile of `samples` in microseconds."""
        low, median, high = np.percentile(np.asarray(samples, float), [10, 50, 90])
        return cls(float(median), float(low), float(high), kernels or {})


def device_time(function, arguments, *, calls: int = 1, iterations: int = 15) -> Timing:
    """Sum of the device time of every kernel that `function(*arguments)` launches.

    Args:
        function: jittable; it may make several calls in one program to rotate over inputs.
        arguments: its arguments.
        calls: how many calls the program holds; the result is for one.
        iterations: runs of the program that are timed.
    """
    from jax.experimental.mosaic.gpu import profiler

    _, runs = profiler.measure(jax.jit(function), aggregate=False, iterations=iterations)(*arguments)
    samples = [sum(ms for _, ms in run) * 1e3 / calls for run in runs]
    kernels: dict[str, float] = {}
    for name, ms in runs[len(runs) // 2]:
        kernels[name] = kernels.get(name, 0.0) + ms * 1e3 / calls
    return Timing.of(samples, kernels)


def read_bandwidth(gib: int = 4) -> float:
    """GB/s of a row sum over `gib` GiB of float32: the ceiling of a kernel that reads once."""
    data = jax.random.normal(jax.random.key(0), (gib << 15, 8192), jnp.float32)
    timing = device_time(lambda x: jnp.sum(x, axis=1), (data,))
    return data.nbytes / timing.median / 1e3


def matmul_rate(size: int = 8192) -> float:
    """TFLOP/s of a bfloat16 product of two random square matrices."""
    a, b = (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in range(2))
    timing = device_time(lambda a, b: a @ b, (a, b))
    return 2 * size**3 / timing.median / 1e6
