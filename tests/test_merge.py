import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.merge import merge_states


def test_p04_merging_empty_states():
    value, score = jnp.array([[1.5, -2.0]]), jnp.array([0.7])
    nothing, empty = jnp.zeros((1, 2)), jnp.array([-jnp.inf])
    out, lse = merge_states([nothing, nothing], [empty, empty])
    assert not np.asarray(out).any()
    assert np.isneginf(lse).all()
    for order in (1, -1):
        out, lse = merge_states([nothing, value][::order], [empty, score][::order])
        assert np.array_equal(out, value)
        assert np.array_equal(lse, score)


def test_p04_the_output_of_an_empty_state_may_be_anything():
    for garbage in (jnp.nan, jnp.inf):
        out, lse = merge_states(
            [jnp.full((1, 2), garbage), jnp.ones((1, 2))], [jnp.array([-jnp.inf]), jnp.zeros(1)]
        )
        assert np.array_equal(out, np.ones((1, 2)))
        assert np.array_equal(lse, np.zeros(1))


@pytest.mark.parametrize("states", [1, 2, 7])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merging_equals_one_softmax_over_all_keys(states, dtype):
    rng = np.random.default_rng(0)
    scores = rng.normal(scale=5, size=(states, 6, 3, 4))
    values = rng.normal(size=(states, 6, 3, 4, 8))
    weights = np.exp(scores - scores.max(axis=(0, 3), keepdims=True))
    expected = (weights[..., None] * values).sum((0, 3)) / weights.sum((0, 3))[..., None]
    expected_lse = np.log(np.exp(scores).sum((0, 3)))
    lse = np.log(np.exp(scores).sum(3))
    out = (np.exp(scores - lse[..., None])[..., None] * values).sum(3)
    merged, merged_lse = merge_states(jnp.asarray(out, dtype), jnp.asarray(lse, jnp.float32))
    assert merged.dtype == dtype
    assert merged_lse.dtype == jnp.float32
    np.testing.assert_allclose(
        np.asarray(merged, np.float64), expected, atol=1e-6 if dtype == "float32" else 2e-2
    )
    np.testing.assert_allclose(merged_lse, expected_lse, rtol=1e-6)


def test_huge_scores_neither_overflow_nor_vanish():
    for shift in (-100352.0, 3e4):
        out, lse = merge_states(
            [jnp.ones((1, 1)), jnp.zeros((1, 1))], [jnp.full(1, shift), jnp.full(1, shift)]
        )
        np.testing.assert_allclose(out, 0.5, rtol=1e-6)
        np.testing.assert_allclose(lse, shift + np.log(2), rtol=1e-6)


def test_pairs_stacks_jit_and_x64_agree_bit_for_bit():
    rng = np.random.default_rng(1)
    out, lse = rng.normal(size=(3, 5, 2, 4)).astype(np.float32), rng.normal(size=(3, 5, 2)).astype(np.float32)
    stacked = merge_states(jnp.asarray(out), jnp.asarray(lse))
    listed = merge_states(list(out), list(lse))
    jitted = jax.jit(merge_states)(out, lse)
    with jax.enable_x64(True):
        wide = merge_states(jnp.asarray(out), jnp.asarray(lse))
    for other in (listed, jitted, wide):
        for one, two in zip(stacked, other, strict=True):
            assert one.dtype == two.dtype
            assert np.array_equal(one, two)


@pytest.mark.parametrize(
    ("out", "lse", "error", "text"),
    [
        ([], [], ValueError, "out: expected at least one state"),
        (np.ones((0, 3, 2)), np.ones((0, 3)), ValueError, "out: expected at least one state"),
        (np.ones((2, 3, 2)), np.ones((2, 3, 2)), ValueError, r"lse: expected shape \(2, 3\)"),
        (np.ones((2, 3, 2), np.int32), np.ones((2, 3)), TypeError, "out: expected a floating point dtype"),
        (np.ones((2, 3, 2)), np.ones((2, 3), np.int32), TypeError, "lse: expected a floating point dtype"),
    ],
)
def test_wrong_arguments_are_named(out, lse, error, text):
    with pytest.raises(error, match=text):
        merge_states(out, lse)
