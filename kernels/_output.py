"""From unnormalised sums to output rows: sink, descale, output scale, cast, and the order of the tokens."""

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int64, Num

from jaxattn.numerics import saturating_cast
from jaxattn.problem import AttentionProblem


def finite_or_zero(maximum: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """Replace a running maximum of `-inf`, so that subtracting it from a masked score stays `-inf`."""
    return jnp.where(maximum == -jnp.inf, jnp.float32(0), maximum)


def finish(
    problem: AttentionProblem,
    maximum: Float32[Array, "B K G Q"],
    total: Float32[Array, "B K G Q"],
    weighted: Float32[Array, "B K G Q Dv"],
) -> tuple[Num[Array, "B Q H Dv"], Float32[Array, "B Q H"]]:
    """Normalise `weighted = sum exp(score - maximum) v` by `total = sum exp(score - maximum)` and the sink.

    A row with `maximum = -inf` saw no key: its output is 0 and its lse `-inf`, sink or not.
    """
    empty = maximum == -jnp.inf
    if problem.sinks is not None:
        sink = problem.sinks.reshape(maximum.shape[1:3])[None, :, :, None]
        joint = jnp.maximum(maximum, sink)
        rescale = jnp.exp(maximum - finite_or_zero(joint))
        total = total * rescale + jnp.exp(sink - finite_or_zero(joint))
        weighted = weighted * rescale[..., None]
        maximum = joint
    divisor = jnp.where(empty, jnp.float32(1), total)
    lse = jnp.where(empty, jnp.float32(-jnp.inf), finite_or_zero(maximum) + jnp.log(divisor))
    out = jnp.where(empty[..., None], jnp.float32(0), weighted / divisor[..., None])
    if problem.v_descale is not None:
        out = out * problem.v_descale[:, None, None, None]
    if problem.output_scale is not None:
        out = out / problem.output_scale
    blocks, kv_heads, group, rows, width = out.shape
    out = out.transpose(0, 3, 1, 2, 4).reshape(blocks, rows, kv_heads * group, width)
    lse = lse.transpose(0, 3, 1, 2).reshape(blocks, rows, kv_heads * group)
    return saturating_cast(out, problem.out_dtype), lse


def to_tokens(
    problem: AttentionProblem,
    first_block: Int64[Array, "S"],
    out: Num[Array, "B Q H Dv"],
    lse: Float32[Array, "B Q H"],
) -> tuple[Num[Array, "T H Dv"], Float32[Array, "T H"]]:
    """Bring rows of blocks into token order, where sequence `s` owns consecutive blocks from `first_block[s]`."""
    blocks, block_rows = lse.shape[:2]
    token = jnp.arange(problem.q.shape[0], dtype=jnp.int64)
    cu_seqlens_q = problem.cu_seqlens_q
    sequence = jnp.searchsorted(cu_seqlens_q, token, side="right", method="compare_all").astype(jnp.int64) - 1
    sequence = jnp.clip(sequence, 0, len(first_block) - 1)
    row = token - cu_seqlens_q[sequence]
    q_len = cu_seqlens_q[sequence + 1] - cu_seqlens_q[sequence]
    live = (row >= 0) & (row < jnp.minimum(q_len, problem.max_seqlen_q))
    source = jnp.where(live, first_block[sequence] * block_rows + row, 0)

    def take(values):
        return values.reshape(blocks * block_rows, *values.shape[2:])[source]

    return (
        jnp.where(live[:, None, None], take(out), jnp.zeros((), problem.out_dtype)),
        jnp.where(live[:, None], take(lse), jnp.float32(-jnp.inf)),
    )


def neutral(problem: AttentionProblem) -> tuple[Num[Array, "T H Dv"], Float32[Array, "T H"]]:
    """Return the result of rows that see no key."""
    tokens, heads, _ = problem.q.shape
    out = jnp.zeros((tokens, heads, problem.v_cache.shape[3]), problem.out_dtype)
    return out, jnp.full((tokens, heads), -jnp.inf, jnp.float32)


def is_empty(problem: AttentionProblem) -> bool:
    """Whether the shapes alone say that no row sees a key: no tokens, sequences, pages or table columns."""
    sizes = (problem.q.shape[0], *problem.page_table.shape, *problem.k_cache.shape[:2])
    return 0 in sizes or problem.max_seqlen_q == 0
