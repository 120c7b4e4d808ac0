"""`jaxattn inspect`: the form of every tensor of a checkpoint, without loading weights."""

from pathlib import Path
from typing import TextIO

from jaxattn.errors import CheckpointError
from jaxattn.quantization import load_report


def inspect_checkpoint(path: str, quantization: str | None, out: TextIO) -> None:
    """Write the load report of the checkpoint folder at `path` to `out`.

    Raises:
        CheckpointError: there is no such folder, or its files are damaged; the message names the tensor.
        ValueError: an unknown method, or one that config.json contradicts.
    """
    if not Path(path).is_dir():
        raise CheckpointError(f"{path}: expected a folder with config.json and safetensors shards")
    print(load_report(path, quantization).table(), file=out)
