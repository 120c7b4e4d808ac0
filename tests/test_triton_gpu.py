"""The Triton kernels compiled, on a GPU, where its instructions and tiles matter: 8-bit K and V, sizes of groups."""

import cases
import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "int8"])
@pytest.mark.parametrize("width", [64, 80, 128, 256])
@pytest.mark.parametrize("q_len", [1, 4, 70])
def test_8_bit_keys_and_values_of_every_width(kv_dtype, width, q_len):
    case = cases.Case(
        lengths=((q_len, 333), (q_len, q_len), (q_len, 1200)),
        heads=16,
        kv_heads=4,
        width=width,
        page_size=16,
        dtype="bfloat16",
        kv_dtype=kv_dtype,
        descales="per_head",
    )
    cases.check(cases.build(case), "triton")


@pytest.mark.parametrize("heads", [1, 4, 8, 16, 32])
@pytest.mark.parametrize("width", [128, 256])
def test_groups_that_fill_every_size_of_block(heads, width):
    case = cases.Case(
        lengths=((1, 700), (2, 80), (3, 3), (1, 0)),
        heads=heads,
        kv_heads=1,
        width=width,
        page_size=16,
        dtype="bfloat16",
    )
    cases.check(cases.build(case), "triton")


@pytest.mark.parametrize("implementation", ["triton", "pallas"])
@pytest.mark.parametrize("options", ["plain", "window", "not_causal", "everything"])
@pytest.mark.parametrize(
    ("width", "page_size", "dtype"),
    [
        (64, 16, "bfloat16"),
        (80, 16, "bfloat16"),
        (128, 16, "bfloat16"),
        (128, 1, "float16"),
        (256, 64, "bfloat16"),
    ],
)
def test_long_prefills_whose_halves_take_turns(width, page_size, dtype, options, implementation):
    case = cases.Case(
        lengths=((300, 5000), (129, 129), (0, 0), (1, 700), (70, 4200)),
        width=width,
        page_size=page_size,
        dtype=dtype,
        **{**cases.OPTIONS, "everything": cases.EVERYTHING}[options],
    )
    cases.check(cases.build(case), implementation)
