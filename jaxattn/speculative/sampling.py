"""Sampling parameters per sequence, and the distribution that they make of a row of logits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, Key

# What the substreams of a position's key are for.
COIN_STREAM, BONUS_STREAM, FIRST_DRAFT_STREAM = 0, 1, 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How each sequence of a batch picks its tokens.

    A row of temperature 0 is greedy. `top_k` 0 and `top_p` 1 mean no restriction.

    Example:
        >>> from jaxattn.speculative import SamplingParams
        >>> params = SamplingParams.create(2, temperature=[0.0, 0.7], top_p=0.9, seed=1)
        >>> params.temperature.tolist()[0]
        0.0
    """

    temperature: Float32[Array, "S"]
    top_k: Int32[Array, "S"]
    top_p: Float32[Array, "S"]
    keys: Key[Array, "S"]

    @classmethod
    def create(cls, num_sequences: int, *, temperature=0.0, top_k=0, top_p=1.0, seed=0) -> "SamplingParams":
        """Check the values and spread each of them over `num_sequences` rows.

        Args:
            num_sequences: number of rows S.
            temperature: a number or one per row, at least 0; 0 is greedy.
            top_k: a count or one per row; only the `top_k` most likely tokens are drawn; 0 for all.
            top_p: a number or one per row in (0, 1]; only the most likely tokens that together reach
                this probability are drawn.
            seed: a number, from which each row gets a stream of its own, or one per row.

        Raises:
            ValueError: a value is out of its range, or there is not one per row.
        """

        def rows(value, name: str, dtype):
            value = np.asarray(value, dtype)
            if value.shape not in ((), (num_sequences,)):
                raise ValueError(f"{name}: expected one value or {num_sequences}, got shape {value.shape}")
            return np.broadcast_to(value, (num_sequences,))

        temperature = rows(temperature, "temperature", np.float32)
        top_k = rows(top_k, "top_k", np.int32)
        top_p = rows(top_p, "top_p", np.float32)
        for name, value, usable, rule in (
            ("temperature", temperature, np.isfinite(temperature) & (temperature >= 0), "0 (greedy) or more"),
            ("top_k", top_k, top_k >= 0, "0 (no limit) or more"),
            ("top_p", top_p, (top_p > 0) & (top_p <= 1), "a number above 0 and at most 1"),
        ):
            if not usable.all():
                raise ValueError(f"{name}: expected {rule}, got {value[~usable][0]}")
        if np.ndim(seed) == 0:
            keys = jax.random.split(jax.random.key(seed), num_sequences)
        else:
            keys = jax.vmap(jax.random.key)(jnp.asarray(rows(seed, "seed", np.uint32)))
        return cls(
            temperature=jnp.asarray(temperature),
            top_k=jnp.asarray(top_k),
            top_p=jnp.asarray(top_p),
            keys=keys,
        )


def usable_logits(logits: Float[Array, "*B V"]) -> tuple[Float32[Array, "*B V"], Bool[Array, "*B"]]:
    """Float32 logits in which NaN is never chosen, and whether each row was sound.

    A row is sound when it holds neither NaN nor +inf and at least one value above -inf. In an unsound
    row NaN becomes -inf and +inf the largest float; a row without any usable value chooses token 0.
    """
    logits = logits.astype(jnp.float32)
    sound = ~jnp.any(jnp.isnan(logits) | (logits == jnp.inf), axis=-1)
    largest = jnp.float32(jnp.finfo(jnp.float32).max)
    logits = jnp.where(jnp.isnan(logits), -jnp.inf, jnp.minimum(logits, largest))
    empty = jnp.all(logits == -jnp.inf, axis=-1)
    first = jnp.arange(logits.shape[-1]) == 0
    logits = jnp.where(empty[..., None] & first, jnp.float32(0), logits)
    return logits, sound & ~empty


def probabilities(
    logits: Float[Array, "S n V"], sampling: SamplingParams
) -> tuple[Float32[Array, "S n V"], Bool[Array, "S n"]]:
    """The distribution that each row is drawn from: softmax(logits / temperature), top-k, then top-p.

    Args:
        logits: any float dtype; see `usable_logits` for NaN and infinities.
        sampling: one entry per sequence S. A greedy row gives probability 1 to its argmax.

    Returns:
        Probabilities that sum to 1 over V, and whether each row of logits was sound.
    """
    logits, sound = usable_logits(logits)
    greedy = (sampling.temperature <= 0)[:, None, None]
    best = jnp.argmax(logits, axis=-1)
    peak = jnp.max(logits, axis=-1, keepdims=True)
    temperature = jnp.where(sampling.temperature > 0, sampling.temperature, jnp.float32(1))
    probs = jax.nn.softmax((logits - peak) / temperature[:, None, None], axis=-1)
    restricted = jnp.any((sampling.top_k > 0) | (sampling.top_p < 1))
    probs = jax.lax.cond(
        restricted, _restrict, lambda probs, *_: probs, probs, sampling.top_k, sampling.top_p
    )
    return jnp.where(greedy, jax.nn.one_hot(best, logits.shape[-1], dtype=jnp.float32), probs), sound


def _restrict(
    probs: Float32[Array, "S n V"], top_k: Int32[Array, "S"], top_p: Float32[Array, "S"]
) -> Float32[Array, "S n V"]:
    """Keep the `top_k` largest of each row, then the fewest of those that reach `top_p`; ties by token id."""
    vocab = probs.shape[-1]
    order = jnp.argsort(-probs, axis=-1, stable=True)
    ranked = jnp.take_along_axis(probs, order, axis=-1)
    rank = jnp.arange(vocab, dtype=jnp.int32)
    limit = jnp.where(top_k > 0, top_k, vocab)[:, None, None]
    ranked = jnp.where(rank < limit, ranked, jnp.float32(0))
    before = jnp.cumsum(ranked, axis=-1) - ranked
    total = jnp.sum(ranked, axis=-1, keepdims=True)
    inside = (before < top_p[:, None, None] * total) | (rank == 0)
    ranked = jnp.where(inside, ranked, jnp.float32(0))
    ranked = ranked / jnp.sum(ranked, axis=-1, keepdims=True)
    return jnp.put_along_axis(jnp.zeros_like(probs), order, ranked, axis=-1, inplace=False)


def keys_at(sampling: SamplingParams, position: Int[Array, "S"]) -> Key[Array, "S"]:
    """The key of each sequence for the draws at `position`: they depend on neither batch nor call."""
    return jax.vmap(jax.random.fold_in)(sampling.keys, position.astype(jnp.uint32))


def substream(keys: Key[Array, "S"], number: int | Int[Array, ""]) -> Key[Array, "S"]:
    """Keys for other draws at the same position."""
    number = jnp.asarray(number).astype(jnp.uint32)
    return jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, number)


def draw(keys: Key[Array, "S"], probs: Float32[Array, "S V"]) -> Int32[Array, "S"]:
    """One token per row from `probs`; a token of probability 0 is never drawn."""
    return jax.vmap(jax.random.categorical)(keys, jnp.log(probs)).astype(jnp.int32)
