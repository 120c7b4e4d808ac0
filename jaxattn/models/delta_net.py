"""The gated delta net, the linear attention layer of Qwen3.5 and Qwen3-Next."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int64

from jaxattn.index64 import cdiv, index64
from jaxattn.models.delta_rule import (
    CHUNK,
    DeltaNetState,
    DeltaSteps,
    PendingSteps,
    causal_conv,
    conv_tail,
    gated_delta_rule,
)
from jaxattn.models.layers import Weight, linear, rms_norm
from jaxattn.models.qwen3_5_config import DeltaNetConfig
from jaxattn.models.sequence_rows import SequenceRows
from jaxattn.models.streaming import Source, WeightSpec

# Inside the square root of the length of a query or key.
L2_EPS = 1e-6


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaNetWeights:
    """Weights of a gated delta net; the rows of `qkv` are queries, keys, values, each head after head."""

    qkv: Weight
    gate: Weight
    beta: Weight
    decay: Weight
    conv: Float32[Array, "C 1 taps"]
    a_log: Float32[Array, "Hv"]
    dt_bias: Float32[Array, "Hv"]
    norm: Float32[Array, "Dv"]
    out: Weight


def delta_net_specs(config: DeltaNetConfig, hidden_size: int, prefix: str, fused: bool) -> DeltaNetWeights:
    """The tensors of a layer.

    Args:
        config: sizes.
        hidden_size: width of the residual stream.
        prefix: what the layer's tensors are called up to `in_proj_qkv.weight` and the like.
        fused: whether the file holds `in_proj_qkvz` and `in_proj_ba`, interleaved by key head.
    """
    heads = config.num_value_heads

    def matrix(name: str, rows: int, columns: int = hidden_size) -> WeightSpec:
        return WeightSpec((rows, columns), (Source(f"{prefix}{name}.weight", (rows, columns)),), linear=True)

    def vector(name: str, *shape: int) -> WeightSpec:
        return WeightSpec(shape, (Source(prefix + name, shape),), dtype=jnp.float32)

    if fused:
        projections = _fused_projections(config, hidden_size, prefix)
    else:
        projections = {
            "qkv": matrix("in_proj_qkv", config.conv_width),
            "gate": matrix("in_proj_z", config.value_width),
            "beta": matrix("in_proj_b", heads),
            "decay": matrix("in_proj_a", heads),
        }
    return DeltaNetWeights(
        **projections,
        conv=vector("conv1d.weight", config.conv_width, 1, config.conv_taps),
        a_log=vector("A_log", heads),
        dt_bias=vector("dt_bias", heads),
        norm=vector("norm.weight", config.value_dim),
        out=matrix("out_proj", hidden_size, config.value_width),
    )


def _fused_projections(config: DeltaNetConfig, hidden_size: int, prefix: str) -> dict[str, WeightSpec]:
    """The rows of Qwen3-Next's fused projections, which follow each other by key head, not by kind."""
    group = config.num_value_heads // config.num_key_heads
    widths = (config.key_dim, config.key_dim, group * config.value_dim, group * config.value_dim)

    def rows(first: int, width: int, stride: int) -> tuple[int, ...]:
        return tuple(head * stride + first + i for head in range(config.num_key_heads) for i in range(width))

    def pick(name: str, file_rows: int, picked: tuple[int, ...]) -> WeightSpec:
        source = Source(f"{prefix}{name}.weight", (file_rows, hidden_size), picked)
        return WeightSpec((len(picked), hidden_size), (source,), linear=True)

    starts = [sum(widths[:i]) for i in range(4)]
    q, k, v, z = (rows(start, width, sum(widths)) for start, width in zip(starts, widths, strict=True))
    qkvz_rows, ba_rows = config.conv_width + config.value_width, 2 * config.num_value_heads
    return {
        "qkv": pick("in_proj_qkvz", qkvz_rows, q + k + v),
        "gate": pick("in_proj_qkvz", qkvz_rows, z),
        "beta": pick("in_proj_ba", ba_rows, rows(0, group, 2 * group)),
        "decay": pick("in_proj_ba", ba_rows, rows(group, group, 2 * group)),
    }


@index64
def delta_net(
    config: DeltaNetConfig,
    w: DeltaNetWeights,
    x: Float[Array, "T E"],
    state: DeltaNetState,
    rows: SequenceRows,
    *,
    eps: float,
    hold: bool,
) -> tuple[Float[Array, "T E"], DeltaNetState, PendingSteps | None]:
    """Outputs of this call's tokens, and what the layer remembers.

    All sequences go on together by up to `CHUNK` tokens a round, for as many rounds as the longest needs.

    Args:
        config: sizes.
        w: weights.
        x: normalised hidden states of the token rows.
        state: of each sequence; a sequence that starts in this call starts from zeros whatever it holds.
        rows: where each sequence's tokens lie.
        eps: of the norm.
        hold: leave the state where it was before this call, and return what advances it later.

    Returns:
        The outputs in the dtype of `x`, the state, and with `hold` the steps to commit.
    """
    state = jax.tree.map(lambda s: jnp.where(rows.fresh.reshape(-1, *[1] * (s.ndim - 1)), 0, s), state)
    tokens = _project(config, w, x)
    out = jnp.zeros((x.shape[0], config.num_value_heads, config.value_dim), jnp.float32)
    size = min(CHUNK, rows.max_count)

    def advance(i, carry):
        state, out = carry
        window, steps = _steps(config, w, tokens, state, rows, i * size, rows.max_count if hold else size)
        values, recurrent = gated_delta_rule(steps, state.recurrent)
        taken = jnp.clip(rows.count - i * size, 0, size)
        conv = conv_tail(window, taken, config.conv_taps - 1)
        return (DeltaNetState(conv, recurrent), rows.scatter(out, values, i * size)), (window, steps)

    if rows.max_count <= size or hold:
        (after, out), pending = advance(jnp.int64(0), (state, out))
    else:
        rounds = cdiv(jnp.max(rows.count), size)
        after, out = lax.fori_loop(jnp.int64(0), rounds, lambda i, carry: advance(i, carry)[0], (state, out))
    gate = linear(x, w.gate, out_dtype=jnp.float32).reshape(out.shape)
    out = rms_norm(out, w.norm, eps) * jax.nn.silu(gate)
    out = linear(out.reshape(x.shape[0], -1).astype(x.dtype), w.out)
    return (out, state, PendingSteps(*pending)) if hold else (out, after, None)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Projected:
    """What the layer takes from each token before tokens meet."""

    qkv: Float[Array, "T C"]
    g: Float32[Array, "T Hv"]
    beta: Float32[Array, "T Hv"]


def _project(config: DeltaNetConfig, w: DeltaNetWeights, x: Float[Array, "T E"]) -> _Projected:
    rate = linear(x, w.decay, out_dtype=jnp.float32) + w.dt_bias
    return _Projected(
        qkv=linear(x, w.qkv, out_dtype=jnp.float32),
        g=-jnp.exp(w.a_log) * jax.nn.softplus(rate),
        beta=jax.nn.sigmoid(linear(x, w.beta, out_dtype=jnp.float32)),
    )


def _steps(
    config: DeltaNetConfig,
    w: DeltaNetWeights,
    tokens: _Projected,
    state: DeltaNetState,
    rows: SequenceRows,
    first: Int64[Array, ""],
    size: int,
) -> tuple[Float32[Array, "S taps+size C"], DeltaSteps]:
    """The window of the convolution and the steps of the recurrence, from step `first` of each sequence on."""
    qkv, g, beta = (rows.gather(part, first, size) for part in (tokens.qkv, tokens.g, tokens.beta))
    convolved, window = causal_conv(qkv, state.conv, w.conv[:, 0])
    q, k, v = jnp.split(jax.nn.silu(convolved), [config.key_width, 2 * config.key_width], axis=-1)
    q, k = (_unit(a.reshape(*a.shape[:2], config.num_key_heads, config.key_dim)) for a in (q, k))
    group = config.num_value_heads // config.num_key_heads
    steps = DeltaSteps(
        q=jnp.repeat(q * jnp.float32(config.key_dim**-0.5), group, axis=2),
        k=jnp.repeat(k, group, axis=2),
        v=v.reshape(*v.shape[:2], config.num_value_heads, config.value_dim),
        g=g,
        beta=beta,
    )
    return window, steps.only(rows.live(first, size))


def _unit(x: Float32[Array, "... D"]) -> Float32[Array, "... D"]:
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + jnp.float32(L2_EPS))
