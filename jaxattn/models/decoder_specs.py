"""The tensors of a Llama-family or Gemma 3 decoder in a safetensors folder, for `jaxattn.models.streaming`."""

import functools

import jax.numpy as jnp

from jaxattn.models.checkpoint import TensorNames
from jaxattn.models.config import DecoderConfig
from jaxattn.models.decoder import DecoderWeights, LayerWeights, layer_shapes
from jaxattn.models.streaming import Source, WeightSpec


def weight_specs(config: DecoderConfig, names: TensorNames) -> DecoderWeights:
    """The tensors of a decoder, under the names of its family."""

    def spec(name: str, stored: str, shape: tuple[int, ...]) -> WeightSpec:
        transform = names.transforms.get(name)
        return WeightSpec(
            shape,
            (Source(stored, shape),),
            dtype=jnp.float32 if name.endswith("norm") else None,
            linear=len(shape) == 2 and name != "embedding",
            transform=None if transform is None else functools.partial(transform, config=config),
        )

    shapes, vocabulary = layer_shapes(config), (config.vocab_size, config.hidden_size)
    return DecoderWeights(
        embedding=spec("embedding", names.model["embedding"], vocabulary),
        layers=tuple(
            LayerWeights(
                **{name: spec(name, names.layer[name].format(i), shape) for name, shape in shapes.items()}
            )
            for i in range(config.num_layers)
        ),
        final_norm=spec("final_norm", names.model["final_norm"], (config.hidden_size,)),
        head=None if config.tied_head else spec("head", names.model["head"], vocabulary),
    )
