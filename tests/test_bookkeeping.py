"""The public builders and the cache write through the kernels that a GPU would take, interpreted."""

import importlib
import importlib.util
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import table_cases

from jaxattn import kernels, kv_cache, page_table
from jaxattn.debug import checked
from jaxattn.metadata import decode_metadata, target_verify_metadata

needs_triton = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs triton")
PACKAGES = [pytest.param("triton", marks=needs_triton), "pallas"]


@pytest.fixture(params=PACKAGES)
def package(request, monkeypatch):
    """Build with the kernels of a package, and record the calls of its page-table kernel."""
    module = importlib.import_module(f"jaxattn.kernels.{request.param}.page_table")
    spy = mock.Mock(wraps=module.build_page_tables)
    monkeypatch.setattr(module, "build_page_tables", spy)
    for user in (page_table, kv_cache):
        monkeypatch.setattr(user, "bookkeeping", lambda: request.param)
    jax.clear_caches()
    yield spy
    jax.clear_caches()


@pytest.mark.parametrize("form", ["ragged", "pooled"])
def test_metadata_is_that_of_the_xla_builders(package, form, monkeypatch):
    lengths = [7, 0, 4, 12]
    case = table_cases.make_case(5, lengths, 4, first_page=0)
    arguments = getattr(case, form)() | {
        "seqused_k": np.array(lengths),
        "page_size": 4,
        "full_to_swa": case.full_to_swa(np.random.default_rng(1)),
    }
    one_launch = decode_metadata(**arguments)
    assert package.call_count == 1
    monkeypatch.setattr(page_table, "bookkeeping", lambda: None)
    jax.clear_caches()
    expected = decode_metadata(**arguments)
    assert package.call_count == 1
    for a, b in zip(jax.tree.leaves(one_launch), jax.tree.leaves(expected), strict=True):
        assert np.array_equal(a, b)


def test_tables_are_rebuilt_in_donated_ones_and_checked(package):
    pool = {"req_to_token": np.arange(4, 20).reshape(2, 8), "req_pool_indices": np.array([1, 0])}
    first = target_verify_metadata(prefix_lens=np.array([3, 4]), num_draft_tokens=2, page_size=4, **pool)
    arguments = {"prefix_lens": np.array([1, 5]), "num_draft_tokens": 2, "page_size": 4, **pool}
    second = target_verify_metadata(**arguments, out=first)
    assert second.page_table.tolist() == [[3, 0], [1, 2]]
    assert package.call_count == 2
    checked(lambda: target_verify_metadata(**arguments))()
    with pytest.raises(Exception, match="sequence 1 "):
        checked(lambda: target_verify_metadata(**arguments | {"prefix_lens": np.array([1, 9])}))()


@needs_triton
def test_the_write_is_one_launch_and_equals_the_xla_write(monkeypatch):
    from jaxattn.kernels.triton import cache_write

    spy = mock.Mock(wraps=cache_write.write_kv)
    monkeypatch.setattr(cache_write, "write_kv", spy)
    rng = np.random.default_rng(0)
    empty = jnp.zeros((3, 4, 2, 8), jnp.float8_e4m3fn)
    k, v = jnp.asarray(rng.normal(size=(2, 5, 2, 8)).astype(np.float32))
    arguments = (empty, empty, k, v, jnp.array([3, -1, 11, 12, 0]))
    expected = kv_cache.write_kv(*arguments, k_descale=0.3, v_descale=np.array([0.5, 2.0]))
    assert not spy.called
    monkeypatch.setattr(kv_cache, "bookkeeping", lambda: "triton")
    actual = jax.jit(kv_cache.write_kv)(*arguments, k_descale=0.3, v_descale=np.array([0.5, 2.0]))
    assert spy.called
    for a, b in zip(actual, expected, strict=True):
        assert np.array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


@needs_triton
@pytest.mark.parametrize("jit", [False, True])
def test_a_write_by_the_kernel_has_the_derivative_of_the_xla_write(jit, monkeypatch):
    rng = np.random.default_rng(0)
    caches, rows = rng.normal(size=(2, 3, 4, 2, 8)), rng.normal(size=(2, 5, 2, 8))
    slots, weights = jnp.array([3, -1, 11, 12, 0]), rng.normal(size=(2, 3, 4, 2, 8))

    def loss(k_cache, v_cache, k, v):
        write = jax.jit(kv_cache.write_kv) if jit else kv_cache.write_kv
        new = write(k_cache, v_cache, k, v, slots, k_descale=0.5)
        return sum(jnp.sum(jnp.tanh(x) * w) for x, w in zip(new, weights, strict=True))

    arguments = [jnp.asarray(x, jnp.float32) for x in (*caches, *rows)]
    expected = jax.grad(loss, argnums=(0, 1, 2, 3))(*arguments)
    monkeypatch.setattr(kv_cache, "bookkeeping", lambda: "triton")
    jax.clear_caches()
    actual = jax.grad(loss, argnums=(0, 1, 2, 3))(*arguments)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert np.abs(actual[2]).max() > 0.1


def test_a_cpu_builds_with_xla_and_a_gpu_with_the_first_package_that_can(monkeypatch):
    assert kernels.bookkeeping() is None
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    refusals = {"triton": None, "pallas": None}
    for name in refusals:
        module = importlib.import_module(f"jaxattn.kernels.{name}")
        monkeypatch.setattr(module, "refuse_device", lambda name=name: refusals[name])
    assert kernels.bookkeeping() == "triton"
    refusals["triton"] = "not installed"
    assert kernels.bookkeeping() == "pallas"
    refusals["pallas"] = "gone"
    assert kernels.bookkeeping() is None
