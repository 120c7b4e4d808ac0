"""A linear layer whose weight is MXFP4 in tiles (`jaxattn.quantization.Mxfp4Tiles`), for few rows.

A warp multiplies by itself: what a lane loads of the weight, 16 bytes of codes of one scale group of one row, is what
its registers of the matrix operand need, and the input is loaded likewise. Nothing passes through shared memory and
no warp waits for another in the loop. The weight is the side of 16 rows of the matrix instruction, tokens that of 8.
"""

import dataclasses
import functools
import importlib.resources
import json
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float, Float32

from jaxattn.errors import UnsupportedError
from jaxattn.index64 import cdiv
from jaxattn.kernels import tuning
from jaxattn.kernels.triton.compat import installed_version
from jaxattn.kernels.triton.launch import launch

if TYPE_CHECKING:
    from jaxattn.quantization.mxfp4_tiles import Mxfp4Tiles

# Tokens of a matrix instruction, columns of a step, rows of a stored tile.
TOKENS, COLUMNS, ROWS = 8, 128, 32
# Bits of a code pair where its halves are bfloat16 values of 2**-126 times theirs.
PATTERN = tl.constexpr(-0x7E3F7E40)  # 0x81C081C0
# From Triton 3.7 on a compiler that spreads a load over lanes and warps takes axes of equal contiguity from the last to
# the first. The kernel says what the order is to be; before, it is the one of the axes.
HINTED = tl.constexpr(installed_version("triton") >= (3, 7))
# Sums of a program, 8 bytes a lane.
ADDED = 512
CODES_OF_STEP, SCALES_OF_STEP = tl.constexpr(512), tl.constexpr(32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constants:
    """What the launches of a product are compiled for; from `warps` on by `kernels/tuning/mxfp4_tiles.json`."""

    tokens: int
    token_blocks: int
    rows: int
    columns: int
    # Stored tiles of rows, and steps of 128 columns.
    tiles: int
    steps: int
    splits: int
    # Warps, of which `row_warps` have rows of their own and the others columns; 16-row parts of a warp.
    warps: int
    row_warps: int
    row_parts: int
    unroll: int
    # Load the input of the next step ahead, as the weight is.
    input_ahead: bool
    # Lay the input out as lanes read it before the launch; pays once there are enough tokens.
    input_laid_out: bool
    expand: str


def is_tuned() -> bool:
    """Whether there are tiles for this device."""
    return tuning.device().architecture in _tables()


def supports(x: Float[Array, "tokens columns"]) -> str | None:
    """The reason why `run` cannot multiply by these rows here, or None."""
    table = _tables().get(tuning.device().architecture)
    if table is None:
        return f"no tiles are tuned for {tuning.device().architecture}"
    if x.dtype != jnp.bfloat16:
        return f"x: expected bfloat16, got {x.dtype}"
    limit = table["entries"][-1]["most_tokens"]
    if not 0 < x.shape[0] <= limit:
        return f"x: expected 1 to {limit} rows, got {x.shape[0]}; others are served by dequantised tiles"
    return None


def run(x: Float[Array, "tokens columns"], weight: "Mxfp4Tiles") -> Float32[Array, "tokens rows"]:
    """`x @ weight.T` in float32 sums.

    Raises:
        UnsupportedError: `supports` gives a reason.
    """
    if reason := supports(x):
        raise UnsupportedError(f"implementation 'triton': {reason}")
    tokens = len(x)
    table = _tables()[tuning.device().architecture]
    entry = next(e for e in table["entries"] if tokens <= e["most_tokens"])
    tiles, steps = weight.codes.shape[:2]
    block_rows = 16 * entry["row_parts"] * entry["row_warps"]
    blocks, column_warps = cdiv(weight.rows, block_rows), entry["warps"] // entry["row_warps"]
    wanted = tuning.device().cores * entry["programs_per_core"] // blocks
    constants = Constants(
        tokens=tokens,
        token_blocks=max(1, triton.next_power_of_2(tokens) // TOKENS),
        rows=weight.rows,
        columns=weight.columns,
        tiles=tiles,
        steps=steps,
        splits=max(1, min(wanted, steps // column_warps)),
        expand="\n".join(table["expand"]),
        **{name: entry[name] for name in _OF_ENTRY},
    )
    missing = steps * COLUMNS - x.shape[1]
    x = _laid_out(x, constants) if constants.input_laid_out else jnp.pad(x, ((0, 0), (0, missing)))
    out = launch(
        mxfp4_tiles_kernel,
        [x, weight.codes, weight.scale, weight.factor],
        [jax.ShapeDtypeStruct((constants.splits, tokens, weight.rows), jnp.float32)],
        grid=blocks * constants.splits,
        num_warps=constants.warps,
        C=constants,
    )[0]
    return _added(out) if constants.splits > 1 else out[0]


_OF_ENTRY = ("warps", "row_warps", "row_parts", "unroll", "input_ahead", "input_laid_out")


def _laid_out(x, constants: Constants):
    """The input as lanes read it, `[steps, token_blocks, 4, 8, 4, 8]`: chunk, token, lane of the four, column."""
    return launch(
        mxfp4_tiles_input_kernel,
        [x],
        [jax.ShapeDtypeStruct((constants.steps, constants.token_blocks, 4, 8, 4, 8), x.dtype)],
        grid=constants.steps * constants.token_blocks,
        num_warps=4,
        C=constants,
    )[0]


def _added(parts: Float32[Array, "splits tokens rows"]) -> Float32[Array, "tokens rows"]:
    """The sum of the parts of all splits, in their order."""
    splits, *shape = parts.shape
    return launch(
        mxfp4_tiles_added_kernel,
        [parts],
        [jax.ShapeDtypeStruct(tuple(shape), jnp.float32)],
        grid=cdiv(math.prod(shape), ADDED),
        num_warps=8,
        SPLITS=splits,
        SIZE=math.prod(shape),
        BLOCK=ADDED,
    )[0]


@functools.cache
def _tables() -> dict[str, dict[str, Any]]:
    """Settings of each architecture: entries by tokens, and the instructions that expand a word of codes.

    `expand` takes a word and its scale, twice in a register, and gives the eight values in pairs.
    """
    return json.loads((importlib.resources.files(tuning) / "mxfp4_tiles.json").read_text())


@triton.jit
def mxfp4_tiles_input_kernel(x_ptr, out_ptr, C: tl.constexpr):
    """One step of a block of tokens in the order that lanes read it; tokens beyond the last are 0."""
    program = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, 4)[:, None, None, None]
    token = tl.arange(0, 8)[None, :, None, None]
    four = tl.arange(0, 4)[None, None, :, None]
    value = tl.arange(0, 8)[None, None, None, :]
    place = ((chunk * 8 + token) * 4 + four) * 8 + value
    token += (program % C.token_blocks).to(tl.int32) * 8
    column = (program // C.token_blocks).to(tl.int32) * 128 + four * 32 + chunk * 8 + value
    x = tl.load(x_ptr + (token * C.columns + column), (token < C.tokens) & (column < C.columns), 0.0)
    tl.store(out_ptr + program * 1024 + place, x)


@triton.jit
def mxfp4_tiles_added_kernel(
    parts_ptr, out_ptr, SPLITS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Some sums over all splits; every part is on its way before the first is added."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(parts_ptr + at, at < SIZE, 0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(parts_ptr + split * SIZE + at, at < SIZE, 0.0)
    tl.store(out_ptr + at, total, at < SIZE)


@triton.jit
def mxfp4_tiles_kernel(x_ptr, codes_ptr, scale_ptr, factor_ptr, out_ptr, C: tl.constexpr):
    """Some rows of the weight times all tokens, over one part of the steps.

    Axes of what is loaded: lane of the four that share a row, row of the eight, warp, then what a lane has for itself.
    """
    COLUMN_WARPS: tl.constexpr = C.warps // C.row_warps
    STRIDE: tl.constexpr = COLUMN_WARPS * C.splits
    ITERATIONS: tl.constexpr = (C.steps + STRIDE - 1) // STRIDE
    PART: tl.constexpr = 16 * C.row_parts
    # Neighbours share rows of the weight; programs far apart, as those of a core are, share the input.
    program = tl.program_id(0).to(tl.int64)
    split, block = program % C.splits, program // C.splits
    four = tl.arange(0, 4)[:, None, None, None, None]
    eight = tl.arange(0, 8)[None, :, None, None, None]
    warp = tl.arange(0, C.warps)[None, None, :, None, None]
    step = (split * COLUMN_WARPS).to(tl.int32) + warp % COLUMN_WARPS
    first_part = (block * C.row_warps + warp // COLUMN_WARPS) * C.row_parts

    half = tl.arange(0, 2 * C.row_parts)[None, None, None, :, None]
    part = first_part + half // 2
    word = tl.arange(0, 4)[None, None, None, None, :]
    place = (part % 2) * 256 + (half % 2) * 128 + eight * 16 + four * 4 + word
    place += (tl.minimum(part // 2, C.tiles - 1) * C.steps + step) * CODES_OF_STEP
    codes_ptr += tl.max_contiguous(place, [8, 4, 2, 1, 16]) if HINTED else place
    TILES: tl.constexpr = (C.row_parts + 1) // 2
    tile = tl.minimum(first_part // 2 + tl.arange(0, TILES)[None, None, None, :, None], C.tiles - 1)
    offset = (tile * C.steps + step) * SCALES_OF_STEP + eight * 4 + four
    # A lane has one scale of each tile; left to itself the compiler gives it four neighbours.
    scale_ptr += tl.max_contiguous(offset, [8, 4, 2, 1, 16] if HINTED else [1, 1, 1, 1, 1])
    at = _input_offsets(step, C)
    x_ptr += tl.max_contiguous(at, [16, 8, 4, 2, 1, 32]) if HINTED else at

    row = (block * C.row_warps + tl.arange(0, C.row_warps)[:, None]) * PART + tl.arange(0, PART)[None, :]
    factor = tl.load(factor_ptr + row, row < C.rows, 0.0)
    acc = tl.full([C.warps, PART, 8 * C.token_blocks], 0.0, tl.float32)
    # Codes are read once, and leave the caches first; half a tile's scales are other halves' too.
    next_codes = _load(codes_ptr, step, 0, CODES_OF_STEP, STRIDE, ITERATIONS, "evict_first", C)
    next_scale = _load(scale_ptr, step, 0, SCALES_OF_STEP, STRIDE, ITERATIONS, "", C)
    next_x = _load_input(x_ptr, step, 0, STRIDE, ITERATIONS, C)
    for i in tl.range(0, ITERATIONS, loop_unroll_factor=C.unroll):
        codes, scale = next_codes, next_scale
        next_codes = _load(codes_ptr, step, i + 1, CODES_OF_STEP, STRIDE, ITERATIONS, "evict_first", C)
        next_scale = _load(scale_ptr, step, i + 1, SCALES_OF_STEP, STRIDE, ITERATIONS, "", C)
        if C.input_ahead:
            x = next_x
            next_x = _load_input(x_ptr, step, i + 1, STRIDE, ITERATIONS, C)
        else:
            x = _load_input(x_ptr, step, i, STRIDE, ITERATIONS, C)
        values = _expand(codes, _scale_pairs(scale, first_part, C), C)
        # Pair j of a word meets the columns 8 j + 2 word of the lane's 32.
        x = tl.reshape(tl.permute(x, [0, 1, 2, 3, 5, 4]), [4, 8, C.warps, C.token_blocks, 8, 2, 2])
        even, odd = tl.split(x)
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
        acc = tl.dot(_weights(values[0], values[1], C), _inputs(x0, C), acc)
        acc = tl.dot(_weights(values[2], values[3], C), _inputs(x1, C), acc)
        acc = tl.dot(_weights(values[4], values[5], C), _inputs(x2, C), acc)
        acc = tl.dot(_weights(values[6], values[7], C), _inputs(x3, C), acc)

    total = tl.sum(tl.reshape(acc, [C.row_warps, COLUMN_WARPS, PART, 8 * C.token_blocks]), 1)
    token = tl.arange(0, 8 * C.token_blocks)
    total = total * factor[:, :, None]
    out_ptr += (split * C.tokens + token)[None, None, :] * C.rows + row[:, :, None]
    tl.store(out_ptr, total, mask=(token < C.tokens)[None, None, :] & (row < C.rows)[:, :, None])


@triton.jit
def _load(
    ptr,
    step,
    i,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    ITERATIONS: tl.constexpr,
    EVICTION: tl.constexpr,
    C: tl.constexpr,
):
    """Codes or scales of an iteration, 0 beyond the last step."""
    whole: tl.constexpr = C.steps == STRIDE * ITERATIONS
    inside = i < ITERATIONS if whole else i * STRIDE + step < C.steps
    return tl.load(ptr + i * (SIZE * STRIDE), mask=inside, other=0, eviction_policy=EVICTION)


@triton.jit
def _input_offsets(step, C: tl.constexpr):
    """Where the input of a step lies for each lane, `[4, 8, warps, token_blocks, 4, 8]`."""
    four = tl.arange(0, 4)[:, None, None, None, None, None]
    eight = tl.arange(0, 8)[None, :, None, None, None, None]
    token_block = tl.arange(0, C.token_blocks)[None, None, None, :, None, None]
    chunk = tl.arange(0, 4)[None, None, None, None, :, None]
    column = tl.arange(0, 8)[None, None, None, None, None, :]
    step = tl.expand_dims(step, 5)
    if C.input_laid_out:
        at = (((step * C.token_blocks + token_block) * 4 + chunk) * 32 + eight * 4 + four) * 8 + column
    else:
        # Tokens beyond the last are that one again, and not stored.
        token = tl.minimum(token_block * 8 + eight, C.tokens - 1)
        at = token * (C.steps * 128) + (step * 4 + four) * 32 + chunk * 8 + column
    return at


@triton.jit
def _load_input(ptr, step, i, STRIDE: tl.constexpr, ITERATIONS: tl.constexpr, C: tl.constexpr):
    SIZE: tl.constexpr = 128 * (8 * C.token_blocks if C.input_laid_out else 1)
    whole: tl.constexpr = C.steps == STRIDE * ITERATIONS
    if not whole:
        x = tl.load(ptr + i * (SIZE * STRIDE), mask=tl.expand_dims(i * STRIDE + step, 5) < C.steps, other=0.0)
    elif C.input_ahead:
        x = tl.load(ptr + i * (SIZE * STRIDE), mask=i < ITERATIONS, other=0.0)
    else:
        x = tl.load(ptr + i * (SIZE * STRIDE))
    return x


@triton.jit
def _scale_pairs(scale, first_part, C: tl.constexpr):
    """The bfloat16 scale of each word, twice in a register; a byte of `scale` is its exponent."""
    TILES: tl.constexpr = (C.row_parts + 1) // 2
    scale = tl.reshape(scale, [4, 8, C.warps, TILES])
    if C.row_parts == 1:
        # One half of the tile is this warp's.
        half = (
            tl.arange(0, 2)[None, None, None, :]
            + tl.expand_dims(tl.reshape(first_part, [1, 1, C.warps]) % 2, 3) * 2
        )
        byte = (scale >> (8 * half).to(tl.int32)) & 0xFF
    else:
        byte = (scale[:, :, :, :, None] >> (8 * tl.arange(0, 4)[None, None, None, None, :])) & 0xFF
    pair = tl.reshape(byte * 0x00800080, [4, 8, C.warps, 2 * C.row_parts])
    return tl.broadcast_to(pair[:, :, :, :, None], [4, 8, C.warps, 2 * C.row_parts, 4])


@triton.jit
def _expand(word, scale, C: tl.constexpr):
    """The eight values of each word in bfloat16, in the order of their pairs."""
    if C.expand == "":
        left_over = (((word >> 7) & 0x00D800D8) * 2081) & PATTERN
        unit = (scale << 16).to(tl.float32, bitcast=True)
        v0, v1 = _pair(word & PATTERN, unit)
        v2, v3 = _pair((word << 3) & PATTERN, unit)
        v4, v5 = _pair((word << 6) & PATTERN, unit)
        v6, v7 = _pair(left_over, unit)
        values = (v0, v1, v2, v3, v4, v5, v6, v7)
    else:
        values = tl.inline_asm_elementwise(
            C.expand,
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
            [word, scale],
            dtype=(tl.bfloat16,) * 8,
            is_pure=True,
            pack=1,
        )
    return values


@triton.jit
def _pair(bits, unit):
    """The values of both halves, whose bits are those of 2**-126 times the code."""
    return _value(bits << 16, unit), _value(bits & -65536, unit)


@triton.jit
def _value(bits, unit):
    """In float32, with factors that no step takes out of its range: `unit` already holds 2**126 of the scale."""
    magnitude = (bits >> 22) & 7
    half: tl.constexpr = 0x3F000000
    wide = tl.where(magnitude > 1, (magnitude << 22) + half, tl.where(magnitude == 1, half, 0))
    value = (wide | (bits & -0x80000000)).to(tl.float32, bitcast=True)
    return ((value * (unit * 2.0**-64)) * 2.0**-62).to(tl.bfloat16)


@triton.jit
def _weights(low, high, C: tl.constexpr):
    """A pair of each word as the matrix operand `[warps, rows, 32]`; each value is where its lane has it already."""
    tile = tl.reshape(tl.join(low, high), [4, 8, C.warps, C.row_parts, 2, 2, 2, 2])
    return tl.reshape(tl.permute(tile, [2, 3, 4, 1, 6, 0, 5, 7]), [C.warps, 16 * C.row_parts, 32])


@triton.jit
def _inputs(x, C: tl.constexpr):
    """The input of the same columns as `[warps, 32, tokens]`."""
    tile = tl.reshape(x, [4, 8, C.warps, C.token_blocks, 2, 2, 2])
    return tl.reshape(tl.permute(tile, [2, 5, 0, 4, 6, 3, 1]), [C.warps, 32, 8 * C.token_blocks])
