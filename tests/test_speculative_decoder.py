"""The compiled loop against token-by-token numpy: text, rows that join and leave, host reads, compilations."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_decoder import VOCAB, WINDOW, plain_logits, plain_text, program, setup

from jaxattn import PagedKVCache, ancestor_bits
from jaxattn.speculative import (
    Admission,
    ModelDrafter,
    NgramDrafter,
    ProgramDraft,
    SamplingParams,
    admit_all,
    compact_accepted,
    draw,
    grant,
    keys_at,
    probabilities,
    release,
)
from jaxattn.speculative import decoder as loop

PROMPTS = [np.random.default_rng(5).integers(0, VOCAB, size).tolist() for size in (9, 1, 20)]
WINDOWS = (None, WINDOW)
text = functools.cache(lambda row, new, windows=(None,): plain_text(PROMPTS[row], new, windows))


def drafter(implementation="reference", **options):
    return ModelDrafter(model=ProgramDraft(program(), (("implementation", implementation),)), **options)


chain = functools.partial(drafter, num_draft_tokens=4)
tree = functools.partial(drafter, num_draft_tokens=8, topk=3, num_steps=3)
branches = functools.partial(drafter, num_draft_tokens=8, topk=3, drawn=True)


@pytest.mark.parametrize(
    ("drafter", "options"),
    [
        (NgramDrafter(num_draft_tokens=4), {"page_size": 1}),
        (NgramDrafter(num_draft_tokens=7, topk=2), {"page_size": 16, "implementation": "xla"}),
        (chain(), {"page_size": 4, "draft_noise": 0.08}),
        (tree(), {"page_size": 3, "draft_noise": 0.08}),
    ],
    ids=["lookup", "lookup tree", "chain", "tree"],
)
def test_greedy_text_is_the_plain_text(drafter, options):
    run = setup(drafter, **options)
    new = (30, 12, 25)
    for row, prompt in enumerate(PROMPTS):
        run.admit(row, prompt, max_new_tokens=new[row])
    assert run.write() == [text(row, 30)[: new[row]] for row in range(3)]
    passes = np.asarray(run.state.passes)
    assert (passes < np.asarray(new) - 1).all()
    assert np.asarray(run.state.sound).all()
    assert not np.asarray(run.state.live).any()


@pytest.mark.parametrize("drafter", [NgramDrafter(num_draft_tokens=9, topk=3)], ids=["tree"])
def test_window_pools_hold_a_ring_of_pages(drafter):
    run = setup(drafter, windows=WINDOWS, page_size=2)
    assert run.window_pages.shape[1] < run.pages.shape[1]
    for row, prompt in enumerate(PROMPTS):
        run.admit(row, prompt, max_new_tokens=30)
    assert run.write() == [text(row, 30, WINDOWS) for row in range(3)]


def test_an_accepted_path_moves_together_in_both_pools():
    cache = PagedKVCache.allocate(
        num_layers=2,
        num_pages=5,
        page_size=2,
        num_kv_heads=1,
        head_dim=1,
        dtype=jnp.float32,
        window_layers=(1,),
        num_window_pages=5,
    )
    state = setup(NgramDrafter(num_draft_tokens=6), rows=2, page_size=2, context=2).state
    state = dataclasses.replace(
        state,
        page_table=jnp.asarray([[4, 1, 3, 0], [0, 0, 2, 0]]),
        swa_page_table=jnp.asarray([[2, 4, 1, 0], [0, 0, 3, 0]]),
    )
    parents = jnp.asarray([[-1, 0, 0, 2, 1], [-1, 0, 0, 0, 0]])
    metadata = state.metadata(
        "target_verify", jnp.asarray([1, 0]), 5, jnp.asarray([True, False]), ancestor_bits(parents)
    )
    pools = metadata, metadata.for_window_pool()
    nodes = jnp.arange(10.0).reshape(10, 1, 1)
    for layer, pool in enumerate(pools):
        cache = cache.write(layer, nodes, -nodes, pool.slots(10))
    path = jnp.asarray([[0, 2, 3, -1, -1], [-1, -1, -1, -1, -1]], jnp.int32)
    moved = jax.jit(compact_accepted)(cache, metadata, path)
    for layer, pool in enumerate(pools):
        k, v = moved.gather(layer, pool.slots(10)[:5])
        assert k[:, 0, 0].tolist() == [0, 2, 3, 3, 4]
        assert v[:, 0, 0].tolist() == [0, -2, -3, -3, -4]


def test_a_draft_model_that_is_the_target_has_all_its_drafts_accepted():
    run = setup(chain())
    run.admit(1, PROMPTS[0], max_new_tokens=29)
    assert run.write()[1] == text(0, 29)
    assert int(run.state.passes[1]) == 7


def test_rows_end_at_their_stop_token_while_others_go_on():
    run = setup(NgramDrafter(num_draft_tokens=4), page_size=1)
    stop = text(0, 30)[6]
    run.admit(0, PROMPTS[0], max_new_tokens=30, stop_tokens=(stop,))
    run.admit(2, PROMPTS[2], max_new_tokens=30)
    texts = run.write()
    assert texts[0] == plain_text(PROMPTS[0], 30, stop_tokens=(stop,))
    assert texts[0][-1] == stop
    assert texts[1:] == [[], text(2, 30)]


def test_a_first_token_that_stops_or_fills_the_limit_ends_the_row():
    run = setup(NgramDrafter(num_draft_tokens=4), page_size=1)
    run.admit(0, PROMPTS[0], max_new_tokens=30, stop_tokens=text(0, 30)[:1])
    run.admit(2, PROMPTS[2], max_new_tokens=1)
    assert run.write() == [text(0, 30)[:1], [], text(2, 30)[:1]]
    assert run.state.passes.tolist() == [0, 0, 0]


def test_requests_join_and_leave_between_reads():
    run = setup(NgramDrafter(num_draft_tokens=4), page_size=1)
    run.admit(0, PROMPTS[0], max_new_tokens=30)
    run.admit(1, PROMPTS[1], max_new_tokens=30)
    texts = [[], [], []]
    steps = run.decoder.stream(run.weights, run.state, every=2)
    run.state, new = next(steps)
    for round_ in range(100):
        for so_far, tokens in zip(texts, new, strict=True):
            so_far += tokens
        if round_ == 2:
            run.state = release(run.state, 1)
            run.admit(2, PROMPTS[2], max_new_tokens=12)
        if round_ == 4:
            run.admit(1, PROMPTS[0], max_new_tokens=5)
            left, texts[1] = texts[1], []
        try:
            run.state, new = steps.send(run.state)
        except StopIteration:
            break
    assert texts == [text(0, 30), text(0, 30)[:5], text(2, 30)[:12]]
    assert 0 < len(left) < 30
    assert left == text(1, 30)[: len(left)]


def test_a_row_without_room_for_a_cycle_waits_for_pages():
    run = setup(NgramDrafter(num_draft_tokens=4), page_size=1)
    few = len(PROMPTS[0]) + 8
    run.admit(0, PROMPTS[0], max_new_tokens=20, pages=run.pages[0, :few])
    run.admit(2, PROMPTS[2], max_new_tokens=20)
    state = run.decoder.run(run.weights, run.decoder.prefill(run.weights, run.state), 50)
    assert state.live.tolist() == [True, False, False]
    assert few - 4 < int(state.lengths[0]) <= few
    run.state = grant(state, 0, run.pages[0])
    state = run.decoder.run(run.weights, run.state, 50)
    assert state.history[0, 9:29].tolist() == text(0, 30)[:20]
    assert state.history[2, 20:40].tolist() == text(2, 30)[:20]


def test_nothing_is_read_by_the_host_between_the_reads_of_the_caller():
    run = setup(NgramDrafter(num_draft_tokens=4), page_size=1)
    run.admit(0, PROMPTS[0], max_new_tokens=30)
    with jax.transfer_guard("disallow"):
        state = run.decoder.run(run.weights, run.decoder.prefill(run.weights, run.state), 3)
        state = run.decoder.run(run.weights, state, 1)
    assert int(state.passes[0]) == 4


def test_one_compilation_serves_every_batch_of_a_size():
    sizes = []
    for order in ((0, 1, 2), (2, 0), (1,)):
        run = setup(NgramDrafter(num_draft_tokens=4), page_size=1)
        for row, prompt in enumerate(order):
            run.admit(row, PROMPTS[prompt], max_new_tokens=5 + row, stop_tokens=(row,))
        run.write(every=1 + len(order))
        sizes.append((loop._run._cache_size(), loop._prefill._cache_size()))
    assert sizes[0] == sizes[1] == sizes[2]


@pytest.mark.parametrize(
    "drafter", [chain("xla"), NgramDrafter(num_draft_tokens=7, topk=2)], ids=["chain", "tree"]
)
def test_the_compiled_loop_holds_no_copy_of_the_caches(drafter):
    run = setup(drafter, context=2**16, page_size=16, implementation="xla")
    caches = [run.state.cache] + ([run.state.draft.cache] if run.state.draft is not None else [])
    size = sum(x.nbytes for x in jax.tree.leaves(caches))
    with jax.enable_x64(True):
        compiled = loop._run.lower(run.decoder, run.weights, run.state, jnp.int64(3)).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 4


def test_a_row_with_unsound_logits_ends_and_is_reported_alone():
    run = setup(NgramDrafter(num_draft_tokens=4), page_size=1)
    target = run.weights.target
    unused = min(set(range(VOCAB)) - {token for row in (0, 2) for token in PROMPTS[row] + text(row, 30)[:10]})
    embedding = target.embedding.at[unused].set(jnp.nan)
    run.weights = run.weights._replace(target=dataclasses.replace(target, embedding=embedding))
    for row, prompt in enumerate((PROMPTS[0], [unused], PROMPTS[2])):
        run.admit(row, prompt, max_new_tokens=10)
    state = run.decoder.run(run.weights, run.decoder.prefill(run.weights, run.state), 9)
    assert not bool(state.live[1])
    assert int(state.lengths[1]) == 2
    assert 0 <= int(state.history[1, 1]) < VOCAB
    assert state.sound.tolist() == [True, False, True]
    assert state.history[0, 9:19].tolist() == text(0, 30)[:10]
    assert state.history[2, 20:30].tolist() == text(2, 30)[:10]


def sampled_text(row, new, seed, **options):
    sampling = SamplingParams.create(1, seed=[seed], **options)

    def choose(logits, position):
        probs, _ = probabilities(jnp.asarray(logits, jnp.float32)[None, None], sampling)
        return draw(keys_at(sampling, jnp.asarray([position])), probs[:, 0])[0]

    return plain_text(PROMPTS[row], new, choose=choose)


@pytest.mark.parametrize("drafter", [NgramDrafter(num_draft_tokens=4), tree()], ids=["lookup", "tree"])
def test_chosen_drafts_leave_the_sampled_text_as_it_is(drafter):
    run = setup(drafter, sampled=True, page_size=4, draft_noise=0.08)
    run.admit(0, PROMPTS[0], max_new_tokens=12, temperature=0.7, top_p=0.9, seed=1)
    run.admit(1, PROMPTS[1], max_new_tokens=20)
    run.admit(2, PROMPTS[2], max_new_tokens=12, temperature=1.0, top_k=5, seed=3)
    assert run.write() == [
        sampled_text(0, 12, 1, temperature=0.7, top_p=0.9),
        text(1, 30)[:20],
        sampled_text(2, 12, 3, temperature=1.0, top_k=5),
    ]


@pytest.mark.parametrize(
    "drafter",
    [chain(drawn=True), branches()],
    ids=["chain", "branches"],
)
def test_drafts_drawn_from_the_target_itself_are_all_accepted(drafter):
    run = setup(drafter, sampled=True)
    run.admit(0, PROMPTS[0], max_new_tokens=25, temperature=1.0, seed=5)
    run.admit(2, PROMPTS[2], max_new_tokens=25)
    texts = run.write()
    levels = 3
    assert int(run.state.passes[0]) == -(-24 // (levels + 1))
    assert texts[2] == text(2, 30)[:25]
    logits = [plain_logits(PROMPTS[0] + texts[0][:i]) for i in range(25)]
    assert np.mean([row.argmax() == token for row, token in zip(logits, texts[0], strict=True)]) < 0.9


def test_several_requests_enter_at_once_as_they_would_one_by_one():
    prompts = ([3, 1, 4, 1, 5], [9, 2, 6])
    options = [{"max_new_tokens": 6 + row, "temperature": 0.5 * row, "seed": row} for row in range(2)]
    single, together = (setup(NgramDrafter(num_draft_tokens=3), rows=2) for _ in range(2))
    for row, prompt in enumerate(prompts):
        single.admit(row, prompt, **options[row])
    admissions = {
        row: Admission(prompt=prompt, pages=together.pages[row], **options[row])
        for row, prompt in enumerate(prompts)
    }
    state = admit_all(together.state, admissions)
    for one, other in zip(jax.tree.leaves(single.state), jax.tree.leaves(state), strict=True):
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        np.testing.assert_array_equal(one, other)
    admissions[1] = dataclasses.replace(admissions[1], prompt=[])
    with pytest.raises(ValueError, match="prompt: expected at least one token"):
        admit_all(together.state, admissions)
    with pytest.raises(ValueError, match="admissions: expected at least one, got none"):
        admit_all(together.state, {})
