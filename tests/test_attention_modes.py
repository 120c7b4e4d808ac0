"""The same token through every forward mode, by the builders of the metadata."""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.attention import unified_attention
from jaxattn.metadata import (
    decode_metadata,
    draft_decode_metadata,
    draft_extend_metadata,
    extend_metadata,
    target_verify_metadata,
)
from jaxattn.tree import ancestor_bits, chain_parents

LENGTHS = np.array([37, 20])
PAGE_SIZE, NUM_DRAFT_TOKENS = 4, 4
OPTIONS = {
    "window": {"sliding_window": 9},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": np.array([0.3, -1.0, 2.0, 0.0], np.float32)},
    "alibi": {"alibi_slopes": np.array([0.5, 0.25, 0.125, 0.0625], np.float32)},
    "window_softcap_sinks_alibi": {
        "sliding_window": 9,
        "softcap": 1.5,
        "sinks": np.zeros(4, np.float32),
        "alibi_slopes": np.full(4, 0.25, np.float32),
    },
}


@functools.cache
def tokens(dtype):
    """Caches, a pool row of slots for each sequence, and the query rows of each sequence's last tokens."""
    rng = np.random.default_rng(0)
    pages = 24
    shape = (pages, PAGE_SIZE, 2, 16)
    caches = [np.full(shape, np.nan, np.float32) for _ in range(2)]
    order = rng.permutation(pages).reshape(2, 12)
    slots = (order[:, :, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).reshape(2, -1)
    for cache in caches:
        for row, length in zip(slots, LENGTHS, strict=True):
            cache.reshape(-1, 2, 16)[row[:length]] = rng.normal(size=(length, 2, 16))
    queries = [rng.normal(size=(length, 4, 16)) for length in LENGTHS]
    return [jnp.asarray(c, dtype) for c in caches], slots, [jnp.asarray(rows, dtype) for rows in queries]


def metadata_of_mode(mode, slots):
    """Build the metadata whose last row of each sequence is the last token, and the number of rows."""
    table = {"page_size": PAGE_SIZE, "req_to_token": slots, "req_pool_indices": np.arange(2)}
    n = NUM_DRAFT_TOKENS
    if mode == "decode":
        return decode_metadata(seqused_k=LENGTHS, **table), [1, 1]
    if mode == "draft_decode":
        return draft_decode_metadata(prefix_lens=LENGTHS - 3, step=2, **table), [1, 1]
    if mode == "target_verify":
        return target_verify_metadata(prefix_lens=LENGTHS - n, num_draft_tokens=n, **table), [n, n]
    if mode == "target_verify_tree":
        chain = ancestor_bits(chain_parents(2, n))
        return target_verify_metadata(
            prefix_lens=LENGTHS - n, num_draft_tokens=n, ancestors=chain, **table
        ), [n, n]
    if mode == "draft_extend":
        return draft_extend_metadata(seqused_k=LENGTHS, num_draft_tokens=n, **table), [n, n]
    starts = np.concatenate([[0], np.cumsum(LENGTHS)])
    return extend_metadata(seqused_k=LENGTHS, cu_seqlens_q=starts, max_seqlen_q=40, **table), list(LENGTHS)


MODES = ("decode", "draft_decode", "target_verify", "target_verify_tree", "draft_extend", "extend")


def last_rows(mode, dtype, implementation, **options):
    """Attend in one mode and return output and lse of the last token of each sequence."""
    caches, slots, queries = tokens(dtype)
    metadata, rows = metadata_of_mode(mode, slots)
    q = jnp.concatenate([query[len(query) - n :] for query, n in zip(queries, rows, strict=True)])
    out, lse = unified_attention(
        q, *caches, metadata, return_lse=True, implementation=implementation, **options
    )
    last = np.cumsum(rows) - 1
    return np.asarray(out)[last], np.asarray(lse)[last]


ALL = "window_softcap_sinks_alibi"


@pytest.mark.parametrize(("name", "dtype"), [*((name, "float32") for name in OPTIONS), (ALL, "bfloat16")])
def test_p39_every_mode_honours_every_option(name, dtype, implementation):
    options = OPTIONS[name]
    caches, slots, queries = tokens(dtype)
    metadata, _ = metadata_of_mode("decode", slots)
    q = np.stack([query[-1] for query in queries])
    expected, expected_lse = cases.oracle_of(q, *caches, metadata, options)
    exact = q.dtype == np.float32
    for mode in MODES:
        out, lse = last_rows(mode, dtype, implementation, **options)
        np.testing.assert_allclose(
            out.astype(np.float64), expected, atol=1e-5 if exact else 2e-2 * np.abs(expected).max()
        )
        np.testing.assert_allclose(lse, expected_lse, atol=1e-5 if exact else 2e-2)


@pytest.mark.parametrize(("options", "dtype"), [({}, "float32"), (OPTIONS[ALL], "bfloat16")])
def test_batch_invariant_rows_have_the_same_bits_in_decode_verify_and_draft_extend(
    options, dtype, implementation
):
    first, first_lse = last_rows(MODES[0], dtype, implementation, batch_invariant=True, **options)
    for mode in MODES[1:-1]:
        out, lse = last_rows(mode, dtype, implementation, batch_invariant=True, **options)
        assert np.array_equal(out, first), mode
        assert np.array_equal(lse, first_lse), mode
    caches, slots, queries = tokens(dtype)
    prefill, _ = last_rows("extend", dtype, implementation, batch_invariant=True, **options)
    table = {"page_size": PAGE_SIZE, "req_to_token": slots, "req_pool_indices": np.arange(1)}
    starts = np.array([0, LENGTHS[0]])
    for q, alone, expected in (
        (queries[0][-1:], decode_metadata(seqused_k=LENGTHS[:1], **table), first),
        (
            queries[0],
            extend_metadata(seqused_k=LENGTHS[:1], cu_seqlens_q=starts, max_seqlen_q=40, **table),
            prefill,
        ),
    ):
        out = unified_attention(
            q, *caches, alone, batch_invariant=True, implementation=implementation, **options
        )
        assert np.array_equal(np.asarray(out)[-1], expected[0])


def test_x64_on_and_off_give_the_same_bits(implementation):
    dtype, options = "float32", OPTIONS[ALL]
    for mode in ("decode", "target_verify_tree", "extend"):
        narrow = last_rows(mode, dtype, implementation, **options)
        with jax.enable_x64(True):
            wide = last_rows(mode, dtype, implementation, **options)
        for one, two in zip(narrow, wide, strict=True):
            assert one.dtype == two.dtype
            assert np.array_equal(one, two)


def test_batch_invariant_rows_do_not_depend_on_the_width_of_the_table_or_on_other_sequences(implementation):
    rng = np.random.default_rng(0)
    lengths, rows, page_size = (1300, 40), 2, 16
    k_cache, v_cache = (rng.normal(size=(90, page_size, 1, 32)).astype(np.float32) for _ in range(2))
    table = rng.permutation(90)[:86].reshape(1, 86)
    table = np.concatenate([table, np.roll(table, 1)])
    q = rng.normal(size=(2, rows, 4, 32)).astype(np.float32)

    def attend(q, table, lengths):
        metadata = cases.make_metadata(table, lengths, page_size=page_size)
        out = unified_attention(
            q, k_cache, v_cache, metadata, batch_invariant=True, implementation=implementation
        )
        return np.asarray(out)

    verify = attend(q.reshape(-1, 4, 32), table, tuple((rows, length) for length in lengths))
    for sequence, length in enumerate(lengths):
        used = -(-length // page_size)
        for row in range(rows):
            one = attend(
                q[sequence, row][None], table[sequence : sequence + 1, :used], ((1, length - rows + 1 + row),)
            )
            assert np.array_equal(one[0], verify[sequence * rows + row])
