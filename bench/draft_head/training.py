"""The loss of a draft head over several draft steps, and AdamW."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from bench.draft_head.texts import Conversations
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
        held_out: conversations, a multiple of `batch`, that are not trained on but measured with at the end.
        learning_rate: the highest; it rises for `warmup` steps and falls along a cosine.
    """

    steps: int = 10000
    batch: int = 32
    held_out: int = 0
    draft_steps: int = 3
    learning_rate: float = 1e-3
    warmup: int = 100
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    seed: int = 0


def train_head(
    model: Model,
    texts: Conversations,
    plan: Plan,
    options=(),
    report=print,
    keep: Callable[[eagle.EagleHead], None] = lambda head: None,
):
    """Train a head on the answers of `texts` and return it in float32.

    The last `plan.held_out` conversations are not trained on, nor others with the same question; every hundred steps
    `keep` gets the head as it is then.

    Raises:
        ValueError: the held-out conversations are not whole batches, or leave none to train on.
    """
    if plan.held_out < 0 or plan.held_out % plan.batch or plan.held_out >= len(texts.tokens):
        raise ValueError(
            f"held_out: expected a multiple of batch={plan.batch} below the {len(texts.tokens)} conversations, "
            f"got {plan.held_out}"
        )
    trained, held_out = _parted(texts, plan.held_out)
    head = eagle.init_head(model.program.config, model.weights, jax.random.key(plan.seed))
    moments = jax.tree.map(jnp.zeros_like, (head, head))
    rng = np.random.default_rng(plan.seed)
    rounds = range(plan.steps * plan.batch // len(trained) + 1)
    order = np.concatenate([rng.permutation(trained) for _ in rounds])
    for step in range(plan.steps):
        chosen = texts.take(order[step * plan.batch : (step + 1) * plan.batch])
        state = (head, moments, chosen, np.int32(step))
        head, moments, measured = _train_step(model.program, plan, options, model.weights, *state)
        if step % 100 == 0 or step + 1 == plan.steps:
            report(f"step {step}: {_described(measured)}")
        if step % 100 == 99:
            keep(head)
    if plan.held_out:
        measured = [
            _evaluate(model.program, plan, options, model.weights, head, texts.take(rows))
            for rows in np.split(held_out, plan.held_out // plan.batch)
        ]
        report(f"held out: {_described(jax.tree.map(lambda *values: sum(values) / len(values), *measured))}")
    return head


def _parted(texts: Conversations, held_out: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows to train on and to measure with, which have no question in common."""

    def question(row):
        return texts.tokens[row, : texts.starts[row]].tobytes()

    first = len(texts.tokens) - held_out
    measured = {question(row) for row in range(first, len(texts.tokens))}
    trained = [row for row in range(first) if question(row) not in measured]
    return np.asarray(trained), np.arange(first, len(texts.tokens))


def _described(measured) -> str:
    loss, agreement = jax.device_get(measured)
    return f"loss {loss:.4f}, agreement by draft step {np.round(agreement, 3).tolist()}"


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=(4, 5))
def _train_step(program, plan, options, weights, head, moments, texts, step):
    loss = functools.partial(draft_loss, program, plan.draft_steps, options, weights, texts=texts)
    (value, agreement), gradient = jax.value_and_grad(loss, has_aux=True)(head)
    head, moments = _adamw(plan, head, moments, gradient, step)
    return head, moments, (value, agreement)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _evaluate(program, plan, options, weights, head, texts):
    return draft_loss(program, plan.draft_steps, options, weights, head, texts=texts)


def draft_loss(program, draft_steps: int, options, weights, head, *, texts: Conversations):
    """Cross-entropy of the head's distributions against the target's, and how often their first choices agree.

    Draft step k at position i has seen the text up to token i + 1 + k, of which the last k + 1 through its own
    hidden states. All steps of a conversation are nodes of one tree, so that each sees what it would see in decoding.
    Only what the target says of its answers counts.
    """
    sequences, length = texts.tokens.shape
    target_hidden = _target_hidden(program, options, weights, texts)
    shared = eagle.EagleWeights.share(head, weights)
    hidden, inputs, outputs = eagle.fuse(program.config, shared.module, target_hidden)[:, None], [], []
    for k in range(draft_steps):
        inputs.append(jnp.roll(texts.tokens, -(1 + k), axis=1))
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
        # Where the target says the same: of token i + 1 + k.
        outputs.append(jnp.roll(out[:, k], 1 + k, axis=1).reshape(sequences * length, -1))
        hidden = jnp.concatenate([hidden, out[:, k:]], axis=1)
    position = jnp.arange(length, dtype=jnp.int32)
    said = (position + 1 >= texts.starts[:, None]) & (position < texts.lengths[:, None])
    counts = [(said & (position > k)).reshape(-1) for k in range(draft_steps)]
    return _compare(
        program,
        weights,
        jnp.stack(outputs, axis=1),
        target_hidden.reshape(sequences * length, -1),
        jnp.stack(counts, axis=1),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _compare(program, weights, outputs, target_hidden, counts):
    """Mean cross-entropy of `outputs [rows, steps, E]` over the rows that count, and agreement by draft step."""
    return _compare_slices(program, weights, outputs, target_hidden, counts)[0]


def _compare_slices(program, weights, outputs, target_hidden, counts):
    """The value of `_compare` and its slope along `outputs`, a slice of rows at a time: no logits are kept.

    The slope is that of a decoder's logits, the product with its embedding or head.
    """
    total, steps = counts.shape
    rows = min(LOGITS_ROWS, total)
    number = -(-total // rows)
    share = 1 / (steps * jnp.maximum(jnp.sum(counts, axis=0), 1))
    head = weights.embedding if weights.head is None else weights.head

    def compare(part):
        outputs, target_hidden, counts = part
        wanted = jax.nn.softmax(program.logits(weights, target_hidden))[:, None]  # [rows, 1, V]
        drafted = program.logits(weights, outputs.reshape(rows * steps, -1)).reshape(rows, steps, -1)
        cross = jax.nn.logsumexp(drafted, axis=-1) - jnp.sum(wanted * drafted, axis=-1)
        agreed = jnp.argmax(wanted, axis=-1) == jnp.argmax(drafted, axis=-1)
        pull = (jax.nn.softmax(drafted) - wanted) * (counts * share)[..., None]
        pull = pull.reshape(rows * steps, -1).astype(head.dtype)
        slope = jnp.dot(pull, head, preferred_element_type=jnp.float32)
        return jnp.sum(cross * counts * share), jnp.sum(agreed & counts, axis=0), slope.reshape(outputs.shape)

    def cut(x):
        x = jnp.pad(x, ((0, number * rows - total), *((0, 0) for _ in x.shape[1:])))
        return x.reshape(number, rows, *x.shape[1:])

    loss, agreed, slope = jax.lax.map(compare, (cut(outputs), cut(target_hidden), cut(counts)))
    agreement = jnp.sum(agreed, axis=0) / jnp.maximum(jnp.sum(counts, axis=0), 1)
    slope = slope.reshape(number * rows, steps, -1)[:total].astype(outputs.dtype)
    return (jnp.sum(loss), agreement), slope


def _pull_back(program, slope, cotangents):
    return None, cotangents[0].astype(slope.dtype) * slope, None, None


_compare.defvjp(_compare_slices, _pull_back)


def _target_hidden(program, options, weights, texts):
    """The target's hidden states and features of every token, which no gradient goes through."""
    sequences, length = texts.tokens.shape
    hidden, _ = program.forward(
        program.config,
        weights,
        texts.tokens.reshape(-1),
        program.allocate_cache(program.config, **_pool(sequences, length), dtype=weights.embedding.dtype),
        _tree_metadata(sequences, length, 1),
        features=eagle.features(program.config),
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
