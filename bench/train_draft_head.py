"""Train an EAGLE-style draft head for a model, on conversations that the model itself writes.

    python -m bench.train_draft_head MODEL.gguf head.safetensors --report report.json

The same seed, model and device give the same head. `--smoke` runs everything at toy size on a CPU.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path

import jax

from bench.draft_head.batches import Request, answer, mean_accepted_length
from bench.draft_head.texts import write_conversations
from bench.draft_head.training import Plan, train_head
from jaxattn.models.load import load_model
from jaxattn.speculative import ModelDrafter, NgramDrafter
from jaxattn.speculative.eagle import EagleDraft, EagleWeights, save_head

# What people ask; no conversation of the training starts from these.
HELD_OUT_PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Explain in simple terms how a refrigerator keeps food cold.",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "Give me three tips for sleeping better at night.",
    "How do I reverse a list in Python? Show an example.",
    "Summarise the causes of the First World War in a few sentences.",
    "What is the difference between weather and climate?",
    "Write a polite email asking a colleague to move a meeting to Thursday.",
    "Describe the life cycle of a butterfly.",
    "Suggest a simple dinner with rice, eggs and vegetables.",
    "What are prime numbers and why do they matter?",
    "Translate 'good morning, my friend' into Spanish and French.",
    "Why is the sky blue during the day and red at sunset?",
    "List five jobs that did not exist fifty years ago.",
    "How can I save money while I am a student?",
    "Write a poem about the first snow of the year.",
)
DRAFTERS = {
    "chain, n = 4": {"num_draft_tokens": 4},
    "tree, n = 8": {"num_draft_tokens": 8, "topk": 3, "num_steps": 3},
    "tree, n = 16": {"num_draft_tokens": 16, "topk": 4, "num_steps": 4},
}


def main() -> None:
    arguments = _parse()
    started = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - started:6.1f} s] {text}", flush=True)

    model = load_model(arguments.model)
    options = () if arguments.implementation is None else (("implementation", arguments.implementation),)
    say(f"{arguments.model} in {model.dtype} on {jax.devices()[0].device_kind}")
    tokens, lengths = write_conversations(
        model,
        count=arguments.conversations,
        length=arguments.length,
        rows=arguments.rows,
        seed=arguments.seed,
        options=options,
        progress=lambda what, done: say(f"{done} {what}"),
    )
    say(f"{int(lengths.sum())} tokens of text, for example:\n{model.codec.decode(tokens[0, : lengths[0]])}")
    plan = Plan(
        steps=arguments.steps,
        batch=arguments.batch,
        learning_rate=arguments.learning_rate,
        warmup=min(100, arguments.steps),
        seed=arguments.seed,
    )
    head = train_head(model, tokens, lengths, plan, options, say)
    notes = {"trained_on": f"{int(lengths.sum())} tokens of {Path(arguments.model).name}'s own text"}
    notes |= {"plan": json.dumps(dataclasses.asdict(plan))}
    Path(arguments.out).parent.mkdir(parents=True, exist_ok=True)
    save_head(arguments.out, head, notes)
    say(f"wrote {arguments.out}, {Path(arguments.out).stat().st_size} bytes")

    measured = measure(model, head, arguments.new_tokens, options, say)
    if arguments.report:
        Path(arguments.report).write_text(json.dumps(notes | {"mean_accepted_length": measured}, indent=1))


def measure(model, head, new_tokens: int, options, say) -> dict[str, float]:
    """Mean accepted length on the held-out prompts, and whether the text is that of plain decoding."""
    prompts = [model.codec.encode_chat(prompt) for prompt in HELD_OUT_PROMPTS]
    requests = [Request(prompt, new_tokens) for prompt in prompts]
    shared = {
        "rows": len(requests),
        "max_context_len": max(map(len, prompts)) + new_tokens,
        "options": options,
        "sampled": False,
    }
    plain = answer(model, requests, NgramDrafter(num_draft_tokens=1), **shared)
    weights = EagleWeights.share(head, model.weights)
    measured = {}
    for name, options_of_drafter in DRAFTERS.items():
        drafter = ModelDrafter(model=EagleDraft(model.program.config, options), **options_of_drafter)
        answers = answer(model, requests, drafter, draft_weights=weights, **shared)
        same = sum(a.tokens == b.tokens for a, b in zip(answers, plain, strict=True))
        measured[name] = mean_accepted_length(answers)
        say(
            f"{name}: {measured[name]:.3f} tokens a pass; {same} of {len(plain)} texts are those of plain decoding"
        )
    return measured


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a GGUF file, a folder, or a model known by name")
    parser.add_argument("out", help="the head, as safetensors")
    parser.add_argument("--report", help="a JSON file with the mean accepted lengths")
    parser.add_argument("--conversations", type=int, default=16384)
    parser.add_argument("--length", type=int, default=256, help="tokens in a conversation at most")
    parser.add_argument("--rows", type=int, default=512, help="conversations written at a time")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=64, help="conversations in a training step")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--new-tokens", type=int, default=200, help="per held-out prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--implementation", help="of attention, but for that of the training, which is dense")
    parser.add_argument("--smoke", action="store_true", help="toy sizes, to see on a CPU that all of it runs")
    arguments = parser.parse_args()
    if arguments.smoke:
        toy = {"conversations": 8, "length": 128, "rows": 4, "steps": 4, "batch": 2, "new_tokens": 8}
        vars(arguments).update(toy)
    return arguments


if __name__ == "__main__":
    main()
