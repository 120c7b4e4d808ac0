"""MXFP4 weights in tiles: every code through the kernel and through XLA, with small, large and odd scales."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import E2M1

from jaxattn.quantization import Mxfp4Tiles, Mxfp4Weight, mxfp4, mxfp4_tiles
from jaxattn.quantization.mxfp4 import pack

needs_triton = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs triton")


def drawn(rows, columns, low=100, high=140, seed=6):
    """A weight of every code, and its value in float64."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (rows, columns)).astype(np.uint8)
    scale = rng.integers(low, high, (rows, -(-columns // 32))).astype(np.uint8)
    dense = E2M1[codes] * np.repeat(2.0 ** (scale.astype(np.float64) - 127), 32, -1)[:, :columns]
    return Mxfp4Weight(pack(jnp.asarray(codes)), jnp.asarray(scale), rows, columns), dense


@pytest.mark.parametrize("shape", [(32, 128), (45, 296), (1, 2), (70, 1024)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tiles_dequantise_to_the_same_bits(shape, dtype):
    weight, _ = drawn(*shape, low=0, high=253)
    tiles = Mxfp4Tiles.from_weight(weight)
    got, want = (np.asarray(w.dequantize(dtype), np.float32) for w in (tiles, weight))
    # Groups far below the largest of their row are rounded, where a float32 sum would not see them.
    largest = np.abs(want).max(axis=1, keepdims=True)
    np.testing.assert_array_equal(got, np.where(np.abs(want) < largest * 2.0**-120, got, want))
    assert (np.abs(got - want) <= largest * 2.0**-120).all()


def test_a_row_with_a_nan_scale_is_nan():
    weight, _ = drawn(40, 128)
    weight = Mxfp4Weight(weight.packed, weight.scale.at[5, 2].set(255), 40, 128)
    tiles = Mxfp4Tiles.from_weight(weight)
    assert np.isnan(tiles.dequantize(jnp.float32)[5]).all()
    out = np.asarray(tiles.matmul(jnp.ones((2, 128), jnp.float32)))
    assert np.isnan(out[:, 5]).all()
    assert np.isfinite(np.delete(out, 5, axis=1)).all()


@pytest.mark.parametrize("tokens", [1, 33])
@pytest.mark.parametrize("shape", [(45, 296), (64, 256)])
def test_the_xla_product_equals_the_dense_one(tokens, shape, monkeypatch):
    monkeypatch.setattr(mxfp4_tiles, "TILE_ELEMENTS", 32 * 512)
    weight, dense = drawn(*shape)
    x = np.random.default_rng(1).standard_normal((tokens, shape[1])).astype(np.float32)
    got = Mxfp4Tiles.from_weight(weight).matmul(jnp.asarray(x))
    want = x.astype(np.float64) @ dense.T
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


@needs_triton
@pytest.mark.parametrize("implementation", ["triton"])
@pytest.mark.parametrize("tokens", [1, 3, 8, 16, 19])
@pytest.mark.parametrize("shape", [(45, 296), (64, 256), (300, 1024)])
def test_the_kernel_equals_the_dense_product(tokens, shape, implementation):
    """Rows and columns that fill no tile, warps that find no step, every code, scales apart and below 2**-126."""
    from jaxattn.kernels.triton import mxfp4_tiles as kernel

    weight, _ = drawn(*shape)
    scale = weight.scale.at[0, 0].set(0).at[1, 1].set(1).at[2].set(230)
    weight = Mxfp4Weight(weight.packed, scale, *shape)
    dense = np.asarray(weight.dequantize(jnp.float32), np.float64)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((tokens, shape[1])), jnp.bfloat16)
    got = jax.jit(kernel.run)(x, Mxfp4Tiles.from_weight(weight))
    assert got.dtype == jnp.float32
    want = np.asarray(x, np.float64) @ dense.T
    scale_of_row = np.abs(dense).sum(axis=1)
    assert (np.abs(got - want) <= 1e-5 * scale_of_row).all()


@needs_triton
def test_the_kernel_says_what_it_cannot_multiply():
    from jaxattn.errors import UnsupportedError
    from jaxattn.kernels import tuning
    from jaxattn.kernels.triton import mxfp4_tiles as kernel

    tiles = Mxfp4Tiles.from_weight(drawn(32, 128)[0])
    with pytest.raises(UnsupportedError, match="expected 1 to 32 rows, got 33"):
        kernel.run(jnp.ones((33, 128), jnp.bfloat16), tiles)
    with pytest.raises(UnsupportedError, match="expected bfloat16, got float32"):
        kernel.run(jnp.ones((1, 128), jnp.float32), tiles)
    with tuning.using(tuning.Device(architecture="gfx942", cores=304)):
        assert kernel.supports(jnp.ones((1, 128), jnp.bfloat16)) == "no tiles are tuned for gfx942"


def test_a_batch_of_weights_is_refused():
    batch = Mxfp4Weight.from_array(jnp.ones((2, 32, 64)))
    with pytest.raises(ValueError, match=r"expected one weight \[rows, columns\], got shape \[2, 32, 64\]"):
        Mxfp4Tiles.from_weight(batch)


def test_four_bit_activations_are_emulated():
    weight, dense = drawn(8, 64)
    tiles = Mxfp4Tiles.from_weight(Mxfp4Weight(weight.packed, weight.scale, 8, 64, quantize_input=True))
    x = jnp.asarray(np.random.default_rng(2).standard_normal((3, 64)), jnp.float32)
    want = np.asarray(mxfp4.quantize_dequantize(x), np.float64) @ dense.T
    np.testing.assert_allclose(tiles.matmul(x), want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


def test_columns_are_compared_and_no_rows_are_no_rows():
    tiles = Mxfp4Tiles.from_weight(drawn(45, 200)[0])
    assert tiles.matmul(jnp.ones((0, 200), jnp.float32)).shape == (0, 45)
    for columns in (100, 256, 257):
        with pytest.raises(ValueError, match=f"x: expected 200 columns, got {columns}"):
            tiles.matmul(jnp.ones((1, columns), jnp.float32))
