"""Qwen3.5, its MoE and Qwen3-Next relatives and their MTP modules against transformers' goldens."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import DATA
from hybrid import Pool, forward, logits, model, mtp_forward, rows

from jaxattn.errors import CheckpointError, UnsupportedError
from jaxattn.metadata import decode_metadata, target_verify_metadata
from jaxattn.models import qwen3_5_mtp
from jaxattn.models.qwen3_5_config import config_from_hf

commit = jax.jit(lambda cache, accepted: cache.commit(accepted))
TINY = "qwen3_5_mtp_tiny"
MODELS = (
    TINY,
    "qwen3_5_moe_mtp_tiny",
    "qwen3_next_mtp_tiny",
    "quark_mxfp4_qwen3_5_mtp",
    "quark_f2f_mxfp4_qwen3_5_moe_mtp",
)


def golden(name, file="golden.npz"):
    return np.load(DATA / name / file)


def close(got, want, rtol=1e-4):
    assert np.abs(np.asarray(got) - want).max() <= rtol * np.abs(want).max()


@pytest.mark.parametrize("name", MODELS)
def test_goldens_of_prefill_and_of_greedy_text_behind_it(name):
    config, weights, _ = model(name)
    g = golden(name)
    pool = Pool(1, 16)
    cache, _ = pool.caches(config)
    hidden, cache = forward(config, weights, rows([g["input_ids"][0]]), cache, pool.extend([0], [40]))
    close(logits(weights, hidden), g["logits" if "logits" in g else "logits_weight_only"][0])
    close(hidden, g["hidden_final_norm"][0])
    if "gdn_recurrent_state_2" in g:
        close(cache.states[2].recurrent, g["gdn_recurrent_state_2"])
        close(cache.states[2].conv[0].T, g["gdn_conv_state_2"][0][:, 1:])
        k, _ = cache.kv.gather(0, np.asarray(pool.table["req_to_token"][0, :40]))
        close(jnp.moveaxis(k, 1, 0), g["kv_key_3"][0])
    greedy = g["greedy_ids" if "greedy_ids" in g else "greedy_ids_weight_only"][0]
    assert logits(weights, hidden)[39].argmax() == greedy[0]
    hidden, cache = forward(config, weights, rows([greedy]), cache, pool.extend([40], [16]))
    assert (logits(weights, hidden)[:15].argmax(axis=1) == greedy[1:]).all()


@pytest.mark.parametrize("name", MODELS)
def test_goldens_of_the_mtp_module_and_its_chained_drafts(name):
    config, weights, module = model(name)
    hidden, m = golden(name)["hidden_final_norm"][0], golden(name, "golden_mtp.npz")
    pool = Pool(1, 16)
    _, cache = pool.caches(config)
    tokens = rows([m["mtp_input_ids"][0], m["chain_first_token"][0]])
    draft, cache = mtp_forward(config, module, tokens, jnp.asarray(hidden), cache, pool.extend([0], [40]))
    close(draft[:39], m["mtp_norm_out"][0])
    close(logits(weights, draft)[:39], m["mtp_logits"][0])
    chain, last = [], 39
    for i in range(4):
        scores = logits(weights, draft)[last]
        close(scores, m["chain_draft_logits"][0, i])
        chain.append(int(scores.argmax()))
        draft = jnp.full_like(draft, jnp.nan).at[0].set(draft[last])
        draft, cache = mtp_forward(
            config, module, rows([chain[-1:]]), draft, cache, pool.extend([40 + i], [1])
        )
        last = 0
    assert chain == m["chain_draft_ids"][0].tolist()


def test_decode_steps_write_the_golden_text_and_update_their_cache_in_place():
    config, weights, _ = model(TINY)
    g = golden(TINY)
    pool = Pool(1, 16)
    cache, _ = pool.caches(config)
    hidden, cache = forward(config, weights, rows([g["input_ids"][0]]), cache, pool.extend([0], [40]))
    text = [int(logits(weights, hidden)[39].argmax())]
    places = [a.unsafe_buffer_pointer() for a in jax.tree.leaves(cache)]
    for i in range(15):
        step = decode_metadata(seqused_k=np.array([41 + i]), **pool.table)
        hidden, cache = forward(config, weights, jnp.array(text[-1:]), cache, step)
        text.append(int(logits(weights, hidden)[0].argmax()))
    assert text == g["greedy_ids"][0].tolist()
    assert [a.unsafe_buffer_pointer() for a in jax.tree.leaves(cache)] == places


def test_a_prompt_longer_than_a_chunk_of_the_delta_rule():
    config, weights, _ = model(TINY)
    g = golden(TINY)
    pool = Pool(1, 16)
    cache, _ = pool.caches(config)
    hidden, _ = forward(
        config, weights, rows([g["long_input_ids"][0]], 104), cache, pool.extend([0], [100], 104)
    )
    close(logits(weights, hidden)[92:100], g["long_logits_last_8"][0])


def test_a_ragged_batch_in_uneven_chunks_equals_each_prompt_alone():
    """Chunks, neighbours, a padding sequence and rows of padding change no sequence's logits or states."""
    config, weights, _ = model(TINY)
    g = golden(TINY)
    prompts = [g["input_ids"][0], [], g["input_ids"][0][:23]]
    pool = Pool(3, 4, seed=3)
    cache, _ = pool.caches(config)
    done, out = np.zeros(3, int), [[], [], []]
    for new in ([17, 0, 22], [1, 0, 1], [22, 0, 0]):
        parts = [p[d : d + n] for p, d, n in zip(prompts, done, new, strict=True)]
        hidden, cache = forward(config, weights, rows(parts), cache, pool.extend(done, new))
        starts, scores = np.cumsum([0, *new]), np.asarray(logits(weights, hidden))
        for s, n in enumerate(new):
            out[s].append(scores[starts[s] : starts[s] + n])
        done += new
    close(np.concatenate(out[0]), g["logits"][0])
    close(np.concatenate(out[2]), g["logits"][0][:23])
    close(cache.states[2].recurrent[0], g["gdn_recurrent_state_2"][0])
    assert np.isnan(cache.states[2].recurrent[1]).all()


@pytest.mark.parametrize("accepted", [(0, 1, 4), (4, 3, 0)])
def test_a_verify_step_commits_any_number_of_its_tokens(accepted):
    """After commit(a) the states are those of a prefill that ends with the a-th token, and so is what follows."""
    config, weights, _ = model(TINY)
    ids = golden(TINY)["long_input_ids"][0]
    lengths = np.array([9, 17, 5])
    pool = Pool(3, 4, seed=1)
    cache, _ = pool.caches(config)
    _, cache = forward(
        config, weights, rows([ids[:n] for n in lengths]), cache, pool.extend([0, 0, 0], lengths)
    )
    before = jax.tree.map(np.array, cache.states)

    verify = target_verify_metadata(prefix_lens=lengths, num_draft_tokens=4, **pool.table)
    drafts = rows([ids[n : n + 4] for n in lengths], 12)
    hidden, held = forward(config, weights, drafts, cache, verify)
    for got, want in zip(jax.tree.leaves(held.states), jax.tree.leaves(before), strict=True):
        assert (np.asarray(got) == want).all()
    with pytest.raises(ValueError, match="pending verify step"):
        forward(config, weights, drafts, held, verify)
    committed = commit(held, np.asarray(accepted))
    with pytest.raises(ValueError, match="expected the steps of a verify call"):
        committed.commit(np.asarray(accepted))

    alone = Pool(3, 4, seed=2)
    plain, _ = alone.caches(config)
    metadata = alone.extend([0, 0, 0], lengths + accepted)
    texts = [ids[: n + a] for n, a in zip(lengths, accepted, strict=True)]
    plain_hidden, plain = forward(config, weights, rows(texts), plain, metadata)
    for got, want in zip(jax.tree.leaves(committed.states), jax.tree.leaves(plain.states), strict=True):
        close(got, np.asarray(want))
    for s, a in enumerate(accepted):
        if a:
            end = int(metadata.cu_seqlens_q[s + 1])
            close(hidden[4 * s + a - 1], np.asarray(plain_hidden[end - 1]))

    following = rows([ids[n + a : n + a + 1] for n, a in zip(lengths, accepted, strict=True)])
    got, _ = forward(config, weights, following, committed, pool.extend(lengths + accepted, [1, 1, 1]))
    want, _ = forward(config, weights, following, plain, alone.extend(lengths + accepted, [1, 1, 1]))
    close(got[:3], np.asarray(want)[:3])


def test_trees_and_states_of_another_batch_are_refused():
    config, weights, _ = model(TINY)
    pool = Pool(2, 4)
    cache, _ = pool.caches(config)
    with jax.enable_x64(True):
        tree = target_verify_metadata(
            prefix_lens=[3, 3], num_draft_tokens=2, ancestors=jnp.ones((4, 1), jnp.uint64), **pool.table
        )
    with pytest.raises(UnsupportedError, match="a recurrent state follows one path"):
        forward(config, weights, jnp.zeros(4, jnp.int32), cache, tree)
    other = decode_metadata(seqused_k=[3], **{**pool.table, "req_pool_indices": [0]})
    with pytest.raises(ValueError, match="states of the 1 sequences of metadata, got 2"):
        forward(config, weights, jnp.zeros(1, jnp.int32), cache, other)


def test_computation_in_bfloat16_stays_near_the_golden():
    config, weights, _ = model(TINY)
    narrow = jax.tree.map(lambda a: a.astype(jnp.bfloat16) if a.ndim == 2 else a, weights)
    g = golden(TINY)
    pool = Pool(1, 16)
    cache, _ = pool.caches(config, jnp.bfloat16)
    hidden, _ = forward(config, narrow, rows([g["input_ids"][0]]), cache, pool.extend([0], [40]))
    assert hidden.dtype == jnp.bfloat16
    assert np.abs(np.asarray(logits(narrow, hidden)) - g["logits"][0]).mean() < 0.1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model_type": "qwen9"}, "model_type: expected one of .*got 'qwen9'"),
        ({"layer_types": ["linear_attention", "sliding_attention"]}, "layer_types: expected"),
        ({"attn_output_gate": False}, "attn_output_gate: expected True"),
        ({"linear_num_key_heads": 3}, "linear_num_value_heads: expected a multiple"),
    ],
)
def test_configs_of_other_models_are_refused(change, text):
    settings = json.loads((DATA / TINY / "config.json").read_text())
    with pytest.raises(CheckpointError, match=text):
        config_from_hf({**settings, **change})


def test_a_module_of_several_layers_or_none_is_refused():
    config = model(TINY)[0]
    with pytest.raises(UnsupportedError, match="mtp_num_hidden_layers: expected at most 1, got 2"):
        qwen3_5_mtp.mtp_specs(dataclasses.replace(config, mtp_layers=2), {})
    with pytest.raises(CheckpointError, match=r"no tensor mtp\.fc\.weight"):
        qwen3_5_mtp.mtp_specs(config, {"model.norm.weight"})
