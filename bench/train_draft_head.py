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
import numpy as np

from bench.draft_head.texts import Conversations, write_conversations
from bench.draft_head.training import Plan, train_head
from bench.requests import Engine, Request, mean_accepted_length
from bench.speculative import encoded_prompts
from jaxattn.models.load import load_model
from jaxattn.speculative import drafting_for
from jaxattn.speculative.eagle import save_head

# Draft tokens and topk that the head is measured with.
SHAPES = {"chain, n = 4": (4, 1), "tree, n = 8": (8, 3), "tree, n = 16": (16, 4)}


def main() -> None:
    arguments = _parse()
    started = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - started:6.1f} s] {text}", flush=True)

    model = load_model(arguments.model)
    options = () if arguments.implementation is None else (("implementation", arguments.implementation),)
    say(f"{arguments.model} in {model.dtype} on {jax.devices()[0].device_kind}")
    texts = conversations(model, arguments, options, say)
    count = int(texts.lengths.sum())
    say(f"{count} tokens of text, for example:\n{model.codec.decode(texts.tokens[0, : texts.lengths[0]])}")
    plan = Plan(
        steps=arguments.steps,
        batch=arguments.batch,
        held_out=arguments.held_out,
        learning_rate=arguments.learning_rate,
        warmup=min(100, arguments.steps),
        seed=arguments.seed,
    )
    notes = {"trained_on": f"{count} tokens of {Path(arguments.model).name}'s own text"}
    notes |= {"plan": json.dumps(dataclasses.asdict(plan))}
    Path(arguments.out).parent.mkdir(parents=True, exist_ok=True)
    # What a run leaves that ends early says so by the steps of its plan.
    head = train_head(model, texts, plan, options, say, lambda head: save_head(arguments.out, head, notes))
    save_head(arguments.out, head, notes)
    say(f"wrote {arguments.out}, {Path(arguments.out).stat().st_size} bytes")

    measured = measure(model, arguments.out, arguments.new_tokens, options, say)
    if arguments.report:
        Path(arguments.report).write_text(json.dumps(notes | {"mean_accepted_length": measured}, indent=1))


def conversations(model, arguments, options, say) -> Conversations:
    """Texts of the model: those of `--texts` where that file is, else new ones, which it then holds."""
    file = Path(arguments.texts) if arguments.texts else None
    if file and file.exists():
        with np.load(file) as arrays:
            return Conversations(**arrays)
    texts = write_conversations(
        model,
        count=arguments.conversations,
        length=arguments.length,
        rows=arguments.rows,
        seed=arguments.seed,
        options=options,
        progress=lambda what, done: say(f"{done} {what}"),
    )
    if file:
        with file.open("wb") as out:
            np.savez_compressed(out, **texts._asdict())
    return texts


def measure(model, head: str, new_tokens: int, options, say) -> dict[str, float]:
    """Mean accepted length on the held-out prompts, and whether the text is that of plain decoding."""
    prompts = encoded_prompts(model)
    requests = [Request(prompt, new_tokens) for prompt in prompts]
    shape = {
        "rows": len(requests),
        "max_context_len": max(map(len, prompts)) + new_tokens,
        "options": options,
    }
    plain = Engine(model, drafting_for("off", model), **shape).answer(requests)
    measured = {}
    for name, (n, topk) in SHAPES.items():
        drafting = drafting_for("eagle", model, num_draft_tokens=n, topk=topk, attention=options, head=head)
        answers = Engine(model, drafting, **shape).answer(requests)
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
    parser.add_argument(
        "--texts", help="an .npz file of conversations, written by the first run and read by others"
    )
    parser.add_argument("--report", help="a JSON file with the mean accepted lengths")
    parser.add_argument("--conversations", type=int, default=32768)
    parser.add_argument("--length", type=int, default=256, help="tokens in a conversation at most")
    parser.add_argument("--rows", type=int, default=2048, help="conversations written at a time")
    parser.add_argument("--steps", type=int, default=10000)
    parser.add_argument("--batch", type=int, default=32, help="conversations in a training step")
    parser.add_argument("--held-out", type=int, default=256, help="conversations to measure the head with")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--new-tokens", type=int, default=200, help="per held-out prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--implementation", help="of attention, but for that of the training, which is dense")
    parser.add_argument("--smoke", action="store_true", help="toy sizes, to see on a CPU that all of it runs")
    arguments = parser.parse_args()
    if arguments.smoke:
        toy = {"conversations": 8, "length": 128, "rows": 4, "steps": 4, "batch": 2, "new_tokens": 8}
        toy["held_out"] = 2
        vars(arguments).update(toy)
    return arguments


if __name__ == "__main__":
    main()
