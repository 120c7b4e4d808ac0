"""Named problem shapes: a model's heads and a batch, shared by the benchmarks and the tuner."""

import dataclasses
import math

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """One attention call; every sequence has `q_len` query tokens at the end of its context."""

    name: str
    contexts: tuple[int, ...]
    q_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int = 16
    kv_dtype: str = "bfloat16"

    @property
    def kind(self) -> str:
        """`prefill` where arithmetic bounds the time, `decode` where K and V bytes do."""
        return "prefill" if self.q_len > 64 else "decode"

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that the call must read once."""
        itemsize = {"bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1}[self.kv_dtype]
        return 2 * sum(self.contexts) * self.num_kv_heads * self.head_dim * itemsize

    @property
    def flops(self) -> int:
        """Floating-point operations of the two products over visible (query, key) pairs."""
        pairs = sum(self.q_len * c - self.q_len * (self.q_len - 1) // 2 for c in self.contexts)
        return 4 * pairs * self.num_heads * self.head_dim

    def replace(self, **changes) -> "Shape":
        """The same shape with `changes`."""
        return dataclasses.replace(self, **changes)


def zipf(num_seqs: int, longest: int) -> tuple[int, ...]:
    """Contexts falling as 1/rank."""
    return tuple(max(64, longest // (rank + 1)) for rank in range(num_seqs))


def lognormal(num_seqs: int, median: int, sigma: float, seed: int = 0) -> tuple[int, ...]:
    """Contexts of a lognormal distribution, as request lengths are in serving."""
    draws = np.random.default_rng(seed).lognormal(math.log(median), sigma, num_seqs)
    return tuple(int(c) for c in np.clip(draws, 64, 32 * median))


def _decode(name, contexts, q_len, heads, page_size=16):
    h, k, d = heads
    return Shape(
        name=name,
        contexts=tuple(contexts),
        q_len=q_len,
        num_heads=h,
        num_kv_heads=k,
        head_dim=d,
        page_size=page_size,
    )


LLAMA_8B = (32, 8, 128)
LLAMA_70B_TP8 = (8, 1, 128)
GEMMA_LIKE = (16, 2, 256)
QWEN3_5_TP2 = (16, 1, 256)

DECODE = (
    _decode("32x8K-llama8b-q1", [8192] * 32, 1, LLAMA_8B),
    _decode("32x8K-llama8b-q4", [8192] * 32, 4, LLAMA_8B),
    _decode("1x128K-llama8b-q4", [131072], 4, LLAMA_8B),
    _decode("128x4K-llama70btp8-q4", [4096] * 128, 4, LLAMA_70B_TP8),
    _decode("64x2K-gemma-q1", [2048] * 64, 1, GEMMA_LIKE),
    _decode("4x64K-qwen3.5-q4", [65536] * 4, 4, QWEN3_5_TP2),
    _decode("16x32K-qwen3.5-q4", [32768] * 16, 4, QWEN3_5_TP2),
    _decode("32x8K-qwen3.5-q4", [8192] * 32, 4, QWEN3_5_TP2),
    _decode("1x64K+63x1K-llama8b-q4", [65536] + [1024] * 63, 4, LLAMA_8B),
    _decode("1x64K+63x1K-llama70btp8-q1", [65536] + [1024] * 63, 1, LLAMA_70B_TP8),
    _decode("1x128K-llama70btp8-q1", [131072], 1, LLAMA_70B_TP8),
    _decode("zipf64-llama8b-q4", zipf(64, 65536), 4, LLAMA_8B),
    _decode("lognormal128-llama8b-q4", lognormal(128, 2048, 1.0), 4, LLAMA_8B),
)
FP8 = tuple(
    s.replace(name=s.name + "-fp8", kv_dtype="float8_e4m3fn")
    for s in DECODE
    if s.name in ("32x8K-llama8b-q1", "32x8K-llama8b-q4", "32x8K-qwen3.5-q4")
)
PREFILL = (
    _decode("prefill-1x16K-llama8b", [16384], 16384, LLAMA_8B),
    _decode("prefill-8x2K-llama8b", [2048] * 8, 2048, LLAMA_8B),
    _decode("prefill-4x2K-of-16K-llama8b", [16384] * 4, 2048, LLAMA_8B),
    _decode("prefill-2x4K-of-8K-gemma", [8192] * 2, 4096, GEMMA_LIKE),
)
ALL = {s.name: s for s in (*DECODE, *FP8, *PREFILL)}
