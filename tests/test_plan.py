"""The split-KV plan against plain loops."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxattn import plan
from jaxattn.index64 import index64
from jaxattn.metadata import AttentionMetadata
from jaxattn.plan import UNCUT, ScheduleSpec

SPEC = ScheduleSpec(
    num_sequences=5,
    num_tokens=48,
    max_seqlen_q=20,
    min_q_len=1,
    max_q_len=2**62,
    num_kv_heads=2,
    group=3,
    capacity=4096,
    causal=True,
    tree=False,
    sliding_window=None,
    block_rows=16,
    tile=32,
    programs=14,
    heads_abreast=2,
    enough_runs=5,
    chunk=0,
)


def line_of_work(spec: ScheduleSpec, q_lens, lengths):
    """The (sequence, block, number of the block's unit, place) of every place of the line, in order."""
    line = []
    for sequence, (q_len, used) in enumerate(zip(q_lens, lengths, strict=True)):
        if not max(spec.min_q_len, 1) <= q_len <= spec.max_q_len:
            continue
        context = used - q_len
        for block in range(-(-q_len * spec.group // spec.block_rows)):
            rows = range(block * spec.block_rows, min((block + 1) * spec.block_rows, q_len * spec.group))
            tokens = [row // spec.group for row in rows]
            stop = min(used, spec.capacity)
            if spec.causal:
                stop = min(stop, context + tokens[-1] + 1)
            stop = max(stop, 0)
            start = 0
            if spec.sliding_window is not None:
                first_position = context if spec.tree else context + tokens[0]
                start = min(max(first_position - spec.sliding_window + 1, 0), stop)
            places = range(start // spec.step, -(-stop // spec.step)) or [start // spec.step]
            heads = spec.num_kv_heads // spec.heads_abreast
            line += [(sequence, block, unit, p) for unit in range(heads) for p in places]
    return line


def expected_active(spec: ScheduleSpec, line) -> int:
    """Runs of the line: as many as end with equally long units, if those are enough."""
    units = [len(list(places)) for _, places in itertools.groupby(line, key=lambda place: place[:3])]
    if units and not spec.chunk and len(set(units)) == 1:
        count, units_in_run = len(units), -(-len(units) // spec.runs)
        ends = [n for n in range(1, spec.runs + 1) if n % count == 0 or n * units_in_run == count]
        even = max(ends, default=0)
        if even >= spec.enough_runs:
            return min(even, len(line))
    return min(len(line), spec.runs)


def check_schedule(spec: ScheduleSpec, schedule: plan.Schedule, q_lens, lengths) -> None:
    line = line_of_work(spec, q_lens, lengths)
    blocks = list(dict.fromkeys((sequence, block) for sequence, block, _, _ in line))
    live = len(blocks)
    arrays = [np.asarray(a) for a in (schedule.block_sequence, schedule.block_index, schedule.tile_start)]
    assert all(a.dtype == np.int64 for a in arrays)
    sequences, indices, starts = arrays
    assert list(zip(sequences[:live].tolist(), indices[:live].tolist(), strict=True)) == blocks
    places = [sum((s, b) == block for s, b, _, _ in line) for block in blocks]
    assert starts[: live + 1].tolist() == [0, *np.cumsum(places).tolist()]
    assert (starts[live:] == len(line)).all()
    active = int(schedule.active[0])
    assert active == expected_active(spec, line)
    for run in range(active):
        sequence, block, _, _ = line[run * len(line) // active]
        assert int(schedule.first_block[run]) == blocks.index((sequence, block))


def cumulated(q_lens):
    return np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int64)


@index64
def xla_schedule(spec, q_lens, lengths):
    arrays = (jnp.asarray(cumulated(q_lens)), jnp.asarray(np.array(lengths, np.int64)))
    return jax.jit(plan.build_schedule, static_argnums=0)(spec, *arrays)


@index64
def fused_schedule(spec, q_lens, lengths):
    fused = pytest.importorskip("jaxattn.kernels.triton.plan")
    arrays = (jnp.asarray(cumulated(q_lens)), jnp.asarray(np.array(lengths, np.int64)))
    return jax.jit(fused.build_schedule, static_argnums=0)(spec, *arrays)


SPECS = {
    "plain": SPEC,
    "window": dataclasses.replace(SPEC, sliding_window=100),
    "not-causal": dataclasses.replace(SPEC, causal=False),
    "tree-window": dataclasses.replace(SPEC, tree=True, sliding_window=40),
    "chunks": dataclasses.replace(SPEC, chunk=256),
    "uncut": dataclasses.replace(SPEC, chunk=UNCUT),
    "one-head-abreast": dataclasses.replace(SPEC, programs=7, heads_abreast=1),
    "long-only": dataclasses.replace(SPEC, min_q_len=5),
    "short-only": dataclasses.replace(SPEC, max_q_len=4),
}
Q_LENS = st.lists(st.integers(0, 9), min_size=5, max_size=5)
LENGTHS = st.lists(st.sampled_from([0, 1, 5, 31, 32, 33, 100, 1000, 4096, 5000]), min_size=5, max_size=5)


@pytest.mark.parametrize("name", SPECS)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(q_lens=Q_LENS, lengths=LENGTHS)
def test_the_schedule_holds_every_tile_once_in_order(name, q_lens, lengths):
    check_schedule(SPECS[name], xla_schedule(SPECS[name], q_lens, lengths), q_lens, lengths)


@pytest.mark.parametrize("name", ["plain", "window", "chunks", "one-head-abreast", "short-only"])
@settings(max_examples=5, deadline=None, derandomize=True)
@given(lengths=LENGTHS, live=st.lists(st.integers(0, 5), min_size=5, max_size=5))
def test_the_fused_kernel_builds_the_same_schedule(name, lengths, live):
    spec = dataclasses.replace(SPECS[name], max_seqlen_q=5, num_tokens=30)
    assert spec.blocks_in_sequence == 1
    expected, actual = xla_schedule(spec, live, lengths), fused_schedule(spec, live, lengths)
    check_schedule(spec, actual, live, lengths)
    work = int(expected.tile_start[-1])
    for field in ("block_sequence", "block_index", "tile_start"):
        assert np.array_equal(getattr(actual, field), getattr(expected, field)), field
    active = min(work, spec.runs)
    assert np.array_equal(actual.active, expected.active)
    assert np.array_equal(actual.first_block[:active], expected.first_block[:active])


@pytest.mark.parametrize(
    ("sequences", "programs", "active"),
    [(3, 13, 12), (3, 11, 6), (5, 10, 10), (5, 9, 5), (5, 7, 5), (5, 4, 4), (1, 9, 8), (2, 7, 7)],
)
@pytest.mark.parametrize("builder", [xla_schedule, fused_schedule])
def test_runs_of_equally_long_units_end_with_units_where_enough_remain(builder, sequences, programs, active):
    spec = dataclasses.replace(SPEC, programs=programs, heads_abreast=1, max_seqlen_q=1, num_tokens=5)
    q_lens, lengths = [1] * sequences + [0] * (5 - sequences), [330] * sequences + [0] * (5 - sequences)
    schedule = builder(spec, q_lens, lengths)
    assert int(schedule.active[0]) == active
    check_schedule(spec, schedule, q_lens, lengths)
    longer = [lengths[0] + 32, *lengths[1:]]
    if sequences > 1:
        assert int(builder(spec, q_lens, longer).active[0]) == programs


def test_one_sequence_of_a_million_tokens_among_short_ones_is_cut_evenly():
    spec = dataclasses.replace(
        SPEC,
        num_sequences=4,
        num_tokens=4,
        max_seqlen_q=1,
        capacity=1 << 20,
        programs=528,
        tile=64,
    )
    lengths = [17, 1 << 20, 0, 64]
    schedule = xla_schedule(spec, [1, 1, 1, 1], lengths)
    starts = np.asarray(schedule.tile_start).tolist()
    assert starts == [0, 1, 1 + 16384, 2 + 16384, 3 + 16384]
    runs = np.diff([g * starts[-1] // 264 for g in range(265)])
    assert runs.max() - runs.min() <= 1
    assert np.asarray(schedule.first_block)[1:-1].tolist() == [1] * 262


def test_p58_no_live_sequence_leaves_an_empty_line():
    schedule = xla_schedule(SPEC, [0] * 5, [0, 3, 0, 9, 0])
    assert not np.asarray(schedule.tile_start).any()


def metadata(q_lens, lengths, page_size=16, columns=8):
    with jax.enable_x64(True):
        return AttentionMetadata(
            page_table=jnp.zeros((len(q_lens), columns), jnp.int64),
            cu_seqlens_q=jnp.asarray(cumulated(q_lens)),
            seqused_k=jnp.asarray(np.array(lengths, np.int64)),
            max_seqlen_q=max(q_lens),
            page_size=page_size,
            mode="extend",
        )


def test_a_plan_holds_a_schedule_for_each_window_and_each_launch():
    q = jax.ShapeDtypeStruct((43, 8, 64), jnp.bfloat16)
    k_cache = jax.ShapeDtypeStruct((32, 16, 2, 64), jnp.bfloat16)
    batch = metadata([40, 1, 1, 1], [40, 100, 7, 0])
    made = plan.make_plan(batch, q, k_cache, sliding_windows=(None, 24))
    windows = [schedule.spec.sliding_window for schedule in made.schedules]
    assert windows == [None, None, 24, 24]
    assert all(made.find(schedule.spec) is schedule for schedule in made.schedules)
    assert made.find(dataclasses.replace(made.schedules[0].spec, tile=8)) is None


def test_p62_a_plan_is_made_without_a_host_read_and_compiled_once():
    q = jax.ShapeDtypeStruct((2, 8, 64), jnp.bfloat16)
    k_cache = jax.ShapeDtypeStruct((32, 16, 2, 64), jnp.bfloat16)
    traces = []

    @index64
    @jax.jit
    def planned(batch):
        traces.append(None)
        return plan.make_plan(batch, q, k_cache)

    ends = [
        int(planned(metadata([1, 1], lengths)).schedules[0].tile_start[-1]) for lengths in ([5, 9], [100, 0])
    ]
    assert len(traces) == 1
    assert ends == [2, 5]
