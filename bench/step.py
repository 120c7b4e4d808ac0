"""What a decode step pays once for all layers: its page table and its plan, as the case `step/SxM[/int32]`.

`step/128x8192` is a batch of 128 sequences whose rows hold 8192 pages of 16 tokens; with `/int32` the slots of the
request pool are stored in 32 bits, as pools of fewer than 2^31 slots may be.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np

from bench.peers import Candidate
from jaxattn.index64 import index64
from jaxattn.metadata import AttentionMetadata
from jaxattn.page_table import build_page_table
from jaxattn.plan import make_plan
from jaxattn.slot_rows import slot_rows

PAGE_SIZE = 16
FULL, SMALL = ("step/128x8192", "step/128x8192/int32"), ("step/8x64",)
IMPLEMENTATIONS = ("triton", "xla")


@dataclasses.dataclass(frozen=True)
class Step:
    """A request pool, and what its page table must be."""

    rows: object
    lengths: jax.Array
    expected: np.ndarray  # [S, M]

    def error(self, result) -> float:
        """0 where the table is right; a plan is checked by the attention that uses it."""
        return 0.0 if np.array_equal(result[0], self.expected) else float("inf")


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
    rows = slot_rows(
        kv_indptr=None,
        kv_indices=None,
        req_to_token=jnp.asarray(slots, dtype),
        req_pool_indices=jnp.asarray(order),
    )
    live = np.arange(columns) < -(-lengths // PAGE_SIZE)[:, None]
    return Step(rows, jnp.asarray(lengths), np.where(live, pages[order], 0))


def candidates(step: Step, implementation: str):
    """The table by one implementation, and the plan, in one program."""
    sequences, columns = step.expected.shape
    q = jax.ShapeDtypeStruct((sequences, 32, 128), jnp.bfloat16)
    cache = jax.ShapeDtypeStruct((1024, PAGE_SIZE, 8, 128), jnp.bfloat16)

    def table_of(rows, lengths):
        if implementation == "xla":
            return build_page_table(rows, lengths, PAGE_SIZE, columns)
        from jaxattn.kernels.triton.page_table import build_page_tables

        return build_page_tables(rows, lengths, PAGE_SIZE, columns)[0]

    @index64
    def table_and_plan(rows, lengths):
        table = table_of(rows, lengths)
        metadata = AttentionMetadata(
            page_table=table, cu_seqlens_q=jnp.arange(sequences + 1), seqused_k=lengths,
            max_seqlen_q=1, page_size=PAGE_SIZE, mode="decode",
        )  # fmt: skip
        return table, make_plan(metadata, q, cache)

    yield Candidate("", table_and_plan, (step.rows, step.lengths), 1, lambda result: result)
