"""A linear layer whose weight is MXFP4, for few rows: every packed byte is read once and expanded in registers.

A program owns some rows of the weight and walks a span of their quads, 16-bit units of four codes. Code j of a quad q
meets column 4 q + j of the input, which is handed over as four tables of every fourth column, so that a tile of quads
becomes four tiles of weights in place, and none is interleaved.
"""

import dataclasses
import functools
import importlib.resources
import json

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float, Float32, UInt8

from jaxattn.errors import UnsupportedError
from jaxattn.index64 import cdiv
from jaxattn.kernels import tuning
from jaxattn.kernels.triton.launch import launch

# Codes of a quad, and quads of a group that shares a scale.
QUAD, QUADS_IN_GROUP = 4, tl.constexpr(8)
DTYPES = ("bfloat16", "float16", "float32")
# The smallest side of a matrix instruction.
LEAST_TOKENS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constants:
    """What one launch is compiled for."""

    tokens: int
    rows: int
    # Quads and scales of a row of the arrays, which may be longer than the weight's.
    quads: int
    groups: int
    block_tokens: int
    block_rows: int
    block_quads: int
    # Quads that one program walks, and whether all of them exist.
    span: int
    whole: bool
    # Instructions that expand two quads with their scales, see `kernels/tuning/mxfp4.json`; empty for any device.
    expand: str


def supports(x: Float[Array, "tokens columns"], packed: UInt8[Array, "padded_rows half"]) -> str | None:
    """The reason why `run` cannot multiply these, or None."""
    if x.dtype.name not in DTYPES:
        return f"x: expected one of {', '.join(DTYPES)}, got {x.dtype}"
    if packed.ndim != 2 or packed.shape[1] % 4:
        return f"packed: expected rows of whole 4-byte words, got shape {list(packed.shape)}"
    limit = _table()["most_tokens"]
    if x.shape[0] > limit:
        return (
            f"x: expected at most {limit} rows, more are served better by dequantised tiles, got {x.shape[0]}"
        )
    return None


def run(
    x: Float[Array, "tokens columns"],
    packed: UInt8[Array, "padded_rows half"],
    scale: UInt8[Array, "padded_rows groups"],
    rows: int,
) -> Float32[Array, "tokens rows"]:
    """`x @ weight.T` of the first `rows` rows of the weight, in float32 sums.

    Raises:
        UnsupportedError: `supports` gives a reason.
    """
    if reason := supports(x, packed):
        raise UnsupportedError(f"implementation 'triton': {reason}")
    tokens, table, quads = len(x), _table(), 2 * packed.shape[1] // QUAD
    blocks, tiles = cdiv(rows, table["block_rows"]), cdiv(quads, table["block_quads"])
    wanted = tuning.device().cores * table["programs_per_core"] // blocks
    span = cdiv(tiles, max(1, min(wanted, tiles)))
    splits = cdiv(tiles, span)
    constants = Constants(
        tokens=tokens,
        rows=rows,
        quads=quads,
        groups=scale.shape[1],
        block_tokens=max(LEAST_TOKENS, triton.next_power_of_2(tokens)),
        block_rows=table["block_rows"],
        block_quads=table["block_quads"],
        span=span * table["block_quads"],
        whole=splits * span * table["block_quads"] == quads,
        expand="\n".join(table["expand"]) if x.dtype == jnp.bfloat16 else "",
    )
    x = jnp.pad(x, ((0, 0), (0, quads * QUAD - x.shape[1]))).reshape(-1, quads, QUAD)
    out = launch(
        mxfp4_matmul_kernel,
        [x.transpose(2, 0, 1), packed, scale],
        [jax.ShapeDtypeStruct((splits, tokens, rows), jnp.float32)],
        grid=blocks * splits,
        num_warps=table["warps"],
        num_stages=table["stages"],
        C=constants,
    )[0]
    return out.sum(axis=0) if splits > 1 else out[0]


def _table() -> dict:
    tables = _tables()
    return tables["default"] | tables.get(tuning.device().architecture, {})


@functools.cache
def _tables() -> dict[str, dict]:
    """Settings of each architecture.

    `expand` shifts the three bits of a code to where the lowest bits of a bfloat16's exponent and the highest of its
    mantissa are, which makes it 2**-126 times its value, and multiplies by 2**126 and by the scale.
    """
    return json.loads((importlib.resources.files(tuning) / "mxfp4.json").read_text())


@triton.jit
def mxfp4_matmul_kernel(x_ptr, packed_ptr, scale_ptr, out_ptr, C: tl.constexpr):
    """One block of weight rows times all tokens, over one span of the quads."""
    NUM_BLOCKS: tl.constexpr = (C.rows + C.block_rows - 1) // C.block_rows
    program = tl.program_id(0).to(tl.int64)
    split, block = program // NUM_BLOCKS, program % NUM_BLOCKS
    row = block * C.block_rows + tl.arange(0, C.block_rows)  # [R]
    token = tl.arange(0, C.block_tokens).to(tl.int64)  # [T]
    # Rows and tokens beyond the last are that one again, and not stored.
    stored_row, stored_token = tl.minimum(row, C.rows - 1), tl.minimum(token, C.tokens - 1)
    quad_ptr = packed_ptr.to(tl.pointer_type(tl.int16), bitcast=True) + stored_row[:, None] * C.quads
    byte_ptr = scale_ptr + stored_row[:, None] * C.groups
    x_ptr += stored_token[:, None] * C.quads
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    first = (split * C.span).to(tl.int32)
    acc = tl.full([C.block_tokens, C.block_rows], 0.0, tl.float32)
    next_byte = _scales(byte_ptr, first, C)
    for start in range(first, first + C.span, C.block_quads):
        # Bytes are too small to be copied ahead of their use by the compiler.
        byte = next_byte
        next_byte = _scales(byte_ptr, start + C.block_quads, C)
        quad = start + tl.arange(0, C.block_quads)  # [Q]
        codes = _load(quad_ptr, quad, C)  # [R, Q]
        if C.expand == "":
            scale = _of_quads(_power_of_two(byte), C).to(tl.float32)
            for j in tl.static_range(4):
                x = _load(x_ptr + j * C.tokens * C.quads, quad, C)  # [T, Q]
                weight = (_element(codes.to(tl.int32) >> (4 * j)) * scale).to(dtype)  # [R, Q]
                acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
        else:
            weights = tl.inline_asm_elementwise(
                C.expand,
                "=&r,=&r,=&r,=&r,r,r",
                [codes, _of_quads(_power_of_two(byte), C)],
                dtype=(tl.bfloat16,) * 4,
                is_pure=True,
                pack=2,
            )
            for j in tl.static_range(4):
                x = _load(x_ptr + j * C.tokens * C.quads, quad, C)  # [T, Q]
                acc = tl.dot(x, tl.trans(weights[j]), acc)
    out_at = out_ptr + (split * C.tokens + token)[:, None] * C.rows + row[None, :]
    tl.store(out_at, acc, mask=(token < C.tokens)[:, None] & (row < C.rows)[None, :])


@triton.jit
def _scales(byte_ptr, first, C: tl.constexpr):
    """The scales of a tile of quads, [R, Q / 8] bytes."""
    group = first // QUADS_IN_GROUP + tl.arange(0, C.block_quads // QUADS_IN_GROUP)
    return tl.load(byte_ptr + group[None, :], (group < C.groups)[None, :], 127)


@triton.jit
def _of_quads(scale, C: tl.constexpr):
    """The scale of each quad, [R, Q]."""
    groups: tl.constexpr = C.block_quads // QUADS_IN_GROUP
    scale = tl.broadcast_to(scale[:, :, None], [C.block_rows, groups, QUADS_IN_GROUP])
    return tl.reshape(scale, [C.block_rows, C.block_quads])


@triton.jit
def _load(ptr, quad, C: tl.constexpr):
    """Load what belongs to some quads of each row, 0 beyond the last."""
    if C.whole:
        tile = tl.load(ptr + quad[None, :])
    else:
        tile = tl.load(ptr + quad[None, :], mask=(quad < C.quads)[None, :], other=0)
    return tile


@triton.jit
def _element(word):
    """The lowest code of each word in float32."""
    magnitude = word & 7
    half: tl.constexpr = 0x3F000000
    bits = tl.where(magnitude > 1, (magnitude << 22) + half, tl.where(magnitude == 1, half, 0))
    return (bits | ((word & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def _power_of_two(byte):
    """2**(byte - 127) in bfloat16, and NaN for 255."""
    wide = byte.to(tl.int16)
    bits = tl.where(wide == 0, 0x0040, wide << 7)
    return tl.where(wide == 255, 0x7FC0, bits).to(tl.int16).to(tl.bfloat16, bitcast=True)
