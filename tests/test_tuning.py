"""Which entry of a table a problem gets."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from bench import tune
from jaxattn.kernels import tuning
from jaxattn.kernels.tuning import launches
from jaxattn.problem import AttentionProblem

SM90 = tuning.Device(architecture="sm90", cores=132)


def prefill(keys=1 << 17, width=128, q="bfloat16", kv="bfloat16", batch=2, page_size=16, **changes):
    struct = jax.ShapeDtypeStruct
    problem = AttentionProblem(
        q=struct((4096, 32, width), jnp.dtype(q)),
        k_cache=struct((64, page_size, 8, width), jnp.dtype(kv)),
        v_cache=struct((64, page_size, 8, width), jnp.dtype(kv)),
        page_table=struct((batch, keys // page_size), jnp.int64),
        cu_seqlens_q=struct((batch + 1,), jnp.int64),
        seqused_k=struct((batch,), jnp.int64),
        softmax_scale=1.0,
        max_seqlen_q=2048,
        out_dtype=jnp.dtype(q),
    )
    return dataclasses.replace(problem, **changes)


def choice_of(problem):
    with tuning.using(SM90):
        return launches.attention_launches(problem, SM90)[-1].choice


@pytest.fixture
def compiler_keeps_turns(monkeypatch):
    monkeypatch.setattr(launches, "compiler_keeps_turns", lambda: True)


@pytest.mark.parametrize("width", [64, 128, 256])
def test_halves_of_a_long_prefill_take_turns(width, compiler_keeps_turns):
    assert choice_of(prefill(width=width)).turns


@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(prefill(keys=4096), id="short-rows-of-the-table"),
        pytest.param(prefill(width=100), id="rows-that-are-not-whole-words"),
        pytest.param(prefill(kv="float16"), id="converted-keys"),
        pytest.param(prefill(kv="float8_e4m3fn"), id="8-bit-keys"),
        pytest.param(prefill(q="float32", kv="float32"), id="float32"),
        pytest.param(prefill(ancestors=jax.ShapeDtypeStruct((4096, 1), jnp.uint64)), id="tree"),
    ],
)
def test_no_turns_where_a_half_could_wait_for_ever_or_tiles_do_not_fit(problem, compiler_keeps_turns):
    assert not choice_of(problem).turns


@pytest.mark.parametrize(
    ("width", "page_size", "turns"),
    [(256, 8, True), (256, 64, True), (256, 4, False), (256, 1, False), (256, 48, False), (128, 1, True)],
)
def test_turns_of_wide_heads_need_few_page_ids_a_tile(width, page_size, turns, compiler_keeps_turns):
    assert choice_of(prefill(width=width, page_size=page_size)).turns == turns


def test_kernels_that_know_no_turns_get_the_entry_beside(compiler_keeps_turns):
    with tuning.using(SM90):
        (launch,) = launches.attention_launches(prefill(batch=1), SM90, takes_turns=False)
    assert not launch.choice.turns


def test_no_turns_with_a_compiler_that_breaks_them(monkeypatch):
    monkeypatch.setattr(launches, "compiler_keeps_turns", lambda: False)
    assert not choice_of(prefill()).turns


def test_converted_16_bit_values_get_the_tiles_of_32_bit_ones():
    """They lie in shared memory twice."""
    assert choice_of(prefill(kv="float16")).kv_bytes == 4
    assert choice_of(prefill(v_cache=jax.ShapeDtypeStruct((64, 16, 8, 128), jnp.float8_e4m3fn))).kv_bytes == 4
    assert choice_of(prefill(kv="float8_e4m3fn")).kv_bytes == 1


def test_turns_need_two_halves():
    entry = {"head_dim": 64, "rows": 64, "kv_bytes": 2, "block_rows": 64, "tile": 64}
    with pytest.raises(ValueError, match="warps: expected 8, two halves of four that take turns, got 4"):
        tuning.TileChoice(**entry, warps=4, stages=3, programs_per_core=1, turns=True)


def test_the_tuner_keeps_what_one_shape_does_not_decide():
    table = tuning.load("sm90")
    plain, turns = (table.choose("prefill", 128, 128, 2, keys) for keys in (0, 1 << 20))
    assert plain.bare_ids
    assert turns.min_keys > 0
    faster = {False: dataclasses.replace(plain, tile=32), True: dataclasses.replace(turns, stages=2)}
    rows = [
        {"choice": dataclasses.replace(choice, bare_ids=False, min_keys=0)}
        for choice in (faster[True], faster[False])
    ]
    changed = tune.updated(table, {"llama-3-8b/1x16k/q16k": rows})
    assert changed.choose("prefill", 128, 128, 2) == faster[False]
    assert changed.choose("prefill", 128, 128, 2, 1 << 20) == faster[True]
    assert len(changed.prefill) == len(table.prefill)


@pytest.mark.parametrize("architecture", ["sm90", "gfx942", "gfx950", "interpreter", "default"])
def test_every_entry_with_turns_has_one_without_beside_it(architecture):
    table = tuning.load(architecture)
    for kind in tuning.KINDS:
        entries = getattr(table, kind)
        sizes = {(c.head_dim, c.rows, c.kv_bytes) for c in entries if not c.turns}
        assert {(c.head_dim, c.rows, c.kv_bytes) for c in entries} == sizes
        assert table.turns != ("", "") or not any(c.turns for c in entries)
    assert tuning.parse(json.loads(tuning.dump(table))) == table
