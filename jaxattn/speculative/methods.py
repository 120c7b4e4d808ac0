"""Drafting methods by name, as `jaxattn generate --speculative` takes them."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxattn.errors import UnsupportedError
from jaxattn.models.config import DecoderConfig
from jaxattn.speculative import eagle
from jaxattn.speculative.drafters import ModelDrafter, NgramDrafter
from jaxattn.speculative.protocols import Drafter

if TYPE_CHECKING:
    from jaxattn.models.load import Model

METHODS = ("off", "ngram", "eagle", "mtp")


@dataclasses.dataclass(frozen=True)
class Drafting:
    """A drafter with what it needs.

    Attributes:
        drafter: the drafter.
        weights: its weights, or None.
        allocate_cache: `(num_pages=, page_size=, dtype=) -> cache` of its draft model, or None.
        features: layers of the target whose inputs the drafter reads; for `ProgramTarget`.
    """

    drafter: Drafter
    weights: Any = None
    allocate_cache: Callable[..., Any] | None = None
    features: tuple[int, ...] = ()

    def empty_state(self, num_seqs: int, **pool: Any) -> Any:
        """The draft state of free rows; None for a drafter without a model."""
        if self.allocate_cache is None:
            return None
        return self.drafter.empty_state(self.allocate_cache(**pool), num_seqs)


def drafting_for(
    method: str,
    model: "Model",
    *,
    num_draft_tokens: int = 4,
    topk: int = 1,
    attention: tuple[tuple[str, Any], ...] = (),
    head: str | Path | eagle.EagleHead | None = None,
) -> Drafting:
    """The drafter of a method for a model.

    Args:
        method: `off` verifies nothing but the last token, which is plain decoding; `ngram` looks up what followed
            the text's own ending; `eagle` uses a trained head; `mtp` the module that the checkpoint brings.
        model: the target.
        num_draft_tokens: n, rows of a verify pass: the last token and its drafts.
        topk: children of a node; above 1 the drafts form a tree.
        attention: further arguments of `unified_attention`, as pairs.
        head: the draft head or its file; by default the one that the package brings for the model.

    Raises:
        ValueError: there is no such method, or the numbers do not fit together.
        UnsupportedError: the model has no module of that kind, or cannot verify trees.
        CheckpointError: there is no head for the model, or its file is damaged.
    """
    config = model.program.config
    if method not in METHODS:
        raise ValueError(f"speculative: expected one of {', '.join(METHODS)}, got {method!r}")
    if method == "off":
        return Drafting(NgramDrafter(num_draft_tokens=1))
    if topk > 1 and not isinstance(config, DecoderConfig):
        raise UnsupportedError(
            f"topk: expected 1 for {model.name}, whose recurrent states follow one chain of drafts, got {topk}"
        )
    if method == "ngram":
        return Drafting(NgramDrafter(num_draft_tokens=num_draft_tokens, topk=topk))
    if method == "mtp":
        from jaxattn.models import qwen3_5_mtp

        if model.mtp is None:
            raise UnsupportedError(
                f"speculative: {model.name} brings no multi-token-prediction module; use ngram"
            )
        drafter = ModelDrafter(
            model=qwen3_5_mtp.MtpDraft(config, attention), num_draft_tokens=num_draft_tokens, topk=topk
        )
        return Drafting(drafter, model.mtp, _bound(qwen3_5_mtp.allocate_cache, config))
    if not isinstance(config, DecoderConfig):
        raise UnsupportedError(
            f"speculative: there are draft heads for decoders only, not for {model.name}; use mtp"
        )
    if not isinstance(head, eagle.EagleHead):
        head = eagle.load_head(eagle.find_head(config) if head is None else head, config)
    drafter = ModelDrafter(
        model=eagle.EagleDraft(config, attention), num_draft_tokens=num_draft_tokens, topk=topk
    )
    return Drafting(
        drafter,
        eagle.EagleWeights.share(head, model.weights),
        _bound(eagle.allocate_cache, config),
        eagle.features(config),
    )


def _bound(allocate, config):
    return lambda **pool: allocate(config, **pool)
