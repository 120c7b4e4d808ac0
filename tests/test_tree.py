import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.tree import ancestor_bits, chain_parents, check_parents, depths, is_tree, tree_positions


def ancestors_of(parents) -> list[set[int]]:
    """Walk from each node to its root."""
    sets = []
    for node in range(len(parents)):
        chain = set()
        while node >= 0:
            chain.add(node)
            node = int(parents[node])
        sets.append(chain)
    return sets


def sets_of(bits) -> list[set[int]]:
    return [
        {64 * w + j for w, word in enumerate(row) for j in range(64) if int(word) >> j & 1} for row in bits
    ]


def random_parents(rng, sequences, nodes):
    parents = np.full((sequences, nodes), -1)
    for sequence in range(sequences):
        for node in range(nodes):
            parents[sequence, node] = rng.integers(max(-1, node - 5), node)
    return parents


@pytest.mark.parametrize(("nodes", "words"), [(1, 1), (2, 1), (24, 1), (64, 1), (65, 2), (130, 3)])
def test_bits_are_the_walks_to_the_root(nodes, words):
    parents = random_parents(np.random.default_rng(nodes), 3, nodes)
    bits = ancestor_bits(parents)
    assert bits.shape == (3 * nodes, words)
    assert bits.dtype == jnp.uint64
    expected = [seen for row in parents for seen in ancestors_of(row)]
    assert sets_of(np.asarray(bits)) == expected
    assert depths(bits).tolist() == [len(seen) - 1 for seen in expected]


def test_p53_positions_follow_the_chosen_parent():
    parents = np.array([[-1, 0, 0, 1, 1, 3], [-1, 0, 1, 2, 3, 4]])
    expected = [[10, 11, 11, 12, 12, 13], [7, 8, 9, 10, 11, 12]]
    assert tree_positions(parents, np.array([10, 7])).tolist() == expected


def test_positions_beyond_int32_with_x64_off():
    base = np.array([2**31 - 1, 2**40])
    positions = tree_positions(np.array([[-1, 0], [-1, 0]]), base)
    assert positions.dtype == jnp.int64
    assert np.array_equal(positions, base[:, None] + [0, 1])


def test_a_chain_is_a_lower_triangle():
    bits = ancestor_bits(chain_parents(2, 70))
    assert sets_of(np.asarray(bits)) == [set(range(i + 1)) for i in range(70)] * 2


def test_jit_vmap_and_x64_give_the_same_bits():
    parents = random_parents(np.random.default_rng(0), 4, 66)
    expected = np.asarray(ancestor_bits(parents))
    assert np.array_equal(jax.jit(ancestor_bits)(parents), expected)
    assert np.array_equal(jax.vmap(ancestor_bits)(parents[:, None]).reshape(expected.shape), expected)
    with jax.enable_x64(True):
        assert np.array_equal(ancestor_bits(parents), expected)
    assert np.array_equal(ancestor_bits(parents.astype(np.int32)), expected)


def test_what_is_no_tree_is_found():
    parents = np.array([[-1, 0, 1], [-1, 2, 0], [-1, 0, 2], [-2, 0, 1], [-1, -1, -1]])
    expected = [True, False, False, False, True]
    assert is_tree(parents).tolist() == expected
    assert jax.jit(is_tree)(parents).tolist() == expected
    check_parents(parents[[0, 4]])
    with pytest.raises(ValueError, match="got parent 2 of node 1 in sequence 1"):
        check_parents(parents)


def test_a_parent_that_is_none_is_a_root_in_compiled_code():
    bits = ancestor_bits(np.array([[5, 0, 2, 3, -7]]))
    assert sets_of(np.asarray(bits)) == [{0}, {0, 1}, {2}, {3}, {4}]


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: ancestor_bits(np.array([-1, 0])),
            ValueError,
            r"parents: expected \[S, n\], got shape \(2,\)",
        ),
        (lambda: ancestor_bits(np.array([[-1.0, 0.0]])), TypeError, "parents: expected an integer dtype"),
        (
            lambda: tree_positions(np.array([[-1, 0]]), np.array([1, 2])),
            ValueError,
            r"prefix_lens: expected shape \(1,\)",
        ),
        (lambda: check_parents([-1, 0]), ValueError, r"parents: expected \[S, n\]"),
    ],
)
def test_wrong_arguments_are_named(call, error, text):
    with pytest.raises(error, match=text):
        call()
