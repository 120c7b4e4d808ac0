"""Public bug reports about storage formats, scales, softcap, sinks and split keys."""

import cases
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, make_metadata

from jaxattn.attention import unified_attention
from jaxattn.merge import merge_states


@pytest.mark.parametrize(("dtype", "value"), [("float8_e4m3fn", 1.0), ("float8_e4m3fnuz", 0.5)])
def test_p40_the_dtype_of_the_array_decides_what_fp8_bytes_mean(dtype, value, implementation):
    cache = np.full((2, 16, 1, 16), 0x38, np.uint8).view(jnp.dtype(dtype))
    metadata = make_metadata([[1]], ((1, 9),), page_size=16, mode="decode")
    q = np.ones((1, 2, 16), np.float32)
    out, lse = unified_attention(
        q, cache, cache, metadata, softmax_scale=1.0, return_lse=True, implementation=implementation
    )
    assert (np.asarray(out) == value).all()
    np.testing.assert_allclose(lse, 16 * value + np.log(9), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16"])
def test_p42_descales_apply_once_whatever_the_format_of_q(dtype, implementation):
    problem = cases.build(Case(mode="decode", dtype=dtype, kv_dtype="float8_e4m3fn", page_size=16))
    scales = {"k_descale": np.float32(2), "v_descale": np.float32(4)}
    if dtype != "bfloat16":
        scales["q_descale"] = np.float32(0.5)
    out, lse = cases.oracle_of(problem.q, problem.k_cache, problem.v_cache, problem.metadata, scales)
    scaled = cases.Problem(problem.q, problem.k_cache, problem.v_cache, problem.metadata, scales, out, lse)
    cases.check(scaled, implementation)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_p44_softcap_of_large_scores_is_finite(dtype, implementation):
    scores = np.array([1000, 3000, 5000, 1e4, -1e4, 4400])
    k_cache = np.zeros((1, 6, 1, 16), dtype)
    k_cache[0, :, 0, 0] = scores
    v_cache = np.eye(6, 16, dtype=dtype)[None, :, None]
    out, lse = unified_attention(
        np.eye(1, 16, dtype=dtype)[None],
        k_cache,
        v_cache,
        make_metadata([[0]], ((1, 6),), page_size=6, mode="decode"),
        softmax_scale=1.0,
        softcap=50.0,
        return_lse=True,
        implementation=implementation,
    )
    expected = np.where(scores > 0, 0.2, 0.0)
    np.testing.assert_allclose(out[0, 0, :6], expected, atol=1e-6 if dtype == "float32" else 1e-3)
    np.testing.assert_allclose(lse, 50 + np.log(5), rtol=1e-6)


def sink_probe():
    """512 keys, a window of 16, q = 0 and a sink of 1 for each head."""
    case = Case(
        mode="decode",
        lengths=((1, 512),),
        page_size=16,
        options={"sliding_window": 16},
        probe=True,
        padding_rows=0,
    )
    return cases.build(case), np.ones(4, np.float32)


def test_p45_a_sink_joins_the_denominator_once(implementation):
    problem, sinks = sink_probe()
    out, lse = unified_attention(
        problem.q,
        problem.k_cache,
        problem.v_cache,
        problem.metadata,
        sliding_window=16,
        sinks=sinks,
        return_lse=True,
        implementation=implementation,
    )
    np.testing.assert_allclose(out[0, :, 496:], 0.0534237, rtol=1e-5)
    assert not np.asarray(out[0, :, :496]).any()
    np.testing.assert_allclose(lse, 2.9295007, rtol=1e-6)


def split_states(q, k_cache, v_cache, table, length, splits, implementation, **options):
    """Attend from one query to `splits` runs of whole pages, each as a sequence of its own."""
    page_size = k_cache.shape[1]
    width = -(-table.shape[1] // splits)
    padded = np.pad(table[0], (0, splits * width - table.shape[1]), constant_values=-1).reshape(splits, width)
    lengths = np.clip(length - np.arange(splits) * width * page_size, 0, width * page_size)
    metadata = make_metadata(padded, tuple((1, int(n)) for n in lengths), page_size=page_size, mode="decode")
    out, lse = unified_attention(
        np.repeat(q, splits, axis=0),
        k_cache,
        v_cache,
        metadata,
        return_lse=True,
        implementation=implementation,
        **options,
    )
    return out[:, None], lse[:, None]


@pytest.mark.parametrize("first_is_empty", [False, True])
def test_p45_a_sink_in_one_of_the_merged_splits_counts_once(first_is_empty, implementation):
    problem, sinks = sink_probe()
    arrays = problem.q, problem.k_cache, problem.v_cache
    # The window of 16 keys is the last page; a split counts its own keys only, so the others get no page.
    table = np.where(np.arange(32) < 31, -1, np.asarray(problem.metadata.page_table)[:, :32])
    out, lse = split_states(*arrays, table, 512, 4, implementation)
    assert np.isneginf(lse[:3]).all()
    last, last_lse = split_states(*arrays, table[:, 24:], 128, 1, implementation, sinks=sinks)
    states = [out[0], last[0]], [lse[0], last_lse[0]]
    if not first_is_empty:
        states = [last[0], out[0]], [last_lse[0], lse[0]]
    merged, merged_lse = merge_states(*states)
    np.testing.assert_allclose(merged[0, :, 496:], 0.0534237, rtol=1e-5)
    np.testing.assert_allclose(merged_lse, 2.9295007, rtol=1e-6)


@pytest.mark.parametrize(("length", "width", "counts"), [(3, 16, (1, 16)), (20548, 128, (1, 8, 128))])
def test_p46_the_number_of_splits_does_not_change_the_result(length, width, counts, implementation):
    rng = np.random.default_rng(0)
    pages = -(-length // 16)
    k_cache, v_cache = (rng.normal(size=(pages, 16, 1, width)).astype(np.float32) for _ in range(2))
    table = rng.permutation(pages)[None]
    for cache in (k_cache, v_cache):
        cache[table[0, -1], (length - 1) % 16 + 1 :] = np.nan
    q = rng.normal(size=(1, 2, width)).astype(np.float32)
    results = [
        merge_states(*split_states(q, k_cache, v_cache, table, length, splits, implementation))
        for splits in counts
    ]
    metadata = make_metadata(table, ((1, length),), page_size=16)
    expected, expected_lse = cases.oracle_of(q, k_cache, v_cache, metadata, {})
    for out, lse in results:
        np.testing.assert_allclose(out, expected, atol=2e-6)
        np.testing.assert_allclose(lse, expected_lse, rtol=1e-6)


@pytest.mark.parametrize("chunk", [8, 16, 48])
def test_p04_chunked_prefix_gives_every_prompt_the_same_answer(chunk, implementation):
    case = Case(lengths=((3, 43), (3, 11)), page_size=8, padding_rows=0)
    problem = cases.build(case)
    table = np.asarray(problem.metadata.page_table)
    prefix = np.array([40, 8])
    columns = chunk // 8

    def part(first_column, lengths, causal):
        metadata = make_metadata(
            table[:, first_column : first_column + columns], tuple((3, int(n)) for n in lengths), page_size=8
        )
        return unified_attention(
            problem.q,
            problem.k_cache,
            problem.v_cache,
            metadata,
            causal=causal,
            return_lse=True,
            implementation=implementation,
        )

    states = [part(start // 8, np.clip(prefix - start, 0, chunk), False) for start in range(0, 48, chunk)]
    own = np.stack([table[row, prefix[row] // 8 :][:1] for row in range(2)])
    states.append(
        unified_attention(
            problem.q,
            problem.k_cache,
            problem.v_cache,
            make_metadata(own, ((3, 3), (3, 3)), page_size=8),
            return_lse=True,
            implementation=implementation,
        )
    )
    out, lse = merge_states([state[0] for state in states], [state[1] for state in states])
    np.testing.assert_allclose(out, problem.out, atol=2e-6)
    np.testing.assert_allclose(lse, problem.lse, rtol=1e-6)
