"""Every case of the feature matrix against the float64 oracle."""

import cases
import pytest

REFERENCE_CASES = (
    "decode-everything",
    "decode-q-int8",
    "decode-empty",
    "extend-everything",
    "extend-not_causal_window",
    "extend-bfloat16-kv-fp8",
    "extend-more-rows-than-keys",
    "extend-ratio-7",
    "tree-everything",
    "tree-ragged",
    "tree-two-words",
)


@pytest.mark.parametrize("name", cases.CASES)
def test_matches_the_oracle(name, implementation):
    cases.check(cases.build(cases.CASES[name]), implementation)


@pytest.mark.parametrize("name", REFERENCE_CASES)
def test_the_dense_definition_matches_the_oracle(name):
    cases.check(cases.build(cases.CASES[name]), "reference")
