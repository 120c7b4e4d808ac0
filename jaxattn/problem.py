"""AttentionProblem: what a kernel module receives, checked and canonical."""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Float32, Int32, Int64, Num, UInt64


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionProblem:
    """One attention call, validated by `jaxattn.checks`, with every index in int64.

    A kernel module computes `out` of `[T, H, Dv]` in `out_dtype` and `lse` of `[T, H]` in float32 from it.
    Row `i` of sequence `s` has query index `seqused_k[s] - q_len[s] + i` among the keys of its sequence.
    Its position, which the window and ALiBi measure from, is the same number, or
    `seqused_k[s] - q_len[s] + depths[row]` where a tree is given.
    """

    q: Num[Array, "T H D"]
    k_cache: Num[Array, "N P K D"]
    v_cache: Num[Array, "N P K Dv"]
    page_table: Int64[Array, "S M"]
    cu_seqlens_q: Int64[Array, "S+1"]
    seqused_k: Int64[Array, "S"]
    # Tree over the sequence's own query rows: bit j of row i is set iff row j is i or an ancestor of i.
    ancestors: UInt64[Array, "T W"] | None = None
    # popcount(ancestors) - 1
    depths: Int32[Array, "T"] | None = None
    sinks: Float32[Array, "H"] | None = None
    alibi_slopes: Float32[Array, "H"] | None = None
    q_descale: Float32[Array, "K"] | None = None
    k_descale: Float32[Array, "K"] | None = None
    v_descale: Float32[Array, "K"] | None = None
    output_scale: Float32[Array, ""] | None = None
    plan: Any = None

    softmax_scale: float = dataclasses.field(metadata={"static": True})
    max_seqlen_q: int = dataclasses.field(metadata={"static": True})
    out_dtype: Any = dataclasses.field(metadata={"static": True})
    causal: bool = dataclasses.field(default=True, metadata={"static": True})
    sliding_window: int | None = dataclasses.field(default=None, metadata={"static": True})
    softcap: float | None = dataclasses.field(default=None, metadata={"static": True})
    batch_invariant: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.q.shape[1] // self.k_cache.shape[2]

    @property
    def path_keys(self) -> bool:
        """Whether a tree's row takes the keys of its path in their order, as decode will: bits are the same then."""
        return self.batch_invariant and self.ancestors is not None

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.k_cache.shape[1]
