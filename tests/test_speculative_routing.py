"""Each row of the routing table: the path it takes, and that either path gives the same result."""

import dataclasses
import functools

import cases
import numpy as np
import pytest

from jaxattn import attention, unified_attention
from jaxattn.routing import AttentionConfig, route

ON = AttentionConfig()
# The switches of the upstream table that concern each mode, and the path that they lead to.
ROWS = [
    ("decode", ON, "unified"),
    ("decode", AttentionConfig(unified=False), "dense"),
    ("decode", AttentionConfig(unified=False, window_pool=True), "unified"),
    ("draft_decode", ON, "unified"),
    ("draft_decode", AttentionConfig(topk=3), "unified"),
    ("draft_decode", AttentionConfig(unified=False), "dense"),
    ("target_verify", ON, "unified"),
    ("target_verify", AttentionConfig(topk=3), "unified"),
    ("target_verify", AttentionConfig(unified_verify=False), "dense"),
    ("target_verify", AttentionConfig(topk=3, unified_verify=False), "dense"),
    ("target_verify", AttentionConfig(unified=False), "dense"),
    ("target_verify", AttentionConfig(unified_draft_extend=False), "unified"),
    ("draft_extend", ON, "unified"),
    ("draft_extend", AttentionConfig(unified_draft_extend=False), "dense"),
    ("draft_extend", AttentionConfig(unified=False), "dense"),
    ("draft_extend", AttentionConfig(unified_verify=False), "unified"),
    ("extend", ON, "unified"),
    ("extend", AttentionConfig(unified=False), "dense"),
]


@functools.cache
def problem(mode, tree):
    shapes = {"draft_decode": "target_verify" if tree else "decode"}.get(mode, mode)
    options = {"sliding_window": 9, "softcap": 1.5}
    return cases.build(cases.Case(mode=shapes, tree=1 if tree else None, options=options))


def row_id(value):
    if isinstance(value, str):
        return value
    return "-".join(k for k, v in dataclasses.asdict(value).items() if v != getattr(ON, k)) or "default"


@pytest.mark.parametrize(("mode", "config", "path"), ROWS, ids=row_id)
def test_a_row_takes_its_path_and_gives_what_the_other_path_gives(mode, config, path, monkeypatch):
    assert route(mode, config).path == path
    built = problem(mode, config.topk > 1)
    metadata = dataclasses.replace(built.metadata, mode=mode)
    ran = []
    original = attention._run

    def recorded(attention_problem, name):
        ran.append(name)
        return original(attention_problem, name)

    monkeypatch.setattr(attention, "_run", recorded)
    call = functools.partial(
        unified_attention, built.q, built.k_cache, built.v_cache, metadata, return_lse=True, **built.options
    )
    out, lse = call(config=config)
    other_out, other_lse = call(implementation="xla" if path == "dense" else "reference")
    assert ran == (["reference", "xla"] if path == "dense" else ["xla", "reference"])
    np.testing.assert_allclose(np.asarray(out), np.asarray(other_out), atol=2e-6)
    np.testing.assert_allclose(np.asarray(lse), np.asarray(other_lse), atol=2e-6)
