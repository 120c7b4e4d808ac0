"""Paged attention in plain loops and float64, straight from the definition; it shares nothing with the library."""

import numpy as np


def depths_of(ancestors) -> list[int]:
    return [max(sum(int(word).bit_count() for word in row) - 1, 0) for row in ancestors]


def visible_keys(
    *, row, q_len, seqused_k, causal=True, sliding_window=None, bits=None, depths=None
) -> list[tuple[int, int]]:
    """List `(key, distance)` of the keys that query row `row` of a sequence sees; distance is in positions."""
    context = seqused_k - q_len
    index = context + row
    position = index if bits is None else context + depths[row]
    seen = []
    for key in range(seqused_k):
        node = key - context
        if causal and key > index:
            continue
        if bits is not None and node >= 0 and not int(bits[row][node // 64]) >> (node % 64) & 1:
            continue
        key_position = key if bits is None or node < 0 else context + depths[node]
        distance = position - key_position
        if sliding_window is not None and distance >= sliding_window:
            continue
        seen.append((key, distance))
    return seen


def attention(
    q,
    k_cache,
    v_cache,
    page_table,
    cu_seqlens_q,
    seqused_k,
    *,
    softmax_scale=None,
    causal=True,
    sliding_window=None,
    softcap=None,
    sinks=None,
    alibi_slopes=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    output_scale=None,
    ancestors=None,
):
    """Return `out [T, H, Dv]` and `lse [T, H]` in float64; the output is not rounded to any storage format."""
    tokens, heads, width = q.shape
    pages, page_size, kv_heads, _ = k_cache.shape
    scale = width**-0.5 if softmax_scale is None else softmax_scale
    out = np.zeros((tokens, heads, v_cache.shape[3]))
    lse = np.full((tokens, heads), -np.inf)

    def descale(value, kv_head):
        return (
            1.0 if value is None else float(np.broadcast_to(np.asarray(value, np.float64), kv_heads)[kv_head])
        )

    for sequence in range(len(seqused_k)):
        first, stop = int(cu_seqlens_q[sequence]), int(cu_seqlens_q[sequence + 1])
        bits = None if ancestors is None else ancestors[first:stop]
        depths = None if ancestors is None else depths_of(bits)
        for row in range(stop - first):
            keys, distances = [], []
            for key, distance in visible_keys(
                row=row,
                q_len=stop - first,
                seqused_k=int(seqused_k[sequence]),
                causal=causal,
                sliding_window=sliding_window,
                bits=bits,
                depths=depths,
            ):
                if key // page_size >= page_table.shape[1]:
                    continue
                page = int(page_table[sequence, key // page_size])
                if 0 <= page < pages:
                    keys.append((page, key % page_size))
                    distances.append(distance)
            if not keys:
                continue
            page, offset = np.array(keys).T
            for head in range(heads):
                kv_head = head // (heads // kv_heads)
                k = k_cache[page, offset, kv_head].astype(np.float64) * descale(k_descale, kv_head)
                v = v_cache[page, offset, kv_head].astype(np.float64) * descale(v_descale, kv_head)
                query = q[first + row, head].astype(np.float64) * descale(q_descale, kv_head)
                score = scale * (k @ query)
                if softcap is not None:
                    score = softcap * np.tanh(score / softcap)
                if alibi_slopes is not None:
                    score = score - float(alibi_slopes[head]) * np.abs(np.array(distances))
                logits = score if sinks is None else np.append(score, float(sinks[head]))
                largest = logits.max()
                total = np.exp(logits - largest).sum()
                lse[first + row, head] = largest + np.log(total)
                value = np.exp(score - largest) @ v / total
                out[first + row, head] = value if output_scale is None else value / float(output_scale)
    return out, lse
