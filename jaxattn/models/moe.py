"""A sparse MLP: a router, experts whose weights are stacked, and a shared expert."""

import dataclasses
from collections.abc import Collection

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int64

from jaxattn.index64 import cdiv, index64
from jaxattn.models.layers import Weight, linear
from jaxattn.models.qwen3_5_config import MoeConfig
from jaxattn.models.streaming import Source, WeightSpec, find


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MlpWeights:
    """A gated MLP, or all experts of one kind stacked on a leading axis."""

    gate: Weight
    up: Weight
    down: Weight


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MoeWeights:
    """Weights of a sparse MLP."""

    router: Weight
    experts: MlpWeights
    shared: MlpWeights
    shared_gate: Weight


def gated_mlp(w: MlpWeights, x: Float[Array, "... E"]) -> Float[Array, "... E"]:
    """`down(silu(gate(x)) * up(x))`."""
    return linear(jax.nn.silu(linear(x, w.gate)) * linear(x, w.up), w.down)


def mlp_specs(hidden_size: int, inner: int, prefix: str) -> MlpWeights:
    """The tensors of a gated MLP."""

    def matrix(name: str, *shape: int) -> WeightSpec:
        return WeightSpec(shape, (Source(f"{prefix}{name}.weight", shape),), linear=True)

    return MlpWeights(
        gate=matrix("gate_proj", inner, hidden_size),
        up=matrix("up_proj", inner, hidden_size),
        down=matrix("down_proj", hidden_size, inner),
    )


def moe_specs(config: MoeConfig, hidden_size: int, prefix: str, tensors: Collection[str]) -> MoeWeights:
    """The tensors of a sparse MLP, one for each expert or, where the file has them, all experts in one."""

    def matrix(name: str, rows: int) -> WeightSpec:
        shape = (rows, hidden_size)
        return WeightSpec(shape, (Source(f"{prefix}{name}.weight", shape),), linear=True)

    stacked = find(f"{prefix}experts.gate_up_proj", tensors) is not None
    return MoeWeights(
        router=matrix("gate", config.num_experts),
        experts=(_stacked if stacked else _separate)(config, hidden_size, f"{prefix}experts."),
        shared=mlp_specs(hidden_size, config.shared_size, f"{prefix}shared_expert."),
        shared_gate=matrix("shared_expert_gate", 1),
    )


def _separate(config: MoeConfig, hidden_size: int, prefix: str) -> MlpWeights:
    def stack(name: str, *shape: int) -> WeightSpec:
        sources = tuple(Source(f"{prefix}{e}.{name}.weight", shape) for e in range(config.num_experts))
        return WeightSpec((config.num_experts, *shape), sources, linear=True)

    return MlpWeights(
        gate=stack("gate_proj", config.expert_size, hidden_size),
        up=stack("up_proj", config.expert_size, hidden_size),
        down=stack("down_proj", hidden_size, config.expert_size),
    )


def _stacked(config: MoeConfig, hidden_size: int, prefix: str) -> MlpWeights:
    inner = config.expert_size

    def part(name: str, file_rows: int, rows: slice | None, *shape: int) -> WeightSpec:
        source = Source(prefix + name, (config.num_experts, file_rows, shape[-1]), rows)
        return WeightSpec((config.num_experts, *shape), (source,), linear=True)

    return MlpWeights(
        gate=part("gate_up_proj", 2 * inner, slice(0, inner), inner, hidden_size),
        up=part("gate_up_proj", 2 * inner, slice(inner, 2 * inner), inner, hidden_size),
        down=part("down_proj", hidden_size, None, hidden_size, inner),
    )


@index64
def moe(config: MoeConfig, w: MoeWeights, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
    """The weighted sum of each token's experts, plus the gated shared expert.

    Args:
        config: sizes; static.
        w: weights; the experts' are stacked, plain or quantised.
        x: normalised hidden states. A row only reads itself, so a row of padding may hold anything.
    """
    scores = jax.nn.softmax(linear(x, w.router, out_dtype=jnp.float32), axis=-1)
    weights, experts = lax.top_k(scores, config.num_experts_per_token)
    if config.normalise:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    routed = _run_experts(w.experts, x, experts.astype(jnp.int64), config.num_experts)  # [T, k, E]
    out = jnp.sum(routed.astype(jnp.float32) * weights[..., None], axis=1)
    shared_weight = jax.nn.sigmoid(linear(x, w.shared_gate, out_dtype=jnp.float32))
    return (out + shared_weight * gated_mlp(w.shared, x).astype(jnp.float32)).astype(x.dtype)


def _run_experts(
    w: MlpWeights, x: Float[Array, "T E"], experts: Int64[Array, "T k"], num_experts: int
) -> Float[Array, "T k E"]:
    """Each token through each of its experts.

    Pairs of token and expert are sorted into blocks that belong to one expert each, so that an expert without
    tokens is not read and a quantised one is dequantised one at a time.
    """
    pairs, per_token = experts.size, experts.shape[1]
    size = min(pairs, max(8, min(128, 1 << (pairs // num_experts).bit_length())))
    num_blocks = min(pairs, cdiv(pairs, size) + min(num_experts, pairs))
    flat = experts.reshape(-1)
    counts = jnp.zeros(num_experts, jnp.int64).at[flat].add(1)
    blocks_end = jnp.cumsum(cdiv(counts, size))
    order = jnp.argsort(flat, stable=True)
    rank = jnp.zeros(pairs, jnp.int64).at[order].set(jnp.arange(pairs, dtype=jnp.int64))
    rank = rank - (jnp.cumsum(counts) - counts)[flat]
    slot = (blocks_end - cdiv(counts, size))[flat] * size + rank
    token = (
        jnp.zeros(num_blocks * size, jnp.int64).at[slot].set(jnp.arange(pairs, dtype=jnp.int64) // per_token)
    )
    expert = jnp.searchsorted(blocks_end, jnp.arange(num_blocks, dtype=jnp.int64), side="right")

    def block(inputs):
        expert, tokens = inputs
        rows = x.at[tokens].get(mode="promise_in_bounds")

        def run():
            return gated_mlp(
                jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, expert, keepdims=False), w), rows
            )

        return lax.cond(expert < num_experts, run, lambda: jnp.zeros_like(rows))

    out = lax.map(block, (expert, token.reshape(num_blocks, size)))
    return out.reshape(-1, x.shape[1])[slot].reshape(*experts.shape, -1)
