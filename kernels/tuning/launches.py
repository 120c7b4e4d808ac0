"""From a problem to its launches: which schedule, which tiles."""

import dataclasses
import functools
import importlib.util

import jax.numpy as jnp
import numpy as np

from jaxattn.index64 import cdiv
from jaxattn.kernels.tuning import Device, TileChoice, tuning
from jaxattn.plan import UNCUT, ScheduleSpec
from jaxattn.problem import AttentionProblem

# Longer windows than any sequence are no window; positions in a kernel are 32-bit.
_LONGEST_WINDOW = 2**31 - 1
_ANY_LENGTH = 2**62
# Versions of Triton whose turns were looked at, from the first to before the last.
_TRITON_WITH_TURNS = ((3, 6), (3, 9))
# So many units for each program balance without cuts.
_MANY_UNITS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """One launch of the attention kernel."""

    spec: ScheduleSpec
    choice: TileChoice


def attention_launches(
    problem: AttentionProblem, device: Device, *, takes_turns: bool = True
) -> tuple[Launch, ...]:
    """Cut a problem into launches by the query lengths of its sequences.

    Short sequences (decode, verify) and long ones (prefill) take different tiles, so a batch that can hold both
    needs two launches, each of which schedules its own sequences only. `takes_turns` says whether the kernels can, see
    `kernels.tuning`.
    """
    table = tuning()
    group = problem.group_size
    longest = min(problem.max_seqlen_q, problem.q.shape[0])
    head_dim = max(problem.q.shape[2], problem.v_cache.shape[3])
    kv_bytes = max(problem.k_cache.dtype.itemsize, problem.v_cache.dtype.itemsize)
    compute = compute_dtype(problem)
    if compute == "float32" or any(
        pool.dtype.itemsize == 2 and pool.dtype.name != compute for pool in (problem.k_cache, problem.v_cache)
    ):
        # Values of 16 bits that are converted lie in shared memory twice.
        kv_bytes = 4
    turns_within = 0
    if takes_turns and _keeps_turns(problem, compute):
        turns_within = problem.page_table.shape[1] * problem.page_size

    def launch(kind: str, rows: int, min_q_len: int, max_q_len: int) -> Launch:
        choice = table.choose(kind, head_dim, rows, kv_bytes, turns_within, problem.page_size)
        chunk = 0
        if problem.batch_invariant:
            chunk = cdiv(table.chunk, choice.tile) * choice.tile if kind == "invariant" else UNCUT
        spec = _spec(problem, device, choice, chunk, min_q_len, max_q_len)
        units = spec.num_blocks * spec.num_kv_heads
        if chunk == UNCUT or (kind == "prefill" and units >= _MANY_UNITS * spec.programs):
            # A program a unit keeps neighbours on the same keys at the same time, which then come from the cache.
            spec = dataclasses.replace(spec, chunk=UNCUT, programs=units, heads_abreast=spec.num_kv_heads)
        return Launch(spec=spec, choice=choice)

    if problem.batch_invariant:
        # The tiles follow from the group alone, so that decode and verify compute a row alike.
        if problem.path_keys:
            return (launch("invariant", group, 1, _ANY_LENGTH),)
        split = launch("invariant", group, 1, max(1, table.split_rows // group))
        if longest <= split.spec.max_q_len:
            return (split,)
        return (split, launch("prefill", longest * group, split.spec.max_q_len + 1, _ANY_LENGTH))

    if longest * group <= table.split_rows or longest == 1:
        return (launch("split", longest * group, 1, _ANY_LENGTH),)
    if problem.seqused_k.shape[0] == 1:
        return (launch("prefill", longest * group, 1, _ANY_LENGTH),)
    choice = table.choose("split", head_dim, group, kv_bytes)
    threshold = max(1, choice.block_rows // group)
    return (
        launch("split", group, 1, threshold),
        launch("prefill", longest * group, threshold + 1, _ANY_LENGTH),
    )


def _spec(
    problem: AttentionProblem, device: Device, choice: TileChoice, chunk: int, min_q_len: int, max_q_len: int
) -> ScheduleSpec:
    window = problem.sliding_window
    kv_heads = problem.k_cache.shape[2]
    slots = device.cores * choice.programs_per_core
    abreast = heads_abreast(kv_heads, slots)
    runs = max(1, slots // abreast)
    return ScheduleSpec(
        num_sequences=problem.seqused_k.shape[0],
        num_tokens=problem.q.shape[0],
        max_seqlen_q=problem.max_seqlen_q,
        min_q_len=min_q_len,
        max_q_len=max_q_len,
        num_kv_heads=kv_heads,
        group=problem.group_size,
        capacity=problem.page_table.shape[1] * problem.page_size,
        causal=problem.causal,
        tree=problem.ancestors is not None,
        sliding_window=None if window is None or window >= _LONGEST_WINDOW else window,
        block_rows=_rows_of_block(problem, choice),
        tile=choice.tile,
        programs=runs * abreast,
        heads_abreast=abreast,
        enough_runs=_enough(runs),
        chunk=chunk,
    )


def _rows_of_block(problem: AttentionProblem, choice: TileChoice) -> int:
    """Choose how many query rows are a block; those of nodes with paths of their own are of one node each."""
    if not problem.path_keys:
        return choice.block_rows
    group = problem.group_size
    return next(n for n in range(min(group, choice.block_rows), 0, -1) if group % n == 0)


def heads_abreast(kv_heads: int, slots: int) -> int:
    """Choose how many KV heads programs walk side by side: the most that leave few of the slots empty."""
    divisors = (n for n in range(kv_heads, 0, -1) if kv_heads % n == 0)
    return next(n for n in divisors if slots // n * n >= _enough(slots))


def _enough(slots: int) -> int:
    """So many of the places for programs keep a device as busy as all of them do."""
    return slots * 15 // 16


def _keeps_turns(problem: AttentionProblem, compute: str) -> bool:
    """Whether nothing makes the halves of a program wait for each other within a turn, in which they would for ever.

    K must go from memory to the product as it lies, and the compiler must put no barrier there: Triton 3.9 does, and
    the audit of compiled kernels looks for one. The masks of a tree take shared memory that tiles need.
    """
    pool = problem.k_cache
    straight = pool.dtype.name == compute and pool.shape[3] * pool.dtype.itemsize % 16 == 0
    return straight and problem.ancestors is None and compiler_keeps_turns()


@functools.cache
def compiler_keeps_turns() -> bool:
    """Whether the installed Triton puts no barrier of all warps into a turn."""
    from jaxattn.kernels.triton.compat import installed_version

    if importlib.util.find_spec("triton") is None:
        return False
    first, end = _TRITON_WITH_TURNS
    return first <= installed_version("triton") < end


def compute_dtype(problem: AttentionProblem) -> str:
    """Choose the type of the products: float16 holds every 8-bit format exactly and converts from it fastest."""
    names = {np.dtype(x.dtype).name for x in (problem.q, problem.k_cache, problem.v_cache)}
    wide = {name for name in names if np.dtype(jnp.dtype(name)).itemsize > 1}
    if "float32" in wide or wide == {"float16", "bfloat16"}:
        return "float32"
    if len(names) == 1 and wide == {"bfloat16"}:
        return "bfloat16"
    return "float16"
