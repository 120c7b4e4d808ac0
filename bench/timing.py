"""Time of a jitted function, and the machine's own read bandwidth and matmul rate.

On CUDA a sample is the sum of the device time of all kernels, from CUPTI; elsewhere it is wall time.
"""

import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np


def interval(samples) -> tuple[float, float, float]:
    """10th percentile, median and 90th percentile."""
    low, median, high = np.percentile(np.asarray(samples, float), [10, 50, 90])
    return float(low), float(median), float(high)


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds a call, over repeated runs."""

    samples: tuple[float, ...]
    kernels: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def median(self) -> float:
        """The median sample."""
        return interval(self.samples)[1]

    @property
    def low(self) -> float:
        """The 10th percentile: the lower end of the spread."""
        return interval(self.samples)[0]

    @property
    def high(self) -> float:
        """The 90th percentile: the upper end of the spread."""
        return interval(self.samples)[2]

    def __add__(self, other: "Timing") -> "Timing":
        """The samples of both, with the kernels of the first."""
        return Timing(self.samples + other.samples, self.kernels or other.kernels)


@functools.cache
def clock() -> str:
    """`cupti` on a CUDA device, else `wall`."""
    device = jax.devices()[0]
    is_cuda = device.platform == "gpu" and "rocm" not in device.client.platform_version.lower()
    return "cupti" if is_cuda else "wall"


def device_time(function, arguments, *, calls: int = 1, iterations: int = 15) -> Timing:
    """Time `function(*arguments)`.

    Args:
        function: jittable; it may make several calls in one program to rotate over inputs.
        arguments: its arguments.
        calls: how many calls the program holds; the result is for one.
        iterations: runs of the program that are timed.
    """
    measure = _cupti if clock() == "cupti" else _wall
    return measure(jax.jit(function), arguments, calls, iterations)


def _cupti(function, arguments, calls: int, iterations: int) -> Timing:
    from jax.experimental.mosaic.gpu import profiler

    _, runs = profiler.measure(function, aggregate=False, iterations=iterations)(*arguments)
    kernels: dict[str, float] = {}
    for name, ms in runs[len(runs) // 2]:
        kernels[name] = kernels.get(name, 0.0) + ms * 1e3 / calls
    return Timing(tuple(sum(ms for _, ms in run) * 1e3 / calls for run in runs), kernels)


def _wall(function, arguments, calls: int, iterations: int) -> Timing:
    jax.block_until_ready(function(*arguments))
    samples = []
    for _ in range(iterations):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        samples.append((time.perf_counter() - start) * 1e6 / calls)
    return Timing(tuple(samples))


def _on_cpu() -> bool:
    return jax.default_backend() == "cpu"


@jax.jit
def _row_sums(x):
    return jnp.sum(x, axis=1)


@jax.jit
def _product(a, b):
    return a @ b


def read_bandwidth(mib: int | None = None) -> float:
    """GB/s of a row sum over float32 (4 GiB, 64 MiB on a CPU): the ceiling of a kernel that reads once."""
    mib = mib or (64 if _on_cpu() else 4096)
    data = jax.random.uniform(jax.random.key(0, impl="rbg"), (mib << 5, 8192), jnp.float32)
    return data.nbytes / device_time(_row_sums, (data,)).median / 1e3


def matmul_rate(size: int | None = None) -> float:
    """TFLOP/s of a product of two random square matrices: bfloat16 of 8192, float32 of 512 on a CPU."""
    size, dtype = size or (512 if _on_cpu() else 8192), jnp.float32 if _on_cpu() else jnp.bfloat16
    a, b = (jax.random.normal(jax.random.key(i, impl="rbg"), (size, size), dtype) for i in range(2))
    return 2 * size**3 / device_time(_product, (a, b)).median / 1e6
