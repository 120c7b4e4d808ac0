"""What the decoding loop asks of a target model, a draft model and a drafter.

All three are static: hashable objects without arrays, whose methods are pure functions that the loop
traces. Their arrays travel as pytrees: weights, which stay, and caches and states, which are donated.
"""

from typing import Any, NamedTuple, Protocol

from jaxtyping import Array, Bool, Float, Float32, Int32

from jaxattn.metadata import AttentionMetadata
from jaxattn.speculative.acceptance import Acceptance
from jaxattn.speculative.drafting import DraftTree
from jaxattn.speculative.state import DecoderState


class Weights(NamedTuple):
    """Weights of the target and of the drafter; a drafter without weights has None."""

    target: Any
    draft: Any = None


class TargetModel(Protocol):
    """The model whose text is written."""

    def forward(
        self, weights: Any, tokens: Int32[Array, "T"], cache: Any, metadata: AttentionMetadata
    ) -> tuple[Float[Array, "T E"], Any]:
        """Hidden states of the query rows, as `logits` takes them, and the cache with their keys and values."""

    def logits(self, weights: Any, hidden: Float[Array, "rows E"]) -> Float[Array, "rows V"]:
        """Scores of the next token."""

    def commit(self, cache: Any, metadata: AttentionMetadata, acceptance: Acceptance) -> Any:
        """Make the cache after a verify step that of the accepted tokens alone.

        A paged cache moves the accepted path of a tree together; a recurrent state goes back to the state
        after the last accepted node, row `s * n + path[s, accept_len - 1]`.
        """


class DraftModel(Protocol):
    """A model that drafts: an EAGLE head, an MTP module or a small language model.

    Attributes:
        position_shift: 1 where the token of index i in the text sits at position i - 1 of the draft cache, beside
            the hidden state of the token before it; 0 for a language model, whose caches align.
        hidden_size: width of the hidden states that `forward` returns.
    """

    position_shift: int
    hidden_size: int

    def read_target(self, weights: Any, hidden: Float[Array, "T target"]) -> Float[Array, "T E"]:
        """The hidden states that `forward` takes for committed tokens, from what the target's `forward` gave."""

    def forward(
        self,
        weights: Any,
        tokens: Int32[Array, "T"],
        hidden: Float[Array, "T E"],
        cache: Any,
        metadata: AttentionMetadata,
    ) -> tuple[Float[Array, "T E"], Any]:
        """Hidden states that predict what follows `tokens`, and the cache.

        `hidden` is `read_target`'s for committed tokens and the model's own, of the parent, for drafts.
        """

    def logits(self, weights: Any, hidden: Float[Array, "rows E"]) -> Float[Array, "rows V"]:
        """Scores of the token that follows."""


class Drafter(Protocol):
    """Proposes a tree for every sequence.

    Attributes:
        num_draft_tokens: n, the nodes of a tree with its root.
        topk: the most children that a node has; 1 for chains.
        lookahead: tokens behind the known ones for which drafting writes keys.
    """

    num_draft_tokens: int
    topk: int
    lookahead: int

    def prefill(
        self,
        weights: Any,
        state: DecoderState,
        metadata: AttentionMetadata,
        hidden: Float[Array, "T E"],
        finished: Bool[Array, "S"],
    ) -> Any:
        """The draft state after a prefill chunk; `state` has the first new token of `finished` sequences."""

    def draft(
        self, weights: Any, state: DecoderState, active: Bool[Array, "S"]
    ) -> tuple[DraftTree, Float32[Array, "S n V"] | None, Any]:
        """A tree per sequence, what its nodes were drawn from (see `accept_sampled`), and the draft state."""

    def update(
        self,
        weights: Any,
        state: DecoderState,
        active: Bool[Array, "S"],
        acceptance: Acceptance,
        hidden: Float[Array, "T E"],
    ) -> Any:
        """The draft state after acceptance. `state` is that of before it, `hidden` the target's at each node."""
