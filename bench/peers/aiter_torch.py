"""AITER's split-KV Triton kernel under torch, in processes of its own: `python -m bench.peers.aiter_torch NAME ...`."""

import functools
import importlib
import math
from collections.abc import Iterator

from bench.peers import torch_process
from bench.peers.torch_process import Inputs, Setting
from bench.shapes import Shape

KERNELS = "aiter.ops.triton._triton_kernels.attention.unified_attention"
# tile, warps, stages; each with few segments and with as many as AITER takes for a full device
SETTINGS = ((16, 2, 2), (64, 4, 2), (64, 4, 3))


def unavailable(shape: Shape) -> str | None:
    """Why the kernel cannot run `shape`."""
    return torch_process.unavailable(KERNELS) or unsupported(shape)


def unsupported(shape: Shape) -> str | None:
    """Why it cannot run `shape` on any device."""
    if (
        shape.kind == "prefill"
        or shape.kv_dtype != "bfloat16"
        or shape.window
        or shape.sinks
        or shape.branches
    ):
        return "compared for decode and verify in bfloat16, without windows, sinks and draft trees"
    return None


def measure(names: list[str]) -> dict[str, dict]:
    """The rows of the named shapes."""
    return torch_process.measure(__name__, names)


def settings(inputs: Inputs) -> Iterator[Setting]:
    """Each tile with few segments and with many."""
    import torch
    import triton

    shape = inputs.shape
    block_m = max(16, triton.next_power_of_2(shape.num_heads // shape.num_kv_heads))
    block_q = block_m // (shape.num_heads // shape.num_kv_heads)
    num_seqs = len(shape.contexts)
    blocks = num_seqs if shape.q_len == 1 else len(inputs.q) // block_q + num_seqs
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    counts = {
        triton.next_power_of_2(max(1, min(128, math.ceil(f * sms / (blocks * shape.num_kv_heads)))))
        for f in (4, 16)
    }
    for tile, warps, stages in SETTINGS:
        for segments in sorted(counts):
            yield Setting(
                f"tile={tile} warps={warps} stages={stages} segments={segments}",
                functools.partial(_prepare, inputs, tile, warps, stages, segments, block_m, block_q, blocks),
            )


def _prepare(inputs: Inputs, tile, warps, stages, segments, block_m, block_q, blocks):
    import torch

    kernels = importlib.import_module(KERNELS)
    shape, q, kc, vc, out = inputs.shape, inputs.q, inputs.k_cache, inputs.v_cache, inputs.out
    p, h, k, d = shape.page_size, shape.num_heads, shape.num_kv_heads, shape.head_dim
    s_count = len(shape.contexts)
    part = torch.empty(len(q), h, segments, d, device=q.device, dtype=torch.float32)
    top, total = (torch.empty(len(q), h, segments, device=q.device, dtype=torch.float32) for _ in range(2))
    strides = {f"stride_{n}_cache_{i}": t.stride(i) for n, t in (("k", kc), ("v", vc)) for i in range(4)}

    def call(i):
        table = inputs.tables[i]
        kernels.kernel_unified_attention_3d[(blocks, k, segments)](
            segm_output_ptr=part, segm_max_ptr=top, segm_expsum_ptr=total, query_ptr=q, key_cache_ptr=kc,
            value_cache_ptr=vc, sink_ptr=None, block_tables_ptr=table, seq_lens_ptr=inputs.lengths,
            alibi_slopes_ptr=None, qq_bias_ptr=None, scale=1 / math.sqrt(d), q_descale_ptr=None, k_descale_ptr=None,
            v_descale_ptr=None, out_scale_ptr=None, softcap=0.0, num_query_heads=h, num_queries_per_kv=h // k,
            block_table_stride=table.stride(0), query_stride_0=q.stride(0), query_stride_1=q.stride(1),
            qq_bias_stride_0=0, BLOCK_SIZE=p, TILE_SIZE=tile, HEAD_SIZE=d, HEAD_SIZE_PADDED=d,
            USE_ALIBI_SLOPES=False, USE_QQ_BIAS=False, USE_SOFTCAP=False, USE_SINKS=False, SLIDING_WINDOW=0,
            query_start_len_ptr=inputs.starts, BLOCK_Q=block_q, num_seqs=s_count, BLOCK_M=block_m, num_warps=warps,
            waves_per_eu=2, num_stages=stages, NUM_SEGMENTS_PER_SEQ=segments, ALL_DECODE=shape.q_len == 1,
            K_WIDTH=8, **strides,
        )  # fmt: skip
        kernels.reduce_segments[(len(q), h)](
            output_ptr=out, segm_output_ptr=part, segm_max_ptr=top, segm_expsum_ptr=total,
            seq_lens_ptr=inputs.lengths, num_seqs=s_count, num_query_heads=h, out_scale_ptr=None,
            output_stride_0=out.stride(0), output_stride_1=out.stride(1), block_table_stride=table.stride(0),
            TILE_SIZE=tile, HEAD_SIZE=d, HEAD_SIZE_PADDED=d, query_start_len_ptr=inputs.starts, BLOCK_Q=block_q,
            NUM_SEGMENTS_PER_SEQ=segments, num_warps=2, num_stages=1,
        )  # fmt: skip

    return call


if __name__ == "__main__":
    torch_process.main(settings)
