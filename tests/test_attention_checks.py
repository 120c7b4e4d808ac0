"""What unified_attention refuses, and what it says."""

import dataclasses

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case

from jaxattn.attention import IMPLEMENTATIONS, implementations, unified_attention
from jaxattn.errors import UnsupportedError
from jaxattn.index64 import index64
from jaxattn.routing import AttentionConfig

HEADS = np.ones(4, np.float32)


@pytest.fixture(scope="module")
def problem():
    return cases.build(Case(mode="target_verify", tree=1, page_size=4))


@index64
def replaced(metadata, **changes):
    return dataclasses.replace(
        metadata, **{name: jnp.asarray(v) if isinstance(v, np.ndarray) else v for name, v in changes.items()}
    )


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"sliding_window": 0}, ValueError, "sliding_window: .* None for no window, got 0"),
        ({"sliding_window": -1}, ValueError, "sliding_window: .* None for no window, got -1"),
        ({"sliding_window": 4.0}, TypeError, "sliding_window: expected a Python int"),
        ({"sliding_window": np.ones(1)}, TypeError, "sliding_window: .* known when the call is traced"),
        ({"softcap": 0.0}, ValueError, "softcap: expected a positive number, or None for no cap, got 0.0"),
        ({"softcap": -3}, ValueError, "softcap: expected a positive number"),
        ({"softcap": float("inf")}, ValueError, "softcap: expected a positive number"),
        ({"softmax_scale": float("nan")}, ValueError, "softmax_scale: expected a finite number"),
        ({"softmax_scale": "1"}, TypeError, "softmax_scale: expected a Python float"),
        ({"causal": 1}, TypeError, "causal: expected True or False"),
        ({"causal": False}, ValueError, "causal: expected True with a draft tree"),
        ({"batch_invariant": None}, TypeError, "batch_invariant: expected True or False"),
        ({"sinks": HEADS[:3]}, ValueError, r"sinks: expected shape \(4,\), one value for each query head"),
        ({"sinks": HEADS.astype(bool)}, TypeError, "sinks: expected float32 values, got bool"),
        ({"alibi_slopes": HEADS[:2]}, ValueError, r"alibi_slopes: expected shape \(4,\)"),
        ({"k_descale": HEADS}, ValueError, r"k_descale: .*\(2,\).*got \(4,\)"),
        ({"q_descale": HEADS[:3]}, ValueError, r"q_descale: .*\(2,\).*got \(3,\)"),
        ({"v_descale": np.ones((2, 1))}, ValueError, "v_descale: "),
        ({"output_scale": HEADS[:2]}, ValueError, r"output_scale: expected a scalar, got shape \(2,\)"),
        ({"out_dtype": "int32"}, TypeError, "out_dtype: expected one of float32, .*, got int32"),
        ({"implementation": "cuda"}, ValueError, "implementation: expected None or some of triton, .*'cuda'"),
        ({"implementation": ()}, ValueError, "implementation: expected None or some of"),
        ({"implementation": ("xla", "cuda")}, ValueError, "implementation: expected None or some of"),
    ],
)
def test_a_wrong_option_is_named(options, error, text, problem):
    with pytest.raises(error, match=text):
        unified_attention(problem.q, problem.k_cache, problem.v_cache, problem.metadata, **options)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"q": lambda q: q[0]}, ValueError, r"q: expected \[T, H, D\] query rows, got shape \(4, 16\)"),
        ({"q": lambda q: q.astype(np.float64)}, TypeError, "q: expected one of float32, .*, got float64"),
        ({"q": lambda q: q.tolist()}, TypeError, r"q: expected an array of \[T, H, D\] query rows, got list"),
        ({"q": lambda q: q[:, :3]}, ValueError, "multiple of the 2 KV heads, got 3"),
        ({"q": lambda q: q[:, :, :8]}, ValueError, "k_cache: expected keys of width 8, as q has, got 16"),
        ({"q": lambda q: q[:, :0]}, ValueError, "at least one head"),
        ({"k_cache": lambda k: k[..., 0]}, ValueError, r"k_cache: expected \[N, P, K, D\] pages"),
        (
            {"k_cache": lambda k: np.zeros(k.shape, np.int16)},
            TypeError,
            "k_cache: expected one of .*, got int16",
        ),
        ({"v_cache": lambda v: v[1:]}, ValueError, "v_cache: expected the pages, page size and KV heads"),
    ],
)
def test_a_wrong_array_is_named(change, error, text, problem):
    arrays = {name: getattr(problem, name) for name in ("q", "k_cache", "v_cache")}
    arrays |= {name: wrong(arrays[name]) for name, wrong in change.items()}
    with pytest.raises(error, match=text):
        unified_attention(*arrays.values(), problem.metadata)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"page_size": 8}, ValueError, "metadata.page_size: expected 4, the page size of k_cache, got 8"),
        ({"max_seqlen_q": -1}, ValueError, "metadata.max_seqlen_q: expected a length, got -1"),
        ({"page_table": np.zeros(5, int)}, ValueError, r"metadata.page_table: expected \[S, M\]"),
        ({"page_table": np.zeros((5, 2))}, TypeError, "metadata.page_table: expected an integer dtype"),
        ({"seqused_k": np.zeros(4, int)}, ValueError, r"metadata.seqused_k: expected shape \(5,\)"),
        ({"cu_seqlens_q": np.zeros(5, int)}, ValueError, r"metadata.cu_seqlens_q: expected shape \(6,\)"),
        ({"ancestors": np.zeros((23, 1), int)}, TypeError, "metadata.ancestors: expected uint64"),
        ({"ancestors": np.zeros((22, 1), np.uint64)}, ValueError, "one row for each of the 23 rows of q"),
        (
            {"ancestors": np.zeros((23, 0), np.uint64)},
            ValueError,
            "at least 1 words a row for trees of up to 4",
        ),
    ],
)
def test_wrong_metadata_is_named(change, error, text, problem):
    with pytest.raises(error, match=text):
        unified_attention(problem.q, problem.k_cache, problem.v_cache, replaced(problem.metadata, **change))


def test_an_option_that_is_traced_is_refused(problem):
    call = jax.jit(
        lambda window: unified_attention(
            problem.q, problem.k_cache, problem.v_cache, problem.metadata, sliding_window=window
        )
    )
    with pytest.raises(TypeError, match=r"sliding_window: .* known when the call is traced"):
        call(4)


def test_the_defaults_of_dtypes():
    for dtype, expected in {
        "float32": "float32",
        "float16": "float16",
        "float8_e5m2": "bfloat16",
        "int8": "bfloat16",
    }.items():
        problem = cases.build(Case(mode="decode", lengths=((1, 3),), dtype=dtype))
        call = jax.eval_shape(
            lambda q, k, v, m: unified_attention(q, k, v, m),
            *map(jnp.asarray, (problem.q, problem.k_cache, problem.v_cache)),
            problem.metadata,
        )
        assert call.dtype == expected


@pytest.mark.parametrize(
    ("dtype", "largest"), [("float8_e4m3fn", 448), ("float8_e4m3fnuz", 240), ("int8", 127)]
)
def test_a_one_byte_output_saturates(dtype, largest, implementation):
    problem = cases.build(Case(mode="decode", lengths=((1, 3),), padding_rows=0))
    for sign in (1, -1):
        v_cache = np.where(np.isnan(problem.v_cache), np.nan, np.float32(sign * 1e4))
        out = unified_attention(
            problem.q,
            problem.k_cache,
            v_cache,
            problem.metadata,
            out_dtype=dtype,
            implementation=implementation,
        )
        lowest = -128 if dtype == "int8" else -largest
        assert (np.asarray(out, np.float32) == (largest if sign > 0 else lowest)).all()


def test_every_refusal_is_gathered_with_its_reason(problem, monkeypatch):
    monkeypatch.setattr("jaxattn.kernels.xla.supports", lambda problem: "no tree today")
    with pytest.raises(UnsupportedError, match="xla: no tree today"):
        unified_attention(problem.q, problem.k_cache, problem.v_cache, problem.metadata)
    with pytest.raises(UnsupportedError) as caught:
        unified_attention(
            problem.q,
            problem.k_cache,
            problem.v_cache,
            problem.metadata,
            implementation=("xla", "reference"),
            batch_invariant=True,
        )
    assert "xla: no tree today" in str(caught.value)
    assert "reference: batch_invariant=True needs fixed reduction shapes" in str(caught.value)


def test_a_sequence_of_names_is_tried_in_order(problem, monkeypatch):
    tried = []
    for name in ("reference", "xla"):
        monkeypatch.setattr(
            f"jaxattn.kernels.{name}.supports", lambda problem, name=name: tried.append(name) or None
        )
    unified_attention(
        problem.q, problem.k_cache, problem.v_cache, problem.metadata, implementation=("reference", "xla")
    )
    assert tried == ["reference"]


def test_a_package_that_is_missing_is_a_reason(problem, monkeypatch):
    def missing(name):
        raise ImportError("no module named triton")

    monkeypatch.setattr("jaxattn.attention._load", missing)
    with pytest.raises(UnsupportedError, match=r"xla: cannot be imported \(no module named triton\)"):
        unified_attention(problem.q, problem.k_cache, problem.v_cache, problem.metadata, implementation="xla")
    assert implementations()["xla"] == "cannot be imported (no module named triton)"


def test_implementations_says_what_runs_here():
    found = implementations()
    assert tuple(found) == IMPLEMENTATIONS
    assert found["xla"] is None
    assert found["reference"] is None


def test_config_routes_a_mode_to_the_dense_path(problem):
    arguments = problem.q, problem.k_cache, problem.v_cache, problem.metadata
    config = AttentionConfig(unified_verify=False)
    out = unified_attention(*arguments, config=config)
    assert np.array_equal(out, unified_attention(*arguments, implementation="reference"))
    with pytest.raises(UnsupportedError, match=r"routed to the dense path \(unified_verify is off\)"):
        unified_attention(*arguments, config=config, implementation="xla")
    unified = unified_attention(*arguments, config=AttentionConfig())
    assert np.array_equal(unified, unified_attention(*arguments, implementation="xla"))
    with pytest.raises(UnsupportedError, match="mode 'target_verify' cannot be computed: mla is on"):
        unified_attention(*arguments, config=AttentionConfig(mla=True))
