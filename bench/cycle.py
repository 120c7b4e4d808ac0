"""Times a cycle of the decoding loop beside the device time of its kernels.

    python -m bench.cycle llama-3.2-1b --methods off,eagle --rows 8 --context 1024

MODEL is one that `jaxattn generate` knows, or a shape of `SHAPES` with random weights. A random draft head stands in
where there is no trained one: it drafts nothing of use, at the same cost.
"""

import argparse
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from bench.inputs import draw
from bench.requests import Engine, Request
from bench.timing import clock, device_time
from jaxattn.models import decoder
from jaxattn.models.config import DecoderConfig, LayerConfig, Rope
from jaxattn.models.load import Model, Program, load_model
from jaxattn.speculative import decoder as loop
from jaxattn.speculative import drafting_for, eagle

# Layers, width, inner width, query heads, KV heads, head width, vocabulary, whether the head is tied.
SHAPES = {
    "smollm2-135m-shape": (30, 576, 1536, 9, 3, 64, 49152, True),
    "llama-3.2-1b": (16, 2048, 8192, 32, 8, 64, 128256, True),
    "llama-3-8b": (32, 4096, 14336, 32, 8, 128, 128256, False),
    "toy": (2, 64, 128, 4, 2, 16, 256, True),
}
CYCLES = 16


def random_model(name: str, dtype) -> Model:
    """A Llama of one of `SHAPES` with random weights."""
    layers, width, inner, heads, kv_heads, head_dim, vocabulary, tied = SHAPES[name]
    config = DecoderConfig(
        architecture="llama",
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        context_length=8192,
        layers=(LayerConfig(Rope(500000.0, head_dim)),) * layers,
        tied_head=tied,
        softmax_scale=head_dim**-0.5,
    )
    keys = iter(jax.random.split(jax.random.key(0, impl="rbg"), 16 * layers + 4))

    def tensor(name, shape):
        return jnp.ones(shape, jnp.float32) if name.endswith("norm") else draw(next(keys), shape, dtype, 0.02)

    shapes = decoder.layer_shapes(config)
    weights = decoder.DecoderWeights(
        embedding=tensor("embedding", (vocabulary, width)),
        layers=tuple(
            decoder.LayerWeights(**{name: tensor(name, shape) for name, shape in shapes.items()})
            for _ in range(layers)
        ),
        final_norm=tensor("final_norm", (width,)),
        head=None if tied else tensor("head", (vocabulary, width)),
    )
    return Model(name, Program(config), weights)


def cycle_times(engine: Engine, batch: list[Request], iterations: int = 5) -> dict[str, float]:
    """Microseconds of a cycle by the clock and, on CUDA, by its kernels, from runs that differ in their cycles only."""
    state = engine.prefilled(batch)

    @jax.jit
    def run(weights, state, count):
        return loop._run.__wrapped__(engine.decoder, weights, state, count)

    times: dict[str, dict[int, float]] = {"cycle": {}} | ({"kernels": {}} if clock() == "cupti" else {})
    with jax.enable_x64(True):
        for count in (1, 1 + CYCLES):
            arguments = (engine.weights, state, jax.device_put(np.int64(count)))
            jax.block_until_ready(run(*arguments))
            if "kernels" in times:
                times["kernels"][count] = device_time(run, arguments, iterations=iterations).median
            samples = []
            for _ in range(2 * iterations):
                started = time.perf_counter()
                jax.block_until_ready(run(*arguments))
                samples.append(1e6 * (time.perf_counter() - started))
            times["cycle"][count] = float(np.median(samples))
    return {f"{name}_us": (found[1 + CYCLES] - found[1]) / CYCLES for name, found in times.items()}


def measure(model: Model, method: str, *, n: int, rows: int, context: int, options) -> dict:
    """A row of the table."""
    n = 1 if method == "off" else n
    head = None
    if method == "eagle" and model.name in SHAPES:
        head = eagle.init_head(model.program.config, model.weights, jax.random.key(1))
    engine = Engine(
        model,
        drafting_for(method, model, num_draft_tokens=n, attention=options, head=head),
        rows=rows,
        max_context_len=context + (CYCLES + 2) * n,
        options=options,
    )
    engine.stop_tokens = ()
    vocabulary = model.program.config.vocab_size
    prompts = np.random.default_rng(0).integers(0, vocabulary, (rows, context)).tolist()
    times = cycle_times(engine, [Request(prompt, (CYCLES + 2) * n) for prompt in prompts])
    return {"model": model.name, "method": method, "n": n, "rows": rows, "context": context, **times}


def main(arguments=None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.cycle",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help=f"a model known to jaxattn generate, or one of {', '.join(SHAPES)}")
    parser.add_argument("--methods", type=lambda text: text.split(","), default=["off", "eagle"])
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--rows", type=int, default=8, help="requests of a batch")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each prompt")
    parser.add_argument("--implementation", help="of attention")
    parser.add_argument("--json", help="a file for the table")
    given = parser.parse_args(arguments)
    options = () if given.implementation is None else (("implementation", given.implementation),)
    model = random_model(given.model, jnp.bfloat16) if given.model in SHAPES else load_model(given.model)
    print(f"{model.name} in {model.dtype} on {jax.devices()[0].device_kind}")
    print("method   n  rows  context  cycle us  kernels us  cycle / kernels")
    table = []
    for method in given.methods:
        row = measure(
            model,
            method,
            n=given.num_draft_tokens,
            rows=given.rows,
            context=given.context,
            options=options,
        )
        table.append(row)
        of_kernels = "          -                -"
        if "kernels_us" in row:
            of_kernels = f"{row['kernels_us']:11.0f} {row['cycle_us'] / row['kernels_us']:16.2f}"
        print(
            f"{row['method']:6} {row['n']:3} {row['rows']:5} {row['context']:8} {row['cycle_us']:9.0f} {of_kernels}",
            flush=True,
        )
    if given.json:
        Path(given.json).write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
