"""The interpreter beside compiled kernels in one process."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

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
