"""FlashInfer's paged attention under torch, in processes of its own: `python -m bench.peers.flashinfer_torch NAME ...`.

A wrapper is planned once for a page table, outside of what is timed, as the layers of a model share a plan. All that it
does in a call is timed: with fp8 also a kernel that multiplies the output with V's descale. The package,
flashinfer-python, compiles what a case needs with nvcc and ninja when it is first used.
"""

import functools
from collections.abc import Iterator

import numpy as np

from bench.peers import torch_process
from bench.peers.torch_process import Inputs, Setting
from bench.shapes import Shape, path_to

DTYPES = ("bfloat16", "float16", "float8_e4m3fn")
WIDTHS = (64, 128, 256)
GROUPS = (1, 2, 3, 4, 8)  # query heads of a KV head for which decoding without tensor cores is compiled
WORKSPACE = 512 << 20


def unavailable(shape: Shape) -> str | None:
    """Why the kernels cannot run `shape`."""
    return torch_process.unavailable("flashinfer") or unsupported(shape)


def unsupported(shape: Shape) -> str | None:
    """Why they cannot run `shape` on any device."""
    if shape.kv_dtype not in DTYPES:
        return "the package takes K and V in fp16, bf16 and fp8 only"
    if shape.head_dim not in WIDTHS:
        return f"the package is compiled for head widths {', '.join(map(str, WIDTHS))}"
    if shape.sinks and (shape.quantised or shape.branches):
        return "the package knows sinks neither with descales nor with draft trees"
    return None


def measure(names: list[str]) -> dict[str, dict]:
    """The rows of the named shapes."""
    # A module serves all shapes of these.
    return torch_process.measure(
        __name__, names, lambda shape: (shape.head_dim, shape.kv_dtype, shape.window is None, shape.sinks)
    )


def settings(inputs: Inputs) -> Iterator[Setting]:
    """The kernels that know the shape: decode with and without tensor cores, and both generations of prefill."""
    import torch

    shape = inputs.shape
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=inputs.q.device)
    if shape.q_len == 1 and not shape.sinks:
        if shape.num_heads // shape.num_kv_heads in GROUPS:
            yield Setting("decode", functools.partial(_decode, inputs, workspace, False))
        yield Setting("decode tensor-cores", functools.partial(_decode, inputs, workspace, True))
    else:
        yield Setting("prefill fa2", functools.partial(_prefill, inputs, workspace, "fa2"))
    # The third generation is for sm90, takes K and V of one byte with such queries only, and no masks.
    if torch.cuda.get_device_capability()[0] == 9 and not shape.quantised and not shape.branches:
        yield Setting("prefill fa3", functools.partial(_prefill, inputs, workspace, "fa3"))


def _decode(inputs: Inputs, workspace, tensor_cores: bool):
    import flashinfer

    wrappers = []
    for table in inputs.page_tables:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=tensor_cores
        )
        wrapper.plan(*_pages(inputs, table), *_sizes(inputs), **_options(inputs))
        wrappers.append(wrapper)
    return functools.partial(_call, inputs, wrappers, ())


def _prefill(inputs: Inputs, workspace, backend: str):
    import flashinfer

    shape, options = inputs.shape, _options(inputs)
    make, arguments = flashinfer.BatchPrefillWithPagedKVCacheWrapper, ()
    if shape.sinks:
        widths = {"head_dim_qk": shape.head_dim, "head_dim_vo": shape.head_dim}
        make = functools.partial(flashinfer.BatchAttentionWithAttentionSinkWrapper, **options, **widths)
        arguments = (inputs.sinks, shape.head_dim**-0.5)
    mask = {"causal": True} if shape.parents is None else {"custom_mask": _tree_mask(inputs)}
    wrappers = []
    for table in inputs.page_tables:
        wrapper = make(workspace, "NHD", backend=backend)
        wrapper.plan(inputs.starts, *_pages(inputs, table), *_sizes(inputs), **mask, **options)
        wrappers.append(wrapper)
    return functools.partial(_call, inputs, wrappers, arguments)


def _pages(inputs: Inputs, table) -> tuple:
    """`indptr` int32 [S+1] and `indices` of the pages of each sequence, and the keys in its last page."""
    import torch

    shape = inputs.shape
    counts = np.array([-(-c // shape.page_size) for c in shape.contexts])
    live = np.arange(table.shape[1]) < counts[:, None]
    arrays = (np.append(0, np.cumsum(counts)), table[live], (inputs.seqused_k - 1) % shape.page_size + 1)
    return tuple(torch.tensor(array, dtype=torch.int32, device=inputs.q.device) for array in arrays)


def _sizes(inputs: Inputs) -> tuple[int, ...]:
    shape = inputs.shape
    return shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.page_size


def _options(inputs: Inputs) -> dict:
    return {
        "window_left": -1 if inputs.shape.window is None else inputs.shape.window - 1,
        "q_data_type": inputs.q.dtype,
        "kv_data_type": inputs.k_cache.dtype,
    }


def _tree_mask(inputs: Inputs):
    """Whether a query token sees a key, `[q_len * C]` of one sequence after the other."""
    import torch

    shape = inputs.shape
    tree = np.zeros((shape.q_len, shape.q_len), bool)
    for node in range(shape.q_len):
        tree[node, path_to(shape.parents, node)] = True
    masks = []
    for context in shape.contexts:
        mask = torch.ones(shape.q_len, context, dtype=torch.bool, device=inputs.q.device)
        mask[:, context - shape.q_len :] = torch.tensor(tree, device=inputs.q.device)
        masks.append(mask.flatten())
    return torch.cat(masks)


def _call(inputs: Inputs, wrappers: list, arguments: tuple, i: int) -> None:
    wrappers[i].run(
        inputs.q,
        (inputs.k_cache, inputs.v_cache),
        *arguments,
        k_scale=inputs.k_descale,
        v_scale=inputs.v_descale,
        out=inputs.out,
    )


if __name__ == "__main__":
    torch_process.main(settings)
