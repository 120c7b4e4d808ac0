"""unified_attention under jit, vmap, shard_map, scan, eval_shape and export, and what is differentiable."""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case
from jax.sharding import PartitionSpec

from jaxattn.attention import unified_attention
from jaxattn.errors import UnsupportedError
from jaxattn.kv_cache import write_kv

CASE = Case(mode="target_verify", tree=1, options={"sliding_window": 9}, sinks=True)


@pytest.fixture(scope="module")
def problem():
    return cases.build(CASE)


def call_with(problem, implementation):
    def call(q, k_cache, v_cache, metadata):
        return unified_attention(
            q, k_cache, v_cache, metadata, return_lse=True, implementation=implementation, **problem.options
        )

    return call, [jnp.asarray(array) for array in (problem.q, problem.k_cache, problem.v_cache)]


def assert_right(problem, results):
    out, lse = results
    np.testing.assert_allclose(out, problem.out, atol=1e-5)
    np.testing.assert_allclose(lse, problem.lse, atol=1e-5)


def test_jit_and_scan(problem, implementation):
    call, arrays = call_with(problem, implementation)
    assert_right(problem, jax.jit(call)(*arrays, problem.metadata))

    def body(carry, _):
        return carry + 1, call(*arrays, problem.metadata)

    _, results = jax.lax.scan(body, 0, length=2)
    assert_right(problem, jax.tree.map(lambda values: values[1], results))


@pytest.mark.parametrize("order", ["vmap", "vmap of jit", "jit of vmap"])
@pytest.mark.parametrize("metadata_axis", [None, 0])
def test_p60_vmap_over_a_leading_axis(order, metadata_axis, problem, implementation):
    call, arrays = call_with(problem, implementation)
    axes = (0, 0, 0, metadata_axis)
    mapped = {
        "vmap": lambda: jax.vmap(call, axes),
        "vmap of jit": lambda: jax.vmap(jax.jit(call), axes),
        "jit of vmap": lambda: jax.jit(jax.vmap(call, axes)),
    }[order]()
    other = [jnp.where(jnp.isnan(array), array, array + 1) for array in arrays]
    stacked = [jnp.stack(pair) for pair in zip(other, arrays, strict=True)]
    metadata = problem.metadata
    if metadata_axis == 0:
        metadata = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (2, *leaf.shape)), metadata)
    results = mapped(*stacked, metadata)
    assert_right(problem, jax.tree.map(lambda values: values[1], results))
    looped = call(*other, problem.metadata)
    for one, two in zip(jax.tree.map(lambda values: values[0], results), looped, strict=True):
        np.testing.assert_allclose(one, two, atol=1e-5)


@pytest.mark.parametrize("jit", [False, True])
def test_p60_shard_map_over_kv_heads(jit, problem, implementation):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("heads",))
    assert mesh.size == 2 or jax.default_backend() == "gpu"
    options = {name: value for name, value in problem.options.items() if name != "sinks"}
    heads, pages = PartitionSpec(None, "heads"), PartitionSpec(None, None, "heads")

    def call(q, k_cache, v_cache, metadata, sinks):
        return unified_attention(
            q,
            k_cache,
            v_cache,
            metadata,
            sinks=sinks,
            return_lse=True,
            implementation=implementation,
            **options,
        )

    sharded = jax.shard_map(
        call,
        mesh=mesh,
        in_specs=(heads, pages, pages, PartitionSpec(), PartitionSpec("heads")),
        out_specs=(heads, heads),
    )
    sharded = jax.jit(sharded) if jit else sharded
    arrays = [jnp.asarray(array) for array in (problem.q, problem.k_cache, problem.v_cache)]
    assert_right(problem, sharded(*arrays, problem.metadata, jnp.asarray(problem.options["sinks"])))


def test_eval_shape(problem, implementation):
    call, arrays = call_with(problem, implementation)
    out, lse = jax.eval_shape(call, *arrays, problem.metadata)
    assert (out.shape, out.dtype) == (problem.out.shape, jnp.float32)
    assert (lse.shape, lse.dtype) == (problem.lse.shape, jnp.float32)


def test_export_keeps_int64_indices_with_x64_off(problem, implementation):
    call, arrays = call_with(problem, implementation)
    leaves, treedef = jax.tree.flatten(problem.metadata)
    step = jax.jit(lambda *a: call(*a[:3], jax.tree.unflatten(treedef, a[3:])))
    if implementation == "triton" and jax.default_backend() == "cpu":
        with pytest.raises(NotImplementedError, match="host_callbacks"):
            jax.export.export(step)(*arrays, *leaves)
        return
    # On a GPU: jax promises nothing about these calls in another version.
    unpromised = [
        jax.export.DisabledSafetyCheck.custom_call(name)
        for name in ("triton_kernel_call", "__gpu$xla.gpu.triton")
    ]
    exported = jax.export.export(step, disabled_checks=unpromised)(*arrays, *leaves)
    assert [aval.dtype for aval in exported.in_avals[3:6]] == [jnp.int64] * 3
    assert_right(problem, exported.call(*arrays, *leaves))


def test_the_dense_definition_has_derivatives_and_no_nan_in_them(problem):
    call, (q, k_cache, v_cache) = call_with(problem, "reference")
    live = jnp.isfinite(k_cache).all(axis=(2, 3))[..., None, None]

    def loss(q, k_cache, v_cache):
        out, lse = call(q, k_cache, v_cache, problem.metadata)
        return (out**2).sum() + jnp.where(jnp.isneginf(lse), 0, lse).sum()

    grads = jax.grad(loss, argnums=(0, 1, 2))(q, k_cache, v_cache)
    assert all(np.isfinite(grad).all() for grad in grads)
    rng = np.random.default_rng(0)
    step = 1e-2
    for argument, grad in enumerate(grads):
        direction = jnp.asarray(rng.normal(size=grad.shape), jnp.float32)
        direction = jnp.where(live, direction, 0) if argument else direction
        moved = [[q, k_cache, v_cache], [q, k_cache, v_cache]]
        moved[0][argument] = moved[0][argument] + step * direction
        moved[1][argument] = moved[1][argument] - step * direction
        slope = (loss(*moved[0]) - loss(*moved[1])) / (2 * step)
        np.testing.assert_allclose((grad * direction).sum(), slope, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("differentiate", [jax.grad, lambda f: lambda q: jax.jvp(f, (q,), (q,))])
def test_a_derivative_of_the_tiled_walk_is_refused(differentiate, problem):
    call, (q, *caches) = call_with(problem, "xla")
    with pytest.raises(UnsupportedError, match="implementation='reference'"):
        differentiate(lambda q: call(q, *caches, problem.metadata)[0].sum())(q)


@pytest.mark.parametrize("caches_first", [False, True])
def test_p59_a_step_that_donates_the_caches_equals_one_that_does_not(caches_first, implementation):
    problem = cases.build(Case(mode="decode", lengths=((1, 9), (1, 14)), page_size=4, padding_rows=0))
    rng = np.random.default_rng(3)
    k, v = (jnp.asarray(rng.normal(size=(2, 2, 16)), jnp.float32) for _ in range(2))
    slots = problem.metadata.slots(2)

    def step(k_cache, v_cache):
        k_cache, v_cache = write_kv(k_cache, v_cache, k, v, slots)
        out = unified_attention(
            jnp.asarray(problem.q), k_cache, v_cache, problem.metadata, implementation=implementation
        )
        return (k_cache, v_cache, out) if caches_first else (out, k_cache, v_cache)

    originals = [jnp.asarray(cache) for cache in (problem.k_cache, problem.v_cache)]
    plain = jax.jit(step)(*originals)
    for original, cache in zip(originals, (problem.k_cache, problem.v_cache), strict=True):
        np.testing.assert_array_equal(original, cache)
    donated = jax.jit(step, donate_argnums=(0, 1))(*(jnp.array(cache) for cache in originals))
    for one, two in zip(plain, donated, strict=True):
        np.testing.assert_array_equal(one, two)
