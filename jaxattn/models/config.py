"""DecoderConfig: what a decoder computes, as static data that a checkpoint's header gives."""

import dataclasses
import math
from typing import Any, Literal

import numpy as np
from jaxtyping import Float32

from jaxattn.errors import CheckpointError


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary embedding in the half-split order: angle `j` of position `p` is `p * theta**(-2j/width) / divisors[j]`.

    `divisors` is empty where nothing is scaled; linear and Llama 3 scaling are divisors too.
    """

    theta: float
    width: int
    divisors: tuple[float, ...] = ()

    def inverse_frequencies(self) -> Float32[np.ndarray, "half"]:
        """Angle per position of each rotated pair.

        Example:
            >>> from jaxattn.models.config import Rope
            >>> Rope(theta=100.0, width=4).inverse_frequencies().tolist()
            [1.0, 0.10000000149011612]
        """
        frequencies = self.theta ** (-np.arange(0, self.width, 2, dtype=np.float64) / self.width)
        if self.divisors:
            frequencies = frequencies / np.asarray(self.divisors, dtype=np.float64)
        return frequencies.astype(np.float32)


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """What differs between the layers of one model; `sliding_window` counts the query itself."""

    rope: Rope
    sliding_window: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder of the Llama family or a Gemma 3; hashable, so that a jitted step takes it as a static argument."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    context_length: int
    layers: tuple[LayerConfig, ...]
    tied_head: bool
    activation: Literal["silu", "gelu_tanh"] = "silu"
    softmax_scale: float
    embedding_scale: float = 1.0
    qk_norm: bool = False
    qkv_bias: bool = False
    # Norms on what attention and MLP give, before the residual sum.
    post_norms: bool = False

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"num_heads: expected a multiple of the {self.num_kv_heads} KV heads, got {self.num_heads}"
            )

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    @property
    def window_layers(self) -> tuple[int, ...]:
        """The layers that attend through a sliding window."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.sliding_window is not None)


def linear_divisors(width: int, factor: float) -> tuple[float, ...]:
    """Divisors of linear rope scaling: every angle of a rotation of `width` is divided by `factor`."""
    return (float(factor),) * (width // 2)


def llama3_divisors(theta: float, width: int, scaling: dict[str, Any]) -> tuple[float, ...]:
    """Divisors of Llama 3 rope scaling: long wavelengths are divided by `factor`, short ones kept, a ramp between.

    Args:
        theta: rope base.
        width: rotated width of a head.
        scaling: `factor`, `low_freq_factor`, `high_freq_factor` and `original_max_position_embeddings`, as a
            Hugging Face `config.json` has them.
    """
    factor, low, high = (float(scaling[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    original = float(scaling["original_max_position_embeddings"])
    frequencies = Rope(theta, width).inverse_frequencies().astype(np.float64)
    turns = original * frequencies / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return tuple((1.0 / ((1.0 - kept) / factor + kept)).tolist())


def required(mapping: dict[str, Any], key: str, origin: str) -> Any:
    """`mapping[key]`, or a `CheckpointError` that names the key and where it was looked for."""
    try:
        return mapping[key]
    except KeyError:
        raise CheckpointError(f"{origin}: expected the key {key!r}, which is missing") from None
