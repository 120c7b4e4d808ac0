"""The feature matrix of attention as data: each case builds a problem and checks it against the float64 oracle.

Every problem has shuffled pages, NaN in every slot that no row may see, anything in the tail of the page table,
and NaN in the rows of q behind the last sequence.
"""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle

from jaxattn.attention import unified_attention
from jaxattn.index64 import index64
from jaxattn.metadata import AttentionMetadata

Lengths = tuple[tuple[int, int], ...]

# An interpreted Pallas kernel takes seconds to compile with all optimisations, and milliseconds to run without.
COMPILED_QUICKLY = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
if jax.__version_info__ < (0, 11):
    # Later ones do not have it.
    COMPILED_QUICKLY["xla_cpu_use_fusion_emitters"] = False

# (q_len, seqused_k) of each sequence.
DECODE: Lengths = ((1, 33), (1, 1), (1, 0), (1, 64), (1, 190), (0, 0))
VERIFY: Lengths = ((4, 20), (4, 4), (4, 133), (4, 0), (4, 64))
# The shapes of VERIFY, so that both share what is compiled.
DRAFT_EXTEND: Lengths = ((4, 64), (4, 133), (4, 4), (4, 20), (4, 0))
EXTEND: Lengths = ((1, 7), (5, 37), (0, 0), (16, 16), (3, 90), (0, 0), (1, 1))
MODES = {
    "decode": DECODE,
    "target_verify": VERIFY,
    "draft_extend": DRAFT_EXTEND,
    "extend": EXTEND,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One attention problem, by its shapes, storage formats and options."""

    mode: str = "extend"
    lengths: Lengths | None = None
    heads: int = 4
    kv_heads: int = 2
    width: int = 16
    v_width: int | None = None
    page_size: int = 3
    dtype: str = "float32"
    kv_dtype: str | None = None
    # Options that are passed on as they are.
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    # Options that take arrays, which `build` draws.
    sinks: bool = False
    alibi: bool = False
    descales: str | None = None
    output_scale: float | None = None
    # Words of the tree mask, None for no tree.
    tree: int | None = None
    # The tree of every sequence; random ones by default.
    parents: tuple[int, ...] | None = None
    padding_rows: int = 3
    # q = 0, V = one-hot of the key's index: an output row is then its visible set, each key with weight 1 / n.
    probe: bool = False
    seed: int = 0


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"options": {"sliding_window": 9}},
    "softcap": {"options": {"softcap": 1.5}},
    "sinks": {"sinks": True},
    "alibi": {"alibi": True},
    "descales": {"descales": "per_head"},
    "output_scale": {"output_scale": 0.25},
    "scale": {"options": {"softmax_scale": 0.4}},
    "not_causal": {"options": {"causal": False}},
    "not_causal_window": {"options": {"causal": False, "sliding_window": 9}},
    "batch_invariant": {"options": {"batch_invariant": True}},
}
EVERYTHING = {
    "options": {"sliding_window": 9, "softcap": 1.5},
    "sinks": True,
    "alibi": True,
    "descales": "scalar",
    "output_scale": 0.5,
}
# One mode for each walk of a kernel: single rows, a few rows, blocks of rows.
WALKS = ("decode", "target_verify", "extend")


def _mode_cases() -> dict[str, Case]:
    cases = {}
    for mode in MODES:
        for name, changes in {**OPTIONS, "everything": EVERYTHING}.items():
            cases[f"{mode}-{name}"] = Case(mode=mode, **changes)
        for dtype in ("bfloat16", "float16"):
            cases[f"{mode}-{dtype}-everything"] = Case(mode=mode, dtype=dtype, page_size=16, **EVERYTHING)
        cases[f"{mode}-bfloat16-kv-fp8"] = Case(
            mode=mode, dtype="bfloat16", kv_dtype="float8_e4m3fn", page_size=16, descales="per_head"
        )
    return cases


def _format_cases() -> dict[str, Case]:
    cases = {}
    for kv_dtype in ("float8_e4m3fnuz", "float8_e5m2", "int8"):
        cases[f"decode-bfloat16-kv-{kv_dtype}"] = Case(
            mode="decode", dtype="bfloat16", kv_dtype=kv_dtype, page_size=16, descales="per_head"
        )
    for dtype in ("float8_e4m3fn", "float8_e4m3fnuz", "int8"):
        cases[f"decode-q-{dtype}"] = Case(mode="decode", dtype=dtype, page_size=16, descales="scalar")
    cases["extend-bfloat16"] = Case(dtype="bfloat16", page_size=16)
    cases["extend-float32-kv-int8"] = Case(kv_dtype="int8", descales="per_head")
    for out_dtype, scale in (("float8_e4m3fn", 0.01), ("float32", 1.0), ("int8", 0.02)):
        cases[f"extend-out-{out_dtype}"] = Case(
            dtype="bfloat16", output_scale=scale, options={"out_dtype": out_dtype}
        )
    return cases


def _shape_cases() -> dict[str, Case]:
    cases = {}
    for page_size in (1, 16, 256):
        cases[f"decode-page-{page_size}"] = Case(mode="decode", page_size=page_size, heads=6)
        cases[f"extend-page-{page_size}"] = Case(page_size=page_size, heads=6)
    for ratio in (1, 3, 5, 7, 16):
        for mode in WALKS if ratio in (3, 7) else ("decode",):
            cases[f"{mode}-ratio-{ratio}"] = Case(mode=mode, heads=2 * ratio)
    for width in (64, 80, 96, 192, 256):
        cases[f"decode-width-{width}"] = Case(mode="decode", width=width, page_size=16)
    for width, v_width in ((64, 48), (24, 40), (192, 128)):
        mode = WALKS[width % 3]
        cases[f"{mode}-width-{width}-{v_width}"] = Case(mode=mode, width=width, v_width=v_width, page_size=16)
    cases["decode-empty"] = Case(mode="decode", lengths=((1, 0), (0, 0), (1, 0)), sinks=True)
    cases["decode-long-among-short"] = Case(mode="decode", lengths=((1, 5), (1, 700), (1, 2), (1, 31)))
    cases["extend-one"] = Case(lengths=((40, 40),), padding_rows=0)
    cases["extend-long-among-short"] = Case(lengths=((1, 2), (70, 75), (2, 2), (66, 66)), heads=2, kv_heads=1)
    cases["extend-more-rows-than-keys"] = Case(lengths=((12, 5), (3, 9)))
    cases["extend-more-rows-than-keys-not-causal"] = Case(
        lengths=((12, 5), (3, 9)), options={"causal": False}
    )
    return cases


def _tree_cases() -> dict[str, Case]:
    cases = {
        f"tree-{name}": Case(mode="target_verify", tree=1, **changes)
        for name, changes in {**OPTIONS, "everything": EVERYTHING}.items()
        if not name.startswith("not_causal")
    }
    cases["tree-ragged"] = Case(
        mode="target_verify", lengths=((9, 40), (9, 9), (9, 0), (2, 70)), tree=2, alibi=True
    )
    cases["tree-bfloat16"] = Case(mode="target_verify", tree=1, dtype="bfloat16", page_size=16, heads=6)
    # Whole tiles between the edge of the window, which differs by row, and the tree.
    cases["tree-window-behind-a-prefix"] = Case(
        mode="target_verify",
        lengths=((5, 85), (9, 120)),
        tree=1,
        heads=2,
        kv_heads=1,
        page_size=16,
        options={"sliding_window": 49},
    )
    cases["tree-two-words"] = Case(
        mode="target_verify",
        lengths=((70, 90), (5, 11)),
        tree=2,
        heads=2,
        kv_heads=1,
        options={"sliding_window": 20},
    )
    return cases


CASES = _mode_cases() | _format_cases() | _shape_cases() | _tree_cases()


@dataclasses.dataclass(frozen=True)
class Problem:
    """Arguments of a call, as numpy arrays where the oracle wants them too, and what the oracle says."""

    q: np.ndarray
    k_cache: np.ndarray
    v_cache: np.ndarray
    metadata: AttentionMetadata
    options: dict[str, Any]
    out: np.ndarray
    lse: np.ndarray


@index64
def make_metadata(
    page_table, lengths: Lengths, *, page_size, mode="extend", ancestors=None
) -> AttentionMetadata:
    q_lens = [q_len for q_len, _ in lengths]
    return AttentionMetadata(
        page_table=jnp.asarray(page_table, jnp.int64),
        cu_seqlens_q=jnp.asarray(np.concatenate([[0], np.cumsum(q_lens)]), jnp.int64),
        seqused_k=jnp.asarray([seqused_k for _, seqused_k in lengths], jnp.int64),
        ancestors=None if ancestors is None else jnp.asarray(ancestors, jnp.uint64),
        max_seqlen_q=max([1, *q_lens]),
        page_size=page_size,
        mode=mode,
    )


def random_parents(rng, q_len: int) -> tuple[int, ...]:
    """Draw a tree with some branching: each parent is one of the three nodes before."""
    return tuple(int(rng.integers(max(0, node - 3), node)) if node else -1 for node in range(q_len))


def bits_of(parents: tuple[int, ...], words: int) -> np.ndarray:
    """Compute the ancestor bits of one tree, node by node."""
    bits = np.zeros((len(parents), words), np.uint64)
    for node, parent in enumerate(parents):
        if parent >= 0:
            bits[node] = bits[parent]
        bits[node, node // 64] |= np.uint64(1 << node % 64)
    return bits


def dead_page_ids(rng, pages: int, count: int) -> np.ndarray:
    return rng.choice([-1, 0, pages - 1, pages, 2**31 + 5, 2**40, -(2**33)], size=count)


def _stored(rng, shape, dtype: str) -> np.ndarray:
    if dtype == "int8":
        return rng.integers(-127, 128, size=shape).astype(np.int8)
    return rng.normal(size=shape).astype(np.float32).astype(jnp.dtype(dtype))


def _dead(shape, dtype: str) -> np.ndarray:
    return np.full(shape, 127 if dtype == "int8" else np.nan).astype(jnp.dtype(dtype))


def _first_visible(q_len, seqused_k, window, bits) -> int:
    """Return the first key that some row of a sequence can still see; what lies before may be evicted."""
    if window is None or q_len == 0:
        return 0
    first_depth = 0 if bits is None else min(oracle.depths_of(bits))
    return max(0, seqused_k - q_len + first_depth - window + 1)


def build(case: Case) -> Problem:
    rng = np.random.default_rng(case.seed)
    lengths = case.lengths if case.lengths is not None else MODES[case.mode]
    longest = max(seqused_k for _, seqused_k in lengths)
    v_width = max(longest, 1) if case.probe else case.v_width or case.width
    kv_dtype = case.kv_dtype or case.dtype
    page_size = case.page_size
    live_rows = sum(q_len for q_len, _ in lengths)
    tokens = live_rows + case.padding_rows

    q = _dead((tokens, case.heads, case.width), case.dtype)
    q[:live_rows] = 0 if case.probe else _stored(rng, q[:live_rows].shape, case.dtype)
    ancestors = None
    if case.tree is not None:
        ancestors = np.full((tokens, case.tree), 2**64 - 1, np.uint64)
        row = 0
        for q_len, _ in lengths:
            ancestors[row : row + q_len] = bits_of(case.parents or random_parents(rng, q_len), case.tree)
            row += q_len

    used = [-(-seqused_k // page_size) for _, seqused_k in lengths]
    pages = sum(used) + 4
    width = max([*used, 0]) + 2
    k_cache = _dead((pages, page_size, case.kv_heads, case.width), kv_dtype)
    v_cache = _dead((pages, page_size, case.kv_heads, v_width), kv_dtype)
    ids = iter(rng.permutation(pages))
    page_table = dead_page_ids(rng, pages, len(lengths) * width).reshape(len(lengths), width)
    row = 0
    for sequence, (q_len, seqused_k) in enumerate(lengths):
        bits = None if ancestors is None else ancestors[row : row + q_len]
        first = _first_visible(q_len, seqused_k, case.options.get("sliding_window"), bits)
        row += q_len
        for logical in range(first // page_size, used[sequence]):
            page = page_table[sequence, logical] = next(ids)
            begin = max(first - logical * page_size, 0)
            end = min(seqused_k - logical * page_size, page_size)
            for cache in (k_cache, v_cache):
                cache[page, begin:end] = _stored(rng, cache[page, begin:end].shape, kv_dtype)
            if case.probe:
                keys = np.arange(logical * page_size + begin, logical * page_size + end)
                v_cache[page, begin:end] = (keys[:, None] == np.arange(v_width))[:, None]

    options = dict(case.options)
    if case.sinks:
        options["sinks"] = rng.normal(size=case.heads).astype(np.float32)
    if case.alibi:
        options["alibi_slopes"] = (2.0 ** -np.arange(1, case.heads + 1)).astype(np.float32)
    if case.descales is not None:
        unit = 1 / 64 if "int8" in (case.dtype, kv_dtype) else 1.0
        shape = (case.kv_heads,) if case.descales == "per_head" else ()
        for name in ("q_descale", "k_descale", "v_descale"):
            options[name] = np.float32(unit * rng.uniform(0.5, 2.0, size=shape))
    if case.output_scale is not None:
        options["output_scale"] = np.float32(case.output_scale)

    metadata = make_metadata(page_table, lengths, page_size=page_size, mode=case.mode, ancestors=ancestors)
    out, lse = oracle_of(q, k_cache, v_cache, metadata, options)
    return Problem(q, k_cache, v_cache, metadata, options, out, lse)


def oracle_of(q, k_cache, v_cache, metadata: AttentionMetadata, options: dict[str, Any]):
    """Run the oracle on the arguments of a call."""
    known = {name: value for name, value in options.items() if name not in ("out_dtype", "batch_invariant")}
    return oracle.attention(
        *(np.asarray(array) for array in (q, k_cache, v_cache)),
        np.asarray(metadata.page_table),
        np.asarray(metadata.cu_seqlens_q),
        np.asarray(metadata.seqused_k),
        ancestors=None if metadata.ancestors is None else np.asarray(metadata.ancestors),
        **known,
    )


def run(problem: Problem, implementation: str):
    def attend(q, k_cache, v_cache):
        return unified_attention(
            q,
            k_cache,
            v_cache,
            problem.metadata,
            return_lse=True,
            implementation=implementation,
            **problem.options,
        )

    if implementation == "pallas" and jax.default_backend() == "cpu":
        attend = jax.jit(attend, compiler_options=COMPILED_QUICKLY)
    return attend(*(jnp.asarray(array) for array in (problem.q, problem.k_cache, problem.v_cache)))


def _plain_attention(q, k, v, seen, distance, scale, softcap, slopes, sinks, v_scale):
    """Dense attention of `[S, Q, H, D]` on `[S, L, H, D]`; per-head numbers are `[H, 1, 1]`.

    Products accumulate in float32 and weights are rounded to the format of q. In numpy, since what XLA's CPU
    backend computes for this is the same, and compiling it for every shape takes longer than all the rest.
    """
    q_heads, k_heads, v_heads = (array.astype(np.float32).swapaxes(1, 2) for array in (q, k, v))
    scores = q_heads @ k_heads.swapaxes(2, 3) * scale  # [S, H, Q, L]
    if softcap is not None:
        scores = np.float32(softcap) * np.tanh(scores / np.float32(softcap))
    scores = scores - slopes * np.abs(distance)[:, None]
    scores = np.where(seen[:, None], scores, np.float32(-np.inf))
    largest = np.maximum(scores.max(axis=3, keepdims=True), sinks)
    largest = np.where(np.isneginf(largest), np.float32(0), largest)
    weights = np.exp(scores - largest)
    total = weights.sum(axis=3, keepdims=True) + np.exp(sinks - largest)
    total = np.where(seen.any(axis=2)[:, None, :, None], total, np.float32(1))
    weights = (weights / total).astype(q.dtype).astype(np.float32)
    return (weights @ v_heads * v_scale).swapaxes(1, 2), (largest + np.log(total))[..., 0].swapaxes(1, 2)


def visible_sets(case: Case, implementation: str) -> list[set[int]]:
    """Read from a probe which keys each row sees; its weights must be equal and its lse the log of their number."""
    problem = build(dataclasses.replace(case, probe=True))
    out, lse = run(problem, implementation)
    sets = []
    for row, row_lse in zip(np.asarray(out)[:, 0], np.asarray(lse)[:, 0], strict=True):
        seen = np.flatnonzero(row)
        np.testing.assert_allclose(row[seen], 1 / max(len(seen), 1), rtol=1e-6)
        np.testing.assert_allclose(row_lse, np.log(len(seen)) if len(seen) else -np.inf, rtol=1e-6)
        sets.append(set(seen.tolist()))
    return sets


def plain_attention(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Compute the problem padded, dense and in the format of q: the error to compare with.

    One-byte formats become bfloat16, which holds most of their values exactly.
    """
    options, metadata = problem.options, problem.metadata
    compute = jnp.dtype(jnp.bfloat16) if problem.q.dtype.itemsize == 1 else problem.q.dtype
    heads, width = problem.q.shape[1:]
    kv_heads = problem.k_cache.shape[2]
    table, starts, lengths = (
        np.asarray(array) for array in (metadata.page_table, metadata.cu_seqlens_q, metadata.seqused_k)
    )
    shape = (len(lengths), metadata.max_seqlen_q, max(1, lengths.max()))
    q = np.zeros((*shape[:2], heads, width), compute)
    k = np.zeros((shape[0], shape[2], heads, width), compute)
    v = np.zeros((shape[0], shape[2], heads, problem.v_cache.shape[3]), compute)
    seen, distance = np.zeros(shape, bool), np.zeros(shape, np.float32)
    for sequence, seqused_k in enumerate(lengths.tolist()):
        rows = np.arange(starts[sequence], starts[sequence + 1])
        bits = None if metadata.ancestors is None else np.asarray(metadata.ancestors)[rows]
        q[sequence, : len(rows)] = problem.q[rows].astype(compute)
        for row in range(len(rows)):
            for key, apart in oracle.visible_keys(
                row=row,
                q_len=len(rows),
                seqused_k=seqused_k,
                causal=options.get("causal", True),
                sliding_window=options.get("sliding_window"),
                bits=bits,
                depths=None if bits is None else oracle.depths_of(bits),
            ):
                seen[sequence, row, key], distance[sequence, row, key] = True, apart
        keys = np.flatnonzero(seen[sequence].any(0))
        slots = table[sequence, keys // metadata.page_size], keys % metadata.page_size
        for dense, cache in ((k, problem.k_cache), (v, problem.v_cache)):
            dense[sequence, keys] = np.repeat(cache[slots], heads // kv_heads, axis=1).astype(compute)

    def per_head(value):
        value = np.broadcast_to(np.float32(value), value.shape if np.ndim(value) else (heads,))
        return np.repeat(value, heads // len(value))[:, None, None]

    def option(name, default):
        return per_head(options.get(name, default))

    scale = np.float32(options.get("softmax_scale", width**-0.5))
    dense_out, dense_lse = _plain_attention(
        *(q, k, v, seen, distance),
        scale * option("q_descale", 1.0) * option("k_descale", 1.0),
        options.get("softcap"),
        option("alibi_slopes", 0.0),
        option("sinks", -np.inf),
        option("v_descale", 1.0) / np.float32(options.get("output_scale", 1.0)),
    )
    out, lse = np.zeros_like(problem.out), np.full_like(problem.lse, -np.inf)
    for sequence, (start, stop) in enumerate(itertools.pairwise(starts.tolist())):
        row_sees = seen[sequence, : stop - start].any(1)
        out[start:stop][row_sees] = dense_out[sequence, : stop - start][row_sees]
        lse[start:stop][row_sees] = dense_lse[sequence, : stop - start][row_sees]
    return out, lse


def rounded(values: np.ndarray, dtype) -> np.ndarray:
    """Round to nearest in `dtype`, saturating, and return float64."""
    if dtype == jnp.int8:
        return np.clip(np.rint(values), -128, 127)
    largest = float(jnp.finfo(dtype).max)
    return np.clip(values, -largest, largest).astype(dtype).astype(np.float64)


def check(problem: Problem, implementation: str) -> None:
    """Compare with the oracle: at most twice the error of plain attention, 3x with softcap, 4x with one byte."""
    out, lse = run(problem, implementation)
    assert out.shape == problem.out.shape
    assert lse.shape == problem.lse.shape
    assert lse.dtype == jnp.float32
    one_byte = 1 in (problem.q.dtype.itemsize, problem.k_cache.dtype.itemsize, out.dtype.itemsize)
    factor = 4 if one_byte else 3 if "softcap" in problem.options else 2
    plain_out, plain_lse = plain_attention(problem)
    plain_out = rounded(plain_out, out.dtype)
    out, lse = np.asarray(out).astype(np.float64), np.asarray(lse).astype(np.float64)

    empty = np.isneginf(problem.lse)
    assert np.array_equal(np.isneginf(lse), empty)
    assert not out[empty].any()
    assert np.isfinite(out).all()
    if empty.all():
        return
    assert_close(out, problem.out, plain_out, factor)
    assert_close(lse[~empty], problem.lse[~empty], plain_lse[~empty], factor)


def assert_close(actual, expected, plain, factor) -> None:
    """Check that `actual` is at most `factor` times as far from `expected` as `plain`, bar float32 rounding."""
    rounding = 8 * np.finfo(np.float32).eps * (1 + np.abs(expected).max())
    error, plain_error = np.abs(actual - expected).max(), np.abs(plain - expected).max()
    assert error <= factor * plain_error + rounding, f"error {error:.3g}, plain attention {plain_error:.3g}"
