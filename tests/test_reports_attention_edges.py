"""Public bug reports about empty rows, extreme values, dead slots, page tables and shapes."""

import dataclasses

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Case, make_metadata

from jaxattn.attention import unified_attention
from jaxattn.index64 import index64
from jaxattn.metadata import AttentionMetadata


def attend(problem, implementation, **changes):
    metadata = changes.pop("metadata", problem.metadata)
    arrays = [changes.pop(name, getattr(problem, name)) for name in ("q", "k_cache", "v_cache")]
    return unified_attention(
        *map(jnp.asarray, arrays),
        metadata,
        return_lse=True,
        implementation=implementation,
        **{**problem.options, **changes},
    )


@index64
def with_table(metadata: AttentionMetadata, table) -> AttentionMetadata:
    return dataclasses.replace(metadata, page_table=jnp.asarray(table, jnp.int64))


@index64
def select(metadata: AttentionMetadata, sequences) -> AttentionMetadata:
    return dataclasses.replace(
        metadata,
        page_table=metadata.page_table[jnp.array(sequences)],
        cu_seqlens_q=jnp.arange(len(sequences) + 1, dtype=jnp.int64),
        seqused_k=metadata.seqused_k[jnp.array(sequences)],
    )


def test_p01_a_sequence_without_keys_is_zero_and_changes_nothing_else(implementation):
    case = Case(
        mode="decode",
        lengths=((1, 5), (1, 0), (1, 17), (1, 0)),
        heads=8,
        width=64,
        page_size=16,
        dtype="bfloat16",
        padding_rows=0,
    )
    problem = cases.build(case)
    table = np.asarray(problem.metadata.page_table).copy()
    table[[1, 3]] = -1
    metadata = with_table(problem.metadata, table)
    out, lse = attend(problem, implementation, metadata=metadata)
    assert not np.asarray(out, np.float32)[[1, 3]].any()
    assert np.isneginf(lse[jnp.array([1, 3])]).all()
    assert np.isfinite(np.asarray(out, np.float32)).all()
    alone, lse_alone = attend(problem, implementation, q=problem.q[[0, 2]], metadata=select(metadata, [0, 2]))
    assert np.array_equal(np.asarray(out)[[0, 2]], alone)
    assert np.array_equal(np.asarray(lse)[[0, 2]], lse_alone)


def test_p02_very_negative_logits_are_not_masked(implementation):
    k_cache = np.full((4, 16, 1, 128), -784, np.float32)
    k_cache[2, 0, 0, 0] = -780
    v_cache = np.zeros((4, 16, 1, 64), np.float32)
    table = np.array([[2, 0, 3, 1]])
    for key in range(64):
        v_cache[table[0, key // 16], key % 16, 0, key] = 1
    out, lse = unified_attention(
        jnp.ones((1, 1, 128)),
        k_cache,
        v_cache,
        make_metadata(table, ((1, 64),), page_size=16, mode="decode"),
        softmax_scale=1.0,
        return_lse=True,
        implementation=implementation,
    )
    expected = np.full(64, 0.0085035)
    expected[0] = 0.464277
    np.testing.assert_allclose(out[0, 0], expected, rtol=2e-4)
    np.testing.assert_allclose(lse[0, 0], -100347.233, atol=0.02)


def test_p05_nan_in_unused_slots_does_not_reach_the_output(implementation):
    lengths = tuple((1, length) for length in (32, 64, 96, 48))
    case = Case(mode="decode", lengths=lengths, heads=8, width=64, page_size=128, dtype="bfloat16")
    problem = cases.build(case)
    assert np.isnan(problem.v_cache.astype(np.float32)).any()
    cases.check(problem, implementation)


def test_p06_nan_in_padding_rows_of_the_token_buffer(implementation):
    case = Case(lengths=((21, 21),), heads=16, kv_heads=1, width=128, page_size=16, dtype="bfloat16")
    problem = cases.build(case)
    assert np.isnan(problem.q[21:].astype(np.float32)).all()
    out, lse = attend(problem, implementation)
    clean, clean_lse = attend(problem, implementation, q=np.nan_to_num(problem.q))
    assert np.array_equal(out, clean)
    assert np.array_equal(lse, clean_lse)
    assert not np.asarray(out, np.float32)[21:].any()
    assert np.isneginf(lse[21:]).all()
    cases.check(problem, implementation)


def test_p07_the_content_of_the_padding_page_never_matters(implementation):
    problem = cases.build(Case(mode="decode", lengths=((1, 3), (1, 7), (1, 10)), page_size=4))
    table = np.asarray(problem.metadata.page_table).copy()
    dummy = next(page for page in range(len(problem.k_cache)) if page not in table[:, :3])
    for sequence, used in enumerate((1, 2, 3)):
        table[sequence, used:] = dummy
    outputs = []
    for content in (np.nan, 0, np.inf):
        k_cache, v_cache = problem.k_cache.copy(), problem.v_cache.copy()
        k_cache[dummy] = v_cache[dummy] = content
        metadata = with_table(problem.metadata, table)
        outputs.append(
            attend(problem, implementation, k_cache=k_cache, v_cache=v_cache, metadata=metadata)[0]
        )
    assert np.array_equal(outputs[0], outputs[1])
    assert np.array_equal(outputs[0], outputs[2])
    assert np.abs(np.asarray(outputs[0]) - problem.out).max() < 1e-5


def test_p08_ids_behind_the_last_live_page_are_never_used(implementation):
    problem = cases.build(Case(mode="decode", lengths=((1, 17),), page_size=16))
    exact = np.asarray(problem.metadata.page_table)[:, :2]
    outputs = [
        attend(problem, implementation, metadata=with_table(problem.metadata, np.append(exact, tail)[None]))[
            0
        ]
        for tail in ([], [2**30, -1], [-1, 2**30, 2**40])
    ]
    assert np.abs(np.asarray(outputs[0]) - problem.out).max() < 1e-5
    assert np.array_equal(outputs[0], outputs[1])
    assert np.array_equal(outputs[0], outputs[2])


@pytest.mark.parametrize("width", [1, 3, 5, 7])
def test_p09_a_table_of_any_width(width, implementation):
    for length in (16 * width, 16 * width - 1):
        problem = cases.build(Case(mode="decode", lengths=((1, length),), page_size=16))
        table = np.asarray(problem.metadata.page_table)[:, :width]
        out, _ = attend(problem, implementation, metadata=with_table(problem.metadata, table))
        assert np.abs(np.asarray(out) - problem.out).max() < 1e-5


def test_p14_a_page_id_outside_the_pool_is_masked_and_aliases_no_page(implementation):
    case = Case(mode="decode", lengths=((1, 12),), page_size=4, probe=True, padding_rows=0)
    problem = cases.build(case)
    pages = len(problem.k_cache)
    for wrong in (-1, -pages, pages, pages + 1, 2**31 + 5, 2**32, 2**32 + 1):
        table = np.asarray(problem.metadata.page_table).copy()
        table[0, 1] = wrong
        out, lse = attend(problem, implementation, metadata=with_table(problem.metadata, table))
        assert set(np.flatnonzero(out[0, 0])) == {0, 1, 2, 3, 8, 9, 10, 11}
        np.testing.assert_allclose(lse, np.log(8), rtol=1e-6)


def test_p15_large_pages_equal_small_ones(implementation):
    case = Case(
        mode="decode",
        lengths=((1, 6144),),
        heads=32,
        kv_heads=2,
        width=256,
        page_size=256,
        dtype="bfloat16",
        padding_rows=0,
    )
    problem = cases.build(case)
    large, large_lse = attend(problem, implementation)
    split = 256 // 16

    def small_pages(cache):
        return cache.reshape(-1, 16, *cache.shape[2:])

    table = np.asarray(problem.metadata.page_table)[:, :24]
    small_table = (table[:, :, None] * split + np.arange(split)).reshape(1, -1)
    shuffle = np.random.default_rng(0).permutation(len(problem.k_cache) * split)
    small, small_lse = attend(
        problem,
        implementation,
        k_cache=small_pages(problem.k_cache)[np.argsort(shuffle)],
        v_cache=small_pages(problem.v_cache)[np.argsort(shuffle)],
        metadata=make_metadata(shuffle[small_table], case.lengths, page_size=16, mode="decode"),
    )
    np.testing.assert_allclose(np.asarray(large, np.float32), np.asarray(small, np.float32), atol=1e-3)
    np.testing.assert_allclose(large_lse, small_lse, rtol=1e-5)
    assert np.abs(np.asarray(large, np.float64) - problem.out).max() < 2e-3


@pytest.mark.parametrize("width", [80, 96, 192])
def test_p27_a_head_width_that_is_no_power_of_two(width, implementation):
    problem = cases.build(Case(mode="decode", lengths=((1, 33),), width=width, page_size=16))
    cases.check(problem, implementation)


def test_p35_numpy_indices_beyond_int32_keep_their_value(implementation):
    problem = cases.build(Case(mode="decode", lengths=((1, 12),), page_size=4, probe=True, padding_rows=0))
    table = np.asarray(problem.metadata.page_table)[:, :3].copy()
    table[0, 2] += 2**32
    host = AttentionMetadata(
        page_table=table,
        cu_seqlens_q=np.array([0, 1]),
        seqused_k=np.array([2**31 + 5]),
        max_seqlen_q=1,
        page_size=4,
        mode="decode",
    )
    # A wrapped id would show keys 8 to 11, a wrapped length would hide all.
    out, lse = attend(problem, implementation, metadata=host)
    assert set(np.flatnonzero(out[0, 0])) == set(range(8))
    np.testing.assert_allclose(lse, np.log(8), rtol=1e-6)


def test_p37_cu_seqlens_q_has_one_entry_more_than_sequences(implementation):
    problem = cases.build(Case(mode="target_verify", lengths=((4, 10), (4, 20), (4, 4)), padding_rows=0))
    cases.check(problem, implementation)
    for entries in ([0, 4, 8], [0, 4, 8, 12, 12]):
        with jax.enable_x64(True):
            starts = jnp.array(entries)
        metadata = dataclasses.replace(problem.metadata, cu_seqlens_q=starts)
        with pytest.raises(ValueError, match=r"cu_seqlens_q: expected shape \(4,\)"):
            attend(problem, implementation, metadata=metadata)


def test_p57_rows_of_an_earlier_larger_batch_are_neutral(implementation):
    eight = Case(mode="decode", lengths=tuple((1, 5 + 3 * s) for s in range(8)), page_size=4, padding_rows=0)
    problem = cases.build(eight)
    step = jax.jit(
        lambda q, k, v, m: unified_attention(q, k, v, m, return_lse=True, implementation=implementation)
    )
    arrays = [jnp.asarray(array) for array in (problem.q, problem.k_cache, problem.v_cache)]
    step(*arrays, problem.metadata)
    with jax.enable_x64(True):
        padded = dataclasses.replace(
            problem.metadata,
            cu_seqlens_q=jnp.array([0, 1, 2, 3, 3, 3, 3, 3, 3]),
            seqused_k=problem.metadata.seqused_k * (jnp.arange(8) < 3),
        )
    out, lse = step(*arrays, padded)
    fresh, fresh_lse = attend(problem, implementation, q=problem.q[:3], metadata=select(padded, [0, 1, 2]))
    assert np.array_equal(out[:3], fresh)
    assert np.array_equal(lse[:3], fresh_lse)
    assert not np.asarray(out)[3:].any()
    assert np.isneginf(lse[3:]).all()


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
    ("tokens", "lengths", "pages"),
    [(0, (), 3), (0, ((0, 0),) * 3, 3), (4, ((0, 0),) * 3, 3), (2, ((1, 0), (1, 0)), 0)],
)
def test_p58_an_empty_batch(tokens, lengths, pages, jit, implementation):
    metadata = make_metadata(np.zeros((len(lengths), 2)), lengths, page_size=4)

    def attend(q, cache):
        return unified_attention(q, cache, cache, metadata, return_lse=True, implementation=implementation)

    attend = jax.jit(attend) if jit else attend
    out, lse = attend(jnp.ones((tokens, 4, 16)), jnp.ones((pages, 4, 2, 16)))
    assert out.shape == (tokens, 4, 16)
    assert not np.asarray(out).any()
    assert np.isneginf(lse).all()


def test_p61_a_tile_that_reaches_past_the_end_of_the_pool(implementation):
    problem = cases.build(Case(mode="decode", lengths=((1, 5),), page_size=16, padding_rows=0))
    page = int(problem.metadata.page_table[0, 0])
    k_cache, v_cache = (
        np.append(cache, cache[page][None], axis=0) for cache in (problem.k_cache, problem.v_cache)
    )
    table = np.array([[len(k_cache) - 1]])
    metadata = with_table(problem.metadata, table)
    out, lse = attend(problem, implementation, k_cache=k_cache, v_cache=v_cache, metadata=metadata)
    assert np.abs(np.asarray(out) - problem.out).max() < 1e-5
    assert np.abs(np.asarray(lse) - problem.lse).max() < 1e-5


def test_p62_other_lengths_and_pages_compile_once(implementation):
    compilations = []

    @jax.jit
    def step(q, k_cache, v_cache, metadata):
        compilations.append(1)
        return unified_attention(q, k_cache, v_cache, metadata, implementation=implementation)

    rng = np.random.default_rng(0)
    q, k_cache, v_cache = (
        rng.normal(size=s).astype(np.float32) for s in ((6, 4, 16), (9, 4, 2, 16), (9, 4, 2, 16))
    )
    for _ in range(20):
        q_lens = rng.multinomial(6, [0.3, 0.3, 0.4])
        lengths = tuple((int(n), int(n + rng.integers(0, 6))) for n in q_lens)
        table = rng.permutation(9).reshape(3, 3)
        metadata = dataclasses.replace(make_metadata(table, lengths, page_size=4), max_seqlen_q=6)
        out = step(q, k_cache, v_cache, metadata)
        expected, _ = oracle.attention(
            q, k_cache, v_cache, table, np.asarray(metadata.cu_seqlens_q), np.asarray(metadata.seqused_k)
        )
        assert np.abs(np.asarray(out) - expected).max() < 1e-5
    assert len(compilations) == 1
