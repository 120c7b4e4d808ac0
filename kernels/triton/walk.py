"""The walk of a block of query rows over tiles of keys: the online softmax."""

import triton
import triton.language as tl

from jaxattn.kernels.triton.formats import decode, decode_pair
from jaxattn.kernels.triton.keys import key_places, known_keys, page_ids, page_starts
from jaxattn.kernels.triton.scores import LOG2E, constant_rows, key_positions, masked, modified, weights


@triton.jit
def fresh_state(C: tl.constexpr):
    """Softmax state of no keys.

    acc [BM, DV] is the weighted sum of values; peak [BM] is what the weights are relative to, in units of log2;
    total [BM] is the sum of weights.
    """
    acc = tl.full([C.block_rows, C.padded_value_dim], 0.0, tl.float32)
    peak = tl.full([C.block_rows], float("-inf"), tl.float32)
    total = tl.full([C.block_rows], 0.0, tl.float32)
    return acc, peak, total


@triton.jit
def turn(anything, C: tl.constexpr, BEGINS: tl.constexpr):
    """Begin a turn at the matrix unit, or leave it to the other half of the program; `anything` is an int32 at hand."""
    if C.begin_turn != "":
        instructions: tl.constexpr = C.begin_turn if BEGINS else C.end_turn
        tl.inline_asm_elementwise(instructions + " mov.b32 $0, $1;", "=r,r", [anything], tl.int32, False, 1)


@triton.jit
def key_products(q, k_ptr, page, tile, C: tl.constexpr, CHECKED: tl.constexpr):
    """Products of the query rows with one tile of keys, whose pages are given."""
    if C.k_unpack != "":
        # Four neighbouring columns come as two 16-bit elements. Converted in pairs as they lie, columns 0 and 1 of
        # each four make one tile and columns 2 and 3 the other; `query_tiles` parts q alike.
        column = tl.arange(0, C.product_dim)
        pairs_ptr = k_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
        width: tl.constexpr = C.num_kv_heads * C.head_dim // 2
        k_at = key_places(pairs_ptr, page_starts(page, C, CHECKED), tile, width, column, C)
        if C.padded_dim == C.head_dim:
            pair = tl.load(k_at)
        else:
            pair = tl.load(k_at, mask=(column < C.head_dim // 2)[None, :], other=0)
        first, second = tl.inline_asm_elementwise(
            C.k_unpack, "=r,=r,r", [pair], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )  # [TILE, D / 2]
        score = tl.dot(q[0], tl.trans(first), input_precision=C.precision)
        score = tl.dot(q[1], tl.trans(second), score, input_precision=C.precision)
    else:
        column = tl.arange(0, C.padded_dim)
        width: tl.constexpr = C.num_kv_heads * C.head_dim
        k_at = key_places(k_ptr, page_starts(page, C, CHECKED), tile, width, column, C)
        if C.padded_dim == C.head_dim:
            k = tl.load(k_at)
        else:
            k = tl.load(k_at, mask=(column < C.head_dim)[None, :], other=0.0)
        k = decode(k, C.k_format, C.compute)  # [TILE, D]
        turn(tile, C, True)
        score = tl.dot(q[0], tl.trans(k), input_precision=C.precision)
        turn(tile, C, False)
    return score  # [BM, TILE]


@triton.jit
def first_tile(first, bare_first, bare, C: tl.constexpr):
    """The tile that a walk from `first` on begins with."""
    return first if C.one_loop else tl.where(first >= bare_first, first + bare, first)


@triton.jit
def walk(
    state,
    q,
    scale,
    rows,
    span,
    tree,
    pointers,
    page,
    first,
    last,
    bare_first,
    bare,
    C: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Fold tiles [first, last) into a softmax state; `page` holds the page ids of the first.

    Of the `bare` tiles from `bare_first` every row must see every key, and their pages must lie in the pool. They are
    jumped over, or with `C.one_loop` walked without masks. Without MASKED all tiles must be such.
    """
    acc, peak, total = state
    start, stop, context, _ = span
    table_ptr, k_ptr, v_ptr = pointers
    value_column = tl.arange(0, C.padded_value_dim)
    unit = scale * LOG2E
    if C.modified:
        unit = constant_rows(LOG2E, C)
    acc_odd = total
    v_width: tl.constexpr = C.num_kv_heads * C.value_dim // (2 if C.paired_values else 1)
    if C.paired_values:
        # Columns 2j and 2j + 1 of V are loaded as one 16-bit element, and summed apart.
        value_column = tl.arange(0, C.padded_value_dim // 2)
        v_ptr = v_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
        acc, acc_odd = unzipped(acc, C)

    gap = bare * 0 if C.one_loop else bare
    # Beside a loop of their own for bare tiles few are left, for which a long pipeline is not worth its filling.
    short: tl.constexpr = MASKED and C.bare_tiles and not C.one_loop
    BARE_IDS: tl.constexpr = C.bare_ids and not MASKED and not C.few_pages
    STAGES: tl.constexpr = min(C.stages, 2) if short else C.stages
    for index in tl.range(first, last - gap, num_stages=STAGES):
        tile = tl.where(index >= bare_first, index + gap, index)
        next_tile = tl.where(index + 1 >= bare_first, index + 1 + gap, index + 1)
        key = tile * C.tile + tl.arange(0, C.tile)  # [TILE]
        known = known_keys(page, C)
        current = page
        # The ids of the next tile, so that its K and V can be fetched ahead without waiting for them.
        if BARE_IDS:
            next_tile = tl.minimum(next_tile, last - 1)
        page = page_ids(table_ptr, next_tile, span, C, BARE_IDS)

        score = key_products(q, k_ptr, current, tile, C, not MASKED)
        key_position = key
        if MASKED:
            key_position = key_positions(key, context, tree, C)
        if C.modified:
            score = modified(score * scale[:, None], rows, key_position, C)
        if MASKED:
            if C.one_loop:
                if (tile < bare_first) | (tile >= bare_first + bare):
                    score = masked(score, rows, key, key_position, known, context, tree, C)
            else:
                score = masked(score, rows, key, key_position, known, context, tree, C)
        weight, peak, decay = weights(score, peak, unit, C)
        total = total * decay + tl.sum(weight, 1)
        acc = acc * decay[:, None]

        # A weight of 0 does not silence a NaN, so the rows of dead keys are zeroed as well.
        live = (key < stop) & known
        if C.window > 0:
            live = live & (key >= start)
        v_at = key_places(v_ptr, page_starts(current, C, not MASKED), tile, v_width, value_column, C)
        if C.paired_values:
            pair = load_values(v_at, live, value_column < C.value_dim // 2, C, MASKED)
            if C.v_unpack != "":
                even, odd = tl.inline_asm_elementwise(
                    C.v_unpack, "=r,=r,r", [pair], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
                )  # [TILE, DV / 2]
            else:
                even, odd = decode_pair(pair, C.v_format, C.v_dtype, C.compute)
            acc = tl.dot(weight.to(C.compute), even, acc, input_precision=C.precision)
            acc_odd = tl.dot(weight.to(C.compute), odd, acc_odd * decay[:, None], input_precision=C.precision)
        else:
            v = load_values(v_at, live, value_column < C.value_dim, C, MASKED)
            v = decode(v, C.v_format, C.compute)  # [TILE, DV]
            acc = tl.dot(weight.to(C.compute), v, acc, input_precision=C.precision)
    if C.paired_values:
        acc = tl.interleave(acc, acc_odd)
    return acc, peak, total


@triton.jit
def load_values(at, live, inside, C: tl.constexpr, MASKED: tl.constexpr):
    """Load a V tile; rows that are not live are 0 where MASKED."""
    if MASKED:
        v = tl.load(at, mask=live[:, None] & inside[None, :], other=0.0)
    elif C.padded_value_dim == C.value_dim:
        v = tl.load(at)
    else:
        v = tl.load(at, mask=inside[None, :], other=0.0)
    return v


@triton.jit
def unzipped(acc, C: tl.constexpr):
    """Part even and odd columns."""
    return tl.split(tl.reshape(acc, [C.block_rows, C.padded_value_dim // 2, 2]))
