"""What peers under torch share: processes of their own, inputs, the check that gates every time, and the clock.

`python -m bench.peers.PEER NAME ...` prints one JSON object a shape: {"shape", "settings", "samples", "error"}, samples
in microseconds a call, or {"shape", "refused"}. Several processes compile and check at the same time; each then times
alone, while nobody else uses the device.
"""

import contextlib
import dataclasses
import fcntl
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from bench import inputs as drawn
from bench.peers import refusal
from bench.shapes import Shape, parse

PROCESSES = 6
CALLS = 8  # of a graph, at least
REPLAYS = 7


class Setting(NamedTuple):
    """One way to compute a case: `prepare()` compiles and plans; `call(i)` of it attends with page table `i`."""

    settings: str
    prepare: Callable[[], Callable[[int], None]]


@dataclasses.dataclass(frozen=True)
class Inputs(drawn.Inputs):
    """A shape's arrays in torch, with what kernels there take besides; no JAX array is made in such a process."""

    tables: tuple[Any, ...]  # int32 [S, M]
    starts: Any  # int32 [S+1], the query tokens of each sequence
    lengths: Any  # int32 [S]
    out: Any  # [S * q_len, H, D]

    def host(self, array) -> np.ndarray:
        """An array in float32 on the host."""
        return array.float().cpu().numpy()

    def cached(self, cache, s: int, kv_head: int) -> np.ndarray:
        """Keys or values `[M, P, D]` of one KV head in the pages of sequence `s`, in float32."""
        import torch

        # As bytes, since torch does not index every dtype.
        rows = cache.view(torch.uint8)[self.tables[0][s].long(), :, kv_head]
        return self.host(rows.contiguous().view(cache.dtype))

    def queries(self, token: int) -> np.ndarray:
        """Queries `[H, D]` of one token, in float32."""
        return self.host(self.q[token])


def unavailable(module: str) -> str | None:
    """Why `module` and torch cannot be used here."""
    try:
        found = importlib.util.find_spec(module) and importlib.util.find_spec("torch")
    except ModuleNotFoundError:
        found = None
    if found is None:
        return f"{module.partition('.')[0]} and torch are not installed"
    return "needs a GPU" if jax.default_backend() != "gpu" else None


def make_inputs(shape: Shape, device: str = "cuda", seed: int = 0) -> Inputs:
    """Draw a batch as `bench.inputs` does, with torch's own random numbers."""
    import torch

    def draw(*dims, dtype, deviation=1.0):
        first = torch.float32 if dtype == "float32" else torch.bfloat16
        values = torch.randn(*dims, device=device, dtype=first)
        return values.mul_(deviation).to(getattr(torch, dtype))

    torch.manual_seed(seed)
    tables, num_pages = drawn.draw_tables(shape, drawn.rotations(shape, on_cpu=device == "cpu"), seed)
    pool = (num_pages, shape.page_size, shape.num_kv_heads, shape.head_dim)
    num_seqs = len(shape.contexts)
    q = draw(num_seqs * shape.q_len, shape.num_heads, shape.head_dim, dtype=shape.q_dtype)
    k_cache, v_cache = (
        draw(*pool, dtype=shape.kv_dtype, deviation=drawn.STORED if shape.quantised else 1.0)
        for _ in range(2)
    )
    starts = np.arange(num_seqs + 1) * shape.q_len
    lengths = np.array(shape.contexts)
    return Inputs(
        shape=shape,
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        page_tables=tables,
        cu_seqlens_q=starts,
        seqused_k=lengths,
        sinks=draw(shape.num_heads, dtype="float32") if shape.sinks else None,
        k_descale=drawn.DESCALE if shape.quantised else None,
        v_descale=drawn.DESCALE if shape.quantised else None,
        tables=tuple(torch.tensor(table, device=device, dtype=torch.int32) for table in tables),
        starts=torch.tensor(starts, device=device, dtype=torch.int32),
        lengths=torch.tensor(lengths, device=device, dtype=torch.int32),
        out=torch.empty_like(q),
    )


def measure(
    module: str, names: Iterable[str], alike: Callable[[Shape], Any] = lambda shape: shape.name
) -> dict[str, dict]:
    """Run `python -m MODULE NAME ...` in fresh processes, because torch and jax would both take the device's memory.

    Args:
        module: a peer that ends in `main(settings)`.
        names: of the shapes, one at least.
        alike: what shapes of one process share: of a kernel that serves many shapes, only one process compiles it.

    Returns:
        The rows by name. A shape whose process ended before it came to it is refused.
    """
    shares = _shares(names, alike)
    compilers = -(-(os.cpu_count() or 1) // len(shares))
    environment = {"MAX_JOBS": str(compilers)} | os.environ
    running = [
        subprocess.Popen(
            [sys.executable, "-m", module, *share], stdout=subprocess.PIPE, text=True, env=environment
        )
        for share in shares
    ]
    rows = {}
    for process, share in zip(running, shares, strict=True):
        output = process.communicate()[0]
        ended = f"its process ended with code {process.returncode}"
        rows |= {name: {"shape": name, "refused": ended} for name in share}
        rows |= {row["shape"]: row for row in map(json.loads, output.splitlines())}
    return rows


def _shares(names, alike) -> list[list[str]]:
    """The names for each process, alike ones together."""
    groups: dict[Any, list[str]] = {}
    for name in names:
        groups.setdefault(alike(parse(name)), []).append(name)
    shares: list[list[str]] = [[] for _ in range(min(PROCESSES, len(groups)))]
    for group in sorted(groups.values(), key=len, reverse=True):
        min(shares, key=len).extend(group)
    return shares


def main(settings: Callable[[Inputs], Iterator[Setting]]) -> None:
    """The command line of a peer, given its settings for a shape."""
    shapes = [parse(name) for name in sys.argv[1:]]
    with _device(fcntl.LOCK_SH):
        checked = [_check(shape, settings) for shape in shapes]
    for shape, (errors, refusals) in zip(shapes, checked, strict=True):
        with _device(fcntl.LOCK_EX):
            row = _best(shape, settings, errors, refusals)
        print(json.dumps({"shape": shape.name} | row), flush=True)


@contextlib.contextmanager
def _device(kind: int):
    """Hold the device together with others (`LOCK_SH`), or wait until nobody does and hold it alone (`LOCK_EX`)."""
    import torch

    with (Path(tempfile.gettempdir()) / "jaxattn-bench-torch.lock").open("w") as lock:
        fcntl.flock(lock, kind)
        with contextlib.redirect_stdout(sys.stderr):  # what a compiler prints must not be taken for a row
            yield
        torch.cuda.empty_cache()


def _check(shape: Shape, settings) -> tuple[dict[str, float], list[str]]:
    """The errors of the right settings, and why the others are out."""
    import torch

    inputs = make_inputs(shape)
    errors, refusals = {}, []
    for setting in settings(inputs):
        inputs.out.fill_(float("nan"))
        try:
            setting.prepare()(0)
            torch.cuda.synchronize()
        except Exception as raised:  # peers and compilers raise what they like; each is a finding
            refusals.append(_report(shape, setting, raised))
            continue
        error = drawn.sampled_error(inputs, inputs.out)
        if error <= drawn.TOLERANCE[shape.kv_dtype]:
            errors[setting.settings] = error
        else:
            refusals.append(f"{setting.settings}: wrong answer, error {error:.1e}")
    return errors, refusals


def _best(shape: Shape, settings, errors: dict[str, float], refusals: list[str]) -> dict:
    """The row of the fastest right setting, or of why there is none."""
    timed = {}
    if errors:
        inputs = make_inputs(shape)
        for setting in settings(inputs):
            if setting.settings in errors:
                try:
                    timed[setting.settings] = _samples(setting.prepare(), len(inputs.tables))
                except Exception as raised:  # not everything can be captured in a graph
                    refusals.append(_report(shape, setting, raised))
    if not timed:
        return {"refused": "; ".join(refusals) or "no setting fits the case"}
    best = min(timed, key=lambda name: np.median(timed[name]))
    return {"settings": best, "samples": timed[best], "error": errors[best]}


def _report(shape: Shape, setting: Setting, raised: Exception) -> str:
    """Print the error of a setting in full; returns it on one line."""
    print(f"{shape.name}, {setting.settings}:", file=sys.stderr)
    traceback.print_exception(raised)
    return refusal(setting.settings, raised)


def _samples(call: Callable[[int], None], tables: int) -> list[float]:
    """Microseconds a call, of a graph that walks over the page tables."""
    import torch

    order = [*range(tables)] * max(1, CALLS // tables)
    for i in range(tables):
        call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in order:
            call(i)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    samples = []
    for _ in range(1 + REPLAYS):
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(end) * 1e3 / len(order))
    return samples[1:]
