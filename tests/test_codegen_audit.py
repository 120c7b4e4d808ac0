"""The audit of compiled kernels on small ones: safe kernels pass, and each fault that it is for fails.

Everything is compiled for GPUs that need not be there, and nothing is executed.
"""

import dataclasses
import re

import pytest

pytest.importorskip("triton")

import audit_kernels as kernels
from audit_kernels import attention, gather, products, request

from bench.audit.addresses import find_narrow, index_arrays
from bench.audit.compilation import compile_request
from bench.audit.mlir import read_module
from bench.audit.report import audit
from jaxattn.kernels import tuning

AMD = ("gfx942", "gfx950")
ALL = (*AMD, "sm90")
LOOP = {"k_cache": "*bf16", "page_table": "*i32", "out": "*bf16", "pages": "i32"}
RAGGED = {"k_cache": "*bf16", "page_table": "*i64", "cu_seqlens_q": "*i64", "out": "*bf16"}
BUILDER = {"kv_indptr": "*i64", "kv_indices": "*i64", "page_table": "*i64", "width": "i64"}


def address_faults(report):
    return [failure for failure in report.failures if " reaches " in failure]


@pytest.mark.parametrize("arch", ALL)
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: gather(kernels.gather_pages), id="uniform-int64-table"),
        pytest.param(lambda: gather(kernels.gather_pages, "*i32"), id="uniform-int32-table"),
        pytest.param(lambda: gather(kernels.gather_lanes, "*i32"), id="lanes-int32-table"),
        pytest.param(
            lambda: request(kernels.page_table_rows, BUILDER, PAGE=16, COLUMNS=256), id="table-builder"
        ),
    ],
)
def test_safe_kernels_pass(make, arch):
    assert audit(compile_request(make(), arch)).failures == ()


@pytest.mark.parametrize("arch", AMD)
def test_a_uniform_page_id_is_safe_although_the_load_is_a_buffer_load(arch):
    kernel = compile_request(gather(kernels.gather_pages), arch)
    assert "buffer_load %k_cache" not in kernel.ttgir
    assert re.search(r"buffer_load %\w+\[%lanes\]", kernel.ttgir)
    assert audit(kernel).passed


@pytest.mark.parametrize("arch", ALL)
@pytest.mark.parametrize(
    ("make", "array", "use"),
    [
        pytest.param(
            lambda: gather(kernels.narrow_product, "*i32"),
            "page_table",
            "32-bit arith.muli",
            id="product-in-int32",
        ),
        pytest.param(
            lambda: gather(kernels.widened_too_late, "*i32"),
            "page_table",
            "32-bit arith.muli",
            id="widened-too-late",
        ),
        pytest.param(
            lambda: gather(kernels.truncated), "page_table", "32-bit arith.trunci", id="cut-to-int32"
        ),
        pytest.param(
            lambda: request(kernels.carried_by_a_loop, LOOP, ROW=kernels.ROW),
            "page_table",
            "32-bit arith.muli",
            id="carried-by-a-loop",
        ),
        pytest.param(
            lambda: gather(kernels.narrow_program), "program", "32-bit arith.muli", id="program-number"
        ),
    ],
)
def test_a_planted_int32_address_fails(make, array, use, arch):
    faults = address_faults(audit(compile_request(make(), arch)))
    assert any(array in fault and use in fault for fault in faults), faults
    assert all(re.match(r".*audit_kernels\.py:\d+: ", fault) for fault in faults)


@pytest.mark.parametrize("arch", AMD)
@pytest.mark.parametrize("kernel", [kernels.gather_pages, kernels.gather_lanes], ids=["uniform", "lanes"])
def test_an_int64_offset_that_the_amd_compiler_narrows_fails(kernel, arch):
    """The source is safe and so is the IR before layouts; a promise of 2 GiB makes the compiler cut the offset."""
    kernel = compile_request(gather(kernel, within_2_gib=("k_cache",)), arch)
    before = read_module(kernel.ttir)
    assert find_narrow(before, index_arrays(before)) == []
    faults = audit(kernel).failures
    assert any("reaches 32-bit arith.trunci" in fault for fault in faults)
    assert any("the 32-bit offset of buffer_load" in fault for fault in faults)


@pytest.mark.parametrize("arch", ALL)
def test_an_id_is_followed_through_a_pipelined_loop(arch):
    """Prefetched ids travel as loop values on AMD and through shared memory on CUDA."""
    kernel = compile_request(attention(widen=False, TILE=32, num_stages=3), arch)
    after = read_module(kernel.ttgir)
    if arch == "sm90":
        copies = [o for o in after.operations if o.name == "ttg.async_copy_global_to_local"]
        assert any(after.width(operation.operands[1]) == 32 for operation in copies)
    assert any("32-bit arith.muli" in f.uses for f in find_narrow(after, {"page_table"}))


@pytest.mark.parametrize("barrier", [False, True])
def test_a_barrier_of_all_warps_within_a_turn_fails(barrier):
    constants = kernels.Turns(*tuning.load("sm90").turns)
    kernel = gather(kernels.turns, num_warps=8, C=constants, BARRIER=barrier)
    failures = audit(compile_request(kernel, "sm90")).failures
    assert failures == (
        ("1 barriers of all warps within a turn, which no warp would leave",) if barrier else ()
    )


@pytest.mark.parametrize("arch", AMD)
def test_offsets_in_a_page_and_lengths_may_be_int32(arch):
    report = audit(compile_request(request(kernels.bounded_uses, RAGGED, ROW=kernels.ROW), arch))
    assert address_faults(report) == []


@pytest.mark.parametrize("arch", AMD)
def test_both_dtypes_of_seqused_k_in_the_style_of_upstream(arch):
    """int32 lengths narrow the tile offset and the segment's start, never the page id; int64 lengths nothing.

    The K and V addresses are int64 for both, because the kernel widens the page id itself. What the dtype of
    the lengths decides is the rest of the chain: with int32 the product of the program's number and the tiles
    of a segment is 32 bits wide, and the offset into the page table's row is a 32-bit one.
    """
    narrow = audit(compile_request(attention("*i32"), arch))
    assert address_faults(narrow) == list(narrow.failures)
    assert [re.sub(r".*: ", "", failure) for failure in narrow.failures] == [
        "the program's number reaches 32-bit arith.muli",  # the first tile of the program's segment
        "the program's number reaches 32-bit arith.muli",  # a tile's first key
    ]
    (note,) = [note for note in narrow.notes if " reaches " in note]
    assert note.endswith("an id from seqused_k reaches a 32-bit pointer offset")

    wide = audit(compile_request(attention("*i64"), arch))
    assert wide.failures == ()
    assert not [note for note in wide.notes if " reaches " in note]


@pytest.mark.parametrize("arch", ALL)
def test_an_attention_kernel_passes_with_its_facts(arch):
    report = audit(compile_request(attention(), arch))
    assert report.passed
    assert report.matrix_instructions > 0
    assert report.load_bytes == 16
    assert arch == "gfx950" or report.direct_loads == (
        arch == "sm90"
    )  # newer Triton loads directly on gfx950
    assert 0 < report.shared <= report.shared_limit
    assert report.occupancy >= 1


@pytest.mark.parametrize("arch", ["gfx950", "sm90"])
def test_spills_fail(arch):
    fault = attention(BM=64, D=256, TILE=128) if arch == "sm90" else products(size=128, num_warps=1)
    report = audit(compile_request(fault, arch))
    assert report.spills
    assert any(failure.startswith("spills: ") for failure in report.failures)


def test_a_configuration_that_was_not_tuned_may_spill_and_load_narrowly_but_must_fit():
    spilling = compile_request(products(size=128, num_warps=1), "gfx950")
    assert audit(spilling, tuned=False).passed
    assert any(note.startswith("spills: ") for note in audit(spilling, tuned=False).notes)
    narrow = compile_request(attention(TILE=16, aligned=False), "gfx942")
    assert audit(narrow, tuned=False).passed
    assert not audit(dataclasses.replace(narrow, shared=65537), tuned=False).passed
    unsafe = compile_request(gather(kernels.narrow_product, "*i32"), "gfx942")
    assert not audit(unsafe, tuned=False).passed


def test_more_shared_memory_than_there_is_fails():
    report = audit(compile_request(attention(D=256, num_stages=4), "gfx942"))
    assert report.shared > 64 * 1024
    assert report.failures == (f"shared memory: {report.shared} bytes, gfx942 has 65536",)
    assert report.occupancy == 0


@pytest.mark.parametrize(("arch", "limit"), [("gfx942", 64), ("gfx950", 160), ("sm90", 227)])
def test_shared_memory_may_be_used_to_the_last_byte(arch, limit):
    kernel = compile_request(gather(kernels.gather_pages), arch)
    assert audit(dataclasses.replace(kernel, shared=limit * 1024)).passed
    assert not audit(dataclasses.replace(kernel, shared=limit * 1024 + 1)).passed


@pytest.mark.parametrize("arch", AMD)
def test_a_product_without_matrix_instructions_fails(arch):
    report = audit(compile_request(attention(BM=2, TILE=16), arch))
    assert report.matrix_instructions == 0
    assert len([f for f in report.failures if "a product of tiles without matrix instructions" in f]) == 2
    assert "no matrix instruction in the machine code" in report.failures


@pytest.mark.parametrize("arch", ALL)
def test_float32_in_full_precision_has_matrix_instructions_on_amd_alone(arch):
    report = audit(compile_request(products("*fp32", size=32), arch))
    assert report.passed
    assert bool(report.matrix_instructions) == (arch != "sm90")


@pytest.mark.parametrize("arch", ALL)
def test_narrow_loads_of_k_and_v_fail(arch):
    report = audit(compile_request(attention(TILE=16, aligned=False), arch))
    assert report.load_bytes == 2
    assert len([f for f in report.failures if "K or V is loaded 2 bytes a lane, not 16" in f]) == 2
