"""A linear layer whose weight is MXFP4, for few rows: every packed byte is read once and expanded in registers.

A program owns some rows of the weight and walks a span of their words of eight codes. Code j of a word w meets column
8 w + j of the input, which is handed over as eight tables of every eighth column, so that nothing is interleaved.
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

WORD = 8
DTYPES = ("bfloat16", "float16", "float32")
# The smallest side of a matrix instruction.
LEAST_ROWS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constants:
    """What one launch is compiled for."""

    tokens: int
    rows: int
    words: int
    groups: int
    block_tokens: int
    block_rows: int
    block_words: int
    # Words that one program walks.
    span: int
    # Instructions that expand two words with their scales, see `kernels/tuning/mxfp4.json`; empty for any device.
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
    table, words = _table(), packed.shape[1] // 4
    x = jnp.pad(x, ((0, 0), (0, words * WORD - x.shape[1]))).reshape(-1, words, WORD)
    blocks, tiles = cdiv(rows, table["block_rows"]), cdiv(words, table["block_words"])
    wanted = tuning.device().cores * table["programs_per_core"] // blocks
    span = cdiv(tiles, max(1, min(wanted, tiles)))
    splits = cdiv(tiles, span)
    constants = Constants(
        tokens=x.shape[0],
        rows=rows,
        words=words,
        groups=scale.shape[1],
        block_tokens=max(LEAST_ROWS, triton.next_power_of_2(x.shape[0])),
        block_rows=table["block_rows"],
        block_words=table["block_words"],
        span=span * table["block_words"],
        expand=table["expand"] if x.dtype == jnp.bfloat16 else "",
    )
    out = launch(
        mxfp4_matmul_kernel,
        [x.transpose(2, 0, 1), packed, scale],
        [jax.ShapeDtypeStruct((splits, x.shape[0], rows), jnp.float32)],
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
    return json.loads((importlib.resources.files(tuning) / "mxfp4.json").read_text())


@triton.jit
def mxfp4_matmul_kernel(x_ptr, packed_ptr, scale_ptr, out_ptr, C: tl.constexpr):
    """One block of weight rows times all tokens, over one span of the words."""
    NUM_BLOCKS: tl.constexpr = (C.rows + C.block_rows - 1) // C.block_rows
    program = tl.program_id(0).to(tl.int64)
    split, block = program // NUM_BLOCKS, program % NUM_BLOCKS
    row = block * C.block_rows + tl.arange(0, C.block_rows)  # [R]
    token = tl.arange(0, C.block_tokens).to(tl.int64)  # [T]
    live_row, live_token = row < C.rows, token < C.tokens
    word_ptr = packed_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + row[:, None] * C.words
    byte_ptr = scale_ptr + row[:, None] * C.groups
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    acc = tl.full([C.block_rows, C.block_tokens], 0.0, tl.float32)
    for start in range(0, C.span, C.block_words):
        place = split * C.span + start + tl.arange(0, C.block_words)  # [W]
        live = live_row[:, None] & (place < C.words)[None, :]
        word = tl.load(word_ptr + place[None, :], mask=live, other=0)  # [R, W]
        byte = tl.load(byte_ptr + (place // 4)[None, :], mask=live, other=127)  # [R, W]
        if C.expand == "":
            scale = _power_of_two(byte)
            for j in tl.static_range(8):
                weight = (_element(word >> (4 * j)) * scale).to(dtype)  # [R, W]
                acc = tl.dot(
                    weight, _columns(x_ptr, token, place, j, live_token, C), acc, input_precision="ieee"
                )
        else:
            weights = tl.inline_asm_elementwise(
                C.expand,
                "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r",
                [word, _power_of_two(byte).to(tl.bfloat16)],
                dtype=(tl.bfloat16,) * 8,
                is_pure=True,
                pack=2,
            )
            for j in tl.static_range(8):
                acc = tl.dot(weights[j], _columns(x_ptr, token, place, j, live_token, C), acc)
    out_at = out_ptr + (split * C.tokens + token)[None, :] * C.rows + row[:, None]
    tl.store(out_at, acc, mask=live_row[:, None] & live_token[None, :])


@triton.jit
def _columns(x_ptr, token, place, j: tl.constexpr, live_token, C: tl.constexpr):
    """Column j of each word of the input, [W, T]."""
    live = (place < C.words)[:, None] & live_token[None, :]
    return tl.load(x_ptr + (j * C.tokens + token)[None, :] * C.words + place[:, None], mask=live, other=0.0)


@triton.jit
def _element(word):
    """The lowest code of each word in float32."""
    magnitude = word & 7
    half: tl.constexpr = 0x3F000000
    bits = tl.where(magnitude > 1, (magnitude << 22) + half, tl.where(magnitude == 1, half, 0))
    return (bits | ((word & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def _power_of_two(byte):
    """2**(byte - 127) in float32, and NaN for 255."""
    wide = byte.to(tl.int32)
    bits = tl.where(wide == 0, 0x00400000, wide << 23)
    return tl.where(wide == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
