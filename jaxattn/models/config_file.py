"""The config.json of a Hugging Face folder."""

import json
import os
from pathlib import Path
from typing import Any

from jaxattn.errors import CheckpointError


def read_config(folder: str | os.PathLike) -> dict[str, Any]:
    """The content of the folder's config.json.

    Raises:
        CheckpointError: there is none, or it is not a JSON object.
    """
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{folder}: expected a config.json beside the weights, found none") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: expected an object, got {type(config).__name__}")
    return config
