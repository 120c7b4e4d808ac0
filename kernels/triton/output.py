"""From softmax states to output rows: sinks, descales, saturating casts, and the rows that belong to nobody."""

import triton
import triton.language as tl

from jaxattn.kernels.triton.formats import encode, stored_pointer
from jaxattn.kernels.triton.scores import LOG2E


@triton.jit
def store_rows(
    acc,  # [R, DV], sum of weights times values
    peak,  # [R], log2 of what the weights are relative to; -inf where no key was seen
    total,  # [R], sum of weights
    token,  # [R] int64, row of the token buffer
    head,  # [R], query head
    live,  # [R]
    kv_head,
    scalars,
    outputs,
    C: tl.constexpr,
):
    """Normalise by the weights and the sink, scale, cast and store; a row that saw no key gets 0 and -inf."""
    sinks_ptr, v_descale_ptr, output_scale_ptr = scalars
    out_ptr, lse_ptr = outputs
    seen = peak != float("-inf")
    base = tl.where(seen, peak, 0.0)
    if C.sinks:
        sink = tl.load(sinks_ptr + head, mask=live, other=0.0) * LOG2E  # [R]
        joint = tl.maximum(base, sink)
        shrink = tl.exp2(base - joint)
        acc = acc * shrink[:, None]
        total = total * shrink + tl.exp2(sink - joint)
        base = joint
    divisor = tl.where(seen, total, 1.0)
    out = acc / divisor[:, None]
    if C.v_descale:
        out = out * tl.load(v_descale_ptr + kv_head)
    if C.output_scale:
        out = out / tl.load(output_scale_ptr)
    out = tl.where(seen[:, None], out, 0.0)
    lse = tl.where(seen, (base + tl.log2(divisor)) / LOG2E, float("-inf"))

    column = tl.arange(0, C.padded_value_dim)
    row = token * C.num_heads + head
    at = stored_pointer(out_ptr, C.out_format) + row[:, None] * C.value_dim + column[None, :]
    mask = live[:, None] & (column < C.value_dim)[None, :]
    tl.store(at, encode(out, C.out_format, C.out_dtype), mask=mask)
    tl.store(lse_ptr + row, lse, mask=live)


@triton.jit
def fill_unowned_rows(cu_seqlens_q_ptr, out_ptr, lse_ptr, program, C: tl.constexpr):
    """Write 0 and -inf to the rows of the token buffer before the first sequence and behind the last."""
    BLOCK: tl.constexpr = 1024
    before = tl.load(cu_seqlens_q_ptr)
    end = tl.load(cu_seqlens_q_ptr + C.num_sequences)
    lane = tl.arange(0, BLOCK)
    width: tl.constexpr = C.num_heads * C.value_dim
    bits_ptr = stored_pointer(out_ptr, C.out_format)
    zero = encode(tl.full([BLOCK], 0.0, tl.float32), C.out_format, C.out_dtype)
    unowned = before + C.num_tokens - end
    for first in range(program * BLOCK, unowned * width, C.programs * BLOCK):
        at = first + lane
        at = tl.where(at < before * width, at, at + (end - before) * width)
        tl.store(bits_ptr + at, zero, mask=at < C.num_tokens * width)
    minus_infinity = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in range(program * BLOCK, unowned * C.num_heads, C.programs * BLOCK):
        at = first + lane
        at = tl.where(at < before * C.num_heads, at, at + (end - before) * C.num_heads)
        tl.store(lse_ptr + at, minus_infinity, mask=at < C.num_tokens * C.num_heads)
