"""From an attention problem to launches of an attention and a reduction kernel, whatever language they are in."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Num

from jaxattn.index64 import cdiv
from jaxattn.kernels import _output, tuning
from jaxattn.kernels._constants import CODES, CUT_UNIT_FIELDS, AttentionConstants
from jaxattn.kernels.tuning.launches import Launch, attention_launches, compute_dtype
from jaxattn.plan import UNCUT, Plan, Schedule
from jaxattn.problem import AttentionProblem

# Weights of float16 reach down to 2**-39 of the largest one.
_FLOAT16_SHIFT = 15.0
# Numbers that a warp of the reduction holds at a time; a power of two.
_REDUCE_ELEMENTS = 4096
# Positions within a sequence are 32-bit in the kernels.
_LARGEST_CAPACITY = 2**31 - 2**16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
    """The kernels in one language, and how to run them."""

    # Take the arrays of `_attend` in order, inputs then outputs, and the constants C.
    attention_kernel: Any
    reduce_kernel: Any
    # launch(kernel, inputs, outputs, *, grid, num_warps, num_stages, aliases, **constants) -> outputs
    launch: Callable[..., list[jax.Array]]
    build_schedule: Callable[..., Schedule]
    # 8-bit formats that the language cannot convert, whatever the architecture does.
    unconverted: tuple[str, ...] = ()
    # Whether halves of a program can take turns.
    takes_turns: bool = False
    # Turns the names of dtypes among the constants into what the kernels take.
    specialise: Callable[[AttentionConstants], AttentionConstants]


def refuse_capacity(problem: AttentionProblem) -> str | None:
    """Return why the rows of the page table are too long for a kernel, or None."""
    capacity = problem.page_table.shape[1] * problem.page_size
    if capacity <= _LARGEST_CAPACITY:
        return None
    return (
        f"page_table: rows of {capacity} keys; the kernels count the keys of one sequence in 32 bits, "
        f"up to {_LARGEST_CAPACITY}"
    )


def run(problem: AttentionProblem, backend: Backend) -> tuple[Num[Array, "T H Dv"], Float32[Array, "T H"]]:
    """Compute attention by one or two launches, whose results share the output."""
    if _output.is_empty(problem):
        return _output.neutral(problem)
    if problem.output_scale is not None:
        problem = dataclasses.replace(problem, output_scale=problem.output_scale.reshape(1))
    result: Any = None
    for step in attention_launches(problem, tuning.device(), takes_turns=backend.takes_turns):
        schedule = problem.plan.find(step.spec) if isinstance(problem.plan, Plan) else None
        if schedule is None:
            schedule = backend.build_schedule(step.spec, problem.cu_seqlens_q, problem.seqused_k)
        result = _attend(problem, backend, step, schedule, result)
    return result


def _attend(problem: AttentionProblem, backend: Backend, step: Launch, schedule: Schedule, earlier):
    """Launch one schedule; the rows of `earlier` results that it does not own keep their values."""
    constants = backend.specialise(_constants(problem, backend, step, fill=earlier is None))
    tokens, heads, _ = problem.q.shape
    value_dim = problem.v_cache.shape[3]
    out = jax.ShapeDtypeStruct((tokens, heads, value_dim), problem.out_dtype)
    lse = jax.ShapeDtypeStruct((tokens, heads), jnp.float32)
    partials = _partial_shapes(constants)
    aliased = (None, None) if earlier is None else earlier
    inputs = (
        problem.q,
        problem.k_cache,
        problem.v_cache,
        problem.page_table,
        problem.cu_seqlens_q,
        problem.seqused_k,
        schedule.block_sequence,
        schedule.block_index,
        schedule.tile_start,
        schedule.first_block,
        schedule.active,
        problem.ancestors,
        problem.depths,
        problem.sinks,
        problem.alibi_slopes,
        problem.q_descale,
        problem.k_descale,
        problem.v_descale,
        problem.output_scale,
        *aliased,
    )
    *result, acc, peak, total, cut_units = backend.launch(
        backend.attention_kernel,
        inputs,
        (out, lse, *partials),
        grid=constants.programs,
        num_warps=step.choice.warps,
        num_stages=step.choice.stages,
        aliases={} if earlier is None else {len(inputs) - 2: 0, len(inputs) - 1: 1},
        C=constants,
    )
    if constants.uncut:
        return tuple(result)
    # Fixed cuts are merged in one way only, so that the bits of a row depend on nothing else.
    pieces = None if constants.chunk else cdiv(constants.programs, constants.units)
    reduce = tuning.tuning().choose_reduce(pieces)
    places = (
        constants.units
        if constants.chunk
        else min(constants.units, constants.programs - constants.heads_abreast)
    )
    if places == 0:
        return tuple(result)
    fitting = max(1, _REDUCE_ELEMENTS * reduce.warps // (reduce.rows * constants.padded_value_dim))
    inputs = (
        problem.cu_seqlens_q,
        problem.seqused_k,
        schedule.block_sequence,
        schedule.block_index,
        schedule.tile_start,
        problem.sinks,
        problem.v_descale,
        problem.output_scale,
        acc,
        peak,
        total,
        cut_units,
        *result,
    )
    return tuple(
        backend.launch(
            backend.reduce_kernel,
            inputs,
            (out, lse),
            grid=places * cdiv(constants.stored_rows, reduce.rows),
            num_warps=reduce.warps,
            aliases={len(inputs) - 2: 0, len(inputs) - 1: 1},
            C=constants,
            PARTIALS=min(reduce.partials, fitting),
            MANY=0 if constants.chunk else min(reduce.many, fitting),
            ROWS=reduce.rows,
        )
    )


def _constants(
    problem: AttentionProblem, backend: Backend, step: Launch, *, fill: bool
) -> AttentionConstants:
    """Gather what the kernels of one launch are specialised on."""
    spec, choice = step.spec, step.choice
    tokens, heads, head_dim = problem.q.shape
    num_pages, page_size, kv_heads, value_dim = problem.v_cache.shape
    compute = compute_dtype(problem)
    table = tuning.tuning()
    out_name = np.dtype(problem.out_dtype).name

    def stored(dtype) -> int:
        name = np.dtype(dtype).name
        native = name in table.native_formats and name not in backend.unconverted
        return CODES[name] if name.startswith("float8") and not native else 0

    def unpack(dtype) -> tuple[str, str]:
        return table.unpack.get(np.dtype(dtype).name, ("", ""))

    unpacks = compute == "float16"
    paired = problem.v_cache.dtype.itemsize == 1 and value_dim % 2 == 0
    begin_turn, end_turn = table.turns if choice.turns else ("", "")
    return AttentionConstants(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        page_size=page_size,
        num_pages=num_pages,
        table_width=problem.page_table.shape[1],
        num_sequences=problem.seqused_k.shape[0],
        num_tokens=tokens,
        block_rows=choice.block_rows,
        rows_in_block=spec.block_rows,
        tile=choice.tile,
        programs=spec.programs,
        runs=spec.runs,
        heads_abreast=spec.heads_abreast,
        heads_in_line=spec.heads_in_line,
        longest_line=spec.longest_line,
        num_blocks=spec.num_blocks,
        stored_rows=min(spec.block_rows, min(problem.max_seqlen_q, spec.max_q_len, tokens) * spec.group),
        chunk=spec.chunk,
        uncut=spec.chunk == UNCUT,
        stages=choice.stages,
        # A tree's prefix is bare, but the loops take tiles in another order than decode does.
        bare_tiles=step.choice.bare or (problem.ancestors is not None and not problem.batch_invariant),
        one_loop=step.choice.one_loop,
        bare_ids=step.choice.bare_ids,
        paired_values=paired,
        k_unpack=unpack(problem.k_cache.dtype)[0] if unpacks and head_dim % 4 == 0 and head_dim > 16 else "",
        v_unpack=unpack(problem.v_cache.dtype)[1] if unpacks and paired else "",
        scalar_pages=table.scalar_pages,
        begin_turn=begin_turn,
        end_turn=end_turn,
        fill=fill,
        softmax_scale=problem.softmax_scale,
        causal=problem.causal,
        window=spec.sliding_window or 0,
        softcap=problem.softcap or 0.0,
        tree_words=0 if problem.ancestors is None else problem.ancestors.shape[1],
        path_keys=problem.path_keys,
        sinks=problem.sinks is not None,
        alibi=problem.alibi_slopes is not None,
        q_descale=problem.q_descale is not None,
        k_descale=problem.k_descale is not None,
        v_descale=problem.v_descale is not None,
        output_scale=problem.output_scale is not None,
        compute=compute,
        q_format=stored(problem.q.dtype),
        k_format=stored(problem.k_cache.dtype),
        v_format=stored(problem.v_cache.dtype),
        v_dtype=problem.v_cache.dtype.name,
        out_dtype=out_name,
        out_format=0 if out_name == "bfloat16" else CODES[out_name],
        precision="ieee" if compute == "float32" else None,
        scale_rows=compute == "float16" and np.dtype(problem.q.dtype).name in ("bfloat16", "float32"),
        weight_shift=_FLOAT16_SHIFT if compute == "float16" else 0.0,
    )


def _partial_shapes(constants: AttentionConstants) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes of the softmax states of cut units, acc, peak and total, and of the description of those units."""
    slots = 2 * constants.programs
    if constants.uncut:
        slots = 1
    elif constants.chunk:
        slots = constants.heads_abreast * constants.longest_line
    rows = (slots, constants.stored_rows)
    described = 1 if constants.chunk else min(constants.units, constants.programs)
    return (
        jax.ShapeDtypeStruct((*rows, constants.value_dim), jnp.float32),
        jax.ShapeDtypeStruct(rows, jnp.float32),
        jax.ShapeDtypeStruct(rows, jnp.float32),
        jax.ShapeDtypeStruct((described, CUT_UNIT_FIELDS), jnp.int64),
    )
