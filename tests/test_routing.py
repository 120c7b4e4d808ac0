import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.attention import unified_attention
from jaxattn.errors import UnsupportedError
from jaxattn.kv_cache import PagedKVCache
from jaxattn.metadata import decode_metadata
from jaxattn.routing import MODES, AttentionConfig, Route, route, routing_table

SWITCHES = ("unified", "unified_verify", "unified_draft_extend", "mla", "window_pool")


def expected_path(mode, unified, unified_verify, unified_draft_extend, mla, window_pool):
    if mla:
        return "unsupported"
    own_switch = {"target_verify": unified_verify, "draft_extend": unified_draft_extend}.get(mode, True)
    return "unified" if (unified or window_pool) and own_switch else "dense"


@pytest.mark.parametrize("values", list(itertools.product([False, True], repeat=len(SWITCHES))))
@pytest.mark.parametrize(("topk", "page_size"), [(1, 16), (4, 1), (4, 16)])
def test_every_row_of_the_table(values, topk, page_size):
    config = AttentionConfig(**dict(zip(SWITCHES, values, strict=True)), topk=topk, page_size=page_size)
    table = routing_table(config)
    assert {mode: decision.path for mode, decision in table.items()} == {
        mode: expected_path(mode, *values) for mode in MODES
    }
    for mode, decision in table.items():
        assert decision == route(mode, config)
        assert decision.reason


@pytest.mark.parametrize(
    ("mode", "config", "reason"),
    [
        ("decode", {"unified": False}, "unified is off"),
        ("target_verify", {"unified_verify": False}, "unified_verify is off"),
        ("draft_extend", {"unified_draft_extend": False}, "unified_draft_extend is off"),
        ("extend", {"mla": True}, "no kernels for multi-head latent attention yet"),
        (
            "decode",
            {"unified": False, "window_pool": True},
            "a window pool turns it on although unified is off",
        ),
        ("target_verify", {"topk": 4}, "the tree of topk = 4 branches as ancestor bits"),
        ("draft_decode", {"topk": 4, "page_size": 1}, "each of topk = 4 branches as a sequence"),
        (
            "draft_decode",
            {"topk": 4},
            "share a partly filled page of 16, so build the table with page_size=1",
        ),
    ],
)
def test_the_reason_names_what_decided(mode, config, reason):
    assert reason in route(mode, AttentionConfig(**config)).reason


def test_the_reason_of_draft_decode_asks_for_no_view_where_pages_hold_one_token():
    assert "view_pages" not in route("draft_decode", AttentionConfig(topk=4, page_size=1)).reason
    assert "view_pages" not in route("draft_decode", AttentionConfig(page_size=16)).reason


def test_everything_is_unified_by_default():
    assert routing_table(AttentionConfig()) == {
        mode: Route("unified", f"unified attention covers {mode}") for mode in MODES
    }


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match=r"mode: expected one of extend, .*, got 'prefill'"):
        route("prefill", AttentionConfig())


def test_environment_variables_are_read_and_arguments_win():
    environment = {
        "JAXATTN_UNIFIED": "OFF",
        "JAXATTN_UNIFIED_VERIFY": "0",
        "JAXATTN_UNIFIED_DRAFT_EXTEND": "no",
        "JAXATTN_MLA": "Yes",
        "JAXATTN_TOPK": "8",
        "JAXATTN_PAGE_SIZE": "64",
        "JAXATTN_WINDOW_POOL": "true",
        "JAXATTN_KV_DTYPE": "float8_e4m3fnuz",
        "JAXATTN_CACHE": "/somewhere",
        "HOME": "/",
    }
    read = {
        "unified": False,
        "unified_verify": False,
        "unified_draft_extend": False,
        "mla": True,
        "topk": 8,
        "page_size": 64,
        "window_pool": True,
        "kv_dtype": "float8_e4m3fnuz",
    }
    assert AttentionConfig.from_environment(environment) == AttentionConfig(**read)
    assert AttentionConfig.from_environment(environment, topk=2, mla=False) == AttentionConfig(
        **read | {"topk": 2, "mla": False}
    )


def test_the_process_environment_is_the_default(monkeypatch):
    monkeypatch.setenv("JAXATTN_TOPK", "3")
    assert AttentionConfig.from_environment().topk == 3


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("JAXATTN_UNIFIED", "maybe", "expected one of 1, true, on, yes, 0, false, off, no, got 'maybe'"),
        ("JAXATTN_MLA", "", "expected one of .*, got ''"),
        ("JAXATTN_TOPK", "0", "expected a whole number of at least 1, got '0'"),
        ("JAXATTN_TOPK", "-1", "expected a whole number of at least 1, got '-1'"),
        ("JAXATTN_PAGE_SIZE", "1e3", "expected a whole number of at least 1, got '1e3'"),
        ("JAXATTN_KV_DTYPE", "fp8", "expected one of float32, .*, got 'fp8'"),
        ("JAXATTN_UNIFED", "0", "did you mean JAXATTN_UNIFIED?"),
        ("JAXATTN_DRAFT_EXTEND", "0", "did you mean JAXATTN_UNIFIED_DRAFT_EXTEND?"),
    ],
)
def test_a_variable_that_does_not_parse_is_named(name, text, message):
    with pytest.raises(ValueError, match=rf"^{name}: .*{message}"):
        AttentionConfig.from_environment({name: text})


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"topk": 0}, ValueError, "topk: expected at least 1, got 0"),
        ({"page_size": 16.0}, TypeError, "page_size: expected int, got 16.0"),
        ({"unified": 1}, TypeError, "unified: expected bool, got 1"),
        ({"topk": True}, TypeError, "topk: expected int, got True"),
        ({"kv_dtype": "int4"}, ValueError, "kv_dtype: expected one of float32, .*, got 'int4'"),
    ],
)
def test_a_setting_of_the_wrong_kind_is_refused(settings, error, message):
    with pytest.raises(error, match=message):
        AttentionConfig(**settings)


def test_the_cache_is_allocated_as_the_config_says():
    config = AttentionConfig(page_size=4, kv_dtype="float8_e5m2")
    cache = PagedKVCache.allocate(
        num_layers=1, num_pages=2, num_kv_heads=1, head_dim=8, **config.cache_options
    )
    assert (cache.page_size, cache.k[0].dtype) == (4, jnp.float8_e5m2)


def test_attention_takes_the_route():
    q, cache = jnp.ones((1, 2, 16)), jnp.ones((2, 4, 1, 16))
    metadata = decode_metadata(
        seqused_k=np.array([3]), page_size=4, req_to_token=np.array([[4, 5, 6, 7]]), req_pool_indices=[0]
    )
    attend = {
        config: unified_attention(q, cache, cache, metadata, config=config)
        for config in (AttentionConfig(), AttentionConfig(unified=False))
    }
    for out in attend.values():
        np.testing.assert_allclose(out, np.ones((1, 2, 16)), rtol=1e-6)
    with pytest.raises(UnsupportedError, match=r"routed to the dense path \(unified is off\)"):
        unified_attention(
            q, cache, cache, metadata, config=AttentionConfig(unified=False), implementation="xla"
        )
    with pytest.raises(UnsupportedError, match="no kernels for multi-head latent attention yet"):
        unified_attention(q, cache, cache, metadata, config=AttentionConfig(mla=True))
