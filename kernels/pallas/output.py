"""From softmax states to output rows: sinks, descales, saturating casts, and the rows that belong to nobody."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxattn.kernels._constants import AttentionConstants
from jaxattn.kernels.pallas.arithmetic import quotient
from jaxattn.kernels.pallas.formats import encode
from jaxattn.kernels.pallas.memory import load, store, store_rows
from jaxattn.kernels.pallas.scores import LOG2E
from jaxattn.kernels.pallas.walk import Softmax

_FILLED_AT_ONCE = 1024


def store_output(
    state: Softmax,
    row,  # [R] int64, row of the token buffer
    head,  # [R], query head
    live,  # [R]
    kv_head,
    sinks,
    v_descale,
    output_scale,
    out_ref,
    lse_ref,
    C: AttentionConstants,
):
    """Normalise by the weights and the sink, scale, cast and store; a row that saw no key gets 0 and -inf."""
    acc, peak, total = state
    seen = peak != -jnp.inf
    base = jnp.where(seen, peak, 0.0)
    if C.sinks:
        sink = load(sinks, head, live) * LOG2E
        joint = jnp.maximum(base, sink)
        shrink = lax.exp2(base - joint)
        acc = acc * shrink[:, None]
        total = total * shrink + lax.exp2(sink - joint)
        base = joint
    divisor = jnp.where(seen, total, 1.0)
    out = acc / divisor[:, None]
    if C.v_descale:
        out = out * load(v_descale, kv_head)
    if C.output_scale:
        out = out / load(output_scale, np.int64(0))
    out = encode(jnp.where(seen[:, None], out, 0.0), C.out_format, out_ref.dtype)
    lse = jnp.where(seen, base / LOG2E + jnp.log(divisor), -jnp.inf)
    at = row * C.num_heads + head
    store_rows(out_ref, at, C.value_dim, out, live)
    store(lse_ref, at, lse, live)


def fill_unowned_rows(cu_seqlens_q, out_ref, lse_ref, program, C: AttentionConstants):
    """Write 0 and -inf to the rows of the token buffer before the first sequence and behind the last."""
    before = load(cu_seqlens_q, np.int64(0))
    end = load(cu_seqlens_q, np.int64(C.num_sequences))
    lane = jnp.arange(_FILLED_AT_ONCE, dtype=jnp.int64)
    stride = C.programs * _FILLED_AT_ONCE

    def fill(ref, value: float, width: int, code: int):
        unowned = (before + C.num_tokens - end) * width
        first = program * _FILLED_AT_ONCE
        value = encode(jnp.full((_FILLED_AT_ONCE,), value, jnp.float32), code, ref.dtype)

        def step(turn, carry):
            at = first + turn * stride + lane
            live = at < unowned
            at = jnp.where(at < before * width, at, at + (end - before) * width)
            store(ref, at, value, live)
            return carry

        turns = quotient(jnp.maximum(unowned - first, 0) + (stride - 1), stride)
        lax.fori_loop(jnp.int64(0), turns, step, ())

    fill(out_ref, 0.0, C.num_heads * C.value_dim, C.out_format)
    fill(lse_ref, -jnp.inf, C.num_heads, 0)
