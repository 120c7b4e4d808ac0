"""load_report: what a checkpoint holds, tensor by tensor, from its headers alone."""

import dataclasses
import os
from pathlib import Path

from jaxattn.models.config_file import read_config
from jaxattn.models.safetensors import SafetensorsFolder
from jaxattn.quantization.config import QuantizationConfig
from jaxattn.quantization.forms import Leaf, leaves
from jaxattn.quantization.registry import resolve_config


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """The form of every tensor of a checkpoint and why.

    Attributes:
        path: the checkpoint.
        config: the parsed quantisation config.
        leaves: one entry per tensor, weight scales counted with their weight, sorted by name.
    """

    path: Path
    config: QuantizationConfig
    leaves: tuple[Leaf, ...]

    @property
    def disagreements(self) -> tuple[Leaf, ...]:
        """The tensors whose form is not the one that the config declares; they load as the file has them."""
        return tuple(leaf for leaf in self.leaves if not leaf.agrees)

    def counts(self) -> dict[str, int]:
        """Number of tensors by form."""
        counts: dict[str, int] = {}
        for leaf in self.leaves:
            counts[leaf.form] = counts.get(leaf.form, 0) + 1
        return counts

    def table(self) -> str:
        """The report as text: tensor, shape, form and why, disagreements marked, then a summary."""
        rows = [("tensor", "shape", "form", "why")]
        for leaf in self.leaves:
            mark = "" if leaf.agrees else "! "
            rows.append((leaf.name, "x".join(map(str, leaf.shape)) or "scalar", leaf.form, mark + leaf.why))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [
            "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]])
            for row in rows
        ]
        counts = ", ".join(f"{count} {form}" for form, count in sorted(self.counts().items()))
        lines += ["", f"method {self.config.method}: {counts}"]
        if self.disagreements:
            lines.append(f"{len(self.disagreements)} marked ! differ from the config; the file decides")
        if self.config.kv_cache_dtype:
            lines.append(f"KV cache: {self.config.kv_cache_dtype}")
        return "\n".join(lines)


def load_report(path: str | os.PathLike, quantization: str | None = None) -> LoadReport:
    """Decide the form of every tensor of a checkpoint without reading weights.

    Args:
        path: a folder with config.json and safetensors shards.
        quantization: a method name, as `--quantization`; None for whatever config.json declares.

    Raises:
        CheckpointError: a shard is missing or truncated, a tensor fits no form, or scales do not fit their weight.
        ValueError: an unknown method, or one that config.json contradicts.

    Example:
        >>> import json, pathlib, tempfile
        >>> import jax.numpy as jnp, numpy as np
        >>> from safetensors.numpy import save_file
        >>> from jaxattn.quantization import load_report
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
        >>> save_file({"lm_head.weight": np.zeros((4, 2), np.float32)}, folder / "model.safetensors")
        >>> load_report(folder).leaves[0].form
        'plain'
    """
    tensors = SafetensorsFolder(Path(path)).tensors
    config = resolve_config(read_config(path), quantization)
    found = sorted(leaves(tensors, config), key=lambda leaf: leaf.name)
    return LoadReport(Path(path), config, tuple(found))
