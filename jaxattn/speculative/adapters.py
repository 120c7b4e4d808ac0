"""The models of `jaxattn.models` in the roles of the decoding loop."""

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxattn.models.program import Program


@dataclasses.dataclass(frozen=True)
class ProgramTarget:
    """A model of `jaxattn.models` as the target.

    Attributes:
        program: what the model computes.
        options: further arguments of `unified_attention`, as pairs: `(("implementation", "triton"),)`.
        features: layers whose inputs the drafter wants behind the hidden states, see `Drafting.features`.
    """

    program: "Program"
    options: tuple[tuple[str, Any], ...] = ()
    features: tuple[int, ...] = ()

    def forward(self, weights, tokens, cache, metadata):
        """See `TargetModel.forward`."""
        options = dict(self.options)
        if self.features:
            options["features"] = self.features
        return self.program.forward(self.program.config, weights, tokens, cache, metadata, **options)

    def logits(self, weights, hidden):
        """See `TargetModel.logits`."""
        return self.program.logits(weights, hidden)

    def commit(self, cache, metadata, acceptance):
        """See `TargetModel.commit`."""
        return self.program.commit(cache, metadata, acceptance.path)


@dataclasses.dataclass(frozen=True)
class ProgramDraft:
    """A language model with the target's vocabulary as the draft model."""

    program: "Program"
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def position_shift(self) -> int:
        """Its cache aligns with the target's."""
        return 0

    @property
    def hidden_size(self) -> int:
        """Width of its hidden states."""
        return self.program.config.hidden_size

    def read_target(self, weights, hidden):
        """See `DraftModel.read_target`; it does not use them."""
        return hidden

    def forward(self, weights, tokens, hidden, cache, metadata):
        """See `DraftModel.forward`; the hidden states that come in are not used."""
        return self.program.forward(
            self.program.config, weights, tokens, cache, metadata, **dict(self.options)
        )

    def logits(self, weights, hidden):
        """See `DraftModel.logits`."""
        return self.program.logits(weights, hidden.astype(weights.embedding.dtype))
