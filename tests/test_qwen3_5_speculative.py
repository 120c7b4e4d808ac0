"""Speculative decoding of a hybrid model: the text is the plain greedy text, whatever its drafts are worth."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import DATA
from hybrid import QUICKLY, Pool, forward, logits, model, rows

from jaxattn.index64 import index64
from jaxattn.models.folder import hybrid_program
from jaxattn.models.hybrid_cache import HybridCache
from jaxattn.models.qwen3_5_mtp import MtpDraft, MtpWeights, allocate_cache
from jaxattn.speculative import (
    DraftTree,
    ModelDrafter,
    ProgramTarget,
    SpeculativeDecoder,
    Weights,
    admit,
    empty_state,
)

NEW, N = 24, 4
OPTIONS = (("implementation", "xla"),)
PROMPTS = tuple(
    tuple(np.load(DATA / "qwen3_5_mtp_tiny" / "golden.npz")["long_input_ids"][0][a:b].tolist())
    for a, b in ((0, 11), (11, 14), (14, 40))
)


@index64
@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICKLY)
def run(decoder, weights, state):
    return decoder.run(weights, decoder.prefill(weights, state), NEW)


@functools.cache
def tiny(agreement=0.0):
    """The last two layers of the tiny model, one recurrent and one full, and its module.

    With `agreement` the embedding is scaled and the module only looks at it, so that target and module come to
    predict the next token from the last one alone, by the same head: the more, the likelier.
    """
    config, weights, module = model("qwen3_5_mtp_tiny")
    config = dataclasses.replace(config, layer_types=config.layer_types[2:])
    weights = dataclasses.replace(weights, layers=weights.layers[2:])
    if agreement:
        width = config.hidden_size
        fc = jnp.concatenate([jnp.eye(width), jnp.zeros((width, width))], axis=1) * agreement
        flat = dataclasses.replace(
            module.module, fc=fc, embedding_norm=weights.final_norm, final_norm=weights.final_norm
        )
        weights = dataclasses.replace(weights, embedding=weights.embedding * agreement)
        return config, weights, MtpWeights.share(flat, weights)
    return config, weights, MtpWeights.share(module.module, weights)


@functools.cache
def greedy(agreement=0.0):
    """The text of each prompt by plain steps of one sequence."""
    config, weights, _ = tiny(agreement)
    texts = []
    for prompt in PROMPTS:
        pool, text, new = Pool(1, 16), list(prompt), prompt
        cache, _ = pool.caches(config)
        for _ in range(NEW):
            hidden, cache = forward(
                config, weights, rows([new]), cache, pool.extend([len(text) - len(new)], [len(new)])
            )
            new = [int(logits(weights, hidden)[len(new) - 1].argmax())]
            text += new
        texts.append(text[len(prompt) :])
    return texts


@dataclasses.dataclass(frozen=True)
class Scripted:
    """Drafts from a text known in advance; in its cycle c, row s has its first `(s + c) % n` drafts right."""

    num_draft_tokens: int = N
    topk: int = 1
    lookahead: int = 0

    def prefill(self, weights, state, metadata, hidden, finished):
        return state.draft

    def draft(self, weights, state, active):
        place = state.lengths[:, None] - 1 + jnp.arange(N)
        truth = jnp.take_along_axis(weights, jnp.minimum(place, weights.shape[1] - 1), axis=1)
        right = (jnp.arange(state.num_seqs) + state.passes) % N
        return (
            DraftTree.chain(jnp.where(jnp.arange(N) <= right[:, None], truth, truth ^ 1)),
            None,
            state.draft,
        )

    def update(self, weights, state, active, acceptance, hidden):
        return state.draft


def write(drafter, page_size, prompts, agreement=0.0, draft_weights=None):
    """The texts of some prompts, and the verify passes that each took."""
    config, weights, module = tiny(agreement)
    decoder = SpeculativeDecoder(
        target=ProgramTarget(hybrid_program(config), OPTIONS), drafter=drafter, prefill_chunk=16
    )
    pool = Pool(len(prompts), page_size, max_len=64, seed=page_size)
    sizes = {"num_pages": pool.num_pages, "page_size": page_size, "dtype": jnp.float32}
    cache = HybridCache.allocate(config, num_seqs=len(prompts), **sizes)
    draft = None
    if isinstance(drafter, ModelDrafter):
        draft = drafter.empty_state(allocate_cache(config, **sizes), len(prompts))
    state = empty_state(
        num_seqs=len(prompts),
        max_context_len=56,
        lookahead=decoder.lookahead,
        cache=jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), cache),
        draft=draft,
        page_size=page_size,
    )
    for row, prompt in enumerate(prompts):
        pages = pool.table["req_to_token"][row, ::page_size] // page_size
        state = admit(
            state, row, PROMPTS[prompt], max_new_tokens=NEW, pages=pages[: state.page_table.shape[1]]
        )
    params = Weights(weights, module if draft_weights is None else draft_weights)
    state = run(decoder, params, state)
    history, sizes = np.asarray(state.history), [len(PROMPTS[p]) for p in prompts]
    return [history[s, size : size + NEW].tolist() for s, size in enumerate(sizes)], state.passes.tolist()


@pytest.mark.parametrize(("page_size", "num_seqs"), [(1, 3), (4, 1)])
def test_the_recurrent_state_follows_0_some_and_all_drafts(page_size, num_seqs):
    prompts = range(num_seqs)
    text = np.zeros((num_seqs, 56), np.int32)
    for s in prompts:
        text[s, : len(PROMPTS[s]) + NEW] = [*PROMPTS[s], *greedy()[s]]
    texts, passes = write(Scripted(), page_size, prompts, draft_weights=jnp.asarray(text))
    assert texts == greedy()[:num_seqs]
    # A cycle emits one token more than it accepts: 1, 2, 3, 4 and again, from row s on.
    for s, count in enumerate(passes):
        emitted, cycles = 1, 0
        while emitted < NEW:
            emitted += (s + cycles) % N + 1
            cycles += 1
        assert count == cycles


@pytest.mark.parametrize(
    ("page_size", "prompts"), [(1, (0, 1, 2)), (4, (2,)), (4, (2, 0, 1)), (16, (1, 2, 0))]
)
def test_mtp_drafts_leave_the_greedy_text_as_it_is(page_size, prompts):
    drafter = ModelDrafter(model=MtpDraft(tiny()[0], OPTIONS), num_draft_tokens=N)
    passes = {}
    for agreement in (0.0, 2.0, 64.0):
        texts, passes[agreement] = write(drafter, page_size, prompts, agreement)
        assert texts == [greedy(agreement)[p] for p in prompts]
    # Every draft is rejected, some are accepted, and nearly all: a pass then emits 4 tokens.
    assert set(passes[0.0]) == {NEW - 1}
    assert all(NEW - 1 > count > NEW // 2 for count in passes[2.0][:1])
    assert min(passes[64.0]) <= 8
