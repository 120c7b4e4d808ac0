"""Peers that run under torch, without a GPU: what they are asked, and what is made of the answers."""

import json
import types

import numpy as np
import pytest

from bench import contest, run
from bench.inputs import expected_rows
from bench.peers import aiter_torch, torch_process
from bench.shapes import parse

UNSUPPORTED = {
    aiter_torch: ["toy/2x99/q99", "toy/2x40/q2/f16", "toy-local/2x40/q1", "toy/2x40/q5/tree2"],
}


@pytest.mark.parametrize(
    ("peer", "name"), [(peer, name) for peer, names in UNSUPPORTED.items() for name in names]
)
def test_a_case_that_a_peer_does_not_know_is_refused(peer, name):
    assert peer.unsupported(parse(name))


def test_a_peer_that_is_not_installed_is_a_row_with_the_reason(monkeypatch):
    monkeypatch.setattr(torch_process.importlib.util, "find_spec", lambda name: None)
    arguments = ["--case", "toy/2x40/q2", "step/4x8", "--peers", "aiter"]
    job, _ = run.parse([*arguments, "--implementation", "xla", "--rounds", "2", "--iterations", "1"])
    rows = {(r["case"], r["who"]): r for r in run.measure(job)["rows"]}
    assert rows["toy/2x40/q2", "aiter"]["refused"] == "aiter and torch are not installed"
    assert ("step/4x8", "aiter") not in rows
    assert len(rows["toy/2x40/q2", "xla"]["samples_us"]) == 2


def test_what_a_process_found_becomes_the_entry_of_its_peer():
    found = {
        "toy/2x40/q2": {"settings": "fast", "samples": [3.0, 1.0, 2.0], "error": 1e-3},
        "toy/2x41/q2": {"refused": "its process ended with code 1"},
    }
    peer = types.SimpleNamespace(
        unavailable=lambda shape: "no such width" if shape.head_dim == 128 else None,
        measure=lambda names: {name: found[name] for name in names},
    )
    entries = run._torch_entries(peer, ("toy/2x40/q2", "toy/2x41/q2", "llama-3-8b/2x40/q2", "step/4x8"))
    assert entries["toy/2x40/q2"].timing.median == 2.0
    assert entries["toy/2x41/q2"].refused == "its process ended with code 1"
    assert entries["llama-3-8b/2x40/q2"] == contest.Entry(refused="no such width")
    assert "step/4x8" not in entries


def test_a_process_that_dies_refuses_what_it_left(tmp_path, monkeypatch):
    (tmp_path / "dying_peer.py").write_text(
        "import json, sys\n"
        "print(json.dumps({'shape': sys.argv[1], 'samples': [1.0]}), flush=True)\n"
        "sys.exit(3 if len(sys.argv) > 2 else 0)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    names = ["toy/2x40/q1", "toy/2x40/q2", "toy/2x40/q3"]
    rows = torch_process.measure("dying_peer", names, lambda shape: shape.q_len == 3)
    assert rows == {
        "toy/2x40/q1": {"shape": "toy/2x40/q1", "samples": [1.0]},
        "toy/2x40/q2": {"shape": "toy/2x40/q2", "refused": "its process ended with code 3"},
        "toy/2x40/q3": {"shape": "toy/2x40/q3", "samples": [1.0]},
    }


def test_alike_shapes_share_a_process():
    names = [f"toy/2x{n}/q{q}" for n in range(40, 48) for q in (1, 2)]
    shares = torch_process._shares(names, lambda shape: shape.contexts)
    assert sorted(name for share in shares for name in share) == sorted(names)
    assert len(shares) == torch_process.PROCESSES
    for share in shares:
        assert {name.replace("q1", "q2") for name in share} == {name for name in share if "q2" in name}
    assert max(map(len, torch_process._shares(names, lambda shape: shape.name))) == 3


def test_rows_are_checked_before_they_are_timed(monkeypatch):
    torch = pytest.importorskip("torch")
    inputs = torch_process.make_inputs(parse("toy/2x20/q2"), device="cpu")
    monkeypatch.setattr(torch_process, "make_inputs", lambda shape: inputs)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch_process, "_samples", lambda call, tables: call("time"))
    right = expected(inputs)

    def setting(name, times, wrong=1.0):
        def call(i):
            if i == "time":
                return times
            return inputs.out.copy_(torch.tensor(wrong * right))

        return torch_process.Setting(name, lambda: call)

    def broken():
        raise ValueError("no such tile\nbecause")

    def settings(_):
        yield torch_process.Setting("broken", broken)
        yield setting("wrong", [0.0], 1.1)
        yield setting("slow", [2.0, 3.0])
        yield setting("fast", [1.0, 9.0, 1.0])

    errors, refusals = torch_process._check(inputs.shape, settings)
    assert errors.keys() == {"slow", "fast"}
    assert refusals[0] == "broken: ValueError: no such tile"
    assert "wrong: wrong answer" in refusals[1]
    row = torch_process._best(inputs.shape, settings, errors, refusals)
    assert row == {"settings": "fast", "samples": [1.0, 9.0, 1.0], "error": errors["fast"]}
    assert json.dumps(row)
    assert torch_process._best(inputs.shape, settings, {}, ["a", "b"]) == {"refused": "a; b"}


def expected(inputs):
    """Float64 output of all rows."""
    shape = inputs.shape
    rows = [
        np.concatenate([expected_rows(inputs, s, kv_head, i) for kv_head in range(shape.num_kv_heads)])
        for s in range(len(shape.contexts))
        for i in range(shape.q_len)
    ]
    return np.stack(rows)
