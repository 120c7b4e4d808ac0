"""CompileRequest: one kernel with everything that its compiler needs, so that it can be audited without a GPU."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxattn.index64 import index64
from jaxattn.kernels import tuning
from jaxattn.problem import AttentionProblem


@dataclasses.dataclass(frozen=True)
class CompileRequest:
    """One kernel as `jax_triton.triton_call` would compile it.

    Args:
        name: what a person calls this configuration, for example `"decode D128 bf16"`.
        fn: the `triton.jit` function.
        signature: argument name -> Triton's type name (`"*bf16"`, `"i64"`, `"constexpr"`).
        constexprs: value of each constexpr argument, and of each argument that is None.
        attrs: argument index, as a one-element tuple -> attributes, for example
            `[["tt.divisibility", 16]]` for an array, which jax-triton always takes to be aligned.
        num_warps: waves of a program.
        num_stages: depth of the software pipeline.
    """

    name: str
    fn: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    attrs: dict[tuple[int, ...], Any]
    num_warps: int
    num_stages: int


# Dtypes of K and V by their width; the 8-bit formats that a device has differ.
KV_DTYPES = {2: ("bfloat16",), 4: ("float32",), 1: ("float8_e4m3fn", "float8_e4m3fnuz", "int8")}
_CORES = {"sm90": 132, "gfx90a": 104, "gfx942": 304, "gfx950": 256}


def device_of(arch: str) -> tuning.Device:
    """Describe a device of an architecture that this machine need not have."""
    return tuning.Device(architecture=arch, cores=_CORES.get(arch, 100))


def compile_requests(arch: str) -> list[CompileRequest]:
    """List every kernel launch that the tuning table of an architecture can lead to, one for each entry.

    Args:
        arch: `sm90`, `gfx942`, ...
    """
    with tuning.using(device_of(arch)):
        return [*_attention_requests()]


def _attention_requests() -> Iterator[CompileRequest]:
    table = tuning.tuning()
    seen = set()
    for kind in tuning.KINDS:
        for choice in getattr(table, kind):
            for dtype in KV_DTYPES[choice.kv_bytes]:
                if dtype.startswith("float8") and dtype not in table.native_formats:
                    continue
                for request in _requests_for(kind, choice, dtype):
                    if request.name not in seen:
                        seen.add(request.name)
                        yield request


def _requests_for(kind: str, choice: tuning.TileChoice, kv_dtype: str) -> Iterator[CompileRequest]:
    """Trace the problem that an entry serves, and name its launches."""
    from jaxattn.kernels.triton.attention import run
    from jaxattn.kernels.triton.launch import recording

    with recording() as calls:
        # A function of its own, because JAX remembers what it has traced.
        index64(jax.eval_shape)(lambda problem: run(problem), _problem(kind, choice, kv_dtype))
    for call in calls:
        name = call.kernel.__name__.removesuffix("_kernel")
        constants = dict(call.constants).get("C")
        if name == "attention":
            name = f"{kind} D{choice.head_dim} {kv_dtype} {constants.block_rows}x{constants.tile}"
        elif name == "reduce":
            name = f"reduce D{choice.head_dim}{' chunks' if constants.chunk else ''}"
        yield request_of(call, name)


def attention_request(arch: str, kind: str, choice: tuning.TileChoice, kv_dtype: str) -> CompileRequest:
    """Describe the attention kernel as `choice` would compile it, in place of the entries of its table."""
    table = dataclasses.replace(tuning.load(arch), **{kind: (choice,)})
    with tuning.using(device_of(arch), table):
        return next(
            request
            for request in _requests_for(kind, choice, kv_dtype)
            if request.name.startswith(f"{kind} ") and f" {choice.block_rows}x{choice.tile}" in request.name
        )


@index64
def _problem(kind: str, choice: tuning.TileChoice, dtype: str) -> AttentionProblem:
    """Describe a problem that this entry serves: 8 sequences of up to 128K keys, 8 KV heads."""
    kv_heads, page_size, columns = 8, 16, 8192
    group = choice.rows if kind == "invariant" else 4
    heads = kv_heads * group
    q_len = 2048 if kind == "prefill" else max(1, choice.rows // group)
    tokens = 8 * q_len
    shape = jax.ShapeDtypeStruct
    quantised = jnp.dtype(dtype).itemsize == 1
    descale = shape((kv_heads,), jnp.float32) if quantised else None
    q_dtype = jnp.dtype(jnp.bfloat16) if quantised else jnp.dtype(dtype)
    return AttentionProblem(
        q=shape((tokens, heads, choice.head_dim), q_dtype),
        k_cache=shape((1 << 20, page_size, kv_heads, choice.head_dim), jnp.dtype(dtype)),
        v_cache=shape((1 << 20, page_size, kv_heads, choice.head_dim), jnp.dtype(dtype)),
        page_table=shape((8, columns), jnp.int64),
        cu_seqlens_q=shape((9,), jnp.int64),
        seqused_k=shape((8,), jnp.int64),
        k_descale=descale,
        v_descale=descale,
        softmax_scale=choice.head_dim**-0.5,
        max_seqlen_q=q_len,
        out_dtype=q_dtype,
        batch_invariant=kind == "invariant",
    )


def request_of(call, name: str) -> CompileRequest:
    """Describe a recorded launch to the compiler."""
    from jaxattn.kernels.triton.interpreter import TRITON_NAMES

    arrays = [*call.inputs, *call.outputs]
    constants = dict(call.constants)
    pointers = [name for name in call.kernel.arg_names if name not in constants]
    types = {name: "*" + TRITON_NAMES[array.dtype.name] for name, array in zip(pointers, arrays, strict=True)}
    return CompileRequest(
        name=name,
        fn=call.kernel,
        signature={name: types.get(name, "constexpr") for name in call.kernel.arg_names},
        constexprs=constants,
        attrs={
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(call.kernel.arg_names)
            if name in types
        },
        num_warps=call.num_warps,
        num_stages=call.num_stages,
    )
