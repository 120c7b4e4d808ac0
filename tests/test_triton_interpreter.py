"""The interpreter beside compiled kernels in one process."""

import contextlib
import os
import subprocess
import sys

import numpy as np
import pytest

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from jaxattn.kernels.triton import interpreter  # noqa: E402

INTERPRET_THEN_COMPILE = """
import jax.numpy as jnp, numpy as np
from jaxattn import decode_metadata, unified_attention

step = decode_metadata(
    seqused_k=np.array([3]), page_size=2, req_pool_indices=np.array([0]), req_to_token=np.array([[4, 5, 6, 7]])
)
cache = jnp.zeros((4, 2, 1, 8))
unified_attention(jnp.ones((1, 2, 8)), cache, cache, step, implementation="triton").block_until_ready()

from audit_kernels import attention
from bench.audit.report import audit_request
print(audit_request(attention(TILE=16), "gfx942").failures)
"""


def test_what_is_interpreted_first_leaves_later_compilations_alone(pytestconfig, tmp_path):
    """Triton's code generator, first imported while names of the language are patched, would keep the patches."""
    paths = [str(pytestconfig.rootpath), str(pytestconfig.rootpath / "tests")]
    program = f"import sys; sys.path[:0] = {paths}\n{INTERPRET_THEN_COMPILE}"
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert run.stdout == "()\n", run.stderr


@triton.jit
def shifted_kernel(x_ptr, out_ptr, BY: tl.constexpr, LAST: tl.constexpr):
    at = tl.arange(0, 8)
    tl.store(out_ptr + at, tl.load(x_ptr + at + BY, mask=at < LAST, other=0.0))


@pytest.mark.parametrize(
    ("by", "last", "error"),
    [
        (0, 8, None),
        (3, 5, None),
        (3, 8, r"shifted_kernel reads 4 bytes outside of its arrays: at byte 32 of x_ptr, which has 32"),
        (-1, 8, r"shifted_kernel reads 4 bytes outside of its arrays"),
    ],
)
def test_an_access_outside_of_the_arrays_is_an_error(by, last, error):
    # With room around them, so that nothing else lies there.
    x, out = (np.zeros(64, np.float32)[24:32] for _ in range(2))
    x += np.arange(8, dtype=np.float32)
    with pytest.raises(IndexError, match=error) if error else contextlib.nullcontext():
        interpreter.run(shifted_kernel, [x, out], 1, BY=by, LAST=last)
    if error is None:
        assert out.tolist() == [float(at + by) if at < last else 0.0 for at in range(8)]


def test_a_write_outside_of_the_arrays_is_an_error():
    x, out = np.zeros(8, np.float32), np.zeros(64, np.float32)[24:31]
    with pytest.raises(
        IndexError, match=r"writes 4 bytes outside of its arrays: at byte 28 of out_ptr, which has 28"
    ):
        interpreter.run(shifted_kernel, [x, out], 1, BY=0, LAST=8)
    assert not out.base.any()
