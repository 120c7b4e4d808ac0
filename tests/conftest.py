import os

# Two CPU devices for shard_map; JAX reads this when it first looks for devices.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"

import contextlib
import importlib.util

import jax
import pytest
from jaxtyping import install_import_hook

# The shapes in these signatures are checked at every call; users pay nothing for them.
CHECKED_MODULES = tuple(f"jaxattn.kernels.{name}" for name in ("_blocks", "_output", "reference", "xla"))
install_import_hook(CHECKED_MODULES, "beartype.beartype")

# Each runs every case of the feature matrix; a kernel joins by its name.
IMPLEMENTATIONS = ("xla", "triton", "pallas") if importlib.util.find_spec("triton") else ("xla", "pallas")

# Compiling an interpreted Pallas kernel takes seconds, so a run without `-m` tests each feature, format and kind of
# shape with it once, all of them together in each walk, and what JAX's transformations do.
COVERING_CASES = {
    *("target_verify-plain", "decode-window", "decode-softcap", "decode-sinks", "decode-alibi"),
    *("decode-descales", "decode-output_scale", "target_verify-not_causal_window", "extend-batch_invariant"),
    *(
        "decode-everything",
        "target_verify-bfloat16-everything",
        "extend-float16-everything",
        "tree-everything",
    ),
    *(
        "tree-window-behind-a-prefix",
        "tree-two-words",
        "decode-bfloat16-kv-fp8",
        "decode-bfloat16-kv-float8_e4m3fnuz",
    ),
    *("decode-bfloat16-kv-float8_e5m2", "extend-float32-kv-int8", "decode-q-float8_e4m3fn", "decode-q-int8"),
    *("extend-out-float8_e4m3fn", "extend-out-int8", "decode-page-1", "decode-ratio-7"),
    *("extend-width-24-40", "decode-long-among-short", "decode-empty"),
}
COVERING_TESTS = {
    "test_p60_vmap_over_a_leading_axis[0-jit of vmap-pallas]",
    "test_p60_shard_map_over_kv_heads[pallas-True]",
    "test_eval_shape",
    "test_export_keeps_int64_indices_with_x64_off",
    "test_p02_very_negative_logits_are_not_masked",
    "test_p14_a_page_id_outside_the_pool_is_masked_and_aliases_no_page",
    "test_p35_numpy_indices_beyond_int32_keep_their_value",
    "test_p61_a_tile_that_reaches_past_the_end_of_the_pool",
}
# Compiled as users' programs are: these look at bits, memory and copies, or compute much.
FULLY_OPTIMISED = {
    *(
        "test_attention_memory",
        "test_attention_modes",
        "test_bench_cases",
        "test_big_pool",
        "test_bookkeeping",
    ),
    *("test_cli", "test_debug", "test_kv_cache", "test_model_by_name", "test_speculative_decoder"),
}
# A cousin of each of these runs by default.
SLOW = {
    "test_a_ragged_batch_equals_each_prompt_alone[off]",
    *(
        f"test_batch_invariant_rows_of_trees_have_the_bits_that_decode_gives_them[{name}-triton]"
        for name in (
            "16-bfloat16-options1",
            "64-bfloat16-options4",
            "16-bfloat16-options5",
            "4-float32-options6",
        )
    ),
    "test_batch_invariant_rows_have_the_same_bits_alone_in_a_batch_in_decode_and_in_verify[pallas-window]",
    *(f"test_chunks_and_pages_change_no_token[changes{i}]" for i in (0, 1, 3)),
    "test_chosen_drafts_leave_the_sampled_text_as_it_is[tree]",
    *(f"test_drafts_drawn_from_the_target_itself_are_all_accepted[{name}]" for name in ("chain", "branches")),
    "test_batch_invariant_rows_have_the_same_bits_in_decode_verify_and_draft_extend[xla-options0-float32]",
    "test_goldens_of_prefill_and_of_greedy_text_behind_it[quark_f2f_mxfp4_qwen3_5_moe_mtp]",
    "test_goldens_of_prefill_and_of_greedy_text_behind_it[qwen3_5_moe_mtp_tiny]",
    "test_goldens_of_prefill_and_of_greedy_text_behind_it[qwen3_next_mtp_tiny]",
    "test_goldens_of_the_mtp_module_and_its_chained_drafts[qwen3_next_mtp_tiny]",
    "test_greedy_text_is_that_of_transformers_and_drafts_change_only_the_passes[gemma3-270m-gemma3]",
    "test_greedy_text_is_the_plain_text[lookup tree]",
    "test_greedy_tokens_are_those_of_transformers[gemma3_tiny-off]",
    "test_mixed_checkpoints_generate_with_the_method_named_and_from_the_config[quark_f2f_mxfp4_qwen3_5_moe_mtp]",
    *(
        f"test_mtp_drafts_leave_the_greedy_text_as_it_is[{name}]"
        for name in ("1-prompts0", "4-prompts2", "16-prompts3")
    ),
    "test_p15_large_pages_equal_small_ones[triton]",
    *(f"test_p36_interpreted_pallas_beyond_two_to_the_31_elements[{m}]" for m in ("decode", "target_verify")),
    *(
        f"test_p39_every_mode_honours_every_option[xla-{option}-float32]"
        for option in ("softcap", "alibi", "sinks")
    ),
    "test_p46_the_number_of_splits_does_not_change_the_result[triton-20548-128-counts1]",
    "test_the_head_leaves_the_text_of_real_architectures_as_it_is[gemma3_tiny]",
    "test_the_recurrent_state_follows_0_some_and_all_drafts[4-1]",
    "test_text_from_a_narrower_cache_starts_the_same[bfloat16-4]",
    *(
        f"test_two_tokens_have_the_joint_distribution_of_the_target[{name}]"
        for name in ("one-drawn", "uneven-drawn", "chain-chosen", "one-chosen", "tree-drawn, q zero")
    ),
}


@pytest.fixture(autouse=True, scope="module")
def _programs_of_a_module(request):
    """Compile quickly where compiled code is not the subject, and drop the programs of a module behind it.

    A process can map only so much memory, and each program that JAX keeps takes some of it.
    """
    jax.config.update("jax_disable_most_optimizations", compiled_quickly(request))
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    with quick_to_interpret(request):
        yield request.param


@pytest.fixture(params=[name for name in IMPLEMENTATIONS if name != "xla"])
def kernels(request):
    """Name of a package of kernels, for tests of what lies beneath `implementation`."""
    with quick_to_interpret(request):
        yield request.param


def compiled_quickly(request):
    return jax.default_backend() == "cpu" and request.module.__name__ not in FULLY_OPTIMISED


@contextlib.contextmanager
def quick_to_interpret(request):
    """Spare most optimisations where a kernel is interpreted by Pallas: they take longer than the run."""
    interpreted = request.param == "pallas" and jax.default_backend() == "cpu"
    jax.config.update("jax_disable_most_optimizations", interpreted or compiled_quickly(request))
    yield
    jax.config.update("jax_disable_most_optimizations", compiled_quickly(request))


def pytest_collection_modifyitems(config, items):
    """Without a GPU its tests are skipped; with one, `-m gpu` also means the matrix compiled for it.

    What is `slow`, such as interpreted Pallas beyond what covers its features, runs where it is asked for: with
    `-m slow`, or by its name.
    """
    on_gpu = jax.default_backend() == "gpu"
    for item in items:
        name = implementation_of(item)
        if on_gpu and (name in ("triton", "pallas") or item.module.__name__ == "test_triton_scatter"):
            item.add_marker(pytest.mark.gpu)
        elif not on_gpu and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        elif item.name in SLOW or (name == "pallas" and not covers(item)):
            item.add_marker(pytest.mark.slow)
    if config.option.markexpr or any("::" in argument for argument in config.args):
        return
    left_out = [item for item in items if item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not item.get_closest_marker("slow")]


def implementation_of(item) -> str | None:
    params = item.callspec.params if getattr(item, "callspec", None) else {}
    return params.get("implementation", params.get("kernels"))


def covers(item) -> bool:
    """Whether a test of an interpreted kernel is one that covers its features; other files choose for themselves."""
    if not item.module.__name__.startswith(("test_attention", "test_reports")):
        return True
    if item.originalname == "test_matches_the_oracle":
        return item.callspec.params["name"] in COVERING_CASES
    return bool({item.originalname, item.name} & COVERING_TESTS)
