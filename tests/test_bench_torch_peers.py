"""Peers that run under torch, without a GPU: what they are asked, and what is made of the answers."""

import json
import sys
import types

import numpy as np
import pytest

from bench import contest, run
from bench.inputs import TOLERANCE, expected_rows, sampled_error
from bench.peers import aiter_torch, flashinfer_torch, torch_process
from bench.shapes import parse

UNSUPPORTED = {
    aiter_torch: ["toy/2x99/q99", "toy/2x40/q2/f16", "toy-local/2x40/q1", "toy/2x40/q5/tree2"],
    flashinfer_torch: ["toy/2x40/q2/f32", "toy/2x40/q2/int8", "toy-local/2x40/q2/fp8"],
}


@pytest.mark.parametrize(
    ("peer", "name"), [(peer, name) for peer, names in UNSUPPORTED.items() for name in names]
)
def test_a_case_that_a_peer_does_not_know_is_refused(peer, name):
    assert peer.unsupported(parse(name))


def test_flashinfer_refuses_a_width_and_sinks_of_a_tree():
    shape = parse("toy/2x40/q5/tree2")
    assert flashinfer_torch.unsupported(shape) is None
    assert "head widths 64, 128, 256" in flashinfer_torch.unsupported(shape.replace(head_dim=96))
    assert "draft trees" in flashinfer_torch.unsupported(shape.replace(sinks=True))


@pytest.mark.parametrize("name", ["toy/2x40/q1", "toy/2x99/q99/p64", "toy-local/2x40/q4", "toy/2x40/q2/fp8"])
def test_flashinfer_enters_decode_verify_and_prefill(name):
    assert flashinfer_torch.unsupported(parse(name)) is None


def test_a_peer_that_is_not_installed_is_a_row_with_the_reason(monkeypatch):
    monkeypatch.setattr(torch_process.importlib.util, "find_spec", lambda name: None)
    arguments = ["--case", "toy/2x40/q2", "step/4x8", "--peers", "flashinfer", "aiter"]
    job, _ = run.parse([*arguments, "--implementation", "xla", "--rounds", "2", "--iterations", "1"])
    kept = []
    rows = {(r["case"], r["who"]): r for r in run.measure(job, keep=kept.append)["rows"]}
    assert [len({r["who"] for r in result["rows"]}) for result in kept] == [1, 1, 1, 1, 2, 3]
    assert rows["toy/2x40/q2", "flashinfer"]["refused"] == "flashinfer and torch are not installed"
    assert rows["toy/2x40/q2", "aiter"]["refused"] == "aiter and torch are not installed"
    assert ("step/4x8", "flashinfer") not in rows
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


CASES = {
    "toy/1x40+2x9/q1/p4": ["decode", "decode tensor-cores", "prefill fa3"],
    "toy/1x40+2x9/q3/p4": ["prefill fa2", "prefill fa3"],
    "toy/2x30/q6/tree2/p8": ["prefill fa2"],
    "toy-local/2x70/q1": ["prefill fa2", "prefill fa3"],
    "toy-local/2x70/q2": ["prefill fa2", "prefill fa3"],
    "toy/2x20/q1/p8/fp8": ["decode", "decode tensor-cores"],
    "toy/2x20/q2/p8/fp8": ["prefill fa2"],
    "toy/2x70/q70/f16": ["prefill fa2", "prefill fa3"],
    "qwen3.5-397b-tp2/2x20/q1": ["decode tensor-cores", "prefill fa3"],
}


@pytest.mark.parametrize("name", CASES)
def test_flashinfer_is_told_all_of_a_case(name, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setitem(sys.modules, "flashinfer", documented_flashinfer(torch))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    inputs = torch_process.make_inputs(parse(name), device="cpu")
    settings = list(flashinfer_torch.settings(inputs))
    assert [setting.settings for setting in settings] == CASES[name]
    for setting in settings:
        inputs.out.fill_(float("nan"))
        setting.prepare()(0)
        assert sampled_error(inputs, inputs.out) < TOLERANCE[inputs.shape.kv_dtype]
        assert sampled_error(inputs, 1.1 * inputs.out) > TOLERANCE[inputs.shape.kv_dtype]


def documented_flashinfer(torch):
    """FlashInfer's wrappers as its documentation describes them, in float32."""

    class Prefill:
        def __init__(self, workspace, layout, *, backend):
            assert (workspace.dtype, layout) == (torch.uint8, "NHD")
            assert backend in ("fa2", "fa3")

        def plan(
            self, qo_indptr, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *,
            q_data_type, kv_data_type, causal=False, custom_mask=None, window_left=-1,
        ):  # fmt: skip
            for array in (qo_indptr, indptr, indices, last_page_len):
                assert array.dtype == torch.int32
            self.qo_indptr, self.indptr, self.indices, self.last = qo_indptr, indptr, indices, last_page_len
            self.q_kind = (num_qo_heads, head_dim, q_data_type)
            self.kv_kind = (page_size, num_kv_heads, head_dim, kv_data_type)
            self.causal, self.mask, self.window_left = causal, custom_mask, window_left

        def run(self, q, cache, *, k_scale, v_scale, out):
            self.attend(q, cache, k_scale or 1.0, v_scale or 1.0, out, None)

        def attend(self, q, cache, k_scale, v_scale, out, sinks):
            assert (*q.shape[1:], q.dtype) == self.q_kind
            masked = 0
            for s in range(len(self.last)):
                rows = slice(*self.qo_indptr[s : s + 2].tolist())
                pages = self.indices[slice(*self.indptr[s : s + 2].tolist())].long()
                count = (len(pages) - 1) * self.kv_kind[0] + int(self.last[s])
                k, v = (
                    c.float()[pages].flatten(0, 1)[:count].repeat_interleave(q.shape[1] // c.shape[2], 1)
                    for c in cache
                )
                assert all((*c.shape[1:], c.dtype) == self.kv_kind for c in cache)
                position = torch.arange(rows.stop - rows.start)[:, None] + count - (rows.stop - rows.start)
                key = torch.arange(count)
                seen = torch.ones(len(position), count, dtype=torch.bool)
                if self.mask is not None:
                    seen = self.mask[masked : masked + seen.numel()].reshape(seen.shape)
                    masked += seen.numel()
                elif self.causal:
                    seen = key <= position
                if self.window_left >= 0:
                    seen &= key >= position - self.window_left
                scores = torch.einsum("ihd,chd->hic", q[rows].float(), k) * k_scale * q.shape[-1] ** -0.5
                scores = scores.masked_fill(~seen, -torch.inf)
                if sinks is not None:
                    scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(position), 1)], -1)
                weights = scores.softmax(-1)[..., :count]
                out[rows] = (torch.einsum("hic,chd->ihd", weights, v) * v_scale).to(out.dtype)

    class Decode(Prefill):
        def __init__(self, workspace, layout, *, use_tensor_cores):
            super().__init__(workspace, layout, backend="fa2")

        def plan(self, indptr, *arguments, **options):
            super().plan(torch.arange(len(indptr), dtype=torch.int32), indptr, *arguments, **options)

    class Sink(Prefill):
        def __init__(
            self,
            workspace,
            layout,
            *,
            backend,
            q_data_type,
            kv_data_type,
            head_dim_qk,
            head_dim_vo,
            window_left,
        ):
            super().__init__(workspace, layout, backend=backend)
            self.compiled = (q_data_type, kv_data_type, head_dim_qk, head_dim_vo, window_left)

        def run(self, q, cache, sink, sm_scale, *, k_scale, v_scale, out):
            assert sink.dtype == torch.float32
            assert sm_scale == q.shape[-1] ** -0.5
            assert (k_scale, v_scale) == (None, None)
            assert self.compiled == (q.dtype, cache[0].dtype, q.shape[-1], q.shape[-1], self.window_left)
            self.attend(q, cache, 1.0, 1.0, out, sink)

    return types.SimpleNamespace(
        BatchPrefillWithPagedKVCacheWrapper=Prefill,
        BatchDecodeWithPagedKVCacheWrapper=Decode,
        BatchAttentionWithAttentionSinkWrapper=Sink,
    )


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
