"""The dense definition of the result: every key of every sequence at once, in float32.

Memory grows with sequences x query rows x context; it is here to be read, to be compared with, and to
serve what `jaxattn.routing` keeps off the unified path. Differentiable by `jax.grad`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Num

from jaxattn.kernels import _blocks, _output, _products
from jaxattn.problem import AttentionProblem


def supports(problem: AttentionProblem) -> str | None:
    """Return why the problem cannot be computed here, or None."""
    if problem.batch_invariant:
        return "batch_invariant=True needs fixed reduction shapes, and the dense path reduces over the whole table"
    return None


def run(problem: AttentionProblem) -> tuple[Num[Array, "T H Dv"], Float32[Array, "T H"]]:
    """Compute attention densely. Shapes and edge rules are those of `jaxattn.kernels`."""
    if _output.is_empty(problem):
        return _output.neutral(problem)
    sequences = jnp.arange(problem.seqused_k.shape[0], dtype=jnp.int64)
    origin = jnp.zeros_like(sequences)
    rows = _blocks.query_rows(problem, sequences, origin, problem.max_seqlen_q)
    start, stop = _blocks.key_range(problem, rows)
    keys = _blocks.gather_keys(problem, sequences, origin, problem.page_table.shape[1], start, stop)

    scores = _blocks.masked_scores(problem, rows, _blocks.scaled_queries(problem, rows), keys)
    maximum = jax.lax.stop_gradient(scores.max(axis=-1))
    weights = jnp.exp(scores - _output.finite_or_zero(maximum)[..., None])
    weighted = _products.weighted_values(weights, keys.v)
    out, lse = _output.finish(problem, maximum, weights.sum(axis=-1), weighted)
    return _output.to_tokens(problem, sequences, out, lse)
