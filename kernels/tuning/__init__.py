"""Tile choices as data: one JSON file for each architecture, chosen by the device, with safe defaults for others.

A file holds:

* `native_formats`: 8-bit formats that the compiler converts by itself there;
* `turns`: the instructions before and after the product of q and K by which the second four warps of a program
  begin theirs when the first four have theirs, or nothing. One half's softmax then runs beside the other's products,
  where both would otherwise do the same thing at the same time;
* `unpack`: for a stored format, the instructions that convert four values of K and four of V to float16; `$2` is
  a register with two elements of two bytes, `$0` and `$1` take two float16 each. For K, `$0` is the first element;
  for V, it is the low byte of both;
* `scalar_pages`: up to so many page ids of a tile of keys are numbers of their own, in every thread. Where threads
  are many for each mask register, as on AMD GPUs, the choice between them costs more than it saves;
* `split_rows`: sequences with up to that many query rows (query token x head of the group) are decoded by
  the `split` entries, longer ones by the `prefill` entries;
* `chunk`: keys between the fixed cut points of `batch_invariant=True`, whose tiles are the `invariant` entries;
* `reduce`: `ReduceChoice` fields for the merge of partial results; the entry of the smallest `pieces` that holds
  the average number of pieces of a unit is taken, and always the last one where the cut points are fixed. A unit
  with more than `partials` pieces, one long sequence among short ones, is merged `many` at a time;
* `split`, `prefill`, `invariant`: lists of `TileChoice` fields. The entry of the smallest `head_dim`, then of
  the smallest `rows`, that hold the problem is taken, among those of the KV dtype's width; one with `turns` comes
  first where they can be taken, a row of the page table holds more than `min_keys` keys, and a tile needs at most
  `max_pages` page ids (0 for any number).
"""

import contextlib
import contextvars
import dataclasses
import functools
import importlib.resources
import json
from collections.abc import Iterator
from typing import Any

import jax

from jaxattn.kernels._constants import pages_in_tile

KINDS = ("split", "prefill", "invariant")
_GPU_PLATFORMS = ("gpu", "cuda", "rocm")
_UNKNOWN_CORES = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """What the choice of tiles depends on: `sm90`, `gfx942`, ..., or `interpreter`; and how many cores it has."""

    architecture: str
    cores: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileChoice:
    """One entry of a table: the problems that it serves, and the tiles, warps and stages for them."""

    head_dim: int
    rows: int
    kv_bytes: int
    block_rows: int
    tile: int
    warps: int
    stages: int
    programs_per_core: int
    # Walk the tiles that need no mask in a loop of their own, or without masks in the one loop of all tiles.
    bare: bool = False
    one_loop: bool = False
    # Load many page ids of a tile without masks in a loop of tiles that need none.
    bare_ids: bool = False
    # Two halves of a program take turns; pays for sequences of some length, and for few page ids a tile; 0 is any.
    turns: bool = False
    min_keys: int = 0
    max_pages: int = 0

    def __post_init__(self):
        if self.turns and self.warps != 8:
            raise ValueError(f"warps: expected 8, two halves of four that take turns, got {self.warps}")
        if self.one_loop and not self.bare:
            raise ValueError("one_loop: expected bare as well, for there is one loop without it")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReduceChoice:
    """How partial results are merged: a tile of `partials` x `rows` at a time, for units of so many `pieces`."""

    pieces: int
    partials: int
    rows: int
    warps: int
    # Partials at a time of a unit that has more than `partials`; 0 for those of any unit.
    many: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """The content of one file."""

    native_formats: tuple[str, ...]
    turns: tuple[str, str]
    unpack: dict[str, tuple[str, str]] = dataclasses.field(hash=False)
    scalar_pages: int
    split_rows: int
    chunk: int
    reduce: tuple[ReduceChoice, ...]
    split: tuple[TileChoice, ...]
    prefill: tuple[TileChoice, ...]
    invariant: tuple[TileChoice, ...]

    def choose(
        self, kind: str, head_dim: int, rows: int, kv_bytes: int, turns_within: int = 0, page_size: int = 1
    ) -> TileChoice:
        """Return the entry of the `kind` table that fits best.

        `turns_within` is the number of keys that a row of the page table holds, where turns can be taken, else 0;
        `page_size` that of the cache, which decides about turns too.
        """

        def fits(choice: TileChoice) -> bool:
            pages = pages_in_tile(choice.tile, page_size)
            return turns_within > choice.min_keys and not 0 < choice.max_pages < pages

        table = getattr(self, kind)
        width = min((c.kv_bytes for c in table), key=lambda b: (abs(b - kv_bytes), b))
        table = [c for c in table if c.kv_bytes == width]
        dim = _smallest_that_holds((c.head_dim for c in table), head_dim)
        table = [c for c in table if c.head_dim == dim]
        held = _smallest_that_holds((c.rows for c in table), rows)
        fitting = [c for c in table if c.rows == held and (not c.turns or fits(c))]
        return max(fitting, key=lambda c: c.turns)

    def choose_reduce(self, pieces: int | None) -> ReduceChoice:
        """Return the entry for units of so many pieces on average; None for any number, merged in one way."""
        if pieces is None:
            return self.reduce[-1]
        held = _smallest_that_holds((c.pieces for c in self.reduce), pieces)
        return next(c for c in self.reduce if c.pieces == held)


def _smallest_that_holds(sizes, needed: int) -> int:
    sizes = sorted(set(sizes))
    return next((size for size in sizes if size >= needed), sizes[-1])


def parse(content: dict[str, Any]) -> Tuning:
    """Read the content of a file."""
    tables = {kind: tuple(TileChoice(**entry) for entry in content[kind]) for kind in KINDS}
    return Tuning(
        native_formats=tuple(content["native_formats"]),
        turns=tuple(content["turns"]),
        unpack={name: (of_k, of_v) for name, (of_k, of_v) in content["unpack"].items()},
        scalar_pages=content["scalar_pages"],
        split_rows=content["split_rows"],
        chunk=content["chunk"],
        reduce=tuple(ReduceChoice(**entry) for entry in content["reduce"]),
        **tables,
    )


def dump(table: Tuning) -> str:
    """Write the content of a file, an entry a line; `parse` reads it back."""
    lines = []
    for name, value in dataclasses.asdict(table).items():
        if name in (*KINDS, "reduce"):
            entries = ",\n".join("    " + json.dumps(entry) for entry in value)
            lines.append(f'  "{name}": [\n{entries}\n  ]')
        else:
            lines.append(f'  "{name}": {json.dumps(value)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


@functools.cache
def load(architecture: str) -> Tuning:
    """Return the choices for an architecture; unknown ones get `default.json`."""
    folder = importlib.resources.files(__name__)
    file = folder / f"{architecture}.json"
    if not file.is_file():
        file = folder / "default.json"
    return parse(json.loads(file.read_text()))


_override: contextvars.ContextVar[tuple[Device, Tuning | None] | None] = contextvars.ContextVar(
    "jaxattn_tuning", default=None
)


@contextlib.contextmanager
def using(device: Device | None = None, tuning: Tuning | None = None) -> Iterator[None]:
    """Trace for another device, or with other choices: for tuning, tests and compilation without a device.

    Functions that were traced already keep their choices.
    """
    token = _override.set((device or current_device(), tuning))
    try:
        yield
    finally:
        _override.reset(token)


def device() -> Device:
    """Return the device that a computation traced now is for."""
    override = _override.get()
    return override[0] if override else current_device()


def tuning() -> Tuning:
    """Return the choices for that device."""
    override = _override.get()
    if override and override[1] is not None:
        return override[1]
    return load(device().architecture)


def current_device() -> Device:
    """Describe the device that JAX computes for; a host without a GPU runs kernels in the interpreter.

    That is the abstract device of a mesh in use, such as one to export for, else JAX's default device.
    """
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None and abstract.platform in _GPU_PLATFORMS:
        return _abstract_device(abstract)
    default = jax.config.jax_default_device
    found = default if isinstance(default, jax.Device) else jax.devices()[0]
    if found.platform not in _GPU_PLATFORMS:
        return Device(architecture="interpreter", cores=4)
    from jaxattn.kernels.triton.compat import device_architecture

    return Device(
        architecture=device_architecture(found), cores=int(getattr(found, "core_count", _UNKNOWN_CORES))
    )


def _abstract_device(abstract: jax.sharding.AbstractDevice) -> Device:
    """Describe a device that is known by its name alone; one that is not recognised gets safe defaults."""
    kind = abstract.device_kind
    hopper = any(name in kind for name in ("H100", "H200"))
    return Device(
        architecture="sm90" if hopper else kind.split(":")[0], cores=abstract.num_cores or _UNKNOWN_CORES
    )
