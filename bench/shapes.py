"""Named problem shapes: a model's heads and a batch, shared by the benchmarks, the tuner and the tests.

A name is its own definition, `MODEL/BATCH/qN[/treeN][/pN][/DTYPE]`, with a `k` for 1024:

    llama-3-8b/32x8k/q4             32 sequences of 8192 keys, each with 4 query tokens
    llama-3-8b/32x8k/q8/tree2       8 query tokens as a draft tree of 2 branches
    qwen3.5-397b-tp2/1x64k+63x1k/q1/p64    one long sequence among short ones, pages of 64
    llama-3-8b/zipf64/q4/fp8        64 sequences whose lengths fall as 1/rank, K and V in fp8
"""

import dataclasses
import fnmatch
import math
import re

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heads:
    """One attention layer of a model, or of one shard of it."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    sinks: bool = False


MODELS = {
    "llama-3-8b": Heads(num_heads=32, num_kv_heads=8, head_dim=128),
    "llama-3-70b-tp8": Heads(num_heads=8, num_kv_heads=1, head_dim=128),
    "qwen3-next-80b": Heads(num_heads=16, num_kv_heads=2, head_dim=256),
    "qwen3.5-397b-tp2": Heads(num_heads=16, num_kv_heads=1, head_dim=256),
    "qwen3.5-397b-tp4": Heads(num_heads=8, num_kv_heads=1, head_dim=256),
    "gemma-3-12b-local": Heads(num_heads=16, num_kv_heads=8, head_dim=256, window=1024),
    "gemma-3-12b-global": Heads(num_heads=16, num_kv_heads=8, head_dim=256),
    "gpt-oss-120b-local": Heads(num_heads=64, num_kv_heads=8, head_dim=64, window=128, sinks=True),
    "gpt-oss-120b-global": Heads(num_heads=64, num_kv_heads=8, head_dim=64, sinks=True),
    # Small enough for a CPU.
    "toy": Heads(num_heads=8, num_kv_heads=2, head_dim=64),
    "toy-local": Heads(num_heads=8, num_kv_heads=2, head_dim=64, window=48, sinks=True),
}
DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "fp8": "float8_e4m3fn", "int8": "int8"}
ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1, "int8": 1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """One attention call; every sequence has `q_len` query tokens at the end of its context."""

    name: str
    contexts: tuple[int, ...]
    q_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    sinks: bool = False
    branches: int | None = None
    page_size: int = 16
    kv_dtype: str = "bfloat16"

    @property
    def kind(self) -> str:
        """`prefill` where arithmetic bounds the time, `decode` where K and V bytes do."""
        return "prefill" if self.q_len > 64 else "decode"

    @property
    def quantised(self) -> bool:
        """Whether K and V are stored in one byte with a descale."""
        return ITEMSIZE[self.kv_dtype] == 1

    @property
    def q_dtype(self) -> str:
        """Dtype of the queries and the output."""
        return "bfloat16" if self.quantised else self.kv_dtype

    @property
    def parents(self) -> tuple[int, ...] | None:
        """The draft tree of each sequence; None where a query token sees all before it."""
        if self.branches is None:
            return None
        return tuple(max(node - self.branches, 0) if node else -1 for node in range(self.q_len))

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that the call must read once."""
        reach = math.inf if self.window is None else self.window + self.q_len - 1
        keys = sum(min(c, reach) for c in self.contexts)
        return 2 * keys * self.num_kv_heads * self.head_dim * ITEMSIZE[self.kv_dtype]

    @property
    def bytes(self) -> int:
        """Bytes that the call must move: K and V, the queries and the output."""
        rows = len(self.contexts) * self.q_len * self.num_heads * self.head_dim
        return self.kv_bytes + 2 * rows * ITEMSIZE[self.q_dtype]

    @property
    def flops(self) -> int:
        """Floating-point operations of the two products over visible (query, key) pairs."""
        per_key = 4 * self.num_heads * self.head_dim
        if self.parents is not None:
            paths = sum(len(path_to(self.parents, node)) for node in range(self.q_len))
            return per_key * sum(self.q_len * (c - self.q_len) + paths for c in self.contexts)
        window = self.window or math.inf
        pairs = 0
        for context in self.contexts:
            first = context - self.q_len + 1  # keys that the first query sees, were there no window
            growing = int(min(max(window - first, 0), self.q_len))
            pairs += growing * first + growing * (growing - 1) // 2
            if growing < self.q_len:
                pairs += (self.q_len - growing) * self.window
        return per_key * pairs

    def replace(self, **changes) -> "Shape":
        """The same shape with `changes`."""
        return dataclasses.replace(self, **changes)


def path_to(parents: tuple[int, ...], node: int) -> list[int]:
    """A node of a draft tree and its ancestors, the node first."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path


def zipf(num_seqs: int, longest: int) -> tuple[int, ...]:
    """Contexts falling as 1/rank."""
    return tuple(max(64, longest // (rank + 1)) for rank in range(num_seqs))


def lognormal(num_seqs: int, median: int, sigma: float, seed: int = 0) -> tuple[int, ...]:
    """Contexts of a lognormal distribution, as request lengths are in serving."""
    draws = np.random.default_rng(seed).lognormal(math.log(median), sigma, num_seqs)
    return tuple(int(c) for c in np.clip(draws, 64, 32 * median))


def number(text: str) -> int:
    """`8k` is 8192."""
    return int(text[:-1]) * 1024 if text.endswith("k") else int(text)


def contexts(batch: str) -> tuple[int, ...]:
    """Lengths of a batch: `32x8k`, `1x64k+63x1k`, `zipf64` (longest 64K), `lognormal128` (median 2K).

    Raises:
        ValueError: the batch is none of these.
    """
    if match := re.fullmatch(r"zipf([1-9]\d*)", batch):
        return zipf(int(match[1]), 65536)
    if match := re.fullmatch(r"lognormal([1-9]\d*)", batch):
        return lognormal(int(match[1]), 2048, 1.0)
    parts = [re.fullmatch(r"([1-9]\d*)x([1-9]\d*k?)", part) for part in batch.split("+")]
    if not all(parts):
        raise ValueError(f"batch: expected 32x8k, 1x64k+63x1k, zipf64 or lognormal128, got {batch!r}")
    return tuple(number(part[2]) for part in parts for _ in range(int(part[1])))


def parse(name: str) -> Shape:
    """The shape that a name describes.

    Raises:
        ValueError: the name is not `MODEL/BATCH/qN[/treeN][/pN][/DTYPE]`, or asks for a tree under a window.
    """
    model, *fields = name.split("/")
    match = re.fullmatch(
        r"([^/]+)/q(\d+k?)(?:/tree([1-9]\d*))?(?:/p([1-9]\d*))?(?:/(\w+))?", "/".join(fields)
    )
    if model not in MODELS or not match or match[5] not in (None, *DTYPES):
        raise ValueError(
            f"case: expected MODEL/BATCH/qN[/treeN][/pN][/DTYPE], for example llama-3-8b/32x8k/q4, got {name!r}; "
            f"models: {', '.join(MODELS)}; dtypes: {', '.join(DTYPES)}"
        )
    lengths, q_len = contexts(match[1]), number(match[2])
    if not 0 < q_len <= min(lengths):
        raise ValueError(f"case {name!r}: expected 1 to {min(lengths)} query tokens, got {q_len}")
    if match[3] and MODELS[model].window:
        raise ValueError(f"case {name!r}: expected a model without a window for a draft tree")
    return Shape(
        name=name,
        contexts=lengths,
        q_len=q_len,
        branches=int(match[3]) if match[3] else None,
        page_size=int(match[4] or 16),
        kv_dtype=DTYPES[match[5] or "bf16"],
        **dataclasses.asdict(MODELS[model]),
    )


def _parse_all(names: str) -> tuple[Shape, ...]:
    return tuple(parse(name) for name in names.split())


DECODE = _parse_all("""
    llama-3-8b/32x8k/q1 llama-3-8b/32x8k/q4 llama-3-8b/1x128k/q4 llama-3-70b-tp8/128x4k/q4
    qwen3-next-80b/64x2k/q1 qwen3.5-397b-tp2/4x64k/q4 qwen3.5-397b-tp2/16x32k/q4 qwen3.5-397b-tp2/32x8k/q4
    llama-3-8b/1x64k+63x1k/q4 llama-3-70b-tp8/1x64k+63x1k/q1 llama-3-70b-tp8/1x128k/q1
    llama-3-8b/zipf64/q4 llama-3-8b/lognormal128/q4
""")
FP8 = _parse_all("llama-3-8b/32x8k/q1/fp8 llama-3-8b/32x8k/q4/fp8 qwen3.5-397b-tp2/32x8k/q4/fp8")
PREFILL = _parse_all("""
    llama-3-8b/1x16k/q16k llama-3-8b/8x2k/q2k llama-3-8b/4x16k/q2k qwen3-next-80b/2x8k/q4k
""")
PAGES = _parse_all("""
    llama-3-8b/32x8k/q1/p1 llama-3-8b/32x8k/q1/p64 llama-3-8b/32x8k/q1/p1/fp8
    qwen3.5-397b-tp2/32x8k/q4/p1 qwen3.5-397b-tp2/32x8k/q4/p64
    llama-3-8b/1x16k/q16k/p1 qwen3-next-80b/2x8k/q4k/p1
""")
OTHER = _parse_all("""
    llama-3-8b/32x8k/q8/tree2 qwen3.5-397b-tp2/32x8k/q8/tree3
    qwen3.5-397b-tp4/32x8k/q4 gemma-3-12b-local/32x8k/q1 gemma-3-12b-global/32x8k/q1
    gpt-oss-120b-local/32x8k/q1 gpt-oss-120b-global/32x8k/q1
""")
SMALL = _parse_all("""
    toy/8x256/q1/f32 toy/8x256/q4/f32 toy/8x256/q4/p64/f32 toy/1x1k+7x64/q4/f32 toy/1x2k/q1/f32
    toy-local/8x256/q1/f32 toy/8x256/q4/bf16 toy/8x256/q8/tree2/f32 toy/2x256/q256/f32 toy/1x512/q128/f32
""")
GROUPS = {"decode": DECODE, "fp8": FP8, "prefill": PREFILL, "pages": PAGES, "other": OTHER, "small": SMALL}
ALL = {shape.name: shape for group in GROUPS.values() for shape in group}


def select(patterns) -> list[str]:
    """Names of listed cases that match a pattern with `*`, and names that describe a case of their own.

    Raises:
        ValueError: a pattern matches nothing, or a name describes no case.
    """
    names: dict[str, None] = {}
    for pattern in patterns:
        found = fnmatch.filter(ALL, pattern) or [parse(pattern).name]
        names |= dict.fromkeys(found)
    return list(names)
