"""The gated delta rule: a recurrent state per head, chunked for prefill and step by step for decode.

With decay a = exp(g): S <- a S;  S <- S + k (beta (v - S^T k))^T;  o = S^T q.
Source: Gated Delta Networks, https://arxiv.org/abs/2412.06464, section 3.3 for the form over a chunk.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int

from jaxattn.index64 import as_index, index64

CHUNK = 64
_HIGHEST = lax.Precision.HIGHEST


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeltaNetState:
    """What one linear-attention layer remembers of each sequence.

    Attributes:
        conv: the last inputs of the causal convolution, oldest first, as many as it has taps before the current.
        recurrent: the state S of every head.
    """

    conv: Float32[Array, "S taps C"]
    recurrent: Float32[Array, "S H Dk Dv"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeltaSteps:
    """The inputs of the recurrence for L tokens of each sequence; a step with `beta = g = 0` changes nothing."""

    q: Float32[Array, "S L H Dk"]
    k: Float32[Array, "S L H Dk"]
    v: Float32[Array, "S L H Dv"]
    g: Float32[Array, "S L H"]
    beta: Float32[Array, "S L H"]

    def only(self, live: Bool[Array, "S L"]) -> "DeltaSteps":
        """The same steps, those that are not live made idle, whatever they hold."""

        def mask(x):
            return jnp.where(live.reshape(*live.shape, *[1] * (x.ndim - 2)), x, 0)

        return jax.tree.map(mask, self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PendingSteps:
    """What a layer saw in a call that may be taken back: enough to advance the state by any number of its tokens.

    It holds inputs instead of one state per token, which would be `Dk * Dv / (Dk + Dv)` times as large.
    """

    window: Float32[Array, "S taps+L C"]
    steps: DeltaSteps

    @index64
    def commit(self, state: DeltaNetState, accepted: Int[Array, "S"]) -> DeltaNetState:
        """The state after the first `accepted` tokens of each sequence.

        Args:
            state: the state before the call.
            accepted: `[S]`, from 0 (everything is taken back) to L.
        """
        accepted = as_index(accepted, "accepted")
        live = jnp.arange(self.steps.g.shape[1], dtype=jnp.int64) < accepted[:, None]
        _, recurrent = recurrent_rule(self.steps.only(live), state.recurrent)
        return DeltaNetState(conv_tail(self.window, accepted, state.conv.shape[1]), recurrent)


def causal_conv(
    inputs: Float32[Array, "S L C"], state: Float32[Array, "S taps C"], weight: Float32[Array, "C taps+1"]
) -> tuple[Float32[Array, "S L C"], Float32[Array, "S taps+L C"]]:
    """Convolve each channel with its own taps, the last tap on the current token.

    Returns:
        out: the convolution, before any activation.
        window: the inputs behind those of the state, from which `conv_tail` takes the next state.
    """
    window = jnp.concatenate([state, inputs], axis=1)
    length = inputs.shape[1]
    out = window[:, :length] * weight[:, 0]
    for tap in range(1, weight.shape[1]):
        out = out + window[:, tap : tap + length] * weight[:, tap]
    return out, window


@index64
def conv_tail(
    window: Float32[Array, "S taps+L C"], steps: Int[Array, "S"], taps: int
) -> Float32[Array, "S taps C"]:
    """The `taps` inputs before the token that follows `steps` tokens of each sequence."""

    def tail(rows, start):
        return lax.dynamic_slice_in_dim(rows, start, taps)

    return jax.vmap(tail)(window, as_index(steps, "steps"))


def gated_delta_rule(
    steps: DeltaSteps, state: Float32[Array, "S H Dk Dv"]
) -> tuple[Float32[Array, "S L H Dv"], Float32[Array, "S H Dk Dv"]]:
    """Outputs and final state of up to `CHUNK` steps, by the cheaper of the two forms."""
    return (chunk_rule if steps.g.shape[1] > CHUNK // 4 else recurrent_rule)(steps, state)


def recurrent_rule(
    steps: DeltaSteps, state: Float32[Array, "S H Dk Dv"]
) -> tuple[Float32[Array, "S L H Dv"], Float32[Array, "S H Dk Dv"]]:
    """Outputs and final state, one step after another; an idle step leaves the state's bits alone."""

    def step(state, now):
        state = state * jnp.exp(now.g)[..., None, None]
        seen = jnp.einsum("shkv,shk->shv", state, now.k, precision=_HIGHEST)
        delta = (now.v - seen) * now.beta[..., None]
        state = state + now.k[..., None] * delta[..., None, :]
        return state, jnp.einsum("shkv,shk->shv", state, now.q, precision=_HIGHEST)

    by_step = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), steps)
    state, out = lax.scan(step, state, by_step)
    return jnp.moveaxis(out, 0, 1), state


def chunk_rule(
    steps: DeltaSteps, state: Float32[Array, "S H Dk Dv"]
) -> tuple[Float32[Array, "S L H Dv"], Float32[Array, "S H Dk Dv"]]:
    """Outputs and final state by matrix products over all steps; their cost is quadratic in L.

    With G the running sum of g and u the corrected values, (I + A) u = beta (v - exp(G) k S), where
    A[i, j] = beta_i exp(G_i - G_j) k_i.k_j for j < i.
    """
    length = steps.g.shape[1]
    q, k, v, g, beta = (jnp.moveaxis(x, 2, 1) for x in jax.tree.leaves(steps))  # [S, H, L, ...]
    total = jnp.cumsum(g, axis=-1)
    row, column = jnp.arange(length)[:, None], jnp.arange(length)[None]
    gap = jnp.where(row >= column, total[..., :, None] - total[..., None, :], -jnp.inf)
    decay = jnp.exp(gap)  # 0 above the diagonal
    growth, last = jnp.exp(total)[..., None], total[..., -1:]

    def product(a, b):
        return jnp.einsum("shik,shkv->shiv", a, b, precision=_HIGHEST)

    k_transposed = jnp.swapaxes(k, -1, -2)
    mixing = jnp.where(row > column, beta[..., None] * product(k, k_transposed) * decay, 0)
    mixing = mixing + jnp.eye(length, dtype=jnp.float32)
    rhs = beta[..., None] * (v - growth * product(k, state))
    corrected = lax.linalg.triangular_solve(mixing, rhs, left_side=True, lower=True, unit_diagonal=True)
    out = growth * product(q, state) + product(product(q, k_transposed) * decay, corrected)
    carried = jnp.swapaxes(k * jnp.exp(last - total)[..., None], -1, -2)
    state = jnp.exp(last)[..., None] * state + product(carried, corrected)
    return jnp.moveaxis(out, 1, 2), state
