import dataclasses

import jax
import jax.numpy as jnp
import loops
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from table_cases import MAX_PAGES, cases, make_case

from jaxattn.debug import checked
from jaxattn.metadata import (
    decode_metadata,
    draft_decode_metadata,
    draft_extend_metadata,
    extend_metadata,
    target_verify_metadata,
)

few = settings(max_examples=30, deadline=None)
N = 3  # draft tokens, at most the smallest capacity of a case
ROWS = 4 * N + 2  # rows of a token buffer for up to four sequences, with padding rows


def constant_rows(case, live, q_len):
    """Expected q_lens and seqused_k where every sequence has q_len rows and `case.lengths` keys."""
    alive = [on and n >= q_len for on, n in zip(live, case.lengths, strict=True)]
    return loops.constant_q_lens(alive, q_len), [
        n if on else 0 for n, on in zip(case.lengths, alive, strict=True)
    ]


def check(metadata, case, q_lens, seqused_k, *, covered=None, depths=None):
    """Compare everything that the metadata says with the loops."""
    covered = case.lengths if covered is None else covered
    covered = [n if keys > 0 else 0 for n, keys in zip(covered, seqused_k, strict=True)]
    table = loops.page_table(case.rows, covered, case.page_size, MAX_PAGES)
    assert {leaf.dtype for leaf in jax.tree.leaves(dataclasses.replace(metadata, ancestors=None))} == {
        np.dtype(np.int64)
    }
    np.testing.assert_array_equal(np.asarray(metadata.page_table), table)
    assert metadata.cu_seqlens_q.tolist() == np.cumsum([0, *q_lens]).tolist()
    assert metadata.seqused_k.tolist() == seqused_k
    ids, positions, slots = loops.query_rows(table, q_lens, seqused_k, case.page_size, ROWS, depths)
    assert metadata.sequence_ids(ROWS).tolist() == ids
    assert metadata.positions(ROWS).tolist() == positions
    assert metadata.slots(ROWS).tolist() == slots


def for_each_form(case, build):
    for form in (case.ragged(), case.pooled()):
        yield build(page_size=case.page_size, **form)


def int64(values):
    return np.array(values, np.int64)


live_masks = st.lists(st.booleans(), min_size=4, max_size=4)


@few
@given(case=cases(), live=live_masks, x64=st.booleans())
def test_decode_equals_the_loop(case, live, x64):
    live = live[: len(case.rows)]
    with jax.enable_x64(x64):
        for metadata in for_each_form(
            case,
            lambda **table: decode_metadata(
                seqused_k=int64(case.lengths), live=np.array(live, bool), **table
            ),
        ):
            check(metadata, case, *constant_rows(case, live, 1))
            assert (metadata.mode, metadata.max_seqlen_q) == ("decode", 1)


@few
@given(case=cases(least=N), live=live_masks, x64=st.booleans())
def test_target_verify_equals_the_loop(case, live, x64):
    live = live[: len(case.rows)]
    prefix = int64(case.lengths) - N
    with jax.enable_x64(x64):
        for metadata in for_each_form(
            case,
            lambda **table: target_verify_metadata(
                prefix_lens=prefix, num_draft_tokens=N, live=np.array(live, bool), **table
            ),
        ):
            check(metadata, case, *constant_rows(case, live, N))
            assert (metadata.mode, metadata.max_seqlen_q) == ("target_verify", N)


@few
@given(case=cases(), live=live_masks, x64=st.booleans())
def test_draft_extend_equals_the_loop(case, live, x64):
    live = live[: len(case.rows)]
    with jax.enable_x64(x64):
        for metadata in for_each_form(
            case,
            lambda **table: draft_extend_metadata(
                seqused_k=int64(case.lengths), num_draft_tokens=N, live=np.array(live, bool), **table
            ),
        ):
            check(metadata, case, *constant_rows(case, live, N))
            assert (metadata.mode, metadata.max_seqlen_q) == ("draft_extend", N)


@few
@given(case=cases(least=2, spare=0), step=st.integers(0, 1), live=live_masks, x64=st.booleans())
def test_draft_decode_equals_the_loop(case, step, live, x64):
    """The length grows with the step: prefix + step + 1."""
    live = live[: len(case.rows)]
    prefix = int64(case.lengths) - step - 1
    with jax.enable_x64(x64):
        for metadata in for_each_form(
            case,
            lambda **table: draft_decode_metadata(
                prefix_lens=prefix, step=step, live=np.array(live, bool), **table
            ),
        ):
            check(metadata, case, *constant_rows(case, live, 1))
            assert (metadata.mode, metadata.max_seqlen_q) == ("draft_decode", 1)


@few
@given(case=cases(), live=live_masks, data=st.data(), x64=st.booleans())
def test_extend_equals_the_loop(case, live, data, x64):
    live = live[: len(case.rows)]
    q_lens = [data.draw(st.integers(0, min(n, N))) for n in case.lengths]
    indptr = np.cumsum([0, *q_lens]).astype(np.int64)
    seqused_k = [n if on and q else 0 for n, on, q in zip(case.lengths, live, q_lens, strict=True)]
    with jax.enable_x64(x64):
        for metadata in for_each_form(
            case,
            lambda **table: extend_metadata(
                seqused_k=int64(case.lengths),
                cu_seqlens_q=indptr,
                max_seqlen_q=N,
                live=np.array(live, bool),
                **table,
            ),
        ):
            check(metadata, case, q_lens, seqused_k)
            assert (metadata.mode, metadata.max_seqlen_q) == ("extend", N)


def random_tree(rng, num_seqs, n):
    """Ancestor bits and depths of one random tree per sequence."""
    bits, depths = np.zeros((num_seqs * n, 1), np.uint64), np.zeros(num_seqs * n, np.int64)
    for s in range(num_seqs):
        for i in range(n):
            node = s * n + i
            bits[node, 0] = np.uint64(1) << np.uint64(i)
            if i:
                parent = s * n + rng.integers(0, i)
                bits[node, 0] |= bits[parent, 0]
                depths[node] = depths[parent] + 1
    return bits, depths


@pytest.mark.parametrize("x64", [False, True])
def test_a_tree_measures_positions_by_depth_and_slots_by_row(x64):
    case = make_case(4, [33, 7, 80, 16], 16)
    bits, depths = random_tree(np.random.default_rng(0), 4, N)
    with jax.enable_x64(True):
        ancestors = jnp.asarray(bits)
    with jax.enable_x64(x64):
        metadata = target_verify_metadata(
            prefix_lens=int64(case.lengths) - N,
            num_draft_tokens=N,
            ancestors=ancestors,
            page_size=16,
            **case.pooled(),
        )
        with pytest.raises(ValueError, match="num_tokens: expected the 12 rows of ancestors, got 14; pad"):
            metadata.positions(ROWS)
        padded = metadata.pad_to(6, ROWS)
        assert padded.ancestors.shape == (ROWS, 1)
        assert padded.ancestors[12:].tolist() == [[0], [0]]
        table = loops.page_table(case.rows, case.lengths, 16, MAX_PAGES)
        for num_tokens, tree in ((12, metadata), (ROWS, padded)):
            ids, positions, slots = loops.query_rows(table, [N] * 4, case.lengths, 16, num_tokens, depths)
            assert tree.sequence_ids(num_tokens).tolist() == ids
            assert tree.positions(num_tokens).tolist() == positions
            assert tree.slots(num_tokens).tolist() == slots


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_window_pool_metadata_equals_the_loop(page_size):
    case = make_case(6, [MAX_PAGES * page_size, 1, 0, page_size], page_size, first_page=0)
    full_to_swa = case.full_to_swa(np.random.default_rng(1))
    expected = loops.page_table(loops.translate(case.rows, full_to_swa), case.lengths, page_size, MAX_PAGES)
    assert (expected == -1).any()
    assert (expected > 0).any()
    for metadata in for_each_form(
        case,
        lambda **table: decode_metadata(seqused_k=int64(case.lengths), full_to_swa=full_to_swa, **table),
    ):
        metadata = dataclasses.replace(metadata, plan=jnp.ones(3, jnp.float32))
        window = metadata.for_window_pool()
        np.testing.assert_array_equal(np.asarray(window.page_table), expected)
        assert window.swa_page_table is None
        assert window.plan is metadata.plan
        np.testing.assert_array_equal(
            np.asarray(metadata.page_table),
            loops.page_table(case.rows, case.lengths, page_size, MAX_PAGES),
        )
        with pytest.raises(ValueError, match="pass full_to_swa to the builder"):
            window.for_window_pool()


def test_pool_index_of_minus_one_is_a_padding_sequence():
    case = make_case(8, [10, 20, 30, 40], 16)
    pooled = case.pooled()
    pooled["req_pool_indices"][[1, 3]] = -1
    metadata = decode_metadata(seqused_k=int64(case.lengths), page_size=16, **pooled)
    assert metadata.seqused_k.tolist() == [10, 0, 30, 0]
    assert metadata.cu_seqlens_q.tolist() == [0, 1, 2, 3, 3]
    assert metadata.page_table[1].tolist() == [0] * MAX_PAGES
    assert metadata.sequence_ids(4).tolist() == [0, -1, 2, -1]


def test_an_empty_prefix_is_live_and_a_negative_one_is_padding():
    case = make_case(9, [N, N, N, N], 16)
    metadata = target_verify_metadata(
        prefix_lens=int64([0, -1, 0, -1]), num_draft_tokens=N, page_size=16, **case.pooled()
    )
    assert metadata.seqused_k.tolist() == [N, 0, N, 0]
    assert metadata.cu_seqlens_q.tolist() == [0, N, 2 * N, 3 * N, 3 * N]


def test_lookahead_covers_what_advance_reaches():
    case = make_case(11, [16, 15, 30, 78], 16, listed=[80, 80, 80, 80])
    metadata = decode_metadata(seqused_k=int64(case.lengths), lookahead=20, page_size=16, **case.pooled())
    check(metadata, case, [1] * 4, case.lengths, covered=[36, 35, 50, 80])
    table = loops.page_table(case.rows, [36, 35, 50, 80], 16, MAX_PAGES)
    later = metadata.advance(20)
    lengths = [n + 20 for n in case.lengths]
    assert later.seqused_k.tolist() == lengths
    ids, positions, slots = loops.query_rows(table, [1] * 4, lengths, 16, 4)
    assert (later.sequence_ids(4).tolist(), later.positions(4).tolist()) == (ids, positions)
    assert later.slots(4).tolist() == slots
    assert slots[3] == -1


def test_ragged_rows_are_covered_as_far_as_they_are_listed():
    case = make_case(12, [16, 15, 30, 78], 16, listed=[17, 80, 30, 80])
    metadata = decode_metadata(seqused_k=int64(case.lengths), page_size=16, **case.ragged())
    check(metadata, case, [1] * 4, case.lengths, covered=[17, 80, 30, 80])
    # What is listed beyond the table is out of reach of `advance`, and does not make a sequence too long.
    narrow = decode_metadata(
        seqused_k=int64([16, 15, 30, 48]), page_size=16, **{**case.ragged(), "max_pages": 3}
    )
    table = loops.page_table(case.rows, [17, 48, 30, 48], 16, 3)
    np.testing.assert_array_equal(np.asarray(narrow.page_table), table)
    assert narrow.advance(1).slots(4).tolist()[3] == -1


def test_a_ragged_row_does_not_continue_in_its_neighbour():
    case = make_case(19, [20, 20, 33, 16], 16, listed=[16, 20, 32, 16])
    metadata = decode_metadata(seqused_k=int64(case.lengths), page_size=16, **case.ragged())
    check(metadata, case, [1] * 4, case.lengths)
    assert metadata.page_table[:, 1:3].tolist()[0] == [-1, 0]
    assert [slot < 0 for slot in metadata.slots(4).tolist()] == [True, False, True, False]


@pytest.mark.parametrize("x64", [False, True])
def test_advance_takes_one_number_or_one_per_sequence(x64):
    metadata = decode_metadata(
        seqused_k=int64([2**33, 0, 5, 0]), page_size=16, **make_case(1, [1, 1, 1, 1], 16).pooled()
    )
    metadata = dataclasses.replace(metadata, plan=jnp.ones(3))
    with jax.enable_x64(x64):
        assert metadata.advance(1).seqused_k.tolist() == [2**33 + 1, 0, 6, 0]
        assert metadata.advance(np.int64(2**33)).seqused_k.tolist() == [2**34, 0, 2**33 + 5, 0]
        assert metadata.advance(np.array([1, 2, 3, 4], np.int32)).seqused_k.tolist() == [2**33 + 1, 0, 8, 0]
        assert metadata.advance(1).seqused_k.dtype == jnp.int64
        assert metadata.advance(1).plan is None
        with pytest.raises(ValueError, match=r"n: expected a scalar or shape \[S\] = \[4\], got \[3\]"):
            metadata.advance(np.ones(3, np.int64))
        with pytest.raises(TypeError, match="n: expected an integer dtype"):
            metadata.advance(np.float32(1))


@pytest.mark.parametrize("x64", [False, True])
def test_with_lengths_replaces_lengths_and_keeps_padding_neutral(x64):
    metadata = decode_metadata(
        seqused_k=int64([3, 4, 5, 0]), page_size=16, **make_case(1, [5, 5, 5, 5], 16).pooled()
    )
    with jax.enable_x64(x64):
        longer = metadata.with_lengths(np.array([2**40, 5, 6, 7], np.int64))
        assert longer.seqused_k.tolist() == [2**40, 5, 6, 0]
        assert longer.seqused_k.dtype == jnp.int64
        ragged = metadata.with_lengths(int64([9, 9, 9, 9]), int64([0, 1, 1, 2, 3]))
        assert ragged.seqused_k.tolist() == [9, 0, 9, 9]
        assert ragged.cu_seqlens_q.tolist() == [0, 1, 1, 2, 3]
    with pytest.raises(ValueError, match=r"seqused_k: expected shape \[S\] = \[4\], got \[3\]"):
        metadata.with_lengths(int64([1, 2, 3]))
    with pytest.raises(ValueError, match=r"cu_seqlens_q: expected shape \[S\+1\] = \[5\], got \[4\]"):
        metadata.with_lengths(int64([1, 2, 3, 4]), int64([0, 1, 2, 3]))


@pytest.mark.parametrize("x64", [False, True])
def test_pad_to_appends_neutral_sequences(x64):
    case = make_case(13, [33, 7, 80, 16], 16, first_page=0)
    full_to_swa = case.full_to_swa(np.random.default_rng(2))
    metadata = decode_metadata(
        seqused_k=int64(case.lengths), page_size=16, full_to_swa=full_to_swa, **case.pooled()
    )
    with jax.enable_x64(x64):
        padded = metadata.pad_to(7)
        assert padded.num_seqs == 7
        for name in ("page_table", "swa_page_table"):
            table = getattr(padded, name)
            assert table.dtype == jnp.int64
            np.testing.assert_array_equal(np.asarray(table[:4]), np.asarray(getattr(metadata, name)))
            assert not np.asarray(table[4:]).any()
        assert padded.cu_seqlens_q.tolist() == [0, 1, 2, 3, 4, 4, 4, 4]
        assert padded.seqused_k.tolist() == [*case.lengths, 0, 0, 0]
        assert padded.slots(9).tolist() == metadata.slots(9).tolist()
        assert padded.advance(1).seqused_k.tolist() == [34, 8, 81, 17, 0, 0, 0]
    with pytest.raises(ValueError, match="num_seqs: expected at least the 4 that are there, got 3"):
        metadata.pad_to(3)


@pytest.mark.parametrize("x64", [False, True])
def test_metadata_is_a_carry_of_device_loops(x64):
    case = make_case(14, [16, 15, 0, 30], 16, listed=[80] * 4)
    metadata = decode_metadata(seqused_k=int64(case.lengths), lookahead=8, page_size=16, **case.pooled())
    expected = []
    stepped = metadata
    for _ in range(6):
        expected.append(stepped.slots(4).tolist())
        stepped = stepped.advance(1)
    with jax.enable_x64(x64):
        last, slots = jax.lax.scan(
            lambda carry, _: (carry.advance(1), carry.slots(4)), metadata, None, length=6
        )
        assert slots.tolist() == expected
        assert last.seqused_k.dtype == jnp.int64
        assert last.seqused_k.tolist() == stepped.seqused_k.tolist() == [22, 21, 0, 36]

        @jax.jit
        def run(metadata):
            return jax.lax.while_loop(
                lambda carry: carry[0] < 6, lambda carry: (carry[0] + 1, carry[1].advance(1)), (0, metadata)
            )[1]

        assert run(metadata).seqused_k.tolist() == stepped.seqused_k.tolist()
        both = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), metadata)
        assert jax.vmap(lambda m: m.advance(6).slots(4))(both).tolist() == [stepped.slots(4).tolist()] * 2


@pytest.mark.parametrize("x64", [False, True])
def test_builders_run_inside_a_compiled_loop(x64):
    """Verify metadata rebuilt in every cycle from lengths that the loop itself moves."""
    case = make_case(15, [10, 16, 40, 1], 16, listed=[80] * 4)
    pooled = case.pooled()
    with jax.enable_x64(True):
        start = jnp.asarray(int64(case.lengths))
        pool, indices = jnp.asarray(pooled["req_to_token"]), jnp.asarray(pooled["req_pool_indices"])

    def cycle(state, _):
        verify = target_verify_metadata(
            prefix_lens=state.seqused_k,
            num_draft_tokens=N,
            page_size=16,
            req_to_token=pool,
            req_pool_indices=indices,
        )
        return state.advance(2), (verify.page_table, verify.slots(4 * N))

    with jax.enable_x64(x64):
        state = decode_metadata(seqused_k=start, page_size=16, req_to_token=pool, req_pool_indices=indices)
        _, (tables, slots) = jax.jit(lambda state: jax.lax.scan(cycle, state, None, length=3))(state)
    for i in range(3):
        lengths = [n + 2 * i + N for n in case.lengths]
        table = loops.page_table(case.rows, lengths, 16, MAX_PAGES)
        np.testing.assert_array_equal(np.asarray(tables[i]), table)
        assert slots[i].tolist() == loops.query_rows(table, [N] * 4, lengths, 16, 4 * N)[2]


def test_draft_steps_may_be_traced():
    case = make_case(16, [10, 16, 40, 1], 16, listed=[80] * 4)
    pooled = case.pooled()

    @jax.jit
    def lengths_of(step):
        return draft_decode_metadata(
            prefix_lens=int64(case.lengths), step=step, page_size=16, **pooled
        ).seqused_k

    assert lengths_of(0).tolist() == [11, 17, 41, 2]
    assert lengths_of(2).tolist() == [13, 19, 43, 4]


@pytest.mark.parametrize("x64", [False, True])
def test_out_donates_the_tables_of_an_older_metadata(x64):
    case = make_case(17, [33, 7, 80, 16], 16, first_page=0)
    full_to_swa = case.full_to_swa(np.random.default_rng(3))

    def build(lengths, out=None):
        return decode_metadata(
            seqused_k=int64(lengths), page_size=16, full_to_swa=full_to_swa, out=out, **case.pooled()
        )

    with jax.enable_x64(x64):
        old = build(case.lengths)
        pointers = {old.page_table.unsafe_buffer_pointer(), old.swa_page_table.unsafe_buffer_pointer()}
        new = build([1, 0, 17, 0], out=old)
    assert old.page_table.is_deleted()
    assert old.swa_page_table.is_deleted()
    assert {new.page_table.unsafe_buffer_pointer(), new.swa_page_table.unsafe_buffer_pointer()} == pointers
    np.testing.assert_array_equal(
        np.asarray(new.page_table), loops.page_table(case.rows, [1, 0, 17, 0], 16, MAX_PAGES)
    )
    with pytest.raises(ValueError, match=r"out: expected shape \[S, M\] = \[4, 5\], got None"):
        build([1, 1, 1, 1], out=dataclasses.replace(new, swa_page_table=None))


def test_checked_mode_names_the_sequence():
    case = make_case(18, [33, 7, 80, 16], 16)

    def error(**change):
        arguments = {"seqused_k": int64(case.lengths), "page_size": 16, **case.pooled(), **change}
        try:
            checked(lambda: decode_metadata(**arguments))()
        except ValueError as error:
            return str(error)
        return ""

    assert error() == ""
    assert "sequence 2 needs more pages of 16" in error(seqused_k=int64([33, 7, 81, 16]))
    assert "sequence 1 lists fewer slots" in error(req_pool_indices=int64([0, 9, 1, 2]))
    assert error(req_pool_indices=int64([0, -1, 1, 2]), page_size=1, max_pages=80) == ""


GOOD = {
    "page_size": 4,
    "max_pages": 2,
    "req_to_token": np.arange(8).reshape(1, 8),
    "req_pool_indices": np.array([0]),
}


@pytest.mark.parametrize(
    ("build", "error", "text"),
    [
        (
            lambda: decode_metadata(seqused_k=int64([1, 2]), **GOOD),
            ValueError,
            r"seqused_k: .* \[1\], got \[2\]",
        ),
        (
            lambda: decode_metadata(seqused_k=np.ones(1), **GOOD),
            TypeError,
            "seqused_k: expected an integer dtype",
        ),
        (
            lambda: decode_metadata(seqused_k=int64([1]), page_size=4),
            ValueError,
            "expected either kv_indptr and kv_indices, or .*; got none of them",
        ),
        (
            lambda: decode_metadata(seqused_k=int64([1]), **GOOD, kv_indptr=int64([0, 1])),
            ValueError,
            "got kv_indptr, req_to_token, req_pool_indices",
        ),
        (
            lambda: decode_metadata(
                seqused_k=int64([1]), page_size=4, kv_indptr=int64([0, 1]), kv_indices=int64([0])
            ),
            ValueError,
            "max_pages: expected a number with kv_indptr",
        ),
        (
            lambda: decode_metadata(
                seqused_k=int64([1]),
                page_size=4,
                max_pages=1,
                lookahead=1,
                kv_indptr=int64([0, 1]),
                kv_indices=int64([0]),
            ),
            ValueError,
            "lookahead: expected none with kv_indptr",
        ),
        (
            lambda: decode_metadata(seqused_k=int64([1]), lookahead=-1, **GOOD),
            ValueError,
            "lookahead: .* got -1",
        ),
        (
            lambda: decode_metadata(seqused_k=int64([1]), live=np.array([1]), **GOOD),
            TypeError,
            "live: expected a bool array, got int64",
        ),
        (
            lambda: decode_metadata(seqused_k=int64([1]), live=np.array([True, True]), **GOOD),
            ValueError,
            r"live: expected shape \[S\] = \[1\], got \[2\]",
        ),
        (
            lambda: target_verify_metadata(prefix_lens=int64([1]), num_draft_tokens=0, **GOOD),
            ValueError,
            "num_draft_tokens: expected at least 1, got 0",
        ),
        (
            lambda: target_verify_metadata(prefix_lens=int64([1]), num_draft_tokens=9, **GOOD),
            ValueError,
            "max_pages: expected at least 3 pages of 4 for the 9 draft tokens of a sequence, got 2",
        ),
        (
            lambda: target_verify_metadata(
                prefix_lens=int64([1]), num_draft_tokens=2, ancestors=np.ones((2, 1), np.int64), **GOOD
            ),
            TypeError,
            "ancestors: expected a uint64 array, got int64",
        ),
        (
            lambda: target_verify_metadata(
                prefix_lens=int64([1]), num_draft_tokens=2, ancestors=np.ones((3, 1), np.uint64), **GOOD
            ),
            ValueError,
            r"ancestors: expected shape \[T, W\] = \[2, 1\] for 2 draft tokens, got \[3, 1\]",
        ),
        (
            lambda: draft_decode_metadata(prefix_lens=int64([1]), step=-1, **GOOD),
            ValueError,
            "step: expected at least 0, got -1",
        ),
        (
            lambda: draft_decode_metadata(prefix_lens=int64([1]), step=int64([1]), **GOOD),
            ValueError,
            r"step: expected a scalar, got shape \[1\]",
        ),
        (
            lambda: extend_metadata(
                seqused_k=int64([1]), cu_seqlens_q=int64([0, 1]), max_seqlen_q=-1, **GOOD
            ),
            ValueError,
            "max_seqlen_q: expected at least 0, got -1",
        ),
        (
            lambda: decode_metadata(seqused_k=int64([1]), **{**GOOD, "page_size": 0}),
            ValueError,
            "page_size: expected at least 1, got 0",
        ),
    ],
)
def test_bad_arguments_are_named(build, error, text):
    with pytest.raises(error, match=text):
        build()
