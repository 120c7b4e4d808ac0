"""Public bug reports about what a query row sees: windows, trees, packed sequences, head groups."""

import cases
import numpy as np
import pytest
from cases import Case, visible_sets

from jaxattn.attention import unified_attention


def window(size):
    return {"sliding_window": size}


def test_p03_a_window_that_hides_whole_tiles_gives_the_mean_of_its_keys(implementation):
    case = Case(lengths=((64, 300),), heads=2, kv_heads=1, options=window(8), padding_rows=0)
    sets = visible_sets(case, implementation)
    assert sets == [set(range(position - 7, position + 1)) for position in range(236, 300)]


def test_p16_window_counts_the_query_itself(implementation):
    decode = Case(mode="decode", lengths=((1, 10),), options=window(4), padding_rows=0)
    prefill = Case(lengths=((10, 10),), options=window(4), padding_rows=0)
    rows = visible_sets(prefill, implementation)
    assert rows == [set(range(max(0, i - 3), i + 1)) for i in range(10)]
    assert visible_sets(decode, implementation) == [{6, 7, 8, 9}] == rows[-1:]


def test_p17_window_shorter_than_the_prompt(implementation):
    case = Case(lengths=((16, 16), (7, 7)), options=window(4), padding_rows=0)
    counts = [len(seen) for seen in visible_sets(case, implementation)]
    assert counts == [min(i + 1, 4) for i in range(16)] + [min(i + 1, 4) for i in range(7)]


def test_p18_window_cuts_inside_a_tile(implementation):
    for q_len in (1, 6):
        case = Case(lengths=((q_len, 21),), page_size=16, options=window(5), padding_rows=0)
        assert visible_sets(case, implementation) == [
            set(range(position - 4, position + 1)) for position in range(21 - q_len, 21)
        ]


def test_p19_no_window_is_none_and_never_zero(implementation):
    for no_window in (None, 2**31 - 1):
        case = Case(mode="decode", lengths=((1, 9),), options=window(no_window), padding_rows=0)
        assert visible_sets(case, implementation) == [set(range(9))]
    problem = cases.build(Case(mode="decode", lengths=((1, 9),)))
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="None for no window"):
            unified_attention(
                problem.q, problem.k_cache, problem.v_cache, problem.metadata, sliding_window=wrong
            )


def test_p20_each_row_of_a_verify_block_has_its_own_window(implementation):
    case = Case(mode="target_verify", lengths=((4, 7), (4, 9)), options=window(4), padding_rows=0)
    sets = visible_sets(case, implementation)
    assert sets[4] == {2, 3, 4, 5}
    assert sets[7] == {5, 6, 7, 8}
    assert sets[:4] == [{0, 1, 2, 3}, {1, 2, 3, 4}, {2, 3, 4, 5}, {3, 4, 5, 6}]


def test_p20_windows_of_bfloat16_queries_on_fp8_keys(implementation):
    case = Case(
        mode="target_verify",
        lengths=((8, 16 + 9),),
        dtype="bfloat16",
        kv_dtype="float8_e4m3fn",
        page_size=16,
        options=window(16),
    )
    cases.check(cases.build(case), implementation)


def test_p21_tree_columns_are_looked_up_by_key_index_in_window_layers(implementation):
    case = Case(
        mode="target_verify",
        lengths=((4, 24),),
        tree=1,
        parents=(-1, 0, 0, 1),
        options=window(8),
        padding_rows=0,
    )
    sets = visible_sets(case, implementation)
    assert sets[3] == {15, 16, 17, 18, 19, 20 + 0, 20 + 1, 20 + 3}
    assert sets[2] == {14, 15, 16, 17, 18, 19, 20 + 0, 20 + 2}


def test_p25_attention_does_not_leak_across_packed_sequences(implementation):
    lengths = ((3, 5), (5, 5), (1, 7))
    problem = cases.build(Case(lengths=lengths, page_size=4, padding_rows=0))
    v_cache = np.full_like(problem.v_cache, np.nan)
    table = np.asarray(problem.metadata.page_table)
    for sequence, (_, seqused_k) in enumerate(lengths):
        for key in range(seqused_k):
            v_cache[table[sequence, key // 4], key % 4] = sequence + 1
    out = unified_attention(
        problem.q, problem.k_cache, v_cache, problem.metadata, implementation=implementation
    )
    expected = np.repeat([1.0, 2.0, 3.0], [3, 5, 1])[:, None, None]
    np.testing.assert_allclose(out, np.broadcast_to(expected, out.shape), rtol=4 * np.finfo(np.float32).eps)


@pytest.mark.parametrize(("heads", "kv_heads"), [(10, 2), (28, 4), (12, 4), (9, 3)])
def test_p26_head_h_reads_kv_head_h_over_the_ratio(heads, kv_heads, implementation):
    for q_len in (9, 1):
        problem = cases.build(Case(lengths=((q_len, 20),), heads=heads, kv_heads=kv_heads, padding_rows=0))
        ids = np.arange(kv_heads, dtype=np.float32)[:, None]
        v_cache = np.where(np.isnan(problem.v_cache), np.nan, ids)
        out = unified_attention(
            problem.q, problem.k_cache, v_cache, problem.metadata, implementation=implementation
        )
        expected = (np.arange(heads) // (heads // kv_heads)).astype(np.float32)[:, None]
        np.testing.assert_allclose(
            out, np.broadcast_to(expected, out.shape), rtol=4 * np.finfo(np.float32).eps
        )


def test_p29_alibi_slopes_belong_to_query_heads(implementation):
    problem = cases.build(Case(mode="decode", lengths=((1, 6),), heads=8, kv_heads=2, probe=True))
    slopes = np.linspace(0.1, 1.5, 8).astype(np.float32)
    out = unified_attention(
        problem.q,
        problem.k_cache,
        problem.v_cache,
        problem.metadata,
        alibi_slopes=slopes,
        implementation=implementation,
    )
    weights = np.exp(-slopes[:, None] * np.arange(5, -1, -1))
    np.testing.assert_allclose(out[0], weights / weights.sum(1, keepdims=True), rtol=1e-5)


def test_p54_siblings_stay_hidden_on_tiles_below_the_diagonal(implementation):
    parents = tuple(-1 if node % 8 == 0 else node - 1 for node in range(24))
    case = Case(
        mode="target_verify", lengths=((24, 88),), tree=1, parents=parents, page_size=16, padding_rows=0
    )
    for node, seen in enumerate(visible_sets(case, implementation)):
        assert seen == set(range(64)) | {64 + ancestor for ancestor in range(node // 8 * 8, node + 1)}


def test_p23_query_length_differs_from_key_length(implementation):
    common = {"heads": 2, "kv_heads": 1, "width": 64, "page_size": 16, "padding_rows": 0}
    bottom_right = Case(lengths=((32, 96),), **common)
    assert visible_sets(bottom_right, implementation) == [set(range(65 + i)) for i in range(32)]
    cases.check(cases.build(bottom_right), implementation)
    for lengths in ((32, 96), (96, 32)):
        cases.check(
            cases.build(Case(lengths=(lengths,), options={"causal": False}, **common)), implementation
        )


def test_p24_a_length_that_is_no_multiple_of_the_tile(implementation):
    common = {"lengths": ((77, 77),), "kv_heads": 4, "width": 32, "padding_rows": 0}
    everything = Case(options={"causal": False}, **common)
    assert visible_sets(everything, implementation) == [set(range(77))] * 77
    for causal in (True, False):
        problem = cases.build(Case(options={"causal": causal}, **common))
        cases.check(problem, implementation)
        first, *others = (np.asarray(cases.run(problem, implementation)[0]) for _ in range(4))
        for other in others:
            assert np.array_equal(first, other)
