"""Program: what a model computes, apart from its weights."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxattn.models import decoder
from jaxattn.speculative.compaction import compact_accepted


@dataclasses.dataclass(frozen=True)
class Program:
    """What a model computes, without its weights; hashable, so that a jitted step takes it as a static argument.

    Attributes:
        config: the model's own configuration.
        forward: `(config, weights, tokens, cache, metadata, **options) -> (hidden, cache)`.
        logits: `(weights, hidden) -> float32 logits`.
        allocate_cache: `(config, num_seqs=, num_pages=, page_size=, dtype=, k_descale=, v_descale=) -> cache`, where
            `num_seqs` is the number of sequences of a step.
        commit: `(cache, metadata, path) -> cache`, what remains of a verify step once the nodes on `path`, `[S, n]`
            from node 0 on and -1 behind the last, are accepted.
    """

    config: Any
    forward: Callable = decoder.forward
    logits: Callable = decoder.logits
    allocate_cache: Callable = decoder.allocate_cache
    commit: Callable = compact_accepted
