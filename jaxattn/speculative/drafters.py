"""The drafters of the decoding loop: prompt lookup, and a draft model that grows chains or trees."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from jaxattn.index64 import cdiv
from jaxattn.speculative import ngram
from jaxattn.speculative.drafting import (
    DraftTree,
    branch_parents,
    draw_children,
    expand,
    keep_best,
    select_tree,
)
from jaxattn.speculative.protocols import DraftModel
from jaxattn.speculative.sampling import (
    FIRST_DRAFT_STREAM,
    draw,
    keys_at,
    probabilities,
    substream,
    usable_logits,
)
from jaxattn.tree import ancestor_bits


@dataclasses.dataclass(frozen=True, kw_only=True)
class NgramDrafter:
    """Prompt lookup; see `jaxattn.speculative.propose`. It has neither weights nor state."""

    num_draft_tokens: int
    topk: int = 1
    max_ngram: int = 3
    min_ngram: int = 1

    @property
    def lookahead(self) -> int:
        """Nothing is written for drafting."""
        return 0

    def prefill(self, weights, state, metadata, hidden, finished):
        """Return the state as it is."""
        return state.draft

    def draft(self, weights, state, active):
        """Trees from the history of each row."""
        tree = ngram.propose(
            state.history,
            jnp.where(active, state.lengths, 0),
            num_draft_tokens=self.num_draft_tokens,
            topk=self.topk,
            max_ngram=self.max_ngram,
            min_ngram=self.min_ngram,
        )
        return tree, None, state.draft

    def update(self, weights, state, active, acceptance, hidden):
        """Return the state as it is."""
        return state.draft


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftState:
    """The draft model's cache, and its hidden state that predicts what follows the last token of each row."""

    cache: Any
    hidden: Float32[Array, "S E"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelDrafter:
    """Drafts with a model, from the hidden state that its last extend left.

    `topk` 1 drafts a chain. Otherwise, with `drawn` off, a tree grows for `num_steps` levels: of the `topk`
    children of each of `topk` nodes the best `topk` grow on, and of all of them the n - 1 best by summed
    log-probability are verified.
    With `drawn` the drafts are draws from the draft model under each row's sampling parameters, in a chain or
    in `topk` branches from the root, which lets more of them be accepted at high temperatures.
    """

    model: DraftModel
    num_draft_tokens: int
    topk: int = 1
    num_steps: int | None = None
    drawn: bool = False

    def __post_init__(self):
        if self.num_draft_tokens < 2 or self.topk < 1:
            raise ValueError(
                "num_draft_tokens, topk: expected at least 2 and at least 1, "
                f"got {self.num_draft_tokens} and {self.topk}"
            )
        nodes = self.topk + (self.levels - 1) * self.topk**2
        if self.topk > 1 and not self.drawn and self.num_draft_tokens - 1 > nodes:
            raise ValueError(
                f"num_draft_tokens: expected at most {nodes + 1} with topk={self.topk} and {self.levels} steps, "
                f"got {self.num_draft_tokens}"
            )

    @property
    def levels(self) -> int:
        """Levels of the tree below its root."""
        if self.topk > 1 and not self.drawn and self.num_steps is not None:
            return self.num_steps
        return cdiv(self.num_draft_tokens - 1, self.topk)

    @property
    def lookahead(self) -> int:
        """Keys of all nodes but those of the last level, or of a draft extend, behind the last known token."""
        return max(self.topk * (self.levels - 1), self.num_draft_tokens)

    def empty_state(self, cache: Any, num_seqs: int) -> DraftState:
        """The state of free rows over the draft model's `cache`."""
        return DraftState(cache=cache, hidden=jnp.zeros((num_seqs, self.model.hidden_size), jnp.float32))

    def prefill(self, weights, state, metadata, hidden, finished):
        """Write the draft keys of a prompt chunk; rows that finish theirs get the hidden state to draft from."""
        num_tokens = hidden.shape[0]
        sequence, position = metadata.sequence_ids(num_tokens), metadata.positions(num_tokens)
        tokens = state.history.at[sequence, position + self.model.position_shift].get(mode="clip")
        known = self.model.read_target(weights, hidden)
        out, cache = self.model.forward(weights, tokens, known, state.draft.cache, metadata)
        out = out[jnp.maximum(metadata.cu_seqlens_q[1:] - 1, 0)]
        if self.model.position_shift == 0:
            last = state.metadata("draft_decode", state.lengths - 1, 1, finished)
            tokens = jnp.take_along_axis(state.history, jnp.maximum(state.lengths - 1, 0)[:, None], axis=1)[
                :, 0
            ]
            out, cache = self.model.forward(weights, tokens, out, cache, last)
        kept = jnp.where(finished[:, None], out.astype(jnp.float32), state.draft.hidden)
        return DraftState(cache=cache, hidden=kept)

    def draft(self, weights, state, active):
        """Grow a tree for every active row."""
        if self.topk == 1:
            return self._draft_chain(weights, state, active)
        grow = self._draft_branches if self.drawn else self._draft_best
        return grow(weights, state, active)

    def update(self, weights, state, active, acceptance, hidden):
        """Extend the draft cache by the emitted tokens: n rows per sequence, whose result is row accept_len - 1."""
        sequences, n = acceptance.path.shape
        node = jnp.maximum(acceptance.path, 0)
        known = self.model.read_target(weights, hidden).reshape(sequences, n, -1)
        known = jnp.take_along_axis(known, node[..., None], axis=1)
        metadata = state.metadata("draft_extend", state.lengths - self.model.position_shift, n, active)
        tokens = jnp.maximum(acceptance.tokens, 0).reshape(-1)
        out, cache = self.model.forward(
            weights, tokens, known.reshape(sequences * n, -1), state.draft.cache, metadata
        )
        result = jnp.maximum(acceptance.accept_len - 1, 0)[:, None, None]
        out = jnp.take_along_axis(out.reshape(sequences, n, -1), result, axis=1)[:, 0]
        kept = jnp.where(active[:, None], out.astype(jnp.float32), state.draft.hidden)
        return DraftState(cache=cache, hidden=kept)

    def _root(self, state):
        last = jnp.maximum(state.lengths - 1, 0)
        return jnp.take_along_axis(state.history, last[:, None], axis=1)[:, 0]

    def _pick(self, logits, state, level):
        """A token per row, and the distribution that it was drawn from if it was drawn."""
        if not self.drawn:
            return jnp.argmax(usable_logits(logits)[0], axis=-1).astype(jnp.int32), None
        probs = probabilities(logits[:, None], state.sampling)[0][:, 0]
        return draw(_draft_keys(state, level), probs), probs

    def _draft_chain(self, weights, state, active):
        hidden = state.draft.hidden
        first, first_probs = self._pick(self.model.logits(weights, hidden), state, 0)
        start = state.metadata("draft_decode", state.lengths - self.model.position_shift, 1, active)

        def step(carry, i):
            token, hidden, cache = carry
            out, cache = self.model.forward(weights, token, hidden, cache, start.advance(i))
            token, probs = self._pick(self.model.logits(weights, out), state, i + 1)
            return (token, out.astype(jnp.float32), cache), (token, probs)

        steps = jnp.arange(self.num_draft_tokens - 2, dtype=jnp.int64)
        (_, _, cache), (tokens, probs) = jax.lax.scan(step, (first, hidden, state.draft.cache), steps)
        tree = DraftTree.chain(
            jnp.concatenate([self._root(state)[:, None], first[:, None], tokens.T], axis=1)
        )
        if self.drawn:
            probs = jnp.concatenate([first_probs[None], probs, jnp.zeros_like(first_probs)[None]]).swapaxes(
                0, 1
            )
        return tree, probs, DraftState(cache=cache, hidden=hidden)

    def _draft_best(self, weights, state, active):
        """The tree of the best nodes, as in EAGLE-2 (arXiv:2406.16858)."""
        sequences, topk = state.num_seqs, self.topk
        hidden, cache = state.draft.hidden[:, None], state.draft.cache
        scores, nodes = jnp.zeros((sequences, 1), jnp.float32), jnp.full((sequences, 1), -1, jnp.int32)
        found, rows = None, _Rows.none(sequences, hidden.shape[-1])
        for level in range(self.levels):
            logits = self._logits(weights, hidden)
            grown = expand(logits, scores, nodes, topk)
            offset = 0 if found is None else found.tokens.shape[1]
            found = grown if found is None else found.extend(grown)
            if level + 1 == self.levels:
                break
            best = keep_best(grown, topk)
            scores, nodes = jnp.take_along_axis(grown.scores, best, axis=1), best + offset
            parent = best // topk
            rows = rows.extend(
                jnp.take_along_axis(grown.tokens, best, axis=1),
                jnp.where(level > 0, parent + (level - 1) * topk, -1),
                jnp.take_along_axis(hidden, parent[..., None], axis=1),
            )
            hidden, cache = self._forward_rows(weights, state, active, rows, cache)
        tree = select_tree(self._root(state), found, self.num_draft_tokens)
        return tree, None, dataclasses.replace(state.draft, cache=cache)

    def _draft_branches(self, weights, state, active):
        """Branches drawn from the draft model; greedy rows take the likeliest tokens instead."""
        sequences, topk, n = state.num_seqs, self.topk, self.num_draft_tokens
        hidden, cache = state.draft.hidden[:, None], state.draft.cache
        rows = _Rows.none(sequences, hidden.shape[-1])
        greedy = (state.sampling.temperature <= 0)[:, None]
        levels, drawn_from = [self._root(state)[:, None]], []
        for level in range(self.levels):
            logits = self._logits(weights, hidden)
            probs = probabilities(logits, state.sampling)[0]
            width, count = (1, topk) if level == 0 else (topk, 1)
            level_keys = jax.vmap(lambda key, width=width: jax.random.split(key, width))(
                _draft_keys(state, level)
            )
            tokens = draw_children(level_keys.reshape(-1), probs.reshape(sequences * width, -1), count)
            likeliest = jax.lax.top_k(usable_logits(logits)[0], count)[1].astype(jnp.int32)
            tokens = jnp.where(greedy, likeliest.reshape(sequences, topk), tokens.reshape(sequences, topk))
            levels.append(tokens)
            drawn_from.append(jnp.where(greedy[..., None], jnp.float32(0), probs))
            if level + 1 == self.levels:
                break
            above = jnp.broadcast_to(jnp.arange(topk, dtype=jnp.int32) + (level - 1) * topk, tokens.shape)
            parent_hidden = jnp.broadcast_to(hidden, (sequences, topk, hidden.shape[-1]))
            rows = rows.extend(tokens, jnp.where(level > 0, above, -1), parent_hidden)
            hidden, cache = self._forward_rows(weights, state, active, rows, cache)
        tokens = jnp.concatenate(levels, axis=1)[:, :n]
        drawn_from = jnp.concatenate(drawn_from, axis=1)
        leaves = jnp.zeros((sequences, max(n - drawn_from.shape[1], 0), drawn_from.shape[2]), jnp.float32)
        tree = DraftTree(tokens=tokens, parents=jnp.broadcast_to(branch_parents(n, topk), tokens.shape))
        return (
            tree,
            jnp.concatenate([drawn_from, leaves], axis=1)[:, :n],
            DraftState(cache=cache, hidden=state.draft.hidden),
        )

    def _logits(self, weights, hidden):
        sequences, width, size = hidden.shape
        return self.model.logits(weights, hidden.reshape(-1, size)).reshape(sequences, width, -1)

    def _forward_rows(self, weights, state, active, rows, cache):
        """Hidden states of the newest `topk` rows. All rows run again: a tree's bits cover one call's rows only."""
        count = rows.tokens.shape[1]
        metadata = state.metadata(
            "draft_decode",
            state.lengths - self.model.position_shift,
            count,
            active,
            ancestor_bits(rows.parents),
        )
        hidden = rows.hidden.reshape(state.num_seqs * count, -1)
        out, cache = self.model.forward(
            weights, jnp.maximum(rows.tokens, 0).reshape(-1), hidden, cache, metadata
        )
        return out.reshape(state.num_seqs, count, -1)[:, -self.topk :].astype(jnp.float32), cache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Rows:
    """The drafted nodes that the draft model has run: token, parent among them, hidden state of the parent."""

    tokens: Array
    parents: Array
    hidden: Array

    @classmethod
    def none(cls, sequences: int, width: int) -> "_Rows":
        empty = jnp.zeros((sequences, 0), jnp.int32)
        return cls(empty, empty, jnp.zeros((sequences, 0, width), jnp.float32))

    def extend(self, *more: Array) -> "_Rows":
        return jax.tree.map(lambda old, new: jnp.concatenate([old, new], axis=1), self, _Rows(*more))


def _draft_keys(state, level):
    return substream(keys_at(state.sampling, state.lengths), FIRST_DRAFT_STREAM + level)
