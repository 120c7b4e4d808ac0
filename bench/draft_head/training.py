"""The loss of a draft head over several draft steps, and AdamW."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.index64 import index64
from jaxattn.metadata import AttentionMetadata
from jaxattn.models.load import Model
from jaxattn.speculative import eagle
from jaxattn.tree import ancestor_bits

PAGE_SIZE = 16
# Rows of logits in memory at a time.
LOGITS_ROWS = 4096


@dataclasses.dataclass(frozen=True)
class Plan:
    """How to train.

    Attributes:
        steps: of the optimiser.
        batch: conversations in a step.
        draft_steps: how many drafts the head makes from its own hidden states; each is trained.
        learning_rate: the highest; it rises for `warmup` steps and falls along a cosine.
    """

    steps: int = 3000
    batch: int = 64
    draft_steps: int = 3
    learning_rate: float = 1e-3
    warmup: int = 100
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    seed: int = 0


def train_head(
    model: Model,
    tokens: np.ndarray,
    lengths: np.ndarray,
    plan: Plan,
    options=(),
    report=print,
    keep: Callable[[eagle.EagleHead], None] = lambda head: None,
):
    """Train a head on `tokens [N, L]`, of which `lengths [N]` count, and return it in float32.

    Every hundred steps `keep` gets the head as it is then.
    """
    head = eagle.init_head(model.program.config, model.weights, jax.random.key(plan.seed))
    moments = jax.tree.map(jnp.zeros_like, (head, head))
    rng = np.random.default_rng(plan.seed)
    order = np.concatenate(
        [rng.permutation(len(tokens)) for _ in range(plan.steps * plan.batch // len(tokens) + 1)]
    )
    for step in range(plan.steps):
        chosen = order[step * plan.batch : (step + 1) * plan.batch]
        head, moments, measured = _train_step(
            model.program,
            plan,
            options,
            model.weights,
            head,
            moments,
            tokens[chosen],
            lengths[chosen],
            np.int32(step),
        )
        if step % 50 == 0 or step + 1 == plan.steps:
            loss, agreement = jax.device_get(measured)
            report(f"step {step}: loss {loss:.4f}, agreement by draft step {np.round(agreement, 3).tolist()}")
        if step % 100 == 99:
            keep(head)
    return head


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=(4, 5))
def _train_step(program, plan, options, weights, head, moments, tokens, lengths, step):
    loss = functools.partial(
        draft_loss, program, plan.draft_steps, options, weights, tokens=tokens, lengths=lengths
    )
    (value, agreement), gradient = jax.value_and_grad(loss, has_aux=True)(head)
    head, moments = _adamw(plan, head, moments, gradient, step)
    return head, moments, (value, agreement)


def draft_loss(program, draft_steps: int, options, weights, head, *, tokens, lengths):
    """Cross-entropy of the head's distributions against the target's, and how often their first choices agree.

    Draft step k at position i has seen the text up to token i + 1 + k, of which the last k + 1 through its own
    hidden states. All steps of a conversation are nodes of one tree, so that each sees what it would see in decoding.
    """
    sequences, length = tokens.shape
    target_hidden = _target_hidden(program, options, weights, tokens, lengths)
    shared = eagle.EagleWeights.share(head, weights)
    hidden, inputs, outputs = target_hidden[:, None], [], []
    for k in range(draft_steps):
        inputs.append(jnp.roll(tokens, -(1 + k), axis=1))
        rows = (k + 1) * length
        out, _ = eagle.forward(
            program.config,
            shared,
            jnp.stack(inputs, axis=1).reshape(-1),
            hidden.reshape(sequences * rows, -1),
            _empty_cache(program, sequences, rows),
            _tree_metadata(sequences, length, k + 1),
            implementation="reference",
        )
        out = out.reshape(sequences, k + 1, length, -1)
        outputs.append(out[:, k])
        hidden = jnp.concatenate([hidden, out[:, k:]], axis=1)
    position = jnp.arange(length, dtype=jnp.int32)
    losses, agreements = [], []
    for k, out in enumerate(outputs):
        known = position + 1 + k < lengths[:, None]
        teacher = jnp.roll(target_hidden, -(1 + k), axis=1)
        loss, agreed = _compare(program, weights, shared, out, teacher, known)
        losses.append(loss)
        agreements.append(agreed)
    return sum(losses) / draft_steps, jnp.stack(agreements)


def _compare(program, weights, shared, out, teacher, known):
    """Mean cross-entropy and agreement over the known rows, a slice of rows of logits at a time."""
    width = out.shape[-1]
    rows = min(LOGITS_ROWS, known.size)
    slices = -(-known.size // rows)
    padding = slices * rows - known.size

    def cut(x, *shape):
        x = x.reshape(known.size, *shape)
        return jnp.pad(x, ((0, padding), *((0, 0) for _ in shape))).reshape(slices, rows, *shape)

    @jax.checkpoint
    def compare(out, teacher, known):
        wanted = jax.lax.stop_gradient(program.logits(weights, teacher))
        drafted = eagle.logits(shared, out)
        cross = -jnp.sum(jax.nn.softmax(wanted) * jax.nn.log_softmax(drafted), axis=-1)
        agreed = jnp.argmax(wanted, axis=-1) == jnp.argmax(drafted, axis=-1)
        return jnp.sum(jnp.where(known, cross, 0)), jnp.sum(agreed & known)

    parts = jax.lax.map(lambda x: compare(*x), (cut(out, width), cut(teacher, width), cut(known)))
    return tuple(jnp.sum(part) / jnp.maximum(jnp.sum(known), 1) for part in parts)


def _target_hidden(program, options, weights, tokens, lengths):
    """The target's hidden states of every token, which no gradient goes through."""
    sequences, length = tokens.shape
    metadata = _tree_metadata(sequences, length, 1)
    hidden, _ = program.forward(
        program.config,
        weights,
        tokens.reshape(-1),
        program.allocate_cache(program.config, **_pool(sequences, length), dtype=weights.embedding.dtype),
        metadata,
        **dict(options),
    )
    return jax.lax.stop_gradient(hidden.reshape(sequences, length, -1))


def _empty_cache(program, sequences, rows):
    # float32, so that the gradient goes through a plain scatter.
    return eagle.allocate_cache(program.config, **_pool(sequences, rows), dtype=jnp.float32)


def _pool(sequences, rows):
    return {"num_pages": sequences * -(-rows // PAGE_SIZE), "page_size": PAGE_SIZE}


@index64
def _tree_metadata(sequences: int, length: int, draft_steps: int) -> AttentionMetadata:
    """Rows of a whole text and, above the first step, of a draft step from each of its positions."""
    rows = draft_steps * length
    node = jnp.arange(rows, dtype=jnp.int64)
    parents = jnp.where(node < length, node - 1, node - length)
    bits = ancestor_bits(parents[None])
    pages = -(-rows // PAGE_SIZE)
    return AttentionMetadata(
        page_table=jnp.arange(sequences * pages, dtype=jnp.int64).reshape(sequences, pages),
        cu_seqlens_q=jnp.arange(sequences + 1, dtype=jnp.int64) * rows,
        seqused_k=jnp.full(sequences, rows, jnp.int64),
        ancestors=None if draft_steps == 1 else jnp.tile(bits, (sequences, 1)),
        max_seqlen_q=rows,
        page_size=PAGE_SIZE,
        mode="extend" if draft_steps == 1 else "target_verify",
    )


def _adamw(plan: Plan, head, moments, gradient, step):
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(gradient)))
    gradient = jax.tree.map(lambda g: g * jnp.minimum(1.0, plan.clip / (norm + 1e-6)), gradient)
    progress = jnp.maximum(step - plan.warmup, 0) / max(1, plan.steps - plan.warmup)
    rate = plan.learning_rate * jnp.minimum((step + 1) / plan.warmup, 0.5 * (1 + jnp.cos(jnp.pi * progress)))
    first, second = (
        jax.tree.map(lambda m, g, b=b, p=p: b * m + (1 - b) * g**p, moment, gradient)
        for moment, b, p in zip(moments, plan.betas, (1, 2), strict=True)
    )
    scales = [1 / (1 - b ** (step + 1.0)) for b in plan.betas]

    def update(w, m, v):
        decay = plan.weight_decay * w if w.ndim > 1 else 0.0
        return w - rate * (m * scales[0] / (jnp.sqrt(v * scales[1]) + 1e-8) + decay)

    return jax.tree.map(update, head, first, second), (first, second)
