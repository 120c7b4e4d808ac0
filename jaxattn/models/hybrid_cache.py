"""HybridCache: keys and values of the full attention layers, recurrent states of the delta nets."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Num

from jaxattn.index64 import as_index, index64
from jaxattn.kv_cache import PagedKVCache
from jaxattn.models.delta_rule import DeltaNetState, PendingSteps
from jaxattn.models.qwen3_5_config import HybridConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HybridCache:
    """What a hybrid decoder remembers of its sequences; donate it to a step.

    Keys and values lie in pages, one cache layer per full attention layer. The states lie by sequence: row s
    belongs to sequence s of the metadata. After a verify step the states still are those before it, and
    `pending` holds what `commit` advances them by.

    Attributes:
        kv: pages of the full attention layers.
        states: one per delta net.
        pending: the steps of a verify call, one entry per delta net, or None.
    """

    kv: PagedKVCache
    states: tuple[DeltaNetState, ...]
    pending: tuple[PendingSteps, ...] | None = None

    @classmethod
    def allocate(
        cls,
        config: HybridConfig,
        *,
        num_seqs: int,
        num_pages: int,
        page_size: int,
        dtype=jnp.bfloat16,
        **kv_options,
    ) -> "HybridCache":
        """Allocate pages and states of zeros.

        Args:
            config: the decoder.
            num_seqs: sequences S of a step.
            num_pages: pages of each full attention layer.
            page_size: tokens in a page.
            dtype: of keys and values; the states are float32.
            **kv_options: further arguments of `PagedKVCache.allocate`.
        """
        net = config.delta_net
        kv = PagedKVCache.allocate(
            num_layers=len(config.full_layers),
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
            **kv_options,
        )

        def state() -> DeltaNetState:
            return DeltaNetState(
                conv=jnp.zeros((num_seqs, net.conv_taps - 1, net.conv_width), jnp.float32),
                recurrent=jnp.zeros((num_seqs, net.num_value_heads, net.key_dim, net.value_dim), jnp.float32),
            )

        return cls(kv, tuple(state() for _ in config.linear_layers))

    @property
    def k(self) -> tuple[Num[Array, "N P K D"], ...]:
        """Keys of each cache layer."""
        return self.kv.k

    @property
    def v(self) -> tuple[Num[Array, "N P K Dv"], ...]:
        """Values of each cache layer."""
        return self.kv.v

    @index64
    def commit(self, accepted: Int[Array, "S"]) -> "HybridCache":
        """The cache after the first `accepted` tokens of each sequence's verify step; the rest is taken back.

        The keys and values of the rest stay in their pages, behind the length that the next metadata gives.

        Args:
            accepted: `[S]`, from 0 to the tokens of the step; 0 for padding sequences.

        Raises:
            ValueError: no verify step is pending.
        """
        if self.pending is None:
            raise ValueError(
                "pending: expected the steps of a verify call, got None; commit once after each of them"
            )
        accepted = as_index(accepted, "accepted")
        states = tuple(p.commit(s, accepted) for p, s in zip(self.pending, self.states, strict=True))
        return HybridCache(self.kv, states)
