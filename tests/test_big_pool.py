"""Pools whose addresses pass every 32-bit threshold: 65,535 pages, 2^31 bytes and elements, 2^32 bytes.

A write donates its pool, and each pool is dropped before the next is made.
"""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jaxattn.attention import unified_attention
from jaxattn.kv_cache import write_kv
from jaxattn.metadata import (
    decode_metadata,
    draft_decode_metadata,
    draft_extend_metadata,
    extend_metadata,
    target_verify_metadata,
)

pytestmark = pytest.mark.big


@pytest.fixture(autouse=True, scope="module")
def _enough_memory():
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if free < 7 * 2**30:
        pytest.skip(f"needs 7 GiB of free memory, {free / 2**30:.1f} GiB are free")


class Pool:
    """A big pool, and a plain record of what it must hold."""

    def __init__(self, num_pages, page_size, widths, dtype, descale, num_kv_heads=1):
        self.k, self.v = (jnp.zeros((num_pages, page_size, num_kv_heads, width), dtype) for width in widths)
        self.descale = descale
        self.record = {}

    def write(self, slots, seed):
        """Write small whole numbers, which every format here stores exactly."""
        k, v = self.new_rows(slots, seed)
        self.k, self.v = _write(self.k, self.v, k, v, jnp.asarray(slots), self.descale)

    def new_rows(self, slots, seed):
        rng = np.random.default_rng(seed)
        k, v = (
            rng.integers(1, 4, (len(slots), *cache.shape[2:])).astype(np.float32)
            for cache in (self.k, self.v)
        )
        self.record |= {int(slot): (k[i], v[i]) for i, slot in enumerate(slots)}
        return jnp.asarray(k), jnp.asarray(v)

    def assert_holds_the_record_and_nothing_else(self):
        for side, cache in enumerate((self.k, self.v)):
            host = np.asarray(cache)
            rows = host.reshape(-1, *host.shape[2:])
            for slot, values in self.record.items():
                stored = rows[slot].astype(np.float32) * np.float32(self.descale)
                np.testing.assert_array_equal(stored, values[side], f"slot {slot}")
            expected = sum(values[side].size for values in self.record.values())
            assert np.count_nonzero(host.view(np.uint8)) == expected

    def attend_by_loops(self, q, metadata):
        """The oracle on the recorded rows of the pages that the table names, brought together in a small cache."""
        page_size = metadata.page_size
        table = np.asarray(metadata.page_table)
        pages, compact = np.unique(table, return_inverse=True)
        k_cache, v_cache = (np.zeros((len(pages), *cache.shape[1:])) for cache in (self.k, self.v))
        for number, page in enumerate(pages):
            for offset in range(page_size):
                if (slot := int(page) * page_size + offset) in self.record:
                    k_cache[number, offset], v_cache[number, offset] = self.record[slot]
        ancestors = None if metadata.ancestors is None else np.asarray(metadata.ancestors)
        return oracle.attention(
            np.asarray(q),
            k_cache,
            v_cache,
            compact.reshape(table.shape),
            np.asarray(metadata.cu_seqlens_q),
            np.asarray(metadata.seqused_k),
            ancestors=ancestors,
        )[0]


@jax.jit
def _attend(k_cache, v_cache, q, metadata, descale):
    return unified_attention(q, k_cache, v_cache, metadata, k_descale=descale, v_descale=descale)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def _write(k_cache, v_cache, k, v, slots, descale):
    return write_kv(k_cache, v_cache, k, v, slots, k_descale=descale, v_descale=descale)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def _step(k_cache, v_cache, q, k, v, metadata, descale):
    k_cache, v_cache = _write(k_cache, v_cache, k, v, metadata.slots(len(q)), descale)
    return _attend(k_cache, v_cache, q, metadata, descale), k_cache, v_cache


def queries(tokens, heads, width):
    return jnp.asarray(np.random.default_rng(9).normal(size=(tokens, heads, width)), jnp.float32)


def slots_of(pages, page_size):
    return (np.asarray(pages)[..., None] * page_size + np.arange(page_size)).reshape(
        *np.shape(pages)[:-1], -1
    )


def test_p30_p31_rows_of_576_bytes_beyond_two_gigabytes():
    page_size, last = 480, 4_000_000
    pool = Pool(4_000_320 // page_size, page_size, (576, 8), jnp.int8, descale=1.0)
    assert last * 576 > 2**31
    pool.write(np.array([last - 1, last, last + 1]), seed=0)
    pool.write(np.array([last]), seed=1)
    pool.assert_holds_the_record_and_nothing_else()

    q = queries(2, 2, 576)
    outputs = []
    for pages in ([[7799, 7790], [7790, 7799]], [[0, 1], [1, 0]]):
        slots = slots_of(pages, page_size)
        pool.write(slots[0], seed=2)
        metadata = decode_metadata(
            seqused_k=np.array([500, 481]),
            page_size=page_size,
            req_to_token=slots,
            req_pool_indices=np.array([0, 1]),
        )
        outputs.append(np.asarray(_attend(pool.k, pool.v, q, metadata, pool.descale)))
    np.testing.assert_array_equal(*outputs)
    np.testing.assert_allclose(outputs[0], pool.attend_by_loops(q, metadata), atol=1e-5)


def test_p33_pages_of_one_token_beyond_four_gigabytes():
    num_pages = 8_401_239
    pool = Pool(num_pages, 1, (64, 8), jnp.int8, descale=0.5, num_kv_heads=8)
    assert pool.k.nbytes > 2**32
    slots = np.array([[16_435, num_pages - 1, 65_535, 3], [num_pages - 2, 65_536, 4_194_304, 8_388_608]])
    pool.write(slots.reshape(-1), seed=0)
    pool.assert_holds_the_record_and_nothing_else()
    q = queries(2, 8, 64)
    metadata = decode_metadata(
        seqused_k=np.array([3, 4]), page_size=1, req_to_token=slots, req_pool_indices=np.array([0, 1])
    )
    out = _attend(pool.k, pool.v, q, metadata, pool.descale)
    np.testing.assert_allclose(out, pool.attend_by_loops(q, metadata), atol=1e-5)


PAGE_SIZE, WIDTH = 16, 256
# 2^31 elements end with page 524,287.
PAGES = np.array([[65_535, 524_288, 525_311], [524_287, 1, 65_536]])
CONTEXT = np.array([37, 33])
# Where these pages would be looked for if an id lost its upper bits, or an offset its 32nd.
ALIASES = sorted({int(page) % 2**bits for page in PAGES.flat for bits in (16, 19)} - set(PAGES.flat))


@pytest.fixture(scope="module")
def pool():
    pool = Pool(8_404_992 // PAGE_SIZE, PAGE_SIZE, (WIDTH, WIDTH), jnp.float8_e4m3fn, descale=0.5)
    assert pool.k.size > 2**31
    pool.write(slots_of(PAGES, PAGE_SIZE).reshape(-1), seed=3)
    pool.write(slots_of(ALIASES, PAGE_SIZE), seed=4)
    return pool


def metadata_of(mode, dtype):
    context = CONTEXT.astype(dtype)
    table = {
        "page_size": PAGE_SIZE,
        "req_to_token": slots_of(PAGES, PAGE_SIZE),
        "req_pool_indices": np.array([0, 1], dtype),
    }
    match mode:
        case "extend":
            return extend_metadata(
                seqused_k=context + np.array([5, 1], dtype),
                cu_seqlens_q=np.array([0, 5, 6], dtype),
                max_seqlen_q=5,
                **table,
            )
        case "decode":
            return decode_metadata(seqused_k=context + dtype(1), **table)
        case "target_verify":
            # A root with two children, the second of which has a child.
            tree = np.tile(np.array([[0b0001], [0b0011], [0b0101], [0b1101]], np.uint64), (2, 1))
            return target_verify_metadata(prefix_lens=context, num_draft_tokens=4, ancestors=tree, **table)
        case "draft_decode":
            return draft_decode_metadata(prefix_lens=context, step=dtype(1), **table)
        case "draft_extend":
            return draft_extend_metadata(seqused_k=context + dtype(4), num_draft_tokens=4, **table)


@pytest.mark.parametrize("mode", ["extend", "decode", "target_verify", "draft_decode", "draft_extend"])
def test_p36_every_mode_beyond_two_to_the_31_elements_with_lengths_of_either_width(pool, mode):
    results = []
    for dtype in (np.int32, np.int64):
        metadata = metadata_of(mode, dtype)
        tokens = int(metadata.cu_seqlens_q[-1])
        slots = np.asarray(metadata.slots(tokens))
        q = queries(tokens, 4, WIDTH)
        # Values differ from mode to mode, so that what an earlier one wrote is wrong for this one.
        k, v = pool.new_rows(slots, seed=list(mode.encode()))
        out, pool.k, pool.v = _step(pool.k, pool.v, q, k, v, metadata, pool.descale)
        np.testing.assert_allclose(out, pool.attend_by_loops(q, metadata), atol=1e-5)
        results.append(np.asarray(out))
    np.testing.assert_array_equal(*results)
    pool.assert_holds_the_record_and_nothing_else()


@pytest.mark.parametrize("mode", ["decode", "target_verify"])
def test_p36_interpreted_pallas_beyond_two_to_the_31_elements(pool, mode):
    metadata = metadata_of(mode, np.int64)
    tokens = int(metadata.cu_seqlens_q[-1])
    slots = np.asarray(metadata.slots(tokens))
    k, v = pool.new_rows(slots, seed=[*mode.encode(), 36])
    pool.k, pool.v = _write(pool.k, pool.v, k, v, jnp.asarray(slots), pool.descale)

    def attend(q, k_cache, v_cache, metadata):
        scales = {"k_descale": pool.descale, "v_descale": pool.descale}
        return unified_attention(q, k_cache, v_cache, metadata, implementation="pallas", **scales)

    q = queries(tokens, 4, WIDTH)
    out = jax.jit(attend)(q, pool.k, pool.v, metadata)
    np.testing.assert_allclose(out, pool.attend_by_loops(q, metadata), atol=1e-5)
