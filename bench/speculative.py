"""What speculative decoding gives: tokens per pass of the target, the same text or not, and time.

    python -m bench.speculative smollm2-135m --methods ngram,eagle --topk 1,3 --page-sizes 1,16,64 --rows 1,8

Every row of the table is compared with plain decoding of the same prompts. With `--batch-invariant` that is a run which
verifies as many rows as the others and drafts nothing (`empty`), since products of other shapes may round otherwise:
texts are then the same in bfloat16 too. `--device-time` adds the time of a cycle of the loop and, on CUDA, of its
kernels.
"""

import argparse
import dataclasses
import hashlib
import itertools
import json
import time
from pathlib import Path

import jax

from bench.cycle import cycle_times
from bench.requests import Engine, Request, mean_accepted_length
from jaxattn.models.load import load_model
from jaxattn.speculative import Drafting, drafting_for
from jaxattn.speculative.drafters import NgramDrafter

# What people ask; the draft heads of the package were not trained on these.
PROMPTS = (
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
EMPTY = "empty"
# Draft tokens of a verify pass by the children of a node.
NODES = {1: 4, 2: 6, 3: 8, 4: 16}


def main() -> None:
    arguments = _parse()
    model = load_model(arguments.model, dtype=arguments.dtype)
    given = {"implementation": arguments.implementation, "batch_invariant": arguments.batch_invariant or None}
    options = tuple((name, value) for name, value in given.items() if value is not None)
    prompts = encoded_prompts(model)[: arguments.prompts]
    requests = [Request(prompt, arguments.new_tokens) for prompt in prompts]
    length = max(map(len, prompts)) + arguments.new_tokens
    print(f"{arguments.model} in {model.dtype} on {jax.devices()[0].device_kind}, {len(requests)} prompts")
    print("method  topk   n  page  rows  tokens/pass  same texts  ms/pass  tokens/s")
    table = []
    for page_size, rows in itertools.product(arguments.page_sizes, arguments.rows):
        shape = {"rows": rows, "page_size": page_size, "max_context_len": length, "options": options}
        methods = [EMPTY, *arguments.methods] if arguments.batch_invariant else arguments.methods
        for topk, method in [(1, "off"), *itertools.product(arguments.topk, methods)]:
            n = 1 if method == "off" else arguments.num_draft_tokens or NODES[topk]
            if method == EMPTY:
                drafting = Drafting(EmptyDrafter(num_draft_tokens=n, topk=topk))
            else:
                drafting = drafting_for(
                    method, model, num_draft_tokens=n, topk=topk, attention=options, head=arguments.head
                )
            line, texts = _measure(model, drafting, requests, shape, arguments.device_time)
            if method in ("off", EMPTY):
                plain = texts
            same = sum(a == b for a, b in zip(texts, plain, strict=True))
            line = {
                "method": method,
                "topk": topk,
                "n": n,
                "page_size": page_size,
                "rows": rows,
                **line,
                "same": same,
                "texts": hashlib.sha256(repr(texts).encode()).hexdigest()[:16],
            }
            table.append(line)
            print(
                f"{method:6} {topk:5} {n:3} {page_size:5} {rows:5} {line['tokens_per_pass']:12.3f} "
                f"{same:4} of {len(plain):2} {line['ms_per_pass']:10.2f} {line['tokens_per_second']:9.1f}",
                flush=True,
            )
            if arguments.device_time:
                kernels = f", its kernels {line['kernels_us']:.0f} us" if "kernels_us" in line else ""
                print(f"        a cycle takes {line['cycle_us']:.0f} us{kernels}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(table, indent=1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmptyDrafter(NgramDrafter):
    """Drafts nothing, in n rows a sequence."""

    def draft(self, weights, state, active):
        """Chains and trees of nodes without tokens below the last verified one."""
        tree, probs, draft = super().draft(weights, state, active)
        return dataclasses.replace(tree, tokens=tree.tokens.at[:, 1:].set(-1)), probs, draft


def encoded_prompts(model) -> list[list[int]]:
    """`PROMPTS` in the model's chat template, or as they are where it has none."""
    codec = model.codec
    return [
        codec.encode(prompt) if codec.chat_template is None else codec.encode_chat(prompt)
        for prompt in PROMPTS
    ]


def _measure(model, drafting: Drafting, requests, shape, device_time: bool):
    engine = Engine(model, drafting, **shape)
    # Compiles.
    engine.answer(requests[: shape["rows"]])
    started = time.perf_counter()
    answers = engine.answer(requests)
    seconds = time.perf_counter() - started
    # Rows of a batch share its passes.
    batches = [answers[i : i + shape["rows"]] for i in range(0, len(answers), shape["rows"])]
    passes = sum(max(a.passes for a in batch) for batch in batches)
    line = {
        "tokens_per_pass": mean_accepted_length(answers),
        "ms_per_pass": 1e3 * seconds / max(passes, 1),
        "tokens_per_second": sum(len(a.tokens) for a in answers) / seconds,
    }
    if device_time:
        line |= cycle_times(engine, requests[: shape["rows"]])
    return line, [a.tokens for a in answers]


def _parse() -> argparse.Namespace:
    def numbers(text):
        return [int(number) for number in text.split(",")]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a GGUF file, a folder, or a model known by name")
    parser.add_argument("--methods", type=lambda text: text.split(","), default=["ngram", "eagle"])
    parser.add_argument("--topk", type=numbers, default=[1, 3])
    parser.add_argument("--num-draft-tokens", type=int, help=f"by topk: {NODES}")
    parser.add_argument("--page-sizes", type=numbers, default=[16])
    parser.add_argument("--rows", type=numbers, default=[8], help="requests at a time")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--head", help="draft head of eagle; the package's own by default")
    parser.add_argument("--dtype", help="of the weights")
    parser.add_argument("--implementation", help="of attention")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--device-time", action="store_true")
    parser.add_argument("--json", help="a file for the table")
    return parser.parse_args()


if __name__ == "__main__":
    main()
