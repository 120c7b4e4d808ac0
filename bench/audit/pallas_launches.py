"""The launches of the Pallas kernels, for the audit.

Pallas itself narrows offsets to 32 bits within an array of up to 4 GiB, which holds at most 2^31 elements (what has
more is refused, see `jaxattn.kernels.pallas`). So that the audit sees what becomes of large arrays, every array here
is larger, which also bounds the launches: those of one program a block can have no more than 2^31 blocks.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from bench.audit.launches import array
from bench.audit.pallas import audit_pallas
from bench.audit.report import Report
from jaxattn.kernels import tuning
from jaxattn.kernels.pallas import attention, page_table
from jaxattn.kernels.pallas.attention_kernel import attention_kernel
from jaxattn.kernels.pallas.page_table import page_table_kernel
from jaxattn.kernels.pallas.reduce_kernel import reduce_kernel
from jaxattn.kernels.triton.requests import KV_DTYPES, device_of
from jaxattn.problem import AttentionProblem
from jaxattn.slot_rows import PooledRows, RaggedRows

# Just over 2^29, so that an int64 for each passes 4 GiB.
SEQUENCES = 2**29 + 16
PAGES, PAGE_SIZE, COLUMNS = 2**24, 16, 8192
TABLE_COLUMNS = 128
GROUP = 4


@dataclasses.dataclass(frozen=True)
class PallasLaunches:
    """A call of Pallas kernels; `tuned` as in `audit`."""

    # What a person calls it.
    name: str
    arch: str
    function: Callable
    arguments: Sequence[Any]
    # What is not given to the kernels of this call.
    absent: frozenset[str] = frozenset()
    tuned: bool = True

    def audit(self) -> list[Report]:
        """Compile and audit each kernel of the call."""
        kernels = (attention_kernel, reduce_kernel, page_table_kernel)
        operands = {kernel.__name__: functools.partial(self.names, kernel) for kernel in kernels}
        with tuning.using(device_of(self.arch)):
            # A function of its own, because JAX remembers what it has traced.
            reports = audit_pallas(
                lambda *traced: self.function(*traced),
                self.arguments,
                self.arch,
                operands,
                tuned=self.tuned,
            )
        return [
            dataclasses.replace(report, name=f"{self.name}: {report.name.removesuffix('_kernel')}")
            for report in reports
        ]

    def names(self, kernel: Callable, count: int) -> list[str]:
        """Names of a kernel's operands; the aliased output is among them where there are as many."""
        parameters = inspect.signature(kernel).parameters.values()
        names = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY and p.name not in self.absent]
        return names if len(names) == count else [name for name in names if not name.startswith("_")]


def pallas_launches(arch: str) -> Iterator[PallasLaunches]:
    """List the calls that the audit looks at: an entry of the tuning table each, every option, page tables.

    Args:
        arch: `sm90`, `gfx942`, ...
    """
    with tuning.using(device_of(arch)):
        table = tuning.tuning()
    for kind in tuning.KINDS:
        for choice in getattr(table, kind):
            for dtype in KV_DTYPES[choice.kv_bytes]:
                native = not dtype.startswith("float8") or dtype in table.native_formats
                if native and fits_a_grid(kind, choice):
                    name = f"{kind} D{choice.head_dim} {dtype} {choice.block_rows}x{choice.tile}"
                    launches = attention_launches(name, arch, served(kind, choice, dtype))
                    # Tiles are chosen for the Triton kernels, whose prefill and, on CDNA, int8 pairs differ from these.
                    yield dataclasses.replace(launches, tuned=kind != "prefill" and dtype != "int8")
    for name, kind, q_len in (
        ("verify", "split", 4),
        ("prefill", "prefill", 32),
        ("invariant", "invariant", 1),
    ):
        choice = next(c for c in getattr(table, kind) if c.head_dim == 128)
        problem = with_every_option(served(kind, dataclasses.replace(choice, rows=q_len * GROUP), "bfloat16"))
        yield dataclasses.replace(attention_launches(f"{name}, every option", arch, problem), tuned=False)
    yield from _page_table_launches(arch)


def fits_a_grid(kind: str, choice: tuning.TileChoice) -> bool:
    """Whether the launches of an entry for so many sequences have no more than 2^31 programs."""
    if kind == "prefill":
        return choice.block_rows >= 64
    return kind == "split" or choice.rows <= 16


def served(kind: str, choice: tuning.TileChoice, dtype: str) -> AttentionProblem:
    """A problem that an entry of a table serves."""
    split = kind == "split"
    group = 1 if kind == "invariant" else GROUP
    kv_heads = 8 if split else 1
    q_len = {"split": max(1, choice.rows // group), "prefill": 32, "invariant": 2}[kind]
    cache = array(PAGES, PAGE_SIZE, kv_heads, choice.head_dim, dtype=jnp.dtype(dtype))
    quantised = cache.dtype.itemsize == 1
    q_dtype = jnp.dtype(jnp.bfloat16) if quantised else cache.dtype
    descale = array(kv_heads, dtype=jnp.float32) if quantised else None
    return AttentionProblem(
        q=array(SEQUENCES * q_len, kv_heads * group, choice.head_dim, dtype=q_dtype),
        k_cache=cache,
        v_cache=cache,
        page_table=array(SEQUENCES, COLUMNS),
        cu_seqlens_q=array(SEQUENCES + 1),
        seqused_k=array(SEQUENCES),
        k_descale=descale,
        v_descale=descale,
        softmax_scale=choice.head_dim**-0.5,
        max_seqlen_q=q_len,
        out_dtype=q_dtype,
        batch_invariant=kind == "invariant",
    )


def with_every_option(problem: AttentionProblem) -> AttentionProblem:
    """Add a tree, a window, softcap, sinks, ALiBi, descales and an output scale."""
    tokens, heads, _ = problem.q.shape
    of_head, descale = array(heads, dtype=jnp.float32), array(problem.k_cache.shape[2], dtype=jnp.float32)
    return dataclasses.replace(
        problem,
        ancestors=array(tokens, 2, dtype=jnp.uint64),
        depths=array(tokens, dtype=jnp.int32),
        sinks=of_head,
        alibi_slopes=of_head,
        q_descale=descale,
        k_descale=descale,
        v_descale=descale,
        output_scale=array(dtype=jnp.float32),
        sliding_window=4096,
        softcap=30.0,
    )


def attention_launches(name: str, arch: str, problem: AttentionProblem) -> PallasLaunches:
    """Describe the launches of an attention problem."""
    given = {field.name for field in dataclasses.fields(problem) if getattr(problem, field.name) is not None}
    optional = set(inspect.signature(attention_kernel).parameters) & {
        field.name for field in dataclasses.fields(problem)
    }
    absent = frozenset(optional - given)
    return PallasLaunches(f"pallas {name}", arch, attention.run, (problem,), absent=absent)


def _page_table_launches(arch: str) -> Iterator[PallasLaunches]:
    ragged = RaggedRows(kv_indptr=array(SEQUENCES + 1), kv_indices=array(2**34))
    pooled = PooledRows(req_to_token=array(2**20, 2**20, dtype=jnp.int32), req_pool_indices=array(SEQUENCES))
    for name, rows in (("ragged", ragged), ("pooled", pooled)):

        def build(rows, lengths, full_to_swa):
            # One program a row: there can be no more than 2^31.
            return page_table.build_page_tables(rows, lengths, PAGE_SIZE, TABLE_COLUMNS, full_to_swa)

        arguments = (rows, array(SEQUENCES), array(2**33))
        yield PallasLaunches(f"pallas {name} rows and window", arch, build, arguments, tuned=False)
