"""What the audit reads out of printed IR and assembly, on small texts."""

import pytest

pytest.importorskip("triton")

from bench.audit.addresses import Finding, find_narrow, index_arrays
from bench.audit.compilation import find_target
from bench.audit.machine import Load, Machine, located_lines, moves_in_tile_loops
from bench.audit.mlir import read_module
from bench.audit.mlir_text import UnreadableIR, result_types
from bench.audit.report import cache_loads, judge_spills, narrow_loads

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


def test_moves_of_spilled_values_count_in_loops_that_multiply_float32_on_cuda():
    code = """
    .L_x_1:
        LDL R20, [R1] ;
    .L_x_2:
        FFMA R0, R1, R2, R0 ;
    @P0 BRA `(.L_x_2) ;
        BRA `(.L_x_1) ;
    """
    assert moves_in_tile_loops(code, r"\bLDL\b") == 0
    assert moves_in_tile_loops(code.replace("FFMA", "LDL R20, [R1] ;\n        FFMA"), r"\bLDL\b") == 1


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
