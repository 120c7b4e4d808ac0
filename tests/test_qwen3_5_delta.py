"""The gated delta rule in both forms, and taking steps back, against a loop in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.metadata import extend_metadata
from jaxattn.models.delta_rule import (
    DeltaNetState,
    DeltaSteps,
    PendingSteps,
    chunk_rule,
    conv_tail,
    gated_delta_rule,
    recurrent_rule,
)
from jaxattn.models.sequence_rows import sequence_rows

S, H, DK, DV = 2, 3, 8, 5
FORMS = {"recurrent": jax.jit(recurrent_rule), "chunk": jax.jit(chunk_rule)}


def random_steps(length, seed=0, decay=1.0):
    rng = np.random.default_rng(seed)

    def unit(*shape):
        x = rng.standard_normal(shape)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    arrays = (
        unit(S, length, H, DK),
        unit(S, length, H, DK),
        rng.standard_normal((S, length, H, DV)),
        -rng.exponential(decay, (S, length, H)),
        rng.uniform(0, 1, (S, length, H)),
    )
    state = rng.standard_normal((S, H, DK, DV))
    return DeltaSteps(*(a.astype(np.float32) for a in arrays)), state.astype(np.float32)


def loop(steps, state, lengths):
    """Outputs and states after `lengths[s]` steps, one head and one step at a time."""
    q, k, v, g, beta = (np.asarray(x, np.float64) for x in (steps.q, steps.k, steps.v, steps.g, steps.beta))
    out, state = np.zeros(v.shape), state.astype(np.float64)
    for s in range(S):
        for t in range(lengths[s]):
            for h in range(H):
                decayed = state[s, h] * np.exp(g[s, t, h])
                delta = beta[s, t, h] * (v[s, t, h] - decayed.T @ k[s, t, h])
                state[s, h] = decayed + np.outer(k[s, t, h], delta)
                out[s, t, h] = state[s, h].T @ q[s, t, h]
    return out, state


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("length", "decay"), [(1, 1.0), (64, 1.0), (33, 1e-3), (33, 60.0)])
def test_both_forms_equal_the_loop(form, length, decay):
    steps, state = random_steps(length, seed=length, decay=decay)
    out, after = FORMS[form](steps, state)
    want_out, want_state = loop(steps, state, [length] * S)
    np.testing.assert_allclose(out, want_out, atol=2e-5 * max(1, np.abs(want_out).max()))
    np.testing.assert_allclose(after, want_state, atol=2e-5 * max(1, np.abs(want_state).max()))
    with jax.enable_x64(True):
        assert {x.dtype.name for x in FORMS[form](steps, state)} == {"float32"}


@pytest.mark.parametrize("length", [4, 40])
def test_idle_steps_leave_the_state_alone_whatever_they_hold(length):
    steps, state = random_steps(length)
    lengths = np.array([length // 2, 0])
    live = np.arange(length) < lengths[:, None]
    poisoned = jax.tree.map(
        lambda a: np.where(live.reshape(*live.shape, *[1] * (a.ndim - 2)), a, np.nan), steps
    )
    out, after = jax.jit(lambda steps, state: gated_delta_rule(steps.only(live), state))(poisoned, state)
    want_out, want_state = loop(steps, state, lengths)
    np.testing.assert_allclose(after, want_state, atol=1e-5)
    np.testing.assert_allclose(np.asarray(out)[live], want_out[live], atol=1e-5)
    if length <= 16:
        assert (np.asarray(after)[1] == state[1]).all()


def test_pending_steps_commit_any_prefix():
    length, taps = 4, 3
    steps, state = random_steps(length)
    window = np.random.default_rng(1).standard_normal((S, taps + length, 7)).astype(np.float32)
    before = DeltaNetState(jnp.asarray(window[:, :taps]), jnp.asarray(state))
    commit = jax.jit(lambda pending, state, accepted: pending.commit(state, accepted))
    for accepted in ([0, 4], [2, 1], [3, 0]):
        got = commit(PendingSteps(jnp.asarray(window), steps), before, np.asarray(accepted))
        np.testing.assert_allclose(got.recurrent, loop(steps, state, accepted)[1], atol=1e-5)
        for s, a in enumerate(accepted):
            assert (np.asarray(got.conv)[s] == window[s, a : a + taps]).all()
    assert (np.asarray(got.recurrent)[1] == state[1]).all()
    assert conv_tail(jnp.asarray(window), np.array([1, 2], np.int32), taps).shape == (S, taps, 7)


def test_rows_go_to_sequences_and_back():
    """A padding sequence between two others, and rows of padding behind them."""
    metadata = extend_metadata(
        seqused_k=[5, 0, 7],
        cu_seqlens_q=[0, 5, 5, 7],
        max_seqlen_q=6,
        page_size=4,
        max_pages=2,
        kv_indptr=[0, 5, 5, 12],
        kv_indices=np.arange(12),
    )
    rows = sequence_rows(metadata)
    assert rows.count.tolist() == [5, 0, 2]
    assert rows.fresh.tolist() == [True, False, False]
    buffer = jnp.asarray([10.0, 11, 12, 13, 14, 20, 21, np.nan])
    assert rows.gather(buffer, 0, 3).tolist() == [[10, 11, 12], [0, 0, 0], [20, 21, 0]]
    assert rows.gather(buffer, 3, 3).tolist() == [[13, 14, 0], [0, 0, 0], [0, 0, 0]]
    back = rows.scatter(jnp.zeros(8), 100 * jnp.arange(1.0, 10).reshape(3, 3), 3)
    assert back.tolist() == [0, 0, 0, 100, 200, 0, 0, 0]
