"""Public bug reports about page tables, lengths and slots, as reduced in the list of reports (P numbers)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn import table_inputs
from jaxattn.debug import checked
from jaxattn.metadata import (
    decode_metadata,
    draft_decode_metadata,
    draft_extend_metadata,
    extend_metadata,
    target_verify_metadata,
)
from jaxattn.page_table import (
    last_page_length,
    page_count,
    page_table_from_ragged,
    page_table_from_req_to_token,
)
from jaxattn.window_pool import evictable_pages, to_window_slots


def identity_pool(num_rows, width):
    """Slots of row r are r * width, r * width + 1, ..."""
    return {
        "req_to_token": np.arange(num_rows * width).reshape(num_rows, width),
        "req_pool_indices": np.arange(num_rows),
    }


def test_p10_last_page_length_at_exact_page_boundaries():
    lengths = np.array([100, 16, 1, 32, 0])
    assert page_count(lengths, 16).tolist() == [7, 1, 1, 2, 0]
    assert np.cumsum([0, *page_count(lengths, 16)]).tolist() == [0, 7, 8, 9, 11, 11]
    assert last_page_length(lengths, 16).tolist() == [4, 16, 1, 16, 0]
    kv_indptr = np.cumsum([0, *lengths])
    kv_indices = np.concatenate([np.arange(n) + 16 * 16 * s for s, n in enumerate(lengths)])
    table = page_table_from_ragged(kv_indptr, kv_indices, page_size=16, max_pages=7)
    assert table.tolist() == [
        [0, 1, 2, 3, 4, 5, 6],
        [16, 0, 0, 0, 0, 0, 0],
        [32, 0, 0, 0, 0, 0, 0],
        [48, 49, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0],
    ]


def test_p11_each_request_starts_at_its_own_page():
    pool = np.zeros((2, 8), np.int64)
    pool[0, :5] = [28, 29, 30, 31, 8]
    pool[1, :6] = [12, 13, 14, 15, 20, 21]
    lengths = np.array([5, 6])
    table = page_table_from_req_to_token(pool, np.array([0, 1]), lengths, page_size=4)
    assert table.tolist() == [[7, 2], [3, 5]]
    for s in range(2):
        alone = page_table_from_req_to_token(pool, np.array([s]), lengths[s : s + 1], page_size=4)
        assert alone.tolist() == table[s : s + 1].tolist()
    kv_indices = np.concatenate([pool[0, :5], pool[1, :6]])
    ragged = page_table_from_ragged(np.array([0, 5, 11]), kv_indices, page_size=4, max_pages=2)
    assert ragged.tolist() == table.tolist()


def test_p12_a_request_near_the_limit_gets_a_page_for_its_draft_tokens():
    verify = target_verify_metadata(
        prefix_lens=np.array([62]), num_draft_tokens=4, page_size=16, **identity_pool(1, 64 + 4)
    )
    assert verify.page_table.tolist() == [[0, 1, 2, 3, 4]]
    assert verify.slots(4).tolist() == [62, 63, 64, 65]


def test_p12_a_table_sized_without_the_draft_tokens_is_an_error():
    pool = identity_pool(1, 64 + 4)
    with pytest.raises(ValueError, match="max_pages: expected at least 5 pages of 16 for the 68 slots"):
        target_verify_metadata(
            prefix_lens=np.array([62]), num_draft_tokens=4, page_size=16, max_pages=4, **pool
        )
    ragged = {"kv_indptr": np.array([0, 66, 98]), "kv_indices": np.arange(98) - 2 * (np.arange(98) > 65)}

    def verify():
        return target_verify_metadata(
            prefix_lens=np.array([62, 28]), num_draft_tokens=4, page_size=16, max_pages=4, **ragged
        )

    # Unchecked, the row has no page at all: no truncated table, and its neighbour is untouched.
    assert verify().page_table.tolist() == [[-1, -1, -1, -1], [4, 5, 0, 0]]
    assert verify().slots(8).tolist() == [-1] * 4 + [92, 93, 94, 95]
    with pytest.raises(ValueError, match="sequence 0 needs more pages of 16 than the 4"):
        checked(verify)()


def test_p12_an_index_buffer_without_the_topk_factor_is_not_read_beyond_its_end():
    topk, seq_len = 8, 5
    kv_indptr = np.arange(topk + 1) * seq_len
    kv_indices = np.arange(seq_len)  # room for one branch only
    build = lambda: page_table_from_ragged(kv_indptr, kv_indices, page_size=1, max_pages=seq_len)  # noqa: E731
    assert build().tolist() == [[0, 1, 2, 3, 4]] + [[-1] * seq_len] * (topk - 1)
    with pytest.raises(ValueError, match="sequence 1 lists fewer slots"):
        checked(build)()


def test_p13_padding_slots_have_no_page():
    kv_indptr, kv_indices = np.array([0, 1, 2, 3]), np.array([-1, 7, -1])
    assert page_table_from_ragged(kv_indptr, kv_indices, page_size=1, max_pages=1).tolist() == [
        [-1],
        [7],
        [-1],
    ]
    paged = page_table_from_ragged(kv_indptr, np.array([-1, 4, -1]), page_size=4, max_pages=1)
    assert paged.tolist() == [[-1], [1], [-1]]
    step = decode_metadata(
        seqused_k=np.array([1, 1, 1]), page_size=1, max_pages=1, kv_indptr=kv_indptr, kv_indices=kv_indices
    )
    assert step.slots(3).tolist() == [-1, 7, -1]
    assert to_window_slots(np.arange(8), np.array([-1, 7, -1])).tolist() == [-1, 7, -1]


def test_p14_rows_out_of_range_are_not_clamped_to_the_last_one():
    pool = identity_pool(8, 16)["req_to_token"]
    table = page_table_from_req_to_token(pool, np.array([7, 9, 8]), np.array([16, 16, 16]), page_size=16)
    assert table.tolist() == [[7], [-1], [-1]]
    beyond = page_table_from_ragged(np.array([0, 2, 6]), np.arange(4), page_size=1, max_pages=4)
    assert beyond.tolist() == [[0, 1, 0, 0], [2, 3, -1, -1]]
    assert to_window_slots(np.arange(4), np.array([3, 4, 2**32])).tolist() == [3, -1, -1]


def test_p22_a_window_page_stays_until_the_earliest_query_has_left_it():
    """W=8, P=4: rows 10..15 still see position 3, rows 16..21 only from position 9 on."""
    free = evictable_pages(np.array([10, 16]), sliding_window=8, page_size=4, max_pages=6)
    assert free.tolist() == [[False] * 6, [True, True, False, False, False, False]]
    for least in range(40):
        visible = {p // 4 for q in range(least, least + 6) for p in range(max(0, q - 7), q + 1)}
        beyond = {page for page in range(12) if page * 4 > least + 5}
        free = evictable_pages(np.array([least]), sliding_window=8, page_size=4, max_pages=12)[0]
        assert {page for page in range(12) if not free[page]} == visible | beyond


def test_p22_dropped_and_padding_slots_translate_to_minus_one():
    full_to_swa = np.array([-1] * 4 + [4, 5, 6, 7, 0, 1, 2, 3] + [-1])
    assert to_window_slots(full_to_swa, np.array([-1, 3, 4, 11])).tolist() == [-1, -1, 4, 3]
    step = decode_metadata(
        seqused_k=np.array([12]), page_size=4, full_to_swa=full_to_swa, **identity_pool(1, 12)
    )
    assert step.page_table.tolist() == [[0, 1, 2]]
    assert step.swa_page_table.tolist() == [[-1, 1, 0]]


@pytest.mark.parametrize("x64", [False, True])
def test_p35_host_indices_beyond_32_bits_keep_their_values(x64):
    slots = np.array([2**31 + 5, 2**32])
    with jax.enable_x64(x64):
        table = page_table_from_ragged(np.array([0, 1, 2]), slots, page_size=1, max_pages=1)
        assert table.tolist() == [[2**31 + 5], [2**32]]
        pooled = page_table_from_req_to_token(slots[:, None], np.arange(2), np.ones(2, int), page_size=1)
        assert pooled.tolist() == [[2**31 + 5], [2**32]]
        assert to_window_slots(np.array([2**32 + 5]), np.array([0, 2**32])).tolist() == [2**32 + 5, -1]
        step = decode_metadata(
            seqused_k=np.array([1, 1]),
            page_size=1,
            req_to_token=slots[:, None],
            req_pool_indices=np.arange(2),
        )
        assert step.slots(2).tolist() == [2**31 + 5, 2**32]
        assert step.with_lengths(slots).seqused_k.tolist() == [2**31 + 5, 2**32]
        assert step.with_lengths(slots).positions(2).tolist() == [2**31 + 4, 2**32 - 1]
        assert step.advance(slots).seqused_k.tolist() == [2**31 + 6, 2**32 + 1]
        in_a_jit = jax.jit(lambda: page_table_from_ragged(np.array([0, 2]), slots, page_size=1, max_pages=2))
        assert in_a_jit().tolist() == [[2**31 + 5, 2**32]]
        free = evictable_pages(slots, sliding_window=8, page_size=2**31, max_pages=2)
        assert free.tolist() == [[False, False], [True, False]]
        with pytest.raises(OverflowError, match="kv_indices: expected values within int64"):
            page_table_from_ragged(np.array([0, 1]), np.array([2**63], np.uint64), page_size=1, max_pages=1)


def test_p37_cu_seqlens_q_needs_one_entry_more_than_sequences():
    pool = identity_pool(3, 16)

    def verify(cu_seqlens_q):
        return extend_metadata(
            seqused_k=np.array([9, 10, 11]), cu_seqlens_q=cu_seqlens_q, max_seqlen_q=4, page_size=16, **pool
        )

    assert verify(np.array([0, 4, 8, 12])).positions(12).tolist() == [5, 6, 7, 8, 6, 7, 8, 9, 7, 8, 9, 10]
    for wrong in (np.array([0, 4, 8]), np.array([0, 4, 8, 12, 12])):
        with pytest.raises(
            ValueError, match=rf"cu_seqlens_q: expected shape \[S\+1\] = \[4\], got \[{len(wrong)}\]"
        ):
            jax.jit(verify)(wrong)
    for lengths in (np.array([5, 6]), np.array([5, 6, 7, 8])):
        with pytest.raises(
            ValueError, match=rf"seqused_k: expected shape \[S\] = \[3\], got \[{len(lengths)}\]"
        ):
            target_verify_metadata(prefix_lens=lengths, num_draft_tokens=4, page_size=16, **pool)


def test_p55_draft_extend_rows_are_laid_out_by_the_number_of_draft_tokens():
    """B=2, 2 steps, topk 4: 8 rows per request, whatever the number of steps."""
    pool = identity_pool(2, 32)
    both = draft_extend_metadata(seqused_k=np.array([20, 13]), num_draft_tokens=8, page_size=16, **pool)
    assert both.cu_seqlens_q.tolist() == [0, 8, 16]
    ragged = extend_metadata(
        seqused_k=np.array([13, 8]), cu_seqlens_q=np.array([0, 1, 4]), max_seqlen_q=3, page_size=16, **pool
    )
    assert ragged.positions(4).tolist() == [12, 5, 6, 7]
    for s, length in enumerate([20, 13]):
        one = {name: value if name == "req_to_token" else value[s : s + 1] for name, value in pool.items()}
        alone = draft_extend_metadata(seqused_k=np.array([length]), num_draft_tokens=8, page_size=16, **one)
        assert alone.page_table[0].tolist() == both.page_table[s].tolist()
        assert alone.positions(8).tolist() == both.positions(16)[8 * s : 8 * s + 8].tolist()
        assert alone.slots(8).tolist() == both.slots(16)[8 * s : 8 * s + 8].tolist()


def test_p55_metadata_built_after_a_prefill_holds_nothing_of_it():
    pool = identity_pool(1, 96)
    extend_metadata(
        seqused_k=np.array([80]), cu_seqlens_q=np.array([0, 80]), max_seqlen_q=80, page_size=16, **pool
    )
    after = draft_extend_metadata(seqused_k=np.array([84]), num_draft_tokens=4, page_size=16, **pool)
    assert (after.cu_seqlens_q.tolist(), after.max_seqlen_q) == ([0, 4], 4)
    assert after.positions(4).tolist() == [80, 81, 82, 83]


@pytest.mark.parametrize("x64", [False, True])
def test_p56_a_position_beyond_the_table_has_no_slot(x64):
    pool = identity_pool(1, 64)
    pool["req_to_token"] = pool["req_to_token"] + 160
    with jax.enable_x64(x64):
        step = draft_decode_metadata(prefix_lens=np.array([63]), step=0, lookahead=2, page_size=16, **pool)
        slots = [step.advance(i).slots(1).tolist() for i in range(3)]
        assert slots == [[160 + 63], [-1], [-1]]
        rows = step.with_lengths(np.array([66]), np.array([0, 3]))
        assert rows.positions(3).tolist() == [63, 64, 65]
        assert rows.slots(3).tolist() == [160 + 63, -1, -1]


def test_p57_padded_sequences_are_neutral_whatever_their_rows_hold():
    pool = identity_pool(8, 32)
    stale = {"prefix_lens": np.arange(8, 16), "num_draft_tokens": 4, "page_size": 16}
    fresh = target_verify_metadata(
        prefix_lens=stale["prefix_lens"][:3],
        num_draft_tokens=4,
        page_size=16,
        req_to_token=pool["req_to_token"],
        req_pool_indices=np.arange(3),
    )
    full = target_verify_metadata(**stale, **pool)
    live = np.arange(8) < 3
    indptr = np.arange(9) * 32
    by_rows = dict(zip(("kv_indptr", "kv_indices"), (indptr, np.arange(256)), strict=True))
    replays = (
        target_verify_metadata(**stale, live=live, out=full, **pool),
        target_verify_metadata(**{**stale, "prefix_lens": np.where(live, np.arange(8, 16), -1)}, **pool),
        target_verify_metadata(
            **stale, req_to_token=pool["req_to_token"], req_pool_indices=np.where(live, np.arange(8), -1)
        ),
        target_verify_metadata(**stale, live=live, max_pages=2, **by_rows),
        fresh.pad_to(8),
    )
    for replay in replays:
        assert replay.cu_seqlens_q.tolist() == [0, 4, 8, 12] + [12] * 5
        assert replay.seqused_k.tolist() == [12, 13, 14] + [0] * 5
        assert replay.slots(32).tolist() == fresh.slots(32).tolist()
        assert not np.asarray(replay.page_table[3:]).any()
    for replay in replays[:3]:
        assert replay.page_table[:3].tolist() == fresh.page_table.tolist()
    # The layout of the live rows does not move when a sequence between them ends.
    ended = target_verify_metadata(**stale, live=np.arange(8) % 2 == 0, **pool)
    assert ended.cu_seqlens_q.tolist() == [0, 4, 8, 12, 16, 20, 24, 28, 28]
    assert ended.advance(3).seqused_k.tolist() == [15, 0, 17, 0, 19, 0, 21, 0]
    assert ended.sequence_ids(32).tolist() == [s if s % 2 == 0 else -1 for s in range(8) for _ in range(4)]


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("num_seqs", [0, 3])
@pytest.mark.parametrize("jitted", [False, True])
def test_p58_empty_batches(x64, num_seqs, jitted):
    zeros = np.zeros(num_seqs, np.int64)
    forms = (
        {"kv_indptr": np.zeros(num_seqs + 1, np.int64), "kv_indices": np.zeros(0, np.int64), "max_pages": 0},
        {"req_to_token": np.zeros((0, 0), np.int64), "req_pool_indices": zeros},
        {"req_to_token": np.zeros((2, 32), np.int64), "req_pool_indices": zeros - 1},
    )
    builders = (
        lambda **table: extend_metadata(
            seqused_k=zeros, cu_seqlens_q=np.zeros(num_seqs + 1, np.int64), max_seqlen_q=0, **table
        ),
        lambda **table: decode_metadata(seqused_k=zeros, **table),
        lambda **table: draft_decode_metadata(prefix_lens=zeros - 1, step=0, **table),
    )
    with jax.enable_x64(x64):
        for form in forms:
            for build in builders:
                make = lambda build=build, form=form: build(page_size=16, **form)  # noqa: E731
                metadata = jax.jit(make)() if jitted else make()
                assert metadata.page_table.shape == (num_seqs, 2 if form is forms[2] else 0)
                assert metadata.cu_seqlens_q.tolist() == [0] * (num_seqs + 1)
                assert metadata.seqused_k.tolist() == [0] * num_seqs
                assert metadata.slots(0).shape == metadata.positions(0).shape == (0,)
                assert metadata.slots(2).tolist() == metadata.sequence_ids(2).tolist() == [-1, -1]
                assert metadata.positions(2).tolist() == [0, 0]
                assert metadata.advance(1).seqused_k.tolist() == [0] * num_seqs


def test_p62_one_compilation_serves_batches_that_differ_in_values():
    rng = np.random.default_rng(0)
    traces = []

    @jax.jit
    def step(prefix_lens, pool, rows, indptr, indices, live):
        traces.append(1)
        verify = target_verify_metadata(
            prefix_lens=prefix_lens,
            num_draft_tokens=4,
            page_size=16,
            live=live,
            req_to_token=pool,
            req_pool_indices=rows,
        )
        ragged = decode_metadata(
            seqused_k=prefix_lens, page_size=16, max_pages=4, kv_indptr=indptr, kv_indices=indices
        )
        return verify.slots(20), ragged.slots(5), verify.advance(prefix_lens).seqused_k

    before = table_inputs.assemble._cache_size()
    for i in range(20):
        lengths = rng.integers(0, 60, 5)
        batch = (
            lengths,
            rng.integers(0, 2**30, (7, 64)),
            rng.permutation(7)[:5],
            np.cumsum([0, *lengths]),
            rng.integers(0, 2**30, 300),
            rng.random(5) < 0.7,
        )
        with jax.enable_x64(True):
            batch = jax.tree.map(jnp.asarray, batch)
        jax.block_until_ready(step(*batch))
        draft_decode_metadata(
            prefix_lens=lengths,
            step=i,
            lookahead=i,
            page_size=16,
            req_to_token=batch[1],
            req_pool_indices=batch[2],
        )
    assert len(traces) == 1
    # The eager calls, and the two traced ones, each compile or trace the assembly once.
    assert table_inputs.assemble._cache_size() - before <= 3
