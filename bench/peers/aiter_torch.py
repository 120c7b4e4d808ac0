"""AITER's split-KV Triton kernel under torch, in processes of its own: `python -m bench.peers.aiter_torch NAME ...`.

Prints one JSON object a shape: {"shape", "settings", "samples", "error"}, samples in microseconds a call. Several
processes compile at the same time; each times while it holds a lock.
"""

import contextlib
import fcntl
import importlib.util
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.shapes import Shape, parse

KERNELS = "aiter.ops.triton._triton_kernels.attention.unified_attention"
# tile, warps, stages; each with few segments and with as many as AITER takes for a full device
SETTINGS = ((16, 2, 2), (64, 4, 2), (64, 4, 3))
PROCESSES = 6


def unavailable(shape: Shape) -> str | None:
    """Why the kernel cannot run `shape`."""
    try:
        found = importlib.util.find_spec(KERNELS)
    except ModuleNotFoundError:
        found = None
    if found is None or importlib.util.find_spec("torch") is None:
        return "aiter and torch are not installed"
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
    """Run the named shapes in fresh processes, because torch and jax would both take the device's memory."""
    command = [sys.executable, "-m", "bench.peers.aiter_torch"]
    shares = [names[i::PROCESSES] for i in range(min(PROCESSES, len(names)))]
    running = [subprocess.Popen([*command, *share], stdout=subprocess.PIPE, text=True) for share in shares]
    outputs = [process.communicate()[0] for process in running]
    for process, share in zip(running, shares, strict=True):
        if process.returncode:
            raise RuntimeError(f"aiter: measuring {', '.join(share)} ended with code {process.returncode}")
    return {row["shape"]: row for output in outputs for row in map(json.loads, output.splitlines())}


@contextlib.contextmanager
def _alone():
    """Wait until no other process of this benchmark is timing."""
    with (Path(tempfile.gettempdir()) / "jaxattn-bench-aiter.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _measure_one(shape: Shape) -> dict:
    import numpy as np
    import torch
    import triton

    kernels = importlib.import_module(KERNELS)
    s_count, p, h, k, d = (
        len(shape.contexts),
        shape.page_size,
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
    )
    group = h // k
    pages = np.array([-(-c // p) for c in shape.contexts])
    copies = max(1, math.ceil((256 << 20) / shape.kv_bytes))
    order = np.random.default_rng(0).permutation(pages.sum() * copies).reshape(copies, -1)
    tables = []
    for row in order:
        table = np.zeros((s_count, pages.max()), np.int32)
        table[np.arange(pages.max()) < pages[:, None]] = row
        tables.append(torch.tensor(table, device="cuda"))
    torch.manual_seed(0)
    q = torch.randn(s_count * shape.q_len, h, d, device="cuda", dtype=torch.bfloat16)
    kc, vc = (torch.randn(order.size, p, k, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    cu = torch.arange(s_count + 1, device="cuda", dtype=torch.int32) * shape.q_len
    lengths = torch.tensor(shape.contexts, device="cuda", dtype=torch.int32)
    block_m = max(16, triton.next_power_of_2(group))
    block_q = block_m // group
    blocks = s_count if shape.q_len == 1 else q.shape[0] // block_q + s_count
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    strides = {f"stride_{n}_cache_{i}": t.stride(i) for n, t in (("k", kc), ("v", vc)) for i in range(4)}
    scale = 1 / math.sqrt(d)
    best = None
    for tile, warps, stages in SETTINGS:
        for segments in {
            triton.next_power_of_2(max(1, min(128, math.ceil(f * sms / (blocks * k))))) for f in (4, 16)
        }:
            part = torch.empty(q.shape[0], h, segments, d, device="cuda", dtype=torch.float32)
            top, total = (
                torch.empty(q.shape[0], h, segments, device="cuda", dtype=torch.float32) for _ in range(2)
            )
            out = torch.full_like(q, float("nan"))

            def run(
                table,
                tile=tile,
                warps=warps,
                stages=stages,
                segments=segments,
                part=part,
                top=top,
                total=total,
                out=out,
            ):
                kernels.kernel_unified_attention_3d[(blocks, k, segments)](
                    segm_output_ptr=part, segm_max_ptr=top, segm_expsum_ptr=total, query_ptr=q, key_cache_ptr=kc,
                    value_cache_ptr=vc, sink_ptr=None, block_tables_ptr=table, seq_lens_ptr=lengths,
                    alibi_slopes_ptr=None, qq_bias_ptr=None, scale=scale, q_descale_ptr=None, k_descale_ptr=None,
                    v_descale_ptr=None, out_scale_ptr=None, softcap=0.0, num_query_heads=h, num_queries_per_kv=group,
                    block_table_stride=table.stride(0), query_stride_0=q.stride(0), query_stride_1=q.stride(1),
                    qq_bias_stride_0=0, BLOCK_SIZE=p, TILE_SIZE=tile, HEAD_SIZE=d, HEAD_SIZE_PADDED=d,
                    USE_ALIBI_SLOPES=False, USE_QQ_BIAS=False, USE_SOFTCAP=False, USE_SINKS=False, SLIDING_WINDOW=0,
                    query_start_len_ptr=cu, BLOCK_Q=block_q, num_seqs=s_count, BLOCK_M=block_m, num_warps=warps,
                    waves_per_eu=2, num_stages=stages, NUM_SEGMENTS_PER_SEQ=segments, ALL_DECODE=shape.q_len == 1,
                    K_WIDTH=8, **strides,
                )  # fmt: skip
                kernels.reduce_segments[(q.shape[0], h)](
                    output_ptr=out, segm_output_ptr=part, segm_max_ptr=top, segm_expsum_ptr=total, seq_lens_ptr=lengths,
                    num_seqs=s_count, num_query_heads=h, out_scale_ptr=None, output_stride_0=out.stride(0),
                    output_stride_1=out.stride(1), block_table_stride=table.stride(0), TILE_SIZE=tile, HEAD_SIZE=d,
                    HEAD_SIZE_PADDED=d, query_start_len_ptr=cu, BLOCK_Q=block_q, NUM_SEGMENTS_PER_SEQ=segments,
                    num_warps=2, num_stages=1,
                )  # fmt: skip

            try:
                run(tables[0])
                torch.cuda.synchronize()
            except Exception as refusal:
                print(f"{shape.name} tile={tile}: {type(refusal).__name__}: {refusal}", file=sys.stderr)
                continue
            visible = shape.contexts[0] - shape.q_len + 1
            rows = tables[0][0, : -(-visible // p)].long()
            keys = kc[rows, :, 0].reshape(-1, d)[:visible].double()
            values = vc[rows, :, 0].reshape(-1, d)[:visible].double()
            expected = torch.softmax(q[0, :group].double() @ keys.T * scale, -1) @ values
            error = float((out[0, :group].double() - expected).abs().max() / expected.abs().max())
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for table in tables * max(1, 8 // copies):
                    run(table)
            calls = copies * max(1, 8 // copies)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            samples = []
            with _alone():
                for _ in range(8):
                    start.record()
                    graph.replay()
                    end.record()
                    torch.cuda.synchronize()
                    samples.append(start.elapsed_time(end) * 1e3 / calls)
            row = {
                "shape": shape.name, "settings": f"tile={tile} warps={warps} stages={stages} segments={segments}",
                "samples": samples[1:], "error": error,
            }  # fmt: skip
            if error < 2e-2 and (best is None or np.median(samples[1:]) < np.median(best["samples"])):
                best = row
    return best or {"shape": shape.name, "refused": "no setting gave a right answer"}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(json.dumps(_measure_one(parse(name))), flush=True)
