"""A block of query rows of one sequence and one KV head: where its rows are, and which keys they can see."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxattn.kernels._constants import AttentionConstants
from jaxattn.kernels.pallas.arithmetic import quotient, remainder
from jaxattn.kernels.pallas.memory import load
from jaxattn.plan import key_range

LARGEST_POSITION = 2**31 - 1


class Block(NamedTuple):
    """Rows are (query token, head of the group) pairs, token-major; positions within a sequence are int32."""

    sequence: Any
    kv_head: Any
    # First row of the sequence in the token buffer, and their number.
    q_start: Any
    q_len: Any
    # First query token of the block, counted within its sequence.
    first_token: Any
    # Position of the sequence's first row.
    context: Any
    # The keys that the block can see.
    start: Any
    stop: Any
    # Keys [bare_start, bare_stop), which every row sees.
    bare_start: Any
    bare_stop: Any
    # Of each row, [BM]: number in the token buffer and query head, int64; whether the row exists.
    row: Any
    head: Any
    live: Any
    # Of each row, [BM]: the last key that it can see, its own position, its ALiBi slope.
    limit: Any
    position: Any
    slope: Any


class Unit(NamedTuple):
    """What the line of work says of the unit that a program has come to; all int64."""

    block: Any
    kv_head: Any
    # Places of the line: where the unit begins, how many it has, and where its block ends.
    start: Any
    places: Any
    block_end: Any


def find_unit(tile_start, block, position, lane, C: AttentionConstants) -> Unit:
    """Find the unit that a position on the line belongs to, in the program of a lane of the heads abreast."""
    if C.uncut:
        # Each block is one place of the line.
        return Unit(block, lane, block, jnp.ones_like(block), block + 1)
    block_start = load(tile_start, block)
    block_end = load(tile_start, block + 1)
    places = block_end - block_start
    if C.heads_in_line == 1:
        return Unit(block, lane, block_start, places, block_end)
    places = quotient(places, C.heads_in_line)
    passed = quotient(position - block_start, jnp.maximum(places, 1))
    return Unit(block, lane + passed * C.heads_abreast, block_start + passed * places, places, block_end)


def read_block(
    unit: Unit,
    block_sequence,
    block_index,
    cu_seqlens_q,
    seqused_k,
    depths,
    alibi_slopes,
    C: AttentionConstants,
) -> tuple[Block, Any]:
    """Describe the rows of a unit; the second result is the first of them among those of its sequence."""
    sequence = load(block_sequence, unit.block)
    first_row = load(block_index, unit.block) * C.rows_in_block
    q_start = load(cu_seqlens_q, sequence)
    q_len = load(cu_seqlens_q, sequence + 1) - q_start
    used = load(seqused_k, sequence)
    context = used - q_len
    first_token = quotient(first_row, C.group)
    last_token = jnp.minimum(quotient(first_row + (C.rows_in_block - 1), C.group), q_len - 1)
    start, stop = key_range(
        context,
        jnp.minimum(used, C.capacity),
        first_token,
        last_token,
        causal=C.causal,
        tree=C.tree_words > 0,
        sliding_window=C.window or None,
    )

    # A length beyond the table's row, which is an error that debug.py reports, must not wrap either.
    context = jnp.minimum(context, LARGEST_POSITION - q_len).astype(jnp.int32)
    start, stop = start.astype(jnp.int32), stop.astype(jnp.int32)
    packed = first_row + jnp.arange(C.block_rows, dtype=jnp.int64)  # [BM]
    token = quotient(packed, C.group)
    live = token < q_len
    if C.rows_in_block < C.block_rows:
        live = live & (jnp.arange(C.block_rows) < C.rows_in_block)
    row = q_start + jnp.minimum(token, q_len - 1)
    head = unit.kv_head * C.group + remainder(packed, C.group)
    token = token.astype(jnp.int32)
    position = context + token
    last_seen = position
    if C.tree_words > 0:
        position = context + load(depths, row)
    if C.path_keys:
        last_seen = position
    limit = jnp.minimum(last_seen, stop - 1) if C.causal else jnp.broadcast_to(stop - 1, token.shape)
    bare_start, bare_stop = start, stop
    if C.tree_words > 0:
        bare_stop = jnp.minimum(stop, context)
    elif C.causal:
        bare_stop = jnp.minimum(stop, context + first_token.astype(jnp.int32) + 1)
    if C.window > 0:
        bare_start = jnp.maximum(start, context + last_token.astype(jnp.int32) - (C.window - 1))
    slope = load(alibi_slopes, head, live) if C.alibi else jnp.zeros(C.block_rows, jnp.float32)
    block = Block(
        sequence=sequence,
        kv_head=unit.kv_head,
        q_start=q_start,
        q_len=q_len.astype(jnp.int32),
        first_token=first_token,
        context=context,
        start=start,
        stop=stop,
        bare_start=bare_start,
        bare_stop=bare_stop,
        row=row,
        head=head,
        live=live,
        limit=jnp.where(live, limit, -1),
        position=position,
        slope=slope,
    )
    return block, first_row
