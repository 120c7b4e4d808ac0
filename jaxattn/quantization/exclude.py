"""Which modules a quantisation config leaves alone: exact names, globs, and regular expressions after `re:`."""

import dataclasses
import fnmatch
import re
from collections.abc import Collection, Iterator

from jaxattn.errors import CheckpointError

# A text decoder is named with or without the wrappers of a multimodal model around it.
WRAPPERS = ("model.language_model.", "language_model.model.", "language_model.", "model.")
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
EXPERT_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def spellings(name: str) -> tuple[str, ...]:
    """Every name that denotes the same module: bare, and behind each wrapper prefix.

    Example:
        >>> from jaxattn.quantization.exclude import spellings
        >>> spellings("model.layers.0.mlp")[:2]
        ('layers.0.mlp', 'model.language_model.layers.0.mlp')
    """
    bare = next((name.removeprefix(prefix) for prefix in WRAPPERS if name.startswith(prefix)), name)
    return (bare, *(prefix + bare for prefix in WRAPPERS))


def shards_of(
    name: str, present: Collection[str] | None = None, entries: Collection[str] = ()
) -> tuple[str, ...]:
    """The modules that a fused name stands for; empty when the name is not a fused one.

    Args:
        name: a module name. `qkv_proj`, `gate_up_proj` and the like may carry a prefix (`index_qkv_proj`).
        present: modules that the checkpoint holds. Shards outside it do not exist, unless that leaves none.
        entries: exclude entries, which tell the expert numbers where `present` does not.

    Example:
        >>> from jaxattn.quantization.exclude import shards_of
        >>> shards_of("layers.0.self_attn.qkv_proj")
        ('layers.0.self_attn.q_proj', 'layers.0.self_attn.k_proj', 'layers.0.self_attn.v_proj')
    """
    parent, _, last = name.rpartition(".")
    if last == "experts":
        known = _below(name, entries if present is None else present)
        return known or tuple(f"{name}.0.{projection}" for projection in EXPERT_PROJECTIONS)
    for fused, parts in FUSED.items():
        if last == fused or last.endswith("_" + fused):
            dotted = f"{parent}." if parent else ""
            shards = tuple(dotted + last.removesuffix(fused) + part for part in parts)
            existing = shards if present is None else tuple(s for s in shards if _among(s, present))
            return existing or shards
    return ()


def _below(name: str, candidates: Collection[str]) -> tuple[str, ...]:
    starts = tuple(f"{spelling}." for spelling in spellings(name))
    return tuple(sorted(c for c in candidates if c.startswith(starts) and not _is_pattern(c)))


def _among(name: str, candidates: Collection[str]) -> bool:
    return any(spelling in candidates for spelling in spellings(name))


@dataclasses.dataclass(frozen=True)
class ExcludeList:
    """Exclude entries of a config.

    An entry is a module name (that module and all below it), a glob (`*`, `?`, `[...]`; fnmatch, case
    sensitive, against the whole name) or `re:` and a regular expression that must match from the start of
    the name. Each is held against every spelling of the name, with and without wrapper prefixes.

    Raises:
        ValueError: an entry is not a string, or what follows `re:` is not a regular expression.

    Example:
        >>> from jaxattn.quantization.exclude import ExcludeList
        >>> exclude = ExcludeList(("lm_head", "*.mlp.gate", "re:mtp.*"))
        >>> exclude.match("model.language_model.layers.3.mlp.gate"), exclude.match("mtp.fc")
        ('*.mlp.gate', 're:mtp.*')
        >>> exclude.match("model.layers.3.mlp.gate_proj") is None
        True
    """

    entries: tuple[str, ...] = ()

    def __post_init__(self):
        for entry in self.entries:
            if not isinstance(entry, str):
                raise ValueError(f"exclude: expected names, globs or 're:' expressions, got {entry!r}")
            if entry.startswith("re:"):
                try:
                    re.compile(entry[3:])
                except re.error as error:
                    raise ValueError(f"exclude: {entry!r} is not a regular expression: {error}") from error

    def match(self, name: str) -> str | None:
        """The first entry that covers the module `name` itself, or None."""
        names = spellings(name)
        return next((entry for entry in self.entries if any(_covers(entry, n) for n in names)), None)

    def decide(self, name: str, present: Collection[str] | None = None) -> str | None:
        """The entry that excludes `name`, a fused name being resolved shard by shard; None when it is not excluded.

        Args:
            name: a module name, fused (`qkv_proj`, `gate_up_proj`, `experts`) or not.
            present: the modules that the checkpoint holds; a shard that it lacks has no say.

        Raises:
            CheckpointError: some shards of a fused name are excluded and some are not.
        """
        direct = self.match(name)
        if direct is not None and not _is_pattern(direct):
            return direct
        verdicts = {shard: self.match(shard) for shard in shards_of(name, present, self.entries)}
        excluded = [shard for shard, entry in verdicts.items() if entry is not None]
        if not excluded:
            return direct
        if len(excluded) < len(verdicts):
            kept = [shard for shard, entry in verdicts.items() if entry is None]
            raise CheckpointError(
                f"{name}: expected all of its shards in one form, but the config excludes {_some(excluded)} and "
                f"quantises {_some(kept)}; they cannot be fused"
            )
        return verdicts[excluded[0]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)


def _is_pattern(entry: str) -> bool:
    """Whether an entry may match a fused name by accident, as `*up_proj` does `gate_up_proj`."""
    return entry.startswith("re:") or bool(set(entry) & set("*?["))


def _covers(entry: str, name: str) -> bool:
    if entry.startswith("re:"):
        return re.match(entry[3:], name) is not None
    if _is_pattern(entry):
        return fnmatch.fnmatchcase(name, entry)
    return name == entry or name.startswith(f"{entry}.")


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
