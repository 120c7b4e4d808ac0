"""A self-test that a wrapped index fails: tables, slots and attention beyond every 32-bit threshold."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.attention import implementations, unified_attention
from jaxattn.errors import JaxattnError, UnsupportedError
from jaxattn.kv_cache import write_kv
from jaxattn.metadata import decode_metadata

_PAGE_SIZE, _K_WIDTH, _V_WIDTH = 16, 16, 128
_PAGE_ELEMENTS = _PAGE_SIZE * _V_WIDTH
# One byte an element and one KV head: the last page of values lies beyond 2^31 elements and 2^31 bytes.
_NUM_PAGES = 2**31 // _PAGE_ELEMENTS + 16
_NEEDED_NBYTES = _NUM_PAGES * _PAGE_SIZE * (_K_WIDTH + _V_WIDTH) + (1 << 30)


@dataclasses.dataclass(frozen=True)
class Result:
    """The outcome of one test; `passed` is None where it could not be run."""

    name: str
    passed: bool | None
    detail: str


def run_selftest(attend: Callable = unified_attention) -> Iterator[Result]:
    """Test tables and slots, then each usable implementation on a pool beyond 2^31 elements.

    Args:
        attend: what is tested; `unified_attention` by default.
    """
    yield check_tables()
    free = _free_nbytes()
    for name, reason in implementations().items():
        if reason is not None:
            continue
        test = f"{name}, a pool beyond 2^31 elements"
        if free is None or free < _NEEDED_NBYTES:
            there = "it is not known how much is" if free is None else f"{free / 2**30:.1f} GiB are"
            yield Result(test, None, f"it needs {_NEEDED_NBYTES / 2**30:.1f} GiB of memory, {there} free")
            continue
        yield check_attention(test, functools.partial(attend, implementation=name))


def check_tables() -> Result:
    """Whether a page table, its slots and their advance keep slots beyond 2^33."""
    first = 2**33 + 5 * _PAGE_SIZE
    slots = np.arange(first, first + 2 * _PAGE_SIZE, dtype=np.int64)[None]
    step = decode_metadata(
        seqused_k=np.array([_PAGE_SIZE]),
        page_size=_PAGE_SIZE,
        lookahead=1,
        req_to_token=slots,
        req_pool_indices=np.array([0]),
    )
    expected = [first // _PAGE_SIZE, first + _PAGE_SIZE - 1, first + _PAGE_SIZE]
    found = [int(step.page_table[0, 0]), int(step.slots(1)[0]), int(step.advance(1).slots(1)[0])]
    detail = f"page and slots {expected}" + ("" if found == expected else f", but got {found}")
    return Result("tables beyond 2^33 slots", found == expected, detail)


def check_attention(name: str, attend: Callable) -> Result:
    """Whether a decode from the last page of a pool beyond 2^31 elements reads that page and no other.

    The page that an address or a page id cut to fewer bits would lead to holds other values.
    """
    last = _NUM_PAGES - 1
    try:
        k_cache, v_cache = _pool({last - 2**31 // _PAGE_ELEMENTS: 5, last: 3})
        slots = last * _PAGE_SIZE + np.arange(_PAGE_SIZE, dtype=np.int64)[None]
        metadata = decode_metadata(
            seqused_k=np.array([_PAGE_SIZE]),
            page_size=_PAGE_SIZE,
            req_to_token=slots,
            req_pool_indices=np.array([0]),
        )
        q = jnp.ones((1, 1, _K_WIDTH), jnp.bfloat16)
        found = np.asarray(jax.jit(attend)(q, k_cache, v_cache, metadata), np.float32)
    except UnsupportedError as error:
        return Result(name, None, " ".join(str(error).split()))
    except (JaxattnError, MemoryError, jax.errors.JaxRuntimeError) as error:
        return Result(name, False, " ".join(str(error).split()))
    if (found == 3).all():
        return Result(name, True, f"page {last} was read, not its alias")
    return Result(name, False, f"expected 3 from page {last}, got {found.min():g} to {found.max():g}")


def _pool(values: dict[int, int]) -> tuple[jax.Array, jax.Array]:
    """Keys of zeros and values that are the same number all over a page; written by slot."""
    pages = np.array(list(values), np.int64)
    slots = (pages[:, None] * _PAGE_SIZE + np.arange(_PAGE_SIZE)).reshape(-1)
    rows = np.repeat(np.array(list(values.values()), np.float32), _PAGE_SIZE)[:, None, None]
    write = jax.jit(write_kv, donate_argnums=(0, 1))
    return write(
        jnp.zeros((_NUM_PAGES, _PAGE_SIZE, 1, _K_WIDTH), jnp.int8),
        jnp.zeros((_NUM_PAGES, _PAGE_SIZE, 1, _V_WIDTH), jnp.int8),
        np.zeros((len(slots), 1, _K_WIDTH), np.float32),
        np.broadcast_to(rows, (len(slots), 1, _V_WIDTH)),
        slots.astype(np.int32),
    )


def _free_nbytes() -> int | None:
    """Free memory of the default device, or None where it cannot be known."""
    stats = jax.devices()[0].memory_stats()
    if stats is not None and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
