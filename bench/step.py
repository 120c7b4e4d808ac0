"""What a decode step pays once for all layers: its page table and its plan, as the case `step/SxM[/int32]`.

`step/128x8192` is a batch of 128 sequences whose rows hold 8192 pages of 16 tokens; with `/int32` the slots of the
request pool are stored in 32 bits, as pools of fewer than 2^31 slots may be.
A candidate is the whole call of a metadata builder, as users make it.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np

from bench.peers import Candidate
from jaxattn.index64 import index64
from jaxattn.kernels import bookkeeping
from jaxattn.metadata import AttentionMetadata, decode_metadata
from jaxattn.page_table import build_page_table
from jaxattn.plan import AttentionLayers, Plan, build_schedule, schedule_specs
from jaxattn.slot_rows import PooledRows, pooled_rows

PAGE_SIZE = 16
FULL, SMALL = ("step/128x8192", "step/128x8192/int32"), ("step/8x64",)
IMPLEMENTATIONS = ("triton", "xla")


@dataclasses.dataclass(frozen=True)
class Step:
    """A request pool, and what its page table must be."""

    rows: PooledRows
    lengths: jax.Array
    expected: np.ndarray  # [S, M]

    @property
    def layers(self) -> AttentionLayers:
        """The layers of a decode step: 32 heads over 8 KV heads of width 128."""
        return AttentionLayers(
            q=jax.ShapeDtypeStruct((self.expected.shape[0], 32, 128), jnp.bfloat16),
            k_cache=jax.ShapeDtypeStruct((1024, PAGE_SIZE, 8, 128), jnp.bfloat16),
        )

    @index64
    def plan(self, lengths: jax.Array) -> Plan:
        """The plan by XLA."""
        sequences, columns = self.expected.shape
        specs = schedule_specs(
            self.layers, num_sequences=sequences, max_pages=columns, page_size=PAGE_SIZE, max_seqlen_q=1
        )
        return Plan(tuple(build_schedule(spec, jnp.arange(sequences + 1), lengths) for spec in specs))

    def error(self, result: AttentionMetadata) -> float:
        """0 where the table and the plan are right."""
        expected = self.plan(self.lengths)
        right = np.array_equal(result.page_table, self.expected)
        right &= jax.tree.structure(result.plan) == jax.tree.structure(expected)
        right &= all(map(np.array_equal, jax.tree.leaves(result.plan), jax.tree.leaves(expected)))
        return 0.0 if right else float("inf")


def is_step(name: str) -> bool:
    """Whether a case is a step rather than an attention call."""
    return _match(name) is not None


def _match(name: str) -> re.Match | None:
    return re.fullmatch(r"step/(\d+)x(\d+)(/int32)?", name)


@index64
def make_step(name: str) -> Step:
    """Draw a pool whose requests hold shuffled pages."""
    found = _match(name)
    sequences, columns = int(found[1]), int(found[2])
    dtype = jnp.int32 if found[3] else jnp.int64
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, columns * PAGE_SIZE, sequences)
    pages = rng.permutation(sequences * columns).reshape(sequences, columns)
    slots = (pages[..., None] * PAGE_SIZE + np.arange(PAGE_SIZE)).reshape(sequences, -1)
    order = np.arange(sequences)[::-1]
    rows = pooled_rows(jnp.asarray(slots, dtype), jnp.asarray(order))
    live = np.arange(columns) < -(-lengths // PAGE_SIZE)[:, None]
    return Step(rows, jnp.asarray(lengths), np.where(live, pages[order], 0))


def unavailable(implementation: str) -> str | None:
    """Why an implementation cannot build a step here, or None."""
    if implementation == "triton" and bookkeeping() != "triton":
        return "builders take the Triton kernels on a GPU only"
    return None


def candidates(step: Step, implementation: str):
    """The metadata of a decode step by one implementation: its page table and its plan."""
    sequences, columns = step.expected.shape

    def by_builder(rows, lengths):
        return decode_metadata(
            seqused_k=lengths,
            page_size=PAGE_SIZE,
            req_to_token=rows.req_to_token,
            req_pool_indices=rows.req_pool_indices,
            plan_for=step.layers,
        )

    @index64
    def by_xla(rows, lengths):
        return AttentionMetadata(
            page_table=build_page_table(rows, lengths, PAGE_SIZE, columns),
            cu_seqlens_q=jnp.arange(sequences + 1),
            seqused_k=lengths,
            plan=step.plan(lengths),
            max_seqlen_q=1,
            page_size=PAGE_SIZE,
            mode="decode",
        )

    function = by_xla if implementation == "xla" else by_builder
    yield Candidate("", function, (step.rows, step.lengths), 1, lambda result: result)
