"""Builders that plan a step along with its tables: `plan_for`, and the launch that makes it all."""

import dataclasses
import importlib
from unittest import mock

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import table_cases
from test_plan import SPEC, cumulated

from jaxattn import metadata, page_table, plan, table_inputs, unified_attention
from jaxattn.debug import checked
from jaxattn.index64 import index64
from jaxattn.plan import AttentionLayers, ScheduleSpec, make_plan
from jaxattn.slot_rows import slot_rows
from jaxattn.tree import ancestor_bits

step = pytest.importorskip("jaxattn.kernels.triton.step")


def layers_of(tokens, page_size, **options):
    return AttentionLayers(
        q=jax.ShapeDtypeStruct((tokens, 4, 16), jnp.float32),
        k_cache=jax.ShapeDtypeStruct((32, page_size, 2, 16), jnp.float32),
        **options,
    )


@index64
def both_steps(spec: ScheduleSpec, lists, lengths, q_lens, page_size, full_to_swa=None):
    """Tables, lengths and schedule by the kernel and by XLA, for given rows or a number of them in each sequence."""
    lists = dict(lists)
    rows = slot_rows(**{name: value for name, value in lists.items() if name != "max_pages"})
    given = not isinstance(q_lens, int)
    arguments = (
        rows,
        jnp.asarray(np.array(lengths, np.int64)),
        jnp.asarray(0, jnp.int64),
        jnp.asarray(cumulated(q_lens)) if given else None,
    )
    options = {
        "live": None,
        "lookahead": jnp.asarray(0, jnp.int64),
        "full_to_swa": None if full_to_swa is None else jnp.asarray(full_to_swa),
        "q_len": None if given else q_lens,
        "page_size": page_size,
        "max_pages": lists["max_pages"],
        "specs": (spec,),
    }
    static = ("q_len", "page_size", "max_pages", "specs")
    actual = jax.jit(step.assemble, static_argnames=static)(*arguments, **options)
    return actual, table_inputs.assemble(*arguments, out=[], **options)


def assert_same_bits(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.fixture
def launches(monkeypatch):
    """Build with the Triton kernels, interpreted, and record the names of their launches."""
    from jaxattn.kernels.triton import launch as launching
    from jaxattn.kernels.triton import plan as plan_kernel

    names = []

    def recorded(kernel, *arguments, **options):
        names.append(kernel.__name__)
        return launching.launch(kernel, *arguments, **options)

    for user in (step, plan_kernel):
        monkeypatch.setattr(user, "launch", recorded)
    for user in (page_table, plan, table_inputs):
        monkeypatch.setattr(user, "bookkeeping", lambda: "triton")
    jax.clear_caches()
    yield names
    jax.clear_caches()


SPECS = {
    "plain": {},
    "window": {"sliding_window": 20},
    "tree-window": {"tree": True, "sliding_window": 20},
    "chunks": {"chunk": 64},
    "uncut": {"chunk": plan.UNCUT},
    "short-only": {"max_q_len": 1},
    "many-programs": {"programs": 264, "enough_runs": 123},
    "fewer-tokens-than-sequences": {"num_tokens": 3},
    "beyond-32-bits": {"capacity": 2**40},
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("form", ["ragged", "pooled"])
def test_one_launch_equals_the_separate_builders(name, form):
    lengths, q_lens = [15, 0, 7, 13, 1], [2, 0, 1, 4, 1]
    sizes = {"max_seqlen_q": 5, "num_tokens": 8, "capacity": 15, "tile": 4}
    spec = dataclasses.replace(SPEC, **sizes | SPECS[name])
    assert spec.blocks_in_sequence == 1
    case = table_cases.make_case(3, lengths, 3)
    used = [2**39, *lengths[1:]] if name == "beyond-32-bits" else lengths
    assert_same_bits(*both_steps(spec, getattr(case, form)(), used, q_lens, 3))


@pytest.mark.parametrize("form", ["ragged", "pooled"])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("page_size", [1, 16])
def test_slots_of_both_widths_and_the_window_table(form, dtype, page_size):
    lengths = [min(n, 5 * page_size) for n in (80, 3, 0, 16)]
    case = table_cases.make_case(5, lengths, page_size, holes=True, first_page=0)
    lists = getattr(case, form)()
    name = "kv_indices" if form == "ragged" else "req_to_token"
    lists[name] = np.clip(lists[name], -1, None).astype(dtype)
    spec = dataclasses.replace(SPEC, num_sequences=4, num_tokens=4, max_seqlen_q=1, capacity=5 * page_size)
    window = case.full_to_swa(np.random.default_rng(1))
    actual, expected = both_steps(spec, lists, lengths, 1, page_size, window)
    assert actual[0][1] is not None
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("lengths", [[200], [0], [130, 0, 7], [0, 0, 0]])
def test_rows_wider_than_a_stretch_and_batches_without_work(lengths):
    columns = 200
    pool = np.random.default_rng(0).permutation(3 * columns).reshape(3, columns)
    lists = {"req_to_token": pool, "req_pool_indices": np.arange(len(lengths)), "max_pages": columns}
    count = len(lengths)
    spec = dataclasses.replace(
        SPEC, num_sequences=count, num_tokens=count, max_seqlen_q=1, capacity=columns, tile=16
    )
    assert_same_bits(*both_steps(spec, lists, lengths, 1, 1))


def test_without_slots_the_separate_builders_run(launches):
    pool = {
        "req_to_token": np.zeros((1, 0), np.int32),
        "req_pool_indices": np.zeros(1, np.int64),
        "max_pages": 2,
    }
    actual, expected = build_twice(
        lambda: metadata.decode_metadata(
            seqused_k=np.array([3]), page_size=4, plan_for=layers_of(1, 4), **pool
        )
    )
    assert launches == ["schedule_kernel"]
    assert_same_bits(actual, expected)


def build_twice(function):
    """The same metadata by the kernels and by XLA."""
    actual = function()
    with pytest.MonkeyPatch.context() as patch:
        for user in (page_table, plan, table_inputs):
            patch.setattr(user, "bookkeeping", lambda: None)
        jax.clear_caches()
        return actual, function()


POOL = {
    "page_size": 4,
    "req_to_token": np.arange(4, 64, dtype=np.int32).reshape(3, 20),
    "req_pool_indices": np.array([2, -1, 1, 0, 0]),
}
TREES = np.asarray(ancestor_bits(np.array([[-1, 0, 0, 1]] * 5)))


def verify_tree(**options):
    return metadata.target_verify_metadata(
        prefix_lens=np.array([9, 4, 0, 16, -1]), num_draft_tokens=4, ancestors=TREES, **POOL, **options
    )


BUILDERS = {
    "decode": lambda **o: metadata.decode_metadata(seqused_k=np.array([9, 4, 3, 20, 0]), **POOL, **o),
    "verify-tree": verify_tree,
    "draft-decode": lambda **o: metadata.draft_decode_metadata(
        prefix_lens=np.array([9, 4, 0, 17, -1]), step=1, lookahead=3, **POOL, **o
    ),
    "draft-extend": lambda **o: metadata.draft_extend_metadata(
        seqused_k=np.array([9, 4, 3, 2, 20]), num_draft_tokens=3, **POOL, **o
    ),
    "extend": lambda **o: metadata.extend_metadata(
        seqused_k=np.array([9, 4, 3, 20, 5]),
        cu_seqlens_q=np.array([0, 2, 2, 3, 5, 5]),
        max_seqlen_q=2,
        **POOL,
        **o,
    ),
}
ROWS = {"decode": 5, "verify-tree": 20, "draft-decode": 5, "draft-extend": 15, "extend": 5}


@pytest.mark.parametrize("mode", BUILDERS)
@pytest.mark.parametrize("live", [None, [True, True, True, False, True]], ids=["all", "marked"])
def test_each_builder_makes_everything_in_one_launch(mode, live, launches):
    layers = layers_of(ROWS[mode], 4, sliding_windows=(6,))
    live = None if live is None else np.array(live)
    actual, expected = build_twice(lambda: BUILDERS[mode](plan_for=layers, live=live))
    assert launches == ["step_kernel"]
    assert_same_bits(actual, expected)
    bare = BUILDERS[mode](live=live)
    assert bare.plan is None
    tables = (bare.page_table, bare.cu_seqlens_q, bare.seqused_k)
    assert_same_bits((actual.page_table, actual.cu_seqlens_q, actual.seqused_k), tables)
    separate = make_plan(bare, layers.q, layers.k_cache, sliding_windows=(6,))
    assert_same_bits(actual.plan, separate)


def test_further_schedules_have_launches_of_their_own_or_come_from_xla(launches):
    layers = layers_of(43, 4, sliding_windows=(None, 6))

    def build():
        return metadata.extend_metadata(
            seqused_k=np.array([20, 5, 3, 20, 4]), cu_seqlens_q=np.array([0, 20, 21, 22, 40, 41]),
            max_seqlen_q=20, plan_for=layers, **POOL,
        )  # fmt: skip

    actual, expected = build_twice(build)
    kinds = [(s.spec.sliding_window, s.spec.blocks_in_sequence > 1) for s in actual.plan.schedules]
    assert kinds == [(None, False), (None, True), (6, False), (6, True)]
    assert launches == ["step_kernel", "schedule_kernel"]
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("mode", ["decode", "verify-tree"])
def test_under_jit_the_plan_is_the_same(mode, x64, launches):
    layers = layers_of(ROWS[mode], 4)
    expected = BUILDERS[mode](plan_for=layers)
    with jax.enable_x64(x64):
        assert_same_bits(jax.jit(lambda: BUILDERS[mode](plan_for=layers))(), expected)
    assert all(leaf.dtype == jnp.int64 for leaf in jax.tree.leaves(expected.plan))


def test_a_donated_table_is_taken_with_a_plan(launches):
    first = BUILDERS["decode"]()
    expected = BUILDERS["decode"](plan_for=layers_of(5, 4))
    assert_same_bits(BUILDERS["decode"](plan_for=layers_of(5, 4), out=first), expected)


def test_checked_mode_checks_the_rows_of_a_planned_step(launches):
    layers = layers_of(5, 4)
    checked(lambda: BUILDERS["decode"](plan_for=layers))()
    short = {"kv_indptr": np.array([0, 4, 4]), "kv_indices": np.arange(4), "max_pages": 2, "page_size": 4}
    layers = layers_of(2, 4)
    with pytest.raises(Exception, match="sequence 1 lists fewer slots"):
        checked(lambda: metadata.decode_metadata(seqused_k=np.array([4, 3]), plan_for=layers, **short))()


def test_other_lengths_drop_the_plan():
    built = BUILDERS["decode"](plan_for=layers_of(5, 4), lookahead=1)
    assert built.plan is not None
    assert built.advance(1).plan is None
    assert built.with_lengths(np.array([1, 0, 2, 3, 0])).plan is None
    assert built.pad_to(7).plan is None


def alone(*_):
    raise AssertionError("a call made a schedule of its own")


@pytest.mark.parametrize("implementation", ["triton", "pallas", "xla"])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 6}, {"batch_invariant": True}], ids=str)
def test_attention_finds_the_plan(implementation, options, monkeypatch):
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(20, 4, 16)), jnp.float32)
    k, v = (jnp.asarray(rng.normal(size=(32, 4, 2, 16)), jnp.float32) for _ in range(2))
    layers = AttentionLayers(
        q=q,
        k_cache=k,
        v_cache=v,
        sliding_windows=(options.get("sliding_window"),),
        batch_invariant=options.get("batch_invariant", False),
    )
    bare, planned = verify_tree(), verify_tree(plan_for=layers)
    expected = unified_attention(q, k, v, bare, implementation=implementation, **options)
    if implementation != "xla":
        attention = importlib.import_module(f"jaxattn.kernels.{implementation}.attention")
        backend = dataclasses.replace(attention._BACKEND, build_schedule=alone)
        monkeypatch.setattr(attention, "_BACKEND", backend)
    actual = unified_attention(q, k, v, planned, implementation=implementation, **options)
    np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected))


@pytest.mark.parametrize("name", ["decode-plain", "extend-everything", "tree-window"])
def test_the_schedules_are_those_that_launches_ask_for(name):
    problem = cases.build(cases.CASES[name])
    batch = problem.metadata
    layers = AttentionLayers(
        q=problem.q,
        k_cache=problem.k_cache,
        v_cache=problem.v_cache,
        sliding_windows=(problem.options.get("sliding_window"),),
    )
    specs = plan.schedule_specs(
        layers,
        num_sequences=batch.num_seqs,
        max_pages=batch.page_table.shape[1],
        page_size=batch.page_size,
        max_seqlen_q=batch.max_seqlen_q,
        tree_words=0 if batch.ancestors is None else batch.ancestors.shape[1],
    )
    from jaxattn.kernels import _launches

    asked = mock.Mock(wraps=_launches.attention_launches)
    with mock.patch.object(_launches, "attention_launches", asked):
        unified_attention(
            problem.q, problem.k_cache, problem.v_cache, batch, implementation="triton", **problem.options
        )
    (call,) = asked.call_args_list
    assert specs == tuple(launch.spec for launch in _launches.attention_launches(*call.args))


def test_layers_are_static():
    arrays = AttentionLayers(
        q=jnp.zeros((5, 4, 16)), k_cache=jnp.zeros((32, 4, 2, 16)), sliding_windows=[None]
    )
    assert arrays == layers_of(5, 4)
    assert hash(arrays) == hash(layers_of(5, 4))
    assert arrays != layers_of(5, 4, batch_invariant=True)


def test_a_batch_without_sequences_has_an_empty_plan():
    empty = {"kv_indptr": np.zeros(1, np.int64), "kv_indices": np.zeros(0, np.int64), "max_pages": 2}
    built = metadata.decode_metadata(
        seqused_k=np.zeros(0, np.int64), page_size=4, plan_for=layers_of(0, 4), **empty
    )
    assert built.plan.schedules == ()


q, cache = jnp.zeros((3, 4, 16)), jnp.zeros((32, 4, 2, 16))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"q": q[0], "k_cache": cache}, r"q: expected shape \[T, H, D\], got \[4, 16\]"),
        ({"q": q, "k_cache": cache[0]}, r"k_cache: expected shape \[N, P, K, D\], got \[4, 2, 16\]"),
        ({"q": q, "k_cache": cache, "v_cache": q}, r"v_cache: expected shape \[N, P, K, Dv\]"),
        (
            {"q": q[:, :3], "k_cache": cache},
            "q: expected a number of query heads that is a multiple of the 2",
        ),
        (
            {"q": q, "k_cache": cache, "v_cache": cache[:4]},
            "v_cache: expected the pages, page size and KV heads",
        ),
        ({"q": q, "k_cache": cache, "sliding_windows": ()}, "sliding_windows: expected one for each kind"),
    ],
)
def test_layers_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        AttentionLayers(**arguments)


def test_a_plan_for_other_tables_is_refused():
    with pytest.raises(
        ValueError, match="k_cache: expected the page size of the tables, 4, got 8; view the cache"
    ):
        BUILDERS["decode"](plan_for=layers_of(5, 8))
    with pytest.raises(ValueError, match="k_cache: expected the page size of the tables"):
        make_plan(BUILDERS["decode"](), q, layers_of(5, 8).k_cache)
    with pytest.raises(
        TypeError, match=r"plan_for: expected a jaxattn\.plan\.AttentionLayers, got ShapeDtypeStruct"
    ):
        BUILDERS["decode"](plan_for=layers_of(5, 4).q)
    with pytest.raises(ValueError, match="plan_for: expected the 20 rows of ancestors in q, got 5"):
        verify_tree(plan_for=layers_of(5, 4))
