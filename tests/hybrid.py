"""Tiny hybrid models of the committed checkpoints, and the steps that tests take with them."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
from checkpoints import DATA

from jaxattn.metadata import extend_metadata
from jaxattn.models import qwen3_5, qwen3_5_mtp
from jaxattn.models.hybrid_cache import HybridCache
from jaxattn.models.qwen3_5_config import config_from_hf
from jaxattn.models.safetensors import SafetensorsFolder
from jaxattn.models.streaming import load_tree, plan_weights
from jaxattn.quantization import resolve_config

# Compiling is most of the time of these tests.
QUICKLY = {"xla_backend_optimization_level": 0}
forward = jax.jit(qwen3_5.forward, static_argnums=0, donate_argnums=3, compiler_options=QUICKLY)
mtp_forward = jax.jit(qwen3_5_mtp.forward, static_argnums=0, donate_argnums=4, compiler_options=QUICKLY)
logits = jax.jit(qwen3_5.logits)


@functools.cache
def model(name, **options):
    """Config, weights and module weights of a committed checkpoint, in float32."""
    return load(DATA / name, **options)


def load(folder, quantization=None, **options):
    settings = json.loads((folder / "config.json").read_text())
    config, tensors = config_from_hf(settings), SafetensorsFolder(folder).tensors
    quantised = resolve_config(settings, quantization)
    specs = qwen3_5.weight_specs(config, tensors), qwen3_5_mtp.mtp_specs(config, tensors)
    weights, module = load_tree(
        plan_weights(specs, tensors, quantised), tensors, dtype=jnp.float32, on_load=quantised, **options
    )
    return config, weights, qwen3_5_mtp.MtpWeights.share(module, weights)


class Pool:
    """Token slots of a few sequences in shuffled pages; page 0 belongs to nobody."""

    def __init__(self, num_seqs, page_size, max_len=112, seed=0):
        per_row = -(-max_len // page_size)
        pages = np.random.default_rng(seed).permutation(num_seqs * per_row) + 1
        rows = pages.reshape(num_seqs, per_row, 1) * page_size + np.arange(page_size)
        self.table = {
            "page_size": page_size,
            "req_to_token": rows.reshape(num_seqs, -1),
            "req_pool_indices": np.arange(num_seqs),
        }
        self.num_seqs, self.num_pages, self.page_size = num_seqs, num_seqs * per_row + 1, page_size

    def caches(self, config, dtype=jnp.float32):
        """A target cache and a module cache whose every slot and state holds NaN."""
        sizes = {"num_pages": self.num_pages, "page_size": self.page_size, "dtype": dtype}
        target = HybridCache.allocate(config, num_seqs=self.num_seqs, **sizes)
        return jax.tree.map(
            lambda a: jnp.full_like(a, jnp.nan), (target, qwen3_5_mtp.allocate_cache(config, **sizes))
        )

    def extend(self, before, new, padded=40):
        """Metadata of `new[s]` tokens behind `before[s]` cached ones, in a buffer of `padded` rows."""
        before, new = np.asarray(before), np.asarray(new)
        return extend_metadata(
            seqused_k=before + new,
            cu_seqlens_q=np.concatenate([[0], np.cumsum(new)]),
            max_seqlen_q=padded,
            **self.table,
        )


def rows(lists, padded=40):
    """Token lists one after another, padded with a valid id. Few widths keep the compilations few."""
    flat = np.concatenate([np.asarray(x, np.int32) for x in lists])
    return jnp.asarray(np.pad(flat, (0, padded - flat.size), constant_values=1))
