"""The audit of Pallas kernels: lowered on this machine for GPUs that need not be there."""

import re

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton")

from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from bench.audit.compilation import compile_ir
from bench.audit.machine import disassembly
from bench.audit.pallas import audit_pallas, name_arguments, pallas_kernels
from bench.audit.pallas_launches import pallas_launches
from jaxattn.kernels import tuning
from jaxattn.kernels.triton.requests import device_of

ARCHS = ("gfx942", "gfx950", "sm90")
NAMES = {"page_products": ("k_cache", "page_table", "out")}
WIDTH = 128


def page_rows(index_dtype):
    """A kernel that multiplies a page of keys with itself; its ids are computed in `index_dtype`."""

    def page_products(k_cache, page_table, out):
        program = pl.program_id(0).astype(jnp.int64)
        page = plt.load(page_table.at[program]).astype(index_dtype)
        lane = jnp.arange(WIDTH, dtype=index_dtype)
        at = (page * WIDTH + lane)[:, None] * WIDTH + lane[None, :]
        tile = plt.load(k_cache.at[at])
        row = program * WIDTH + jnp.arange(WIDTH, dtype=jnp.int64)
        plt.store(out.at[row], jnp.sum(plt.dot(tile, tile), 1).astype(tile.dtype))

    def call(k_cache, page_table):
        return pl.pallas_call(
            page_products,
            out_shape=jax.ShapeDtypeStruct((64 * WIDTH,), k_cache.dtype),
            grid=(64,),
            compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
            name="page_products",
        )(k_cache, page_table)

    return call


def reports(index_dtype, arch, operands=NAMES):
    with jax.enable_x64(True):
        arguments = jax.ShapeDtypeStruct((1 << 33,), jnp.bfloat16), jax.ShapeDtypeStruct((64,), jnp.int64)
    return audit_pallas(page_rows(index_dtype), arguments, arch, operands)


@pytest.mark.parametrize("arch", ARCHS)
def test_int64_ids_pass(arch):
    (report,) = reports(jnp.int64, arch)
    assert report.failures == ()
    assert (report.name, report.arch, report.load_bytes) == ("page_products", arch, 16)
    assert report.matrix_instructions > 0


@pytest.mark.parametrize("arch", ARCHS)
def test_a_planted_int32_address_fails_and_names_its_line(arch):
    (report,) = reports(jnp.int32, arch)
    assert any("an id from page_table reaches 32-bit arith.trunci" in failure for failure in report.failures)
    assert any(
        re.search(r"an id from page_table .*32-bit arith\.muli", failure) for failure in report.failures
    )
    assert all(re.match(r".*test_codegen_pallas\.py:\d+: ", failure) for failure in report.failures)


def test_operands_without_names_are_refused():
    with pytest.raises(ValueError, match="operands: the kernel has 3 inputs and outputs, got 2 names"):
        reports(jnp.int64, "gfx950", {"page_products": ("k_cache", "page_table")})
    with pytest.raises(ValueError, match=r"operands: expected names for kernel 'page_products', got \[\]"):
        reports(jnp.int64, "gfx950", {})


def test_names_go_to_the_arguments_in_order():
    ttir = "module {\n  tt.func public @f(%arg0: !tt.ptr<i64> loc(unknown), %arg1: i64 loc(unknown)) {\n"
    named = name_arguments(ttir, ("page_table", "width"))
    assert re.findall(r'(%arg\d).*?loc\("(\w+)"', named) == [("%arg0", "page_table"), ("%arg1", "width")]


def reports_of(arch, name):
    launches = next(launches for launches in pallas_launches(arch) if launches.name.startswith(name))
    return launches.audit()


@pytest.mark.parametrize("arch", ARCHS)
def test_a_tuned_decode_of_the_attention_kernels_passes(arch):
    attention, reduction = reports_of(arch, "pallas split D128 bfloat16 ")
    assert (attention.failures, reduction.failures) == ((), ())
    assert attention.load_bytes == 16
    assert attention.matrix_instructions > 0
    assert not {"VGPR", "scratch bytes", "stack bytes"} & attention.spills.keys()


@pytest.mark.parametrize(
    ("arch", "dtype", "pairs", "unpacked"),
    [
        ("sm90", "float8_e4m3fn", True, True),
        ("sm90", "int8", True, False),
        ("gfx942", "float8_e4m3fnuz", False, False),
        ("gfx950", "float8_e4m3fn", False, False),
    ],
)
def test_a_tuned_decode_of_8_bits_passes_and_takes_pairs_on_cuda(arch, dtype, pairs, unpacked):
    attention, reduction = reports_of(arch, f"pallas split D128 {dtype} ")
    assert (attention.failures, reduction.failures) == ((), ())
    assert attention.load_bytes == 16
    kernel = attention_kernel_of(arch, f"pallas split D128 {dtype} ")
    assert ("!tt.ptr<i16>" in kernel.ttir) == pairs
    assert ("elementwise_inline_asm" in kernel.ttir) == unpacked


def test_pairs_of_8_bit_values_are_transposed_on_the_way_from_shared_memory():
    kernel = attention_kernel_of("sm90", "pallas split D128 float8_e4m3fn ")
    compiled = compile_ir(kernel.name, kernel.ttir, "sm90", kernel.num_warps, kernel.num_stages)
    code = disassembly(compiled.cubin)
    assert re.search(r"\bLDSM\.16\.MT88", code)
    assert not re.search(r"\bLDS\.[US]8", code)


def attention_kernel_of(arch, name):
    launches = next(launches for launches in pallas_launches(arch) if launches.name.startswith(name))
    with tuning.using(device_of(arch)):
        kernels = pallas_kernels(lambda *given: launches.function(*given), launches.arguments, arch)
    return next(kernel for kernel in kernels if kernel.name == "attention_kernel")


@pytest.mark.parametrize("name", ["ragged", "pooled"])
def test_page_tables_are_safe(name):
    (report,) = reports_of("gfx950", f"pallas {name} rows")
    assert report.failures == ()
    assert report.name == f"pallas {name} rows and window: page_table"
