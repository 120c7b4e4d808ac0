"""What only a GPU can show: kernels compiled for it over pools of 9 GiB a side, huge batches, and equal bits."""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_models
import test_plan_for
from test_big_pool import Pool, queries, slots_of

from jaxattn.attention import unified_attention
from jaxattn.index64 import index64
from jaxattn.kernels import bookkeeping
from jaxattn.kernels.triton import cache_write
from jaxattn.kv_cache import write_kv
from jaxattn.metadata import (
    decode_metadata,
    draft_decode_metadata,
    draft_extend_metadata,
    extend_metadata,
    target_verify_metadata,
)
from jaxattn.page_table import build_page_table
from jaxattn.plan import AttentionLayers, make_plan
from jaxattn.slot_rows import slot_rows

pytestmark = pytest.mark.gpu

PAGE_SIZE, KV_HEADS, HEADS, WIDTH = 16, 8, 32, 128
PAGE_ELEMENTS = PAGE_SIZE * KV_HEADS * WIDTH
BYTES = 9 << 30
MODES = ("extend", "decode", "target_verify", "draft_decode", "draft_extend")


@functools.cache
def pool_of(dtype):
    pages = BYTES // (PAGE_ELEMENTS * jnp.dtype(dtype).itemsize)
    descale = 0.5 if jnp.dtype(dtype).itemsize == 1 else 1.0
    return Pool(pages, PAGE_SIZE, (WIDTH, WIDTH), dtype, descale=descale, num_kv_heads=KV_HEADS)


@pytest.fixture(params=["bfloat16", "float8_e4m3fn"])
def pool(request):
    for other in ("bfloat16", "float8_e4m3fn"):
        if other != request.param:
            pool_of.cache_clear()
    return pool_of(request.param)


def fingerprint_pages(pool):
    """Pages on both sides of each threshold that an index can wrap at, and the last ones."""
    itemsize = pool.k.dtype.itemsize
    limits = {2**16, 2**31 // PAGE_ELEMENTS, 2**32 // PAGE_ELEMENTS}
    limits |= {2**31 // (PAGE_ELEMENTS * itemsize), 2**32 // (PAGE_ELEMENTS * itemsize)}
    pages = {limit + side for limit in limits for side in (-1, 0)} | {
        pool.k.shape[0] - 1,
        pool.k.shape[0] - 2,
        1,
    }
    pages = np.random.default_rng(5).permutation(sorted(page for page in pages if page < pool.k.shape[0]))
    return pages[: len(pages) // 2 * 2].reshape(2, -1)


def metadata_of(mode, table, context):
    match mode:
        case "extend":
            rows = np.array([40, 3])
            return extend_metadata(
                seqused_k=context + rows, cu_seqlens_q=np.array([0, 40, 43]), max_seqlen_q=40, **table
            )
        case "decode":
            return decode_metadata(seqused_k=context + 1, **table)
        case "target_verify":
            tree = np.tile(np.array([[0b0001], [0b0011], [0b0101], [0b1101]], np.uint64), (2, 1))
            return target_verify_metadata(prefix_lens=context, num_draft_tokens=4, ancestors=tree, **table)
        case "draft_decode":
            return draft_decode_metadata(prefix_lens=context, step=1, **table)
        case "draft_extend":
            return draft_extend_metadata(seqused_k=context + 4, num_draft_tokens=4, **table)


@pytest.mark.big
@pytest.mark.parametrize(("implementation", "writer"), [("triton", "triton"), ("pallas", "xla")])
@pytest.mark.parametrize("mode", MODES)
def test_p30_to_p36_every_mode_in_a_pool_of_nine_gib_a_side(pool, mode, implementation, writer):
    pages = fingerprint_pages(pool)
    assert pool.k.nbytes > 2**33 or pool.k.size > 2**32
    slots = slots_of(pages, PAGE_SIZE)
    pool.write(slots.reshape(-1), seed=[7, *mode.encode()])
    # Where these pages would be looked for if an id or an offset lost its upper bits.
    aliases = {int(page) % 2**bits for page in pages.flat for bits in (16, 17, 18)} - set(pages.flat)
    pool.write(slots_of(sorted(aliases), PAGE_SIZE).reshape(-1), seed=8)
    context = np.array([slots.shape[1] - 41, slots.shape[1] - 50])
    table = {"page_size": PAGE_SIZE, "req_to_token": slots, "req_pool_indices": np.array([1, 0])}
    metadata = metadata_of(mode, table, context)
    tokens = int(metadata.cu_seqlens_q[-1])
    own = np.asarray(metadata.slots(tokens))
    k, v = pool.new_rows(own, seed=[9, *mode.encode(), *writer.encode()])
    if writer == "triton":
        descale = jnp.full(KV_HEADS, pool.descale, jnp.float32)
        write = index64(jax.jit(cache_write.write_kv, donate_argnums=(0, 1)))
        pool.k, pool.v = write(pool.k, pool.v, k, v, metadata.slots(tokens), descale, descale)
    else:
        pool.write(own, seed=[9, *mode.encode(), *writer.encode()])
    q = queries(tokens, HEADS, WIDTH).astype(jnp.bfloat16)
    out = unified_attention(
        q, pool.k, pool.v, metadata, k_descale=pool.descale, v_descale=pool.descale,
        implementation=implementation, out_dtype=jnp.float32,
    )  # fmt: skip
    expected = pool.attend_by_loops(q.astype(jnp.float32), metadata)
    np.testing.assert_allclose(out, expected, atol=2e-2)
    filled = sum(k.size for k, _ in pool.record.values())
    assert int(jax.jit(lambda k: jnp.sum((k != 0).astype(jnp.int32)))(pool.k)) == filled


@pytest.mark.parametrize("kernels", ["triton", "pallas"])
def test_tables_built_by_either_compiler_are_equal_beyond_32_bits(kernels):
    page_table = importlib.import_module(f"jaxattn.kernels.{kernels}.page_table")
    rng = np.random.default_rng(0)
    page_size, max_pages, sequences = 16, 8192, 128
    lengths = rng.integers(0, max_pages * page_size, sequences)
    first = rng.integers(0, 2**40, (sequences, 1)) * page_size
    req_to_token = first + np.arange(max_pages * page_size)

    @index64
    def tables():
        rows = slot_rows(
            kv_indptr=None,
            kv_indices=None,
            req_to_token=req_to_token,
            req_pool_indices=np.arange(sequences)[::-1],
        )
        used = jnp.asarray(lengths)
        build = jax.jit(page_table.build_page_tables, static_argnums=(2, 3))
        return build(rows, used, page_size, max_pages)[0], build_page_table(rows, used, page_size, max_pages)

    actual, expected = tables()
    np.testing.assert_array_equal(actual, expected)


def test_public_builders_and_writes_take_the_triton_kernels():
    assert bookkeeping() == "triton"
    slots = np.arange(64).reshape(2, 32)[:, ::-1].copy()
    table = {"req_to_token": slots, "req_pool_indices": np.array([1, 0]), "page_size": 1}
    cache = jnp.zeros((64, 1, 2, 16), jnp.bfloat16)
    rows = jnp.ones((2, 2, 16), jnp.bfloat16)

    def step(lengths, k_cache, v_cache):
        metadata = decode_metadata(seqused_k=lengths, **table)
        return metadata.page_table, write_kv(k_cache, v_cache, rows, rows, metadata.slots(2))

    with jax.enable_x64(True):
        lengths = jnp.array([31, 7])
        program = jax.jit(step).lower(lengths, cache, cache).as_text()
        page_table, (k_cache, _) = jax.jit(step)(lengths, cache, cache)
    assert program.count("triton_kernel_call") >= 2
    assert np.asarray(page_table)[0, :31].tolist() == slots[1, :31].tolist()
    assert np.flatnonzero(np.asarray(k_cache, np.float32).sum((1, 2, 3))).tolist() == sorted(
        [slots[1, 30], slots[0, 6]]
    )


@pytest.mark.big
@pytest.mark.parametrize("implementation", ["triton", "pallas"])
@pytest.mark.parametrize("sequences", [65_536, 70_000])
def test_p34_more_sequences_than_a_grid_axis_holds(sequences, implementation):
    k, v = (jax.random.normal(jax.random.key(i), (sequences, 1, 1, 16)) for i in range(2))
    metadata = decode_metadata(
        seqused_k=np.ones(sequences, np.int64), page_size=1, max_pages=1, kv_indptr=np.arange(sequences + 1),
        kv_indices=np.arange(sequences)[::-1].copy(),
    )  # fmt: skip
    out = unified_attention(jnp.ones((sequences, 1, 16)), k, v, metadata, implementation=implementation)
    np.testing.assert_array_equal(out[:, 0], v[::-1, 0, 0])


@pytest.mark.big
@pytest.mark.parametrize("implementation", ["triton", "pallas"])
def test_p32_query_rows_beyond_two_to_the_31_elements(implementation):
    tokens, heads, width = 131_073, 128, 128
    q = jax.random.normal(jax.random.key(0), (tokens, heads, width), jnp.bfloat16)
    k, v = (jax.random.normal(jax.random.key(i), (4, 16, 1, width), jnp.bfloat16) for i in (1, 2))
    lengths = np.full(tokens, 33)
    table = {"page_size": 16, "max_pages": 3, "kv_indptr": np.arange(tokens + 1) * 33}
    metadata = decode_metadata(seqused_k=lengths, kv_indices=np.tile(np.arange(16, 49), tokens), **table)
    out = unified_attention(q, k, v, metadata, implementation=implementation)
    last = decode_metadata(
        seqused_k=lengths[:3], page_size=16, max_pages=3, kv_indptr=np.arange(4) * 33,
        kv_indices=np.tile(np.arange(16, 49), 3),
    )  # fmt: skip
    expected = unified_attention(q[-3:], k, v, last, implementation="reference")
    np.testing.assert_allclose(out[-3:].astype(jnp.float32), expected.astype(jnp.float32), atol=2e-2)


def ragged_batch(seed=0, sequences=24):
    rng = np.random.default_rng(seed)
    prefix = rng.integers(1, 9000, sequences)
    pages = -(-(prefix + 4) // PAGE_SIZE)
    order = rng.permutation(int(pages.sum()))
    req_to_token = np.full((sequences, int(pages.max()) * PAGE_SIZE), -1)
    for row, (count, ids) in enumerate(zip(pages, np.split(order, np.cumsum(pages)[:-1]), strict=True)):
        req_to_token[row, : count * PAGE_SIZE] = slots_of(ids, PAGE_SIZE)
    k, v = (
        jax.random.normal(jax.random.key(i), (len(order), PAGE_SIZE, KV_HEADS, WIDTH), jnp.bfloat16)
        for i in range(2)
    )
    q = jax.random.normal(jax.random.key(3), (sequences * 4, HEADS, WIDTH), jnp.bfloat16)
    return q, k, v, prefix, req_to_token


@pytest.mark.parametrize("implementation", ["triton", "pallas"])
def test_two_runs_give_the_same_bits(implementation):
    q, k, v, prefix, req_to_token = ragged_batch()
    metadata = target_verify_metadata(
        prefix_lens=prefix, num_draft_tokens=4, req_to_token=req_to_token,
        req_pool_indices=np.arange(len(prefix)), page_size=PAGE_SIZE,
    )  # fmt: skip
    first = np.asarray(unified_attention(q, k, v, metadata, implementation=implementation))
    for _ in range(5):
        again = np.asarray(unified_attention(q, k, v, metadata, implementation=implementation))
        np.testing.assert_array_equal(first.view(np.uint16), again.view(np.uint16))


@pytest.mark.parametrize("implementation", ["triton", "pallas"])
def test_batch_invariant_rows_have_the_same_bits_alone_in_a_batch_in_decode_and_in_verify(implementation):
    q, k, v, prefix, req_to_token = ragged_batch()

    def attend(q, metadata):
        out = unified_attention(q, k, v, metadata, implementation=implementation, batch_invariant=True)
        return np.asarray(out).view(np.uint16)

    table = {"req_to_token": req_to_token, "page_size": PAGE_SIZE}
    everyone = np.arange(len(prefix))
    verify = attend(
        q, target_verify_metadata(prefix_lens=prefix, num_draft_tokens=4, req_pool_indices=everyone, **table)
    )
    for i in range(4):
        decode = attend(
            q[i::4], decode_metadata(seqused_k=prefix + i + 1, req_pool_indices=everyone, **table)
        )
        np.testing.assert_array_equal(verify[i::4], decode)
    for s in (0, 7, 23):
        alone = target_verify_metadata(
            prefix_lens=prefix[s : s + 1], num_draft_tokens=4, req_pool_indices=np.array([s]), **table
        )
        np.testing.assert_array_equal(verify[4 * s : 4 * s + 4], attend(q[4 * s : 4 * s + 4], alone))


@pytest.mark.parametrize("implementation", ["triton", "pallas"])
def test_a_plan_made_once_changes_no_bit(implementation):
    q, k, v, prefix, req_to_token = ragged_batch()
    metadata = decode_metadata(
        seqused_k=prefix,
        req_to_token=req_to_token,
        req_pool_indices=np.arange(len(prefix)),
        page_size=PAGE_SIZE,
    )
    planned = dataclasses.replace(metadata, plan=make_plan(metadata, q[::4], k))
    a, b = (unified_attention(q[::4], k, v, m, implementation=implementation) for m in (metadata, planned))
    np.testing.assert_array_equal(np.asarray(a).view(np.uint16), np.asarray(b).view(np.uint16))


@pytest.mark.parametrize("mode", test_plan_for.BUILDERS)
@pytest.mark.parametrize("live", [None, [True, True, True, False, True]], ids=["all", "marked"])
def test_a_builder_with_a_plan_equals_xla(mode, live):
    layers = test_plan_for.layers_of(test_plan_for.ROWS[mode], 4, sliding_windows=(None, 6))
    live = None if live is None else np.array(live)
    built = test_plan_for.build_twice(lambda: test_plan_for.BUILDERS[mode](plan_for=layers, live=live))
    test_plan_for.assert_same_bits(*built)


@pytest.mark.parametrize("sequences", [1, 100, 500, 1000])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_a_step_of_many_long_rows_equals_xla(sequences, dtype):
    rng = np.random.default_rng(sequences)
    pages = rng.permutation(sequences * 300).reshape(sequences, 300)
    pool = slots_of(pages, PAGE_SIZE).astype(dtype)
    layers = AttentionLayers(
        q=jax.ShapeDtypeStruct((sequences, HEADS, WIDTH), jnp.bfloat16),
        k_cache=jax.ShapeDtypeStruct((sequences * 300, PAGE_SIZE, KV_HEADS, WIDTH), jnp.bfloat16),
    )
    lengths = rng.integers(-1, 300 * PAGE_SIZE, sequences)
    built = test_plan_for.build_twice(
        lambda: decode_metadata(
            seqused_k=lengths, page_size=PAGE_SIZE, req_to_token=pool, lookahead=7,
            req_pool_indices=np.arange(sequences)[::-1].copy(), plan_for=layers,
        )
    )  # fmt: skip
    test_plan_for.assert_same_bits(*built)


def test_features_change_no_bit_of_a_batch_invariant_model():
    test_models.test_features_change_no_bit_of_a_batch_invariant_model()
