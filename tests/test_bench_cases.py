"""What the benchmarks measure: case names, the work of a case, and the check that gates every time."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from bench import contest, cycle, results, run, shapes, step
from bench import mxfp4 as mxfp4_bench
from bench.inputs import TOLERANCE, expected_rows, make_inputs, sampled_error
from bench.peers import Candidate, aiter_torch, dense, fa3, flashinfer_torch, jax_paged
from jaxattn import plan


def test_a_name_says_everything():
    shape = shapes.parse("qwen3.5-397b-tp2/1x64k+63x1k/q4/p64/fp8")
    assert shape.contexts == (65536,) + (1024,) * 63
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (16, 1, 256)
    assert (shape.q_len, shape.page_size, shape.kv_dtype) == (4, 64, "float8_e4m3fn")
    assert shapes.parse("toy/2x3/q1").kv_dtype == "bfloat16"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "toy",
        "toy/2x3",
        "llama-9/2x3/q1",
        "toy/2y3/q1",
        "toy/2x3/q1/f99",
        "toy/2x3/q4",
        "toy/2x3/q0",
        "toy/0x3/q1",
        "toy/zipf0/q1",
        "toy/2x9/q4/tree0",
        "toy-local/2x9/q4/tree2",
        "toy/2x3/q1/p0",
    ],
)
def test_a_name_that_describes_no_case_is_refused(name):
    with pytest.raises(ValueError, match="expected"):
        shapes.parse(name)


def test_patterns_pick_listed_cases_and_names_describe_new_ones():
    assert shapes.select(["llama-3-8b/32x8k/q?"]) == ["llama-3-8b/32x8k/q1", "llama-3-8b/32x8k/q4"]
    assert shapes.select(["toy/5x100/q2/f32"]) == ["toy/5x100/q2/f32"]
    with pytest.raises(ValueError, match="gpt-7"):
        shapes.select(["gpt-7*"])


def test_all_covers_every_group_but_the_small_one():
    names = run.cases_of("all")
    assert len(set(names)) == len(names)
    assert {*step.FULL, "llama-3-8b/zipf64/q4", "llama-3-8b/1x16k/q16k", "gpt-oss-120b-local/32x8k/q1"} <= {
        *names
    }
    assert not [name for name in names if name.startswith("toy")]


@pytest.mark.parametrize("window", [None, 3, 9, 100])
@pytest.mark.parametrize("q_len", [1, 4, 12])
def test_work_counts_visible_keys(window, q_len):
    shape = shapes.parse(f"toy/1x12+2x30/q{q_len}/f32").replace(window=window)
    seen = [
        {key for key, _ in oracle.visible_keys(row=i, q_len=q_len, seqused_k=c, sliding_window=window)}
        for c in shape.contexts
        for i in range(q_len)
    ]
    assert shape.flops == 4 * sum(map(len, seen)) * 8 * 64
    keys = sum(len(set().union(*seen[s * q_len : (s + 1) * q_len])) for s in range(3))
    assert shape.kv_bytes == 2 * keys * 2 * 64 * 4


def ancestors_of(shape):
    """`[S * q_len, 1]` bits of the draft trees, from the definition; None without trees."""
    if shape.parents is None:
        return None
    bits = np.zeros((shape.q_len, 1), np.uint64)
    for node, parent in enumerate(shape.parents):
        bits[node] = np.uint64(1 << node) | (bits[parent] if parent >= 0 else np.uint64(0))
    return np.tile(bits, (len(shape.contexts), 1))


@pytest.mark.parametrize("branches", [1, 2, 3])
def test_work_counts_the_paths_of_a_tree(branches):
    shape = shapes.parse(f"toy/1x12+2x30/q7/tree{branches}/f32")
    bits = ancestors_of(shape)[:7]
    depths = oracle.depths_of(bits)
    seen = [
        len(oracle.visible_keys(row=i, q_len=7, seqused_k=c, bits=bits, depths=depths))
        for c in shape.contexts
        for i in range(7)
    ]
    assert shape.flops == 4 * sum(seen) * 8 * 64


@pytest.mark.parametrize(
    "name", ["toy/2x30/q6/tree2/f32", "toy/1x40+2x9/q3/p4/f32", "toy-local/2x70/q2/f32", "toy/2x20/q2/p8/fp8"]
)
def test_the_gate_knows_the_right_answer(name):
    inputs = make_inputs(shapes.parse(name))
    shape = inputs.shape
    expected, _ = oracle.attention(
        *(np.asarray(a.astype(jnp.float32), np.float64) for a in (inputs.q, inputs.k_cache, inputs.v_cache)),
        inputs.page_tables[0],
        inputs.cu_seqlens_q,
        inputs.seqused_k,
        sliding_window=shape.window,
        sinks=None if inputs.sinks is None else np.asarray(inputs.sinks, np.float64),
        k_descale=inputs.k_descale,
        v_descale=inputs.v_descale,
        ancestors=ancestors_of(shape),
    )
    for s in range(len(shape.contexts)):
        for kv_head in range(2):
            for i in range(shape.q_len):
                actual = expected_rows(inputs, s, kv_head, i)
                row = expected[s * shape.q_len + i, kv_head * 4 : (kv_head + 1) * 4]
                np.testing.assert_allclose(actual, row, rtol=1e-9, atol=1e-12)
    assert sampled_error(inputs, expected) < 1e-6
    assert sampled_error(inputs, 1.1 * expected) > TOLERANCE[shape.kv_dtype]
    assert np.isnan(sampled_error(inputs, np.where(np.arange(64) == 5, np.nan, expected)))


def contest_of(*candidates, error=lambda out: float(abs(out - 1).max())):
    return contest.Contest({"one": candidates}, error, 0.1)


def candidate(value, settings="a"):
    return Candidate(settings, lambda x: x * value, (jnp.ones(3),), 1, lambda out: out)


def test_no_time_for_a_wrong_answer():
    entry = contest.first_round(contest_of(candidate(2.0)), 2)["one"]
    assert entry.timing is None
    assert "wrong answer, error 1.0e+00" in entry.refused
    entry = contest.first_round(contest_of(candidate(np.nan), error=lambda out: float("nan")), 2)["one"]
    assert "wrong answer" in entry.refused


def test_the_best_right_setting_is_kept_and_measured_again():
    def broken(x):
        raise RuntimeError("no such tile")

    entrants = contest_of(
        Candidate("x", broken, (1,), 1, None), candidate(2.0, "wrong"), candidate(1.0, "right")
    )
    entries = contest.first_round(entrants, 2)
    assert entries["one"].settings == "right"
    assert len(contest.next_round(entrants, entries, 3)["one"].timing.samples) == 5


def test_a_contest_without_right_settings_says_why():
    def broken(x):
        raise RuntimeError("no such tile")

    entry = contest.first_round(contest_of(Candidate("x", broken, (1,), 1, None)), 2)["one"]
    assert entry.refused == "x: RuntimeError: no such tile"


@pytest.mark.parametrize(
    ("peer", "name"),
    [(dense, "toy/1x40+2x9/q3/p4/f32"), (jax_paged, "toy/3x512/q1/f32")],
    ids=["dense", "jax-paged"],
)
def test_a_peer_that_runs_here_gives_the_right_answer(peer, name):
    if peer is jax_paged and not jax_paged.installed():
        pytest.skip("this jax has no paged attention of its own")
    inputs = make_inputs(shapes.parse(name))
    found = next(iter(peer.candidates(inputs)))
    assert sampled_error(inputs, found.output(found.function(*found.arguments))) < TOLERANCE["float32"]


@pytest.mark.parametrize(
    "unavailable",
    [
        dense.unavailable,
        fa3.unavailable,
        aiter_torch.unsupported,
        flashinfer_torch.unsupported,
        jax_paged.unsupported,
    ],
)
def test_peers_refuse_what_they_cannot_do(unavailable):
    assert unavailable(shapes.parse("gpt-oss-120b-local/32x8k/q1/fp8"))


@pytest.mark.parametrize(("suffix", "dtype"), [("", "int64"), ("/int32", "int32")])
@pytest.mark.parametrize("implementation", step.IMPLEMENTATIONS)
def test_a_wrong_page_table_or_plan_of_a_step_is_wrong(suffix, dtype, implementation):
    drawn = step.make_step("step/4x8" + suffix)
    assert drawn.rows.req_to_token.dtype == dtype
    (found,) = step.candidates(drawn, implementation)
    metadata = jax.jit(found.function)(*found.arguments)
    assert drawn.error(metadata) == 0
    table = np.array(metadata.page_table)
    table[1, 0] += 1
    assert drawn.error(dataclasses.replace(metadata, page_table=table)) > 0
    (schedule,) = metadata.plan.schedules
    start = np.array(schedule.tile_start)
    start[1] += 1
    wrong = plan.Plan((dataclasses.replace(schedule, tile_start=start),))
    assert drawn.error(dataclasses.replace(metadata, plan=wrong)) > 0
    assert drawn.error(dataclasses.replace(metadata, plan=None)) > 0


def test_a_step_is_refused_where_builders_take_no_triton_kernels():
    entrants = contest.make_contest("step/4x8", ("triton", "xla"), ()).entrants
    assert "on a GPU only" in entrants["triton"]
    assert not isinstance(entrants["xla"], str)


def test_the_command_writes_what_it_prints(tmp_path, capsys):
    path = tmp_path / "result.json"
    arguments = [
        "--case",
        "toy/2x40/q2/f32",
        "step/4x8",
        "toy-local/2x40/q1/f32",
        "toy/2x40/q5/tree2/f32",
        "--implementation",
        "xla",
    ]
    arguments += ["--peers", "dense", "--rounds", "2", "--iterations", "3", "--json", str(path)]
    assert run.main(arguments) == 0
    out = capsys.readouterr().out
    result = results.load(path)
    rows = {(r["case"], r["who"]): r for r in result["rows"]}
    ours = rows["toy/2x40/q2/f32", "xla"]
    assert len(ours["samples_us"]) == 6
    assert ours["low_us"] <= ours["median_us"] <= ours["high_us"]
    shape = shapes.parse(ours["case"])
    assert ours["gbps"] == pytest.approx(shape.kv_bytes / ours["median_us"] / 1e3)
    assert ours["share"] == pytest.approx(ours["gbps"] / result["ceilings"]["read_gbps"])
    assert ours["ratios"]["dense"] == pytest.approx(
        rows[shape.name, "dense"]["median_us"] / ours["median_us"]
    )
    assert rows["step/4x8", "xla"]["kind"] == "step"
    assert "sinks" in rows["toy-local/2x40/q1/f32", "dense"]["refused"]
    assert rows["toy/2x40/q5/tree2/f32", "xla"]["error"] < 1e-4
    assert {"device", "commit", "versions", "command", "clocks"} <= result["environment"].keys()
    assert result["environment"]["command"].startswith("python -m bench.run --case toy/2x40/q2/f32")
    assert f"{ours['median_us']:.1f}" in out


def test_a_run_that_is_stopped_leaves_what_it_had_measured(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    make_contest = contest.make_contest

    def stopped(name, *arguments):
        if name == "step/4x8":
            raise KeyboardInterrupt
        return make_contest(name, *arguments)

    monkeypatch.setattr(contest, "make_contest", stopped)
    arguments = ["--case", "toy/2x40/q1/f32", "step/4x8", "--implementation", "xla", "--peers", "dense"]
    with pytest.raises(KeyboardInterrupt):
        run.main([*arguments, "--rounds", "1", "--iterations", "2", "--json", str(path)])
    rows = results.load(path)["rows"]
    assert {(r["case"], r["who"]) for r in rows} == {("toy/2x40/q1/f32", w) for w in ("xla", "dense")}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--case", "nothing"],
        ["--cases", "most"],
        ["--peers", "fa9"],
        ["--case", "toy/2x40/q2", "--rounds", "0"],
    ],
)
def test_a_bad_command_line_is_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        run.main(arguments)
    assert stop.value.code == 2
    assert "error" in capsys.readouterr().err


def test_fp8_is_set_beside_bf16():
    rows = [
        {"case": "toy/2x40/q2", "who": "xla", "median_us": 30.0},
        {"case": "toy/2x40/q2/fp8", "who": "xla", "median_us": 20.0},
    ]
    assert results.with_ratios(rows, ("xla",), ())[1]["ratios"] == {"bf16": 1.5}


def test_only_results_are_loaded(tmp_path):
    for text in ("", "[]", json.dumps({"rows": []})):
        path = tmp_path / "file.json"
        path.write_text(text)
        with pytest.raises(results.BadResult, match=r"file\.json: expected a file that bench.run"):
            results.load(path)


def test_an_mxfp4_layer_is_timed_beside_bfloat16(tmp_path, capsys):
    path = tmp_path / "result.json"
    size = ["--tokens", "1", "3", "--rows", "96", "--columns", "64", "--iterations", "2"]
    assert mxfp4_bench.main([*size, "--implementation", "xla", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(r["tokens"], r["who"]) for r in rows] == [
        (1, "bfloat16"), (1, "xla"), (3, "bfloat16"), (3, "xla"),
    ]  # fmt: skip
    assert all(r["low_us"] <= r["median_us"] <= r["high_us"] for r in rows)
    assert "3 x 64 x 96" in capsys.readouterr().out


def test_a_wrong_mxfp4_product_has_no_speed(monkeypatch):
    right = mxfp4_bench.matmul
    monkeypatch.setattr(mxfp4_bench, "matmul", lambda *a, **k: right(*a, **k) + 1)
    with pytest.raises(SystemExit, match="xla: wrong answer"):
        mxfp4_bench.measure(1, 64, 64, ["xla"], 1)


def test_a_cycle_of_the_loop_is_timed(capsys, tmp_path):
    cycle.main(["toy", "--rows", "2", "--context", "20", "--json", str(tmp_path / "cycle.json")])
    rows = json.loads((tmp_path / "cycle.json").read_text())
    assert [(row["method"], row["n"], row["rows"]) for row in rows] == [("off", 1, 2), ("eagle", 4, 2)]
    assert all(row["cycle_us"] > 0 for row in rows)
    # Without the clock of a GPU no time is called that of kernels.
    assert not any("kernels_us" in row for row in rows)
    assert "toy in bfloat16" in capsys.readouterr().out
