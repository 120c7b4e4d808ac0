"""The attention kernels where splitting, tiling and launching matter; the feature matrix is in cases.py."""

import dataclasses
import importlib
import importlib.util
import itertools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import plan
from jaxattn.attention import unified_attention
from jaxattn.checks import attention_problem
from jaxattn.errors import UnsupportedError
from jaxattn.index64 import index64
from jaxattn.kernels import tuning
from jaxattn.kernels.tuning.launches import attention_launches, heads_abreast

interpreted = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="sizes and settings are those of the interpreter"
)


needs_triton = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs triton")


def with_every_choice(table: tuning.Tuning, **changes) -> tuning.Tuning:
    """Change each tile choice of a table."""
    kinds = {
        kind: tuple(dataclasses.replace(choice, **changes) for choice in getattr(table, kind))
        for kind in tuning.KINDS
    }
    return dataclasses.replace(table, **kinds)


@index64
def run_with(kernels: str, problem: cases.Problem, *, cores: int | None = None, **choice):
    """Run the kernels with a number of programs and tile choices forced."""
    attention = importlib.import_module(f"jaxattn.kernels.{kernels}.attention")
    table = with_every_choice(tuning.tuning(), **choice)
    device = tuning.device()
    device = dataclasses.replace(device, cores=cores or device.cores)
    arrays = (jnp.asarray(array) for array in (problem.q, problem.k_cache, problem.v_cache))
    checked = attention_problem(*arrays, problem.metadata, **problem.options)
    options = cases.COMPILED_QUICKLY if jax.default_backend() == "cpu" else None
    with tuning.using(device, table):
        return tuple(
            np.asarray(x) for x in jax.jit(lambda p: attention.run(p), compiler_options=options)(checked)
        )


@interpreted
@pytest.mark.parametrize("splits", [1, 8, 128])
def test_p46_any_number_of_splits_gives_the_same_result(kernels, splits):
    case = cases.Case(
        mode="decode",
        lengths=((1, 3), (1, 5000)),
        heads=2,
        kv_heads=1,
        width=32,
        page_size=16,
        dtype="bfloat16",
    )
    problem = cases.build(case)
    out, lse = run_with(kernels, problem, cores=splits, tile=128)
    assert np.abs(out.astype(np.float64) - problem.out)[:2].max() < 4e-3 * np.abs(problem.out).max()
    np.testing.assert_allclose(lse[:2], problem.lse[:2], atol=1e-5)


@interpreted
def test_p46_more_programs_than_tiles_leave_no_empty_split(kernels):
    problem = cases.build(cases.Case(mode="decode", lengths=((1, 3),), heads=2, kv_heads=1, padding_rows=0))
    few, many = run_with(kernels, problem, cores=1), run_with(kernels, problem, cores=16)
    assert np.array_equal(few[0], many[0])
    assert np.array_equal(few[1], many[1])


@interpreted
def test_p45_the_sink_joins_the_denominator_once_however_the_window_is_cut(kernels):
    keys, window = 512, 16
    lengths = ((1, keys),)
    metadata = cases.make_metadata(np.arange(32).reshape(1, 32), lengths, page_size=16, mode="decode")
    v = np.zeros((32, 16, 1, 16), np.float32)
    v[-1, :, 0] = np.eye(16)
    problem = cases.Problem(
        q=np.zeros((1, 2, 16), np.float32),
        k_cache=np.ones((32, 16, 1, 16), np.float32),
        v_cache=v,
        metadata=metadata,
        options={"sliding_window": window, "sinks": np.ones(2, np.float32)},
        out=np.zeros(0),
        lse=np.zeros(0),
    )
    for cores in (1, 4):
        out, lse = run_with(kernels, problem, cores=cores, tile=16)
        np.testing.assert_allclose(out[0], 0.0534237, rtol=1e-5)
        np.testing.assert_allclose(lse[0], 2.9295007, rtol=1e-6)
    options = {"sinks": np.ones(2, np.float32)}
    out, lse = run_with(kernels, dataclasses.replace(problem, options=options), cores=7, tile=16)
    np.testing.assert_allclose(out[0], 1 / (keys + np.e), rtol=1e-5)
    np.testing.assert_allclose(lse[0], np.log(keys + np.e), rtol=1e-6)


@interpreted
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(("cores", "abreast"), [(4, 3), (5, 2), (7, 6), (16, 3)])
def test_heads_that_walk_a_run_side_by_side(kernels, cores, abreast, batch_invariant):
    assert heads_abreast(6, cores) == abreast
    case = cases.Case(
        mode="decode",
        lengths=((1, 3), (1, 90), (0, 0), (1, 41)),
        heads=12,
        kv_heads=6,
        options={"batch_invariant": batch_invariant},
    )
    problem = cases.build(case)
    out, lse = run_with(kernels, problem, cores=cores)
    np.testing.assert_allclose(out, problem.out, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(lse, problem.lse, rtol=2e-6)


@interpreted
@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "page_size"), [("plain", 16), ("plain", 1), ("everything", 16), ("batch_invariant", 16)]
)
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float32", "float8_e4m3fn"])
@pytest.mark.parametrize("width", [64, 128, 256, 512])
@pytest.mark.parametrize("architecture", ["sm90", "gfx942", "gfx950", "default"])
def test_tiles_of_each_architecture_match_the_oracle(architecture, width, kv_dtype, options, page_size):
    """Interpreted, so without instructions and formats that only the device has."""
    table = dataclasses.replace(
        with_every_choice(tuning.load(architecture), turns=False),
        native_formats=tuning.load("interpreter").native_formats,
        turns=("", ""),
        unpack={},
    )
    case = cases.Case(
        lengths=((1, 90), (5, 70), (40, 131), (0, 0)),
        width=width,
        page_size=page_size,
        dtype="float32" if kv_dtype == "float32" else "bfloat16",
        kv_dtype=kv_dtype,
        **{**cases.OPTIONS, "everything": cases.EVERYTHING}[options],
    )
    jax.clear_caches()
    with tuning.using(tuning.device(), table):
        cases.check(cases.build(case), "triton")


# In the interpreter, widths up to 64 walk tiles without masks in a loop of their own, wider ones do not.
@pytest.mark.parametrize("width", [16, 80])
@pytest.mark.parametrize("page", [-1, 10**6, 2**40])
# Few pages a tile, and many; behind the first page ids too, which are looked at before all others.
@pytest.mark.parametrize(
    ("page_size", "place", "keys"), [(4, 9, 150), (1, 60, 150), (4, 260, 1200), (1, 1060, 1200)]
)
def test_p14_an_unknown_page_among_tiles_without_masks_is_masked_out(
    kernels, page_size, place, keys, page, width
):
    case = cases.Case(
        lengths=((40, keys),), heads=4, kv_heads=1, width=width, page_size=page_size, padding_rows=0
    )
    problem = cases.build(case)
    # One page more at the front, full of NaN: what an unmasked read of an unknown page would find.
    k_cache, v_cache = (
        np.concatenate([np.full_like(cache[:1], np.nan), cache])
        for cache in (problem.k_cache, problem.v_cache)
    )
    table = np.asarray(problem.metadata.page_table) + 1
    table[0, place] = page
    metadata = cases.make_metadata(table, case.lengths, page_size=page_size)
    problem = dataclasses.replace(problem, k_cache=k_cache, v_cache=v_cache, metadata=metadata)
    out, lse = cases.run(problem, kernels)
    expected, expected_lse = cases.oracle_of(problem.q, k_cache, v_cache, metadata, {})
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(lse, expected_lse, rtol=2e-6)


def test_no_page_is_looked_up_behind_the_end_of_the_table(kernels):
    """The last tile ends in a page that the table does not have, and its window leaves no tile without masks."""
    case = cases.Case(
        lengths=((24, 24),), heads=4, kv_heads=1, page_size=24, padding_rows=0, options={"sliding_window": 4}
    )
    problem = cases.build(case)
    metadata = cases.make_metadata(np.asarray(problem.metadata.page_table)[:, :1], case.lengths, page_size=24)
    out, _ = cases.run(dataclasses.replace(problem, metadata=metadata), kernels)
    np.testing.assert_allclose(out, problem.out, rtol=2e-5, atol=2e-6)


def batch_invariant_rows(kernels, lengths, sequence_data, options):
    """Run sequences with `batch_invariant=True` and return their rows; pages are laid out afresh."""
    page_size, kv_heads, width = 4, 1, 16
    columns = max(-(-used // page_size) for _, used in lengths) + 1
    pages = sum(-(-used // page_size) for _, used in lengths)
    k_cache = np.full((pages, page_size, kv_heads, width), np.nan, np.float32)
    v_cache, table, q = k_cache.copy(), np.full((len(lengths), columns), -1), []
    ids = iter(np.random.default_rng(7).permutation(pages))
    for row, ((q_len, used), (queries, keys, values)) in enumerate(zip(lengths, sequence_data, strict=True)):
        for logical in range(-(-used // page_size)):
            table[row, logical] = page = next(ids)
            rows = slice(logical * page_size, min(used, (logical + 1) * page_size))
            k_cache[page, : rows.stop - rows.start, 0] = keys[rows]
            v_cache[page, : rows.stop - rows.start, 0] = values[rows]
        q.append(queries[used - q_len : used])
    metadata = cases.make_metadata(table, lengths, page_size=page_size)
    out, lse = unified_attention(
        jnp.asarray(np.concatenate(q)),
        jnp.asarray(k_cache),
        jnp.asarray(v_cache),
        metadata,
        batch_invariant=True,
        return_lse=True,
        implementation=kernels,
        **options,
    )
    return np.asarray(out), np.asarray(lse)


WINDOW = {"sliding_window": 50, "sinks": np.ones(2, np.float32)}


@pytest.mark.parametrize(
    ("kernels", "options"),
    [
        pytest.param("triton", {}, marks=needs_triton, id="triton-plain"),
        pytest.param("triton", WINDOW, marks=needs_triton, id="triton-window"),
        pytest.param("pallas", WINDOW, id="pallas-window"),
    ],
)
def test_batch_invariant_rows_have_the_same_bits_alone_in_a_batch_in_decode_and_in_verify(kernels, options):
    rng = np.random.default_rng(0)

    def sequence(length):
        return (
            rng.normal(size=(length, 2, 16)).astype(np.float32),
            rng.normal(size=(length, 16)).astype(np.float32),
            rng.normal(size=(length, 16)).astype(np.float32),
        )

    data, others = sequence(131), [sequence(n) for n in (3, 260, 64)]
    verify = batch_invariant_rows(kernels, [(4, 131)], [data], options)
    batch = batch_invariant_rows(
        kernels, [(1, 3), (4, 131), (2, 260), (1, 64)], [others[0], data, *others[1:]], options
    )
    for a, b in zip(verify, batch, strict=True):
        assert np.array_equal(a, b[1:5])
    for row in range(4):
        decode = batch_invariant_rows(kernels, [(1, 128 + row)], [data], options)
        for a, b in zip(decode, verify, strict=True):
            assert np.array_equal(a[0], b[row])


def decode_of_each_node(problem: cases.Problem) -> cases.Problem:
    """The rows of a verify pass over trees, each as a sequence of its own whose path follows the prefix."""
    batch, page_size = problem.metadata, problem.metadata.page_size
    table = np.asarray(batch.page_table)
    starts, used = np.asarray(batch.cu_seqlens_q), np.asarray(batch.seqused_k)
    bits = np.asarray(batch.ancestors)
    caches, rows, lengths = ([], []), [], []
    for sequence, (begin, end) in enumerate(itertools.pairwise(starts.tolist())):
        context = int(used[sequence]) - (end - begin)
        pages = table[sequence, : -(-int(used[sequence]) // page_size)]
        for row in range(begin, end):
            path = [node for node in range(end - begin) if int(bits[row, node // 64]) >> node % 64 & 1]
            for cache, copies in zip((problem.k_cache, problem.v_cache), caches, strict=True):
                # What a window has passed may be no page at all.
                inside = (pages >= 0) & (pages < len(cache))
                keys = cache[np.where(inside, pages, 0)]
                keys[~inside] = np.nan
                keys = keys.reshape(-1, *cache.shape[2:])
                moved = np.full_like(keys, np.nan)
                moved[:context] = keys[:context]
                moved[context : context + len(path)] = keys[[context + node for node in path]]
                copies.append(moved.reshape(-1, page_size, *cache.shape[2:]))
            rows.append(row)
            lengths.append((1, context + len(path)))
    columns = max(map(len, caches[0]))
    ids = np.full((len(rows), columns), -1)
    first = 0
    for number, copy in enumerate(caches[0]):
        ids[number, : len(copy)] = np.arange(first, first + len(copy))
        first += len(copy)
    return dataclasses.replace(
        problem,
        q=problem.q[rows],
        k_cache=np.concatenate(caches[0]),
        v_cache=np.concatenate(caches[1]),
        metadata=cases.make_metadata(ids, tuple(lengths), page_size=page_size, mode="decode"),
    )


@pytest.mark.parametrize("implementation", [pytest.param("triton", marks=needs_triton), "pallas", "xla"])
@pytest.mark.parametrize(
    ("page_size", "dtype", "options"),
    [
        (1, "bfloat16", {}),
        (16, "bfloat16", {}),
        (3, "float32", {"sliding_window": 20}),
        (16, "float32", {"softcap": 2.0}),
        (64, "bfloat16", {"width": 64}),
        (16, "bfloat16", {"heads": 8, "width": 128}),
        # More nodes than a word has bits, and more heads to a group than a tile has rows.
        (4, "float32", {"heads": 24, "kv_heads": 1, "nodes": 66}),
    ],
)
def test_batch_invariant_rows_of_trees_have_the_bits_that_decode_gives_them(
    implementation, page_size, dtype, options
):
    options = dict(options)
    shapes = {name: options.pop(name) for name in ("heads", "kv_heads", "width") if name in options}
    nodes = options.pop("nodes", 7)
    case = cases.Case(
        mode="verify",
        lengths=((nodes, 29 + nodes), (nodes, 94 + nodes), (nodes, nodes))[: 1 if nodes > 64 else 3],
        **{"heads": 6, **shapes},
        page_size=page_size,
        dtype=dtype,
        tree=-(-nodes // 64),
        padding_rows=0,
        alibi="sliding_window" in options,
        options={"batch_invariant": True, **options},
    )
    problem = cases.build(case)
    cases.check(problem, implementation)
    verify = cases.run(problem, implementation)
    decode = cases.run(decode_of_each_node(problem), implementation)
    for ours, theirs in zip(verify, decode, strict=True):
        assert np.array_equal(np.asarray(ours, np.float32), np.asarray(theirs, np.float32))


def test_a_batch_of_long_and_short_sequences_schedules_each_once():
    problem = cases.build(cases.Case(lengths=((1, 2), (70, 75), (2, 2), (66, 66)), heads=2, kv_heads=1))
    with jax.enable_x64(True):
        checked = attention_problem(problem.q, problem.k_cache, problem.v_cache, problem.metadata)
        specs = [launch.spec for launch in attention_launches(checked, tuning.device())]
    assert len(specs) == 2
    assert specs[0].min_q_len == 1
    assert specs[0].max_q_len + 1 == specs[1].min_q_len
    assert specs[0].blocks_in_sequence == 1


@index64
def launches_of(problem: cases.Problem):
    checked = attention_problem(
        problem.q, problem.k_cache, problem.v_cache, problem.metadata, **problem.options
    )
    from jaxattn.kernels.triton import attention
    from jaxattn.kernels.triton.launch import recording

    with recording() as calls:
        jax.eval_shape(lambda p: attention.run(p), checked)
    return calls


@pytest.mark.parametrize(
    ("kernels", "name"),
    [
        pytest.param("triton", "decode-plain", marks=needs_triton),
        pytest.param("triton", "extend-everything", marks=needs_triton),
        ("pallas", "decode-plain"),
    ],
)
def test_a_plan_made_once_changes_nothing(kernels, name):
    problem = cases.build(cases.CASES[name])
    made = plan.make_plan(
        problem.metadata,
        problem.q,
        problem.k_cache,
        sliding_windows=(problem.options.get("sliding_window"),),
    )
    planned = dataclasses.replace(problem, metadata=dataclasses.replace(problem.metadata, plan=made))
    if kernels == "triton":
        assert "schedule_kernel" not in {call.kernel.__name__ for call in launches_of(planned)}
    (out, lse), (planned_out, planned_lse) = cases.run(problem, kernels), cases.run(planned, kernels)
    assert np.array_equal(out, planned_out)
    # XLA compiles what Pallas interprets anew in each program, with a rounding of its own in the logarithm.
    np.testing.assert_allclose(lse, planned_lse, rtol=1e-6 if kernels == "pallas" else 0)


@needs_triton
def test_p34_launches_use_one_axis_whatever_the_batch():
    problem = cases.build(
        cases.Case(mode="decode", lengths=((1, 1),) * 70, heads=1, kv_heads=1, padding_rows=0)
    )
    out, _ = cases.run(problem, "triton")
    np.testing.assert_allclose(np.asarray(out), problem.out, rtol=1e-6)
    calls = launches_of(problem)
    assert {call.kernel.__name__ for call in calls} >= {"attention_kernel", "reduce_kernel"}
    assert all(isinstance(call.grid, int) for call in calls)


def test_a_derivative_is_refused(kernels):
    problem = cases.build(cases.Case(mode="decode", lengths=((1, 9), (1, 4)), padding_rows=0))

    def total(q):
        out, _ = cases.run(dataclasses.replace(problem, q=q), kernels)
        return out.sum()

    with pytest.raises(UnsupportedError, match=f"implementation='{kernels}' has no derivative"):
        jax.grad(total)(jnp.asarray(problem.q))


def test_vmap_equals_a_loop(kernels):
    problem = cases.build(cases.Case(mode="decode", lengths=((1, 9), (1, 4)), padding_rows=0))
    queries = jnp.stack([jnp.asarray(problem.q), 2 * jnp.asarray(problem.q)])

    def attend(q):
        return cases.run(dataclasses.replace(problem, q=q), kernels)[0]

    mapped = jax.vmap(attend)(queries)
    for index in range(2):
        assert np.array_equal(mapped[index], attend(queries[index]))


@needs_triton
def test_p60_shard_map_over_kv_heads_equals_the_whole():
    problem = cases.build(cases.Case(mode="decode", lengths=((1, 9), (1, 40)), padding_rows=0))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("heads",))
    spec = jax.sharding.PartitionSpec

    # A device with fewer heads cuts keys elsewhere; fixed cuts keep the bits.
    def attend(q, k_cache, v_cache):
        return unified_attention(
            q, k_cache, v_cache, problem.metadata, batch_invariant=True, implementation="triton"
        )

    arrays = tuple(jnp.asarray(array) for array in (problem.q, problem.k_cache, problem.v_cache))
    heads, cache = spec(None, "heads"), spec(None, None, "heads")
    sharded = jax.shard_map(
        attend, mesh=mesh, in_specs=(heads, cache, cache), out_specs=heads, check_vma=False
    )
    assert np.array_equal(jax.jit(sharded)(*arrays), attend(*arrays))
