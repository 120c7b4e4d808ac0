"""MXFP4 and FP8 numerics against table look-up in float64, and against what Quark itself wrote."""

import importlib.util

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoints import DATA, E2M1, dequantised, packed, read_tensors

from jaxattn.errors import UnsupportedError
from jaxattn.quantization import Fp8Weight, Mxfp4Weight, mxfp4, mxfp4_matmul
from jaxattn.quantization.mxfp4 import dequantize, quantize

QUARK = ("quark_mxfp4_llama", "quark_mxfp4_qwen3", "quark_mxfp4_kvfp8_llama", "quark_mxfp4_qwen3_5_mtp")


def bits(x):
    return np.asarray(x, np.float32).view(np.uint32)


def edge():
    return np.load(DATA / "quark_mxfp4_edge" / "edge.npz")


def test_every_code_times_every_scale_equals_the_table_bit_for_bit():
    codes = np.tile(np.arange(16, dtype=np.uint8), (256, 2))
    scale = np.arange(256, dtype=np.uint8)[:, None]
    got = dequantize(jnp.asarray(codes[:, 0::2] | codes[:, 1::2] << 4), jnp.asarray(scale))
    with np.errstate(over="ignore"):
        want = (E2M1[codes] * 2.0 ** (scale.astype(np.float64) - 127)).astype(np.float32)
    want[255] = np.nan
    assert (bits(got)[:255] == bits(want)[:255]).all()
    assert np.isnan(got[255]).all()
    assert (np.abs(want[:2]) < 2**-126).any()
    assert np.isinf(want[254]).any()
    narrow = dequantize(
        jnp.asarray(codes[:, 0::2] | codes[:, 1::2] << 4), jnp.asarray(scale), dtype="bfloat16"
    )
    assert (
        np.asarray(narrow)[:255].view(np.uint16) == want[:255].astype(ml_dtypes.bfloat16).view(np.uint16)
    ).all()
    assert np.isnan(np.asarray(narrow, np.float32)[255]).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_p68_extreme_scale_bytes_follow_the_formats_rules(dtype):
    for byte, want in ((1, 2.0**-127), (126, 0.25), (127, 0.5), (254, 2.0**126)):
        got = dequantize(jnp.array([0x11], jnp.uint8), jnp.array([byte], jnp.uint8), dtype=dtype)
        assert np.asarray(got, np.float64).tolist() == [want, want]
    top = dequantize(jnp.array([0x77], jnp.uint8), jnp.array([254], jnp.uint8), dtype=dtype)
    assert np.isposinf(np.asarray(top, np.float32)).all()
    lowest = dequantize(jnp.array([0x11], jnp.uint8), jnp.array([0], jnp.uint8), dtype=dtype)
    assert np.asarray(lowest, np.float64).tolist() == [2.0**-128] * 2


def test_edge_blocks_dequantise_to_quarks_frozen_weights():
    z = edge()
    got = bits(dequantize(jnp.asarray(z["packed"]), jnp.asarray(z["scale"]))).reshape(10, 4, 32)
    want = bits(z["quark_frozen"]).reshape(10, 4, 32)
    exact = z["block_exact"]
    assert exact.sum() == 39
    assert (got[exact] == want[exact]).all()


def test_edge_blocks_quantise_to_what_quark_packed():
    z = edge()
    codes, scale = quantize(jnp.asarray(z["source_f32"]))
    assert (np.asarray(scale) == z["scale"]).all()
    # Quark rounds subnormals twice (row 8), and packs its infinity (row 9) as 4, where 1.94 is nearest to 2.
    same = np.asarray(codes) == z["packed"]
    same[8, 32:48] = True
    assert np.argwhere(~same).tolist() == [[9, 0]]
    assert np.isinf(dequantize(codes, scale)[9, 0])


@pytest.mark.parametrize("name", QUARK)
def test_packing_of_quarks_files_is_reproduced_from_their_own_values(name):
    tensors = read_tensors(DATA / name)
    weights = [key for key in tensors if key + "_scale" in tensors]
    for key in weights[:: max(1, len(weights) // 5)]:
        want = dequantised(tensors, key)
        got = dequantize(jnp.asarray(tensors[key]), jnp.asarray(tensors[key + "_scale"]))
        assert (bits(got) == bits(want)).all()
        again = dequantize(*quantize(got))
        assert (np.asarray(again) == want).all()


def test_quantising_random_values_equals_a_search_over_the_grid():
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((16, 96)) * 2.0 ** rng.integers(-30, 30, (16, 1))).astype(np.float32)
    codes, scale = quantize(jnp.asarray(x))
    want_codes, want_scale = packed(x)
    assert (np.asarray(codes) == want_codes).all()
    assert (np.asarray(scale) == want_scale).all()
    assert mxfp4.pack(mxfp4.unpack(codes)).tolist() == want_codes.tolist()


def test_columns_are_padded_to_whole_groups_and_nan_stays_nan():
    x = jnp.asarray(np.random.default_rng(1).standard_normal((3, 40)), jnp.float32).at[1, 33].set(jnp.nan)
    codes, scale = quantize(x)
    assert codes.shape == (3, 32)
    assert scale.shape == (3, 2)
    back = np.asarray(dequantize(codes, scale))
    assert (back[[0, 2], 40:] == 0).all()
    assert np.isnan(back[1, 32:]).all()
    assert np.isfinite(back[1, :32]).all()
    emulated = mxfp4.quantize_dequantize(x[:1].astype(jnp.bfloat16))
    assert emulated.dtype == jnp.bfloat16
    assert emulated.shape == (1, 40)


def test_an_infinite_value_stays_infinite_and_its_neighbours_finite():
    x = np.zeros((1, 32), np.float32)
    x[0, :3] = np.inf, -np.inf, 1.0
    codes, scale = quantize(jnp.asarray(x))
    assert scale.tolist() == [[254]]
    assert dequantize(codes, scale)[0, :4].tolist() == [np.inf, -np.inf, 0, 0]


def test_wrong_arguments_are_refused_by_name():
    with pytest.raises(ValueError, match=r"scale: expected shape \[2, 2\]"):
        mxfp4.dequantize(jnp.zeros((2, 32), jnp.uint8), jnp.zeros((2, 3), jnp.uint8))
    with pytest.raises(ValueError, match="codes: expected an even number of columns, got 3"):
        mxfp4.pack(jnp.zeros((1, 3), jnp.uint8))
    with pytest.raises(TypeError, match="x: expected a floating point dtype, got int32"):
        mxfp4.quantize(jnp.zeros((1, 32), jnp.int32))
    with pytest.raises(ValueError, match="column_multiple: expected a multiple of 32, got 48"):
        Mxfp4Weight.from_array(jnp.ones((2, 32))).pad(8, 48)


@pytest.mark.parametrize("shape", [(7, 32), (96, 96), (130, 40)])
def test_matmul_equals_the_dense_product_and_holds_one_tile(shape, monkeypatch):
    monkeypatch.setattr(mxfp4_matmul, "TILE_ELEMENTS", 4096)
    rng = np.random.default_rng(2)
    weight = Mxfp4Weight.from_array(jnp.asarray(rng.standard_normal(shape), jnp.float32))
    x = rng.standard_normal((2, 5, shape[1])).astype(np.float32)
    dense = np.asarray(weight.dequantize(jnp.float32), np.float64)
    got = jax.jit(lambda w, x: w.matmul(x))(weight, jnp.asarray(x))
    np.testing.assert_allclose(got, x.astype(np.float64) @ dense.T, atol=1e-4)
    assert weight.dequantize(jnp.float32).shape == weight.shape == shape


def test_the_compiled_matmul_stores_no_dequantised_copy():
    rows, columns = 4096, 2048
    weight = Mxfp4Weight(
        jax.ShapeDtypeStruct((rows, columns // 2), jnp.uint8),
        jax.ShapeDtypeStruct((rows, columns // 32), jnp.uint8),
        rows,
        columns,
    )
    x = jax.ShapeDtypeStruct((1, columns), jnp.bfloat16)
    compiled = jax.jit(lambda w, x: w.matmul(x)).lower(weight, x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < rows * columns * 2


KERNELS = [
    pytest.param(
        "triton", marks=pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs triton")
    ),
    "pallas",
]


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize(("tokens", "dtype"), [(1, "float32"), (19, "bfloat16"), (3, "float16")])
def test_kernels_expand_every_code_as_the_definition_does(implementation, tokens, dtype):
    """Odd row counts, a last group of 8 columns, several spans of words, extreme scales."""
    rng = np.random.default_rng(6)
    rows, columns = 45, 296
    codes = rng.integers(0, 16, (rows, columns)).astype(np.uint8)
    scale = rng.integers(115, 130, (rows, -(-columns // 32))).astype(np.uint8)
    scale[0, 0], scale[1, 3] = 0, 1
    weight = Mxfp4Weight(mxfp4.pack(jnp.asarray(codes)), jnp.asarray(scale), rows, columns)
    if implementation == "pallas":
        weight = weight.pad(32, 256)
    x = jnp.asarray(rng.standard_normal((tokens, columns)), dtype)
    dense = E2M1[codes] * np.repeat(2.0 ** (scale.astype(np.float64) - 127), 32, -1)[:, :columns]
    want = np.asarray(x, np.float64) @ dense.T
    multiply = jax.jit(mxfp4_matmul.matmul, static_argnames=("rows", "implementation"))
    got = multiply(x, weight.packed, weight.scale, rows, implementation=implementation)
    assert got.dtype == jnp.float32
    assert got.shape == (tokens, rows)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("implementation", KERNELS)
def test_a_nan_scale_reaches_only_its_row(implementation):
    packed = jnp.full((64, 128), 0x22, jnp.uint8)
    scale = jnp.full((64, 8), 127, jnp.uint8).at[5, 2].set(255)
    got = mxfp4_matmul.matmul(
        jnp.ones((2, 256), jnp.float32), packed, scale, 64, implementation=implementation
    )
    assert np.isnan(got[:, 5]).all()
    assert (np.delete(np.asarray(got), 5, axis=1) == 256).all()


def test_implementations_that_cannot_multiply_say_why():
    packed, scale = jnp.zeros((8, 48), jnp.uint8), jnp.zeros((8, 3), jnp.uint8)
    with pytest.raises(
        UnsupportedError, match=r"pallas: packed: expected multiples of 32 rows .*got \[8, 48\]; pad"
    ):
        mxfp4_matmul.matmul(jnp.ones((1, 96), jnp.float32), packed, scale, 8, implementation="pallas")
    with pytest.raises(ValueError, match=r"implementation: expected one of triton, pallas, xla, got 'cuda'"):
        mxfp4_matmul.matmul(jnp.ones((1, 96), jnp.float32), packed, scale, 8, implementation="cuda")
    many = jnp.ones((33, 96), jnp.float32)
    for name in ("triton", "pallas"):
        with pytest.raises(UnsupportedError, match=r"expected at most 32 rows.*got 33"):
            mxfp4_matmul.matmul(many, packed, scale, 8, implementation=name)
    assert mxfp4_matmul.matmul(many, packed, scale, 8, implementation=("triton", "xla")).shape == (33, 8)


@pytest.mark.parametrize("alignment", [256, 512])
def test_p67_padding_for_a_kernels_tiles_adds_nothing(alignment):
    rng = np.random.default_rng(3)
    hidden, inner = 64, 352
    up = Mxfp4Weight.from_array(jnp.asarray(rng.standard_normal((inner, hidden)), jnp.float32))
    down = Mxfp4Weight.from_array(jnp.asarray(rng.standard_normal((hidden, inner)), jnp.float32))
    x = jnp.asarray(rng.standard_normal((3, hidden)), jnp.float32)
    wide_up, wide_down = up.pad(alignment, alignment), down.pad(alignment, alignment)
    assert wide_down.packed.shape == (alignment, -(-inner // alignment) * alignment // 2)
    assert wide_down.scale.shape == (alignment, -(-inner // alignment) * alignment // 32)
    want = np.asarray(x, np.float64) @ np.asarray(up.dequantize(jnp.float32), np.float64).T
    want = want @ np.asarray(down.dequantize(jnp.float32), np.float64).T
    got = wide_down.matmul(wide_up.matmul(x))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)
    assert wide_up.shape == up.shape
    assert (wide_down.dequantize(jnp.float32) == down.dequantize(jnp.float32)).all()


def test_four_bit_activations_are_emulated_exactly():
    rng = np.random.default_rng(4)
    weight = Mxfp4Weight.from_array(
        jnp.asarray(rng.standard_normal((8, 64)), jnp.float32), quantize_input=True
    )
    x = rng.standard_normal((5, 64)).astype(np.float32)
    codes, scale = packed(x)
    rounded = dequantised({"x": codes, "x_scale": scale}, "x")
    assert not np.allclose(rounded, x, atol=1e-2)
    want = rounded @ np.asarray(weight.dequantize(jnp.float32), np.float64).T
    np.testing.assert_allclose(weight.matmul(jnp.asarray(x)), want, atol=1e-5)


def test_fp8_per_row_and_per_tensor_scales():
    rng = np.random.default_rng(5)
    dense = (rng.standard_normal((6, 32)) * 2.0 ** rng.integers(-8, 8, (6, 1))).astype(np.float32)
    per_row = Fp8Weight.from_array(jnp.asarray(dense))
    back = np.asarray(per_row.dequantize(jnp.float32))
    assert (np.abs(back - dense) <= np.abs(dense).max(axis=1, keepdims=True) / 16 + 1e-9).all()
    per_tensor = Fp8Weight(per_row.values, jnp.array([0.5], jnp.float32))
    x = rng.standard_normal((3, 32)).astype(np.float32)
    for weight in (per_row, per_tensor):
        values, scale = np.asarray(weight.values, np.float64), np.asarray(weight.scale, np.float64)
        want = x.astype(np.float64) @ (values * scale[:, None]).T
        np.testing.assert_allclose(weight.matmul(jnp.asarray(x)), want, rtol=1e-4, atol=1e-3)


def test_fp8_rounds_and_saturates_its_input_by_the_static_scale():
    weight = Fp8Weight(
        jnp.eye(3, dtype=jnp.float8_e4m3fn), jnp.array([1.0], jnp.float32), input_scale=jnp.float32(0.5)
    )
    got = weight.matmul(jnp.array([1000.0, 1.07, -3.0]))
    assert got.tolist() == [224.0, 1.125, -3.0]


def test_a_row_of_zeros_has_a_harmless_scale():
    weight = Fp8Weight.from_array(jnp.zeros((2, 4)))
    assert weight.scale.tolist() == [1.0, 1.0]
    assert weight.matmul(jnp.ones(4)).tolist() == [0.0, 0.0]
