import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from jaxattn.attention import unified_attention
from jaxattn.debug import check_finite, check_metadata, check_slots, checked
from jaxattn.index64 import index64
from jaxattn.metadata import AttentionMetadata, extend_metadata
from jaxattn.tree import ancestor_bits

SHAPE = (9, 4, 2, 16)
TOKENS = 8
POOL = np.array([[20, 21, 22, 23, 8, 9, 10, 11], [32, 33, 34, 35, 4, 5, 6, 7], [0] * 8])


def good():
    """Sequences of 6 keys with 3 rows, 3 keys with 2 rows, and a padding sequence; a token buffer of 8 rows."""
    return extend_metadata(
        seqused_k=np.array([6, 3, 0]),
        cu_seqlens_q=np.array([0, 3, 5, 5]),
        max_seqlen_q=3,
        page_size=4,
        req_to_token=POOL,
        req_pool_indices=np.array([0, 1, 2]),
    )


@index64
def with_entry(name, index, value):
    metadata = good()
    return dataclasses.replace(metadata, **{name: getattr(metadata, name).at[index].set(value)})


def with_tree(rows):
    with jax.enable_x64(True):
        bits = jnp.asarray(np.array(rows, np.uint64)[:, None])
    return dataclasses.replace(good(), ancestors=bits)


TREE = [0b001, 0b011, 0b101, 0b01, 0b11, 0, 0, 0]

BROKEN = {
    "page beyond the pool": (
        with_entry("page_table", (0, 1), 9),
        r"page_table: sequence 0, page 1 from position 4: expected a page in \[0, 9\), got 9",
    ),
    "page without an id": (
        with_entry("page_table", (1, 0), -1),
        r"page_table: sequence 1, page 0 from position 0: expected a page in \[0, 9\), got -1",
    ),
    "page that int32 would wrap": (
        with_entry("page_table", (1, 0), 2**32 + 8),
        r"page_table: sequence 1, page 0 from position 0: expected a page in \[0, 9\), got 4294967304",
    ),
    "more keys than pages": (
        with_entry("seqused_k", 1, 9),
        "seqused_k: sequence 1: expected at most the 8 keys of 2 pages of 4, got 9",
    ),
    "fewer keys than rows": (
        with_entry("seqused_k", 0, 2),
        "seqused_k: sequence 0: expected its 3 query rows to be counted, or 0 for padding, got 2",
    ),
    "negative length": (
        with_entry("seqused_k", 2, -1),
        "seqused_k: sequence 2: expected its 0 query rows to be counted, or 0 for padding, got -1",
    ),
    "first row not 0": (with_entry("cu_seqlens_q", 0, 1), "cu_seqlens_q: expected to start at 0, got 1"),
    "falling starts": (
        with_entry("cu_seqlens_q", 2, 2),
        "cu_seqlens_q: sequence 1: expected to rise, got rows 3 to 2",
    ),
    "too many rows": (
        with_entry("cu_seqlens_q", 3, 9),
        "cu_seqlens_q: sequence 2: expected at most max_seqlen_q = 3 rows, got 4",
    ),
    "rows beyond the buffer": (
        dataclasses.replace(with_entry("cu_seqlens_q", 3, 9), max_seqlen_q=4),
        "cu_seqlens_q: sequence 2: expected at most the 8 rows of the token buffer, got 9",
    ),
    "node without its own bit": (
        with_tree([0b001, 0b001, *TREE[2:]]),
        "ancestors: sequence 0, node 1: expected its own bit to be set",
    ),
    "later node as an ancestor": (
        with_tree([*TREE[:3], 0b11, *TREE[4:]]),
        "ancestors: sequence 1, node 0: expected only bits of earlier nodes besides its own, got bit 1",
    ),
    "parent without its ancestors": (
        with_tree([0b001, 0b011, 0b110, *TREE[3:]]),
        "ancestors: sequence 0, node 2: expected the bits of its parent, node 1, and its own, got others",
    ),
}


def check(metadata):
    check_metadata(metadata, SHAPE, num_tokens=TOKENS)
    return metadata.seqused_k


run_checked = checked(check)


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_value_is_named_at_once(case):
    metadata, text = BROKEN[case]
    with pytest.raises(ValueError, match=text):
        check(metadata)


@pytest.mark.parametrize("case", [case for case in BROKEN if case != "rows beyond the buffer"])
def test_a_broken_value_is_named_by_a_compiled_function(case):
    metadata, text = BROKEN[case]
    with pytest.raises(ValueError, match=text):
        run_checked(metadata)


def test_checks_work_under_plain_checkify_in_the_x64_scope():
    metadata, text = BROKEN["page that int32 would wrap"]
    error, _ = index64(jax.jit(checkify.checkify(check)))(metadata)
    with pytest.raises(ValueError, match=text):
        error.throw()


@pytest.mark.parametrize("metadata", [good(), with_tree(TREE)])
def test_good_metadata_passes_in_both_modes(metadata):
    check(metadata)
    assert run_checked(metadata).tolist() == [6, 3, 0]


def test_trees_of_several_words_pass():
    rng = np.random.default_rng(0)
    parents = np.array([[rng.integers(-1, node) if node else -1 for node in range(70)] for _ in range(2)])
    metadata = AttentionMetadata(
        page_table=jnp.zeros((2, 40), jnp.int32),
        cu_seqlens_q=jnp.array([0, 70, 140]),
        seqused_k=jnp.array([70, 80]),
        ancestors=ancestor_bits(parents),
        max_seqlen_q=70,
        page_size=4,
        mode="target_verify",
    )
    check_metadata(metadata, SHAPE)
    swapped = dataclasses.replace(metadata, ancestors=metadata.ancestors[jnp.arange(140).at[69].set(68)])
    with pytest.raises(ValueError, match="ancestors: sequence 0, node 69: expected its own bit"):
        check_metadata(swapped, SHAPE)


def test_pages_that_no_query_sees_may_be_missing():
    # The first query sits at position 3, in page 0; later, at position 5.
    metadata = with_entry("page_table", (0, 0), -1)
    with pytest.raises(ValueError, match="sequence 0, page 0"):
        check_metadata(metadata, SHAPE, sliding_window=1)
    later = metadata.with_lengths(np.array([8, 3, 0]))
    check_metadata(later, SHAPE, sliding_window=2)
    with pytest.raises(ValueError, match="sequence 0, page 0"):
        check_metadata(later, SHAPE, sliding_window=3)
    # Sequence 2 has no rows: its table may hold anything.
    check_metadata(with_entry("page_table", (2, 0), 2**40), SHAPE)


def test_page_size_must_be_that_of_the_cache():
    with pytest.raises(ValueError, match="page_size: expected 8, the page size of the cache, got 4"):
        check_metadata(good(), (9, 8, 2, 16))


@pytest.mark.parametrize(
    ("slots", "text"),
    [
        ([0, -1, 36], r"slots: token 2: expected -1 for padding or a slot in \[0, 36\), got 36"),
        ([-2, 0, 1], r"slots: token 0: expected -1 for padding or a slot in \[0, 36\), got -2"),
        ([2**33, 0], r"slots: token 0: expected -1 for padding or a slot in \[0, 36\), got 8589934592"),
        ([4, 7, -1, 7, -1, 7], "slots: slot 7 is given to 3 tokens"),
    ],
)
def test_a_bad_slot_is_named_in_both_modes(slots, text):
    with pytest.raises(ValueError, match=text):
        check_slots(np.array(slots), SHAPE)
    slots = index64(jnp.array)(np.array(slots))
    with pytest.raises(ValueError, match=text):
        checked(lambda slots: check_slots(slots, SHAPE))(slots)


def test_good_slots_pass():
    for slots in ([], [-1, -1, 0, 35]):
        check_slots(np.array(slots, np.int64), SHAPE)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_result_that_is_not_finite_is_named_in_both_modes(value):
    out = jnp.zeros((TOKENS, 4, 16), jnp.bfloat16)
    check_finite(out, good())
    bad = out.at[4, 2, 7].set(value)
    text = f"out: row 4 \\(sequence 1, position 2\\), head 2: expected finite values, got {value}"
    with pytest.raises(ValueError, match=text):
        check_finite(bad, good())
    with pytest.raises(ValueError, match=text):
        checked(check_finite)(bad, good())
    with pytest.raises(ValueError, match=r"out: row 7 \(sequence -1, position 0\), head 0"):
        check_finite(out.at[7, 0, 0].set(value), good())


def test_checks_cost_nothing_unless_they_are_on():
    metadata = with_entry("page_table", (0, 1), 9)
    q, cache = jnp.ones((TOKENS, 4, 16)), jnp.ones(SHAPE)

    def step(q, cache, metadata, *, check):
        if check:
            check_metadata(metadata, cache.shape, num_tokens=TOKENS)
        return unified_attention(q, cache, cache, metadata)

    def compiled(check):
        return jax.jit(lambda *args: step(*args, check=check)).lower(q, cache, metadata).compile()

    plain, with_checks = compiled(False), compiled(True)
    assert with_checks.cost_analysis()["flops"] == plain.cost_analysis()["flops"]
    np.testing.assert_array_equal(with_checks(q, cache, metadata), plain(q, cache, metadata))
    with pytest.raises(ValueError, match="page_table: sequence 0, page 1"):
        checked(lambda *args: step(*args, check=True))(q, cache, metadata)


def test_checked_keeps_the_callers_x64_state_and_compiles_once():
    traces = []

    def function(x, nested):
        traces.append(jax.config.jax_enable_x64)
        return x * 2.0, {"sum": nested["a"] + nested["b"]}

    run = checked(function)
    for factor in (1, 2):
        doubled, sums = run(np.float32(factor), {"a": np.arange(3), "b": 1})
        assert doubled == 2 * factor
        assert sums["sum"].tolist() == [1, 2, 3]
        assert sums["sum"].dtype == jnp.asarray(np.arange(3)).dtype
    assert traces == [jax.config.jax_enable_x64]
    assert doubled.dtype == jnp.float32
