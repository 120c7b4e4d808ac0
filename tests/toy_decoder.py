"""A decoder small enough to be computed token by token in numpy, and a speculative decoder around it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.models import decoder
from jaxattn.models.config import DecoderConfig, LayerConfig, Rope
from jaxattn.models.load import Program
from jaxattn.speculative import (
    ModelDrafter,
    ProgramTarget,
    SpeculativeDecoder,
    Weights,
    admit,
    empty_state,
    window_ring,
)

VOCAB, WIDTH, HEADS, KV_HEADS, HEAD_DIM = 24, 32, 4, 2, 8
WINDOW = 6


@functools.cache
def program(windows=(None,)):
    """A Llama with one layer for each entry: its window, or None."""
    rope = Rope(100.0, HEAD_DIM)
    return Program(
        DecoderConfig(
            architecture="llama",
            vocab_size=VOCAB,
            hidden_size=WIDTH,
            intermediate_size=48,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            rms_norm_eps=1e-5,
            context_length=256,
            layers=tuple(LayerConfig(rope, window) for window in windows),
            tied_head=False,
            softmax_scale=HEAD_DIM**-0.5,
        )
    )


@functools.cache
def weights(windows=(None,), noise=0.0):
    """Random weights, of which `noise` makes a draft model that agrees with the target now and then."""
    config = program(windows).config
    rng, other = np.random.default_rng(0), np.random.default_rng(1)

    def tensor(name, shape):
        if name.endswith("norm"):
            return jnp.ones(shape, jnp.float32)
        return jnp.asarray(
            (rng.standard_normal(shape) + noise * other.standard_normal(shape)) * 0.25, jnp.float32
        )

    shapes = decoder.layer_shapes(config)
    embedding = tensor("embedding", (VOCAB, WIDTH))
    return decoder.DecoderWeights(
        embedding=embedding,
        head=embedding,
        layers=tuple(
            decoder.LayerWeights(**{name: tensor(name, shape) for name, shape in shapes.items()})
            for _ in windows
        ),
        final_norm=tensor("final_norm", (WIDTH,)),
    )


def plain_logits(tokens, windows=(None,)):
    """Float64 logits after the last of `tokens`, by dense numpy."""
    w = jax.tree.map(lambda x: np.asarray(x, np.float64), weights(windows))
    position = np.arange(len(tokens))

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight

    def rotate(x):
        angle = position[:, None] * 100.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    x = w.embedding[np.asarray(tokens)]
    for layer, window in zip(w.layers, windows, strict=True):
        y = norm(x, layer.attention_norm)
        q = rotate((y @ layer.q.T).reshape(len(tokens), HEADS, HEAD_DIM))
        k = rotate((y @ layer.k.T).reshape(len(tokens), KV_HEADS, HEAD_DIM))
        v = (y @ layer.v.T).reshape(len(tokens), KV_HEADS, HEAD_DIM)
        k, v = (np.repeat(a, HEADS // KV_HEADS, axis=1) for a in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) * HEAD_DIM**-0.5
        distance = position[:, None] - position[None]
        visible = (distance >= 0) & (distance < (window or len(tokens)))
        scores = np.exp(np.where(visible, scores, -np.inf) - scores.max())
        out = np.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdims=True), v)
        x = x + out.reshape(len(tokens), -1) @ layer.o.T
        y = norm(x, layer.mlp_norm)
        gate = y @ layer.gate.T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ layer.up.T)) @ layer.down.T
    return norm(x[-1], w.final_norm) @ w.embedding.T


def plain_text(
    prompt, new_tokens, windows=(None,), stop_tokens=(), choose=lambda logits, position: logits.argmax()
):
    """The new tokens that follow `prompt`, one at a time."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + new_tokens:
        tokens.append(int(choose(plain_logits(tokens, windows), len(tokens))))
        if tokens[-1] in stop_tokens:
            break
    return tokens[len(prompt) :]


@dataclasses.dataclass
class Setup:
    """A decoder, a state of free rows, and pages for each row in shuffled order."""

    decoder: SpeculativeDecoder
    state: object
    weights: Weights
    pages: np.ndarray
    window_pages: np.ndarray | None

    def admit(self, row, prompt, **options):
        window = None if self.window_pages is None else self.window_pages[row]
        pages = options.pop("pages", self.pages[row])
        self.state = admit(self.state, row, prompt, pages=pages, window_pages=window, **options)

    def write(self, every=3):
        """Run to the end; the new tokens of each row."""
        texts = [[] for _ in range(self.state.num_seqs)]
        for state, new in self.decoder.stream(self.weights, self.state, every=every):
            self.state = state
            for text, tokens in zip(texts, new, strict=True):
                text += tokens
        return texts


def setup(
    drafter,
    *,
    windows=(None,),
    rows=3,
    page_size=4,
    context=64,
    draft_noise=0.0,
    implementation="reference",
    features=(),
    **options,
):
    """Caches are full of NaN; page 0 belongs to nobody."""
    model = program(windows)
    target = ProgramTarget(model, (("implementation", implementation),), features)
    loop = SpeculativeDecoder(target=target, drafter=drafter, prefill_chunk=16, **options)
    width = -(-(context + loop.lookahead) // page_size)
    in_window = tuple(i for i, window in enumerate(windows) if window)
    ring = window_ring(WINDOW, max(16, drafter.num_draft_tokens), page_size)

    def cache(**pool):
        zeros = model.allocate_cache(
            model.config, num_pages=rows * width + 1, page_size=page_size, dtype=jnp.float32, **pool
        )
        return jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), zeros)

    pool = {"window_layers": in_window, "num_window_pages": rows * ring + 1} if in_window else {}
    drafts = isinstance(drafter, ModelDrafter)
    rng = np.random.default_rng(2)
    return Setup(
        decoder=loop,
        state=empty_state(
            num_seqs=rows,
            max_context_len=context,
            lookahead=loop.lookahead,
            cache=cache(**pool),
            draft=drafter.empty_state(cache(), rows) if drafts else None,
            page_size=page_size,
            window_pool=bool(in_window),
        ),
        weights=Weights(weights(windows), weights(windows, draft_noise) if drafts else None),
        pages=rng.permutation(np.arange(1, rows * width + 1)).reshape(rows, width),
        window_pages=rng.permutation(np.arange(1, rows * ring + 1)).reshape(rows, ring)
        if in_window
        else None,
    )
