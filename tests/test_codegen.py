"""The audit of compiled kernels, itself tested: safe kernels pass, and each fault that it is for fails.

Everything is compiled for GPUs that need not be there, and nothing is executed.
"""

import dataclasses
import json
import re

import pytest

pytest.importorskip("triton")

import audit_kernels as kernels
from audit_kernels import attention, gather, products, request

from bench import codegen
from bench.audit.addresses import Finding, find_narrow, index_arrays
from bench.audit.compilation import compile_request, find_target
from bench.audit.launches import other_requests
from bench.audit.machine import Load, Machine, located_lines, moves_in_tile_loops
from bench.audit.mlir import read_module
from bench.audit.mlir_text import UnreadableIR, result_types
from bench.audit.report import audit, audit_request, cache_loads, judge_spills, narrow_loads
from jaxattn.kernels.triton.requests import compile_requests

AMD = ("gfx942", "gfx950")
ALL = (*AMD, "sm90")
LOOP = {"k_cache": "*bf16", "page_table": "*i32", "out": "*bf16", "pages": "i32"}
RAGGED = {"k_cache": "*bf16", "page_table": "*i64", "cu_seqlens_q": "*i64", "out": "*bf16"}
BUILDER = {"kv_indptr": "*i64", "kv_indices": "*i64", "page_table": "*i64", "width": "i64"}


def address_faults(report):
    return [failure for failure in report.failures if " reaches " in failure]


# Addresses


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


# Registers, shared memory, matrix instructions, load widths


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


LOOPS = """
.LBB0_1:
  v_readlane_b32 s2, v255, 0
.LBB0_2:
  v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[0:3]
  s_cbranch_scc1 .LBB0_2
  v_writelane_b32 v255, s2, 0
  s_branch .LBB0_1
"""


def test_moves_of_spilled_values_count_in_the_innermost_loop_that_multiplies():
    moves = r"v_(read|write)lane"
    assert moves_in_tile_loops(LOOPS, moves) == 0
    assert (
        moves_in_tile_loops(LOOPS.replace("  s_cbranch", "  v_readlane_b32 s2, v255, 0\n  s_cbranch"), moves)
        == 1
    )
    assert moves_in_tile_loops(LOOPS.replace("v_mfma", "v_fma"), moves) == 2


@pytest.mark.parametrize(
    ("spills", "reloads", "fails"),
    [
        ({}, 0, False),
        ({"SGPR": 4}, 0, False),
        ({"SGPR": 4}, 2, True),
        ({"VGPR": 1, "scratch bytes": 8}, 0, True),
        ({"stack bytes": 8}, 0, False),
        ({"stack bytes": 8}, 1, True),
    ],
)
def test_spills_that_cost_nothing_for_each_tile_are_notes(spills, reloads, fails):
    machine = Machine(128, 0, spills, reloads, matrix_instructions=1, loads=[])
    failures, notes = judge_spills(machine)
    assert bool(failures) == fails
    assert len(failures) + len(notes) == len(spills)


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


def test_a_load_that_the_compiler_moved_to_another_line_is_found():
    lines = ("kernel.py:1", "kernel.py:2")
    text = "tt.func public @f(%k_cache: !tt.ptr<bf16>, %page_table: !tt.ptr<i64>) {\n"
    text += '%a = tt.load %k_cache : !tt.ptr<bf16> loc("kernel.py":1:1)\n'
    text += '%b = tt.load %page_table : !tt.ptr<i64> loc("kernel.py":2:1)\n}\n'
    module = read_module(text)
    key, table = (Load(width, False, line) for width, line in zip((16, 8), lines, strict=True))
    moved, stray = Load(16, False, "kernel.py:3"), Load(4, False, "kernel.py:4")
    assert cache_loads(module, [key, table, stray]) == ([key], [])
    assert cache_loads(module, [table, stray, moved]) == ([moved], [])
    assert cache_loads(module, [table]) == ([], ["kernel.py:1"])
    assert narrow_loads([], ["kernel.py:1"]) == ["kernel.py:1: no load of K or V found in the machine code"]


@pytest.mark.parametrize(
    ("arch", "registers", "shared", "num_warps", "waves"),
    [
        ("gfx942", 128, 0, 4, 4),
        ("gfx942", 129, 0, 4, 3),
        ("gfx942", 512, 0, 4, 1),
        ("gfx942", 24, 0, 4, 8),
        ("gfx942", 64, 32 * 1024, 4, 2),
        ("gfx950", 64, 32 * 1024, 4, 5),
        ("gfx950", 64, 80 * 1024, 8, 4),
        ("gfx950", 64, 160 * 1024, 2, 0.5),
        ("sm90", 128, 0, 4, 4),
        ("sm90", 168, 0, 4, 3),
        ("sm90", 32, 100 * 1024, 4, 2),
    ],
)
def test_occupancy(arch, registers, shared, num_warps, waves):
    assert find_target(arch).occupancy(registers, shared, num_warps) == waves


def test_unknown_architectures_are_refused():
    with pytest.raises(ValueError, match="arch: expected one of gfx90a, gfx942, gfx950, sm90, got 'gfx1100'"):
        find_target("gfx1100")


# Reading IR and assembly


BRANCHES = """
#loc = loc("kernel.py":1:1)
module {
  tt.func public @kernel(%table: !tt.ptr<i64> loc("page_table"(#loc)), %pool: !tt.ptr<bf16> loc("pool"(#loc))) {
    %c1 = arith.constant 1 : i1 loc(#loc)
    %page = tt.load %table : !tt.ptr<i64> loc(#loc)
    %zero = arith.constant 0 : i64 loc(#loc)
    cf.cond_br %c1, ^bb1(%page : i64), ^bb1(%zero : i64) loc(#loc)
  ^bb1(%chosen: i64 loc(#loc)):  // 2 preds: ^bb0, ^bb0
    %sum = "tt.reduce"(%chosen) <{axis = 0 : i32}> ({
    ^bb0(%a: i64 loc(#loc), %b: i64 loc(#loc)):
      %c = arith.addi %a, %b : i64 loc(#loc)
      tt.reduce.return %c : i64 loc(#loc)
    }) : (tensor<4xi64>) -> i64 loc(#loc)
    %small = arith.trunci %sum : i64 to i32 loc(callsite("helper.py":7:3 at #loc))
    tt.return loc(#loc)
  } loc(#loc)
} loc(#loc)
"""


def test_ids_are_followed_over_branches_and_through_reductions():
    module = read_module(BRANCHES)
    assert find_narrow(module, {"page_table"}) == [
        Finding("page_table", "helper.py:7", ("32-bit arith.trunci",))
    ]


COPIES = """
module {
  tt.func public @kernel(%page_table: !tt.ptr<i64>, %pool: !tt.ptr<bf16>, %depths: !tt.ptr<i32>) {
    %page = tt.load %page_table : !tt.ptr<i64>
    %at = tt.addptr %pool, %page : !tt.ptr<bf16>, i64
    %k = ttg.local_alloc : () -> !ttg.memdesc<64xbf16, #shared, #smem, mutable>
    %d = ttg.local_alloc : () -> !ttg.memdesc<64xi32, #shared, #smem, mutable>
    %first = ttg.async_copy_global_to_local %at, %k : !tt.ptr<bf16> -> <64xbf16, #shared, #smem, mutable>
    %second = ttg.async_copy_global_to_local %depths, %d : !tt.ptr<i32> -> <64xi32, #shared, #smem, mutable>
    %done = ttg.async_wait %first, %second {num = 0 : i32}
    %depth = ttg.local_load %d token %done : !ttg.memdesc<64xi32, #shared, #smem, mutable> -> tensor<64xi32>
    %sum = arith.addi %depth, %depth : tensor<64xi32>
    tt.return
  }
}
"""


def test_what_local_memory_holds_comes_from_its_copy_and_not_from_one_awaited_with_it():
    module = read_module(COPIES)
    assert find_narrow(module, {"page_table"}) == []
    assert find_narrow(module, {"depths"}) == [Finding("depths", "", ("32-bit arith.addi",))]


@pytest.mark.parametrize(
    ("code", "count", "types"),
    [
        ("tt.split %a : tensor<4x2xi32> -> tensor<4xi32>", 2, ["tensor<4xi32>"] * 2),
        ("arith.cmpi slt, %a, %b : tensor<4xi64, #blocked>", 1, ["tensor<4xi1, #blocked>"]),
        ("tt.load %p, %mask : tensor<4x!tt.ptr<i64>, #blocked>", 1, ["tensor<4xi64, #blocked>"]),
        ("tt.addptr %p, %a : !tt.ptr<bf16>, i32", 1, ["!tt.ptr<bf16>"]),
        ("arith.select %c, %a, %b : tensor<4xi1>, tensor<4xi64>", 1, ["tensor<4xi64>"]),
        ("arith.addui_extended %a, %b : i64, i1", 2, ["i64", "i1"]),
        ("arith.trunci %a : i64 to i32", 1, ["i32"]),
        ("tt.make_range {end = 4 : i32, start = 0 : i32} : tensor<4xi32>", 1, ["tensor<4xi32>"]),
        ("arith.constant true", 1, ["i1"]),
        ("ttg.async_commit_group tokens %t", 1, [""]),
    ],
)
def test_types_of_results(code, count, types):
    assert result_types(code.split()[0], code, count) == types


def test_an_operation_with_unknown_regions_is_refused():
    text = BRANCHES.replace('"tt.reduce"', '"tt.novelty"')
    with pytest.raises(UnreadableIR, match=r"does not know the regions of tt\.novelty"):
        read_module(text)


def test_every_integer_array_counts_as_an_index_array_unless_it_is_known_to_hold_counts():
    text = BRANCHES.replace('loc("page_table"', 'loc("anything"').replace('"pool"', '"seqused_k_ptr"')
    text = text.replace("%pool: !tt.ptr<bf16>", "%pool: !tt.ptr<i64>")
    assert index_arrays(read_module(text)) == {"anything", "program_id"}


def test_lines_of_inline_assembly_have_the_line_of_its_statement():
    ptx = """
    .loc 1 8 2
    mov.u32 %r1, %tid.x;
    // begin inline asm
    .loc 1 9 2
    mov.u32 %r2, 0x0;
    .loc 1 10 2
    ld.global.v4.b32 { %r2 }, [ %rd1 + 0 ];
    // end inline asm
    .file 1 "/src/kernel.py"
    """
    where = {line.split()[0]: location for line, location in located_lines(ptx) if line}
    assert where["ld.global.v4.b32"] == "/src/kernel.py:9"


# The library's own kernels


@pytest.mark.parametrize("arch", ALL)
def test_page_tables_and_cache_writes_are_safe(arch):
    launches = [launch for launch in other_requests(arch) if "every option" not in launch.name]
    assert {launch.fn.__name__ for launch in launches} == {"page_table_kernel", "cache_write_kernel"}
    for launch in launches:
        assert audit_request(launch, arch, tuned=False).failures == (), launch.name


@pytest.mark.parametrize("arch", AMD)
def test_attention_with_every_option_is_safe(arch):
    launch = next(
        launch for launch in other_requests(arch) if launch.name == "verify, every option: attention"
    )
    report = audit_request(launch, arch, tuned=False)
    assert report.failures == ()
    assert not [note for note in report.notes if " reaches " in note]


@pytest.mark.parametrize("arch", ALL)
def test_a_tuned_decode_configuration_passes(arch):
    launch = next(
        launch for launch in compile_requests(arch) if launch.name.startswith("split D128 bfloat16 ")
    )
    assert audit_request(launch, arch).failures == ()


@pytest.mark.slow
@pytest.mark.parametrize("arch", ALL)
def test_every_configuration_passes(arch, capsys):
    assert codegen.main(["--arch", arch]) == 0, capsys.readouterr().out


# The command


@pytest.fixture
def tuned(monkeypatch):
    """Let the command find these configurations instead of the tuned ones."""

    def use(*found):
        monkeypatch.setattr(codegen, "compile_requests", lambda arch: list(found))
        monkeypatch.setattr(codegen, "other_requests", lambda arch: [])

    return use


def test_the_command_prints_a_table_and_succeeds(tuned, capsys):
    tuned(gather(kernels.gather_pages), attention(TILE=16))
    assert codegen.main(["--arch", "gfx950"]) == 0
    out = capsys.readouterr().out
    assert "gfx950: 160 KiB of shared memory" in out
    assert re.search(r"^gather_pages .* - +ok$", out, re.M)
    assert re.search(r"^attend .* 16( LDS)? +ok$", out, re.M)
    assert out.endswith("2 configurations, 0 failed\n")


def test_the_command_fails_with_one_line_for_each_failure(tuned, capsys):
    tuned(gather(kernels.gather_pages), gather(kernels.narrow_product, "*i32"))
    assert codegen.main(["--arch", "gfx942"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"^narrow_product .* FAIL$", out, re.M)
    assert re.search(r"^FAIL gfx942 narrow_product: .*:\d+: an id from page_table reaches", out, re.M)
    assert out.endswith("2 configurations, 1 failed\n")


def test_the_command_reports_a_kernel_that_does_not_compile(tuned, capsys):
    tuned(products(size=24), gather(kernels.gather_pages))
    assert codegen.main(["--arch", "gfx942"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"^FAIL gfx942 chained_products: does not compile: CompilationError: ", out, re.M)
    assert re.search(r"^gather_pages .* ok$", out, re.M)


def test_the_command_prints_json(tuned, capsys):
    tuned(gather(kernels.gather_pages), gather(kernels.gather_lanes))
    assert codegen.main(["--arch", "gfx942", "--only", "lanes", "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert (report["name"], report["arch"], report["failures"], report["load_bytes"]) == (
        "gather_lanes", "gfx942", [], None
    )  # fmt: skip


def test_the_command_fails_where_nothing_is_audited(tuned, capsys):
    tuned(gather(kernels.gather_pages))
    assert codegen.main(["--arch", "gfx942", "--only", "no such configuration"]) == 1
    assert "0 configurations" in capsys.readouterr().out
