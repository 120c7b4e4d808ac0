"""Follow page and slot ids through a kernel's IR: none may reach arithmetic or an offset of 32 bits."""

import re
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass

from bench.audit.mlir import VALUE, Module, Operation
from bench.audit.mlir_text import UnreadableIR

# Lengths, depths, tile numbers and bit masks count within one sequence; a pool's stride never multiplies them.
# The words of an MXFP4 weight are values.
COUNTS = frozenset(
    {
        *("seqused_k", "lengths", "added", "depths", "ancestors"),
        *("tile_start", "active", "block_index", "codes", "scale"),
    }
)

READS = ("tt.load", "tt.atomic_rmw", "tt.atomic_cas", "tt.descriptor_load", "tt.descriptor_gather")
BUFFER_READS = ("buffer_load", "buffer_atomic_rmw", "buffer_atomic_cas")
COPIES_TO_LOCAL = ("ttg.async_copy_global_to_local", "buffer_load_to_local")
UNCHANGED = ("arith.extsi", "arith.extui", "arith.trunci", "tt.splat", "ttg.convert_layout")
PRODUCTS = ("arith.muli", "arith.shli")
NARROW_ARITHMETIC = (*PRODUCTS, "arith.addi", "arith.trunci")
PROGRAM_ID = "program_id"


@dataclass(frozen=True)
class Finding:
    """An index of 32 bits: the array that it was loaded from, the line that uses it, and how."""

    array: str
    location: str
    uses: tuple[str, ...]

    @property
    def is_address(self) -> bool:
        """Whether it is an address, rather than arithmetic that may lead to one."""
        return any("offset" in use for use in self.uses)

    def __str__(self) -> str:
        what = "the program's number" if self.array == PROGRAM_ID else f"an id from {self.array}"
        return f"{self.location or 'unknown line'}: {what} reaches {', '.join(self.uses)}"


def base_name(argument: str) -> str:
    """A kernel argument's name without the `_ptr` that some kernels add."""
    return argument.removesuffix("_ptr")


def index_arrays(module: Module) -> set[str]:
    """Arguments that point to 32- or 64-bit integers, save `COUNTS`; and the program's number."""
    return {PROGRAM_ID} | {
        name
        for value, name in module.arguments.items()
        if re.fullmatch(r"!tt\.ptr<[su]?i(32|64)>", module.types[value]) and base_name(name) not in COUNTS
    }


def short_name(operation: Operation) -> str:
    """An operation's name without the AMD dialect's, which has changed between releases."""
    return re.sub(r"^amdg(pu)?\.", "", operation.name)


class Provenance:
    """For each value, the kernel arguments whose loaded contents it depends on."""

    def __init__(self, module: Module):
        self.module = module
        self.reads: dict[str, str] = {}
        self.writes: dict[str, set[str]] = {}
        self._note_memory()

    def roots(self, pointer: str) -> set[str]:
        """Arguments that a pointer, or a tensor of pointers, is computed from."""
        arguments = self.module.arguments
        return {arguments[value] for value in self._walk(pointer, self._is_pointer) if value in arguments}

    def loaded_from(self, value: str) -> set[str]:
        """Arguments whose contents `value` depends on as a number, not only through a comparison."""
        reads = self._walk(value, self._is_number) & self.reads.keys()
        return set().union(*(self.roots(self.reads[read]) for read in reads))

    def never_widened(self, value: str) -> bool:
        """Whether `value` depends on the program's number through 32-bit values alone."""
        producers = self.module.producers
        walked = self._walk(value, lambda v: 1 < (self.module.width(v) or 0) <= 32)
        return any(producers[v].name == "tt.get_program_id" for v in walked if v in producers)

    def reads_of_memory(self) -> Iterator[tuple[Operation, str]]:
        """Every operation that reads global memory, with its pointer."""
        for operation in self.module.operations:
            if short_name(operation) in (*READS, *BUFFER_READS, *COPIES_TO_LOCAL):
                yield operation, next(v for v in operation.operands if self._is_pointer(v))

    def _note_memory(self) -> None:
        for operation, pointer in self.reads_of_memory():
            if short_name(operation) in COPIES_TO_LOCAL:
                # the copy's contents are a value of their own: its result is only a token
                contents = f"contents of {operation.results[0]}"
                self.reads[contents] = pointer
                self._write(self._memory(operation), contents)
            else:
                self.reads.update(dict.fromkeys(operation.results, pointer))
        for operation in self.module.operations:
            if operation.name == "ttg.local_store":
                self._write(self._memory(operation), operation.operands[0])

    def _is_pointer(self, value: str) -> bool:
        return "!tt.ptr" in self.module.types[value] or "!tt.tensordesc" in self.module.types[value]

    def _is_number(self, value: str) -> bool:
        """Whether a value, or what local memory it names holds, can be an id: no truth value, pointer or token."""
        type_text = self.module.types[value]
        return (
            type_text != ""
            and "token" not in type_text
            and not self._is_pointer(value)
            and self.module.width(value) != 1
        )

    def _memory(self, operation: Operation) -> str:
        return next(v for v in operation.operands if self._is_memory(v))

    def _is_memory(self, value: str) -> bool:
        return "memdesc" in self.module.types[value]

    def _write(self, destination: str, value: str) -> None:
        """A write reaches every view of the memory that `destination` is a view of."""
        for view in self._walk(destination, self._is_memory):
            self.writes.setdefault(view, set()).add(value)

    def _sources(self, value: str) -> set[str]:
        operation = self.module.producers.get(value)
        if value in self.reads or (operation and self._is_small(operation)):
            return set()
        return self.module.sources.get(value, set()) | self.writes.get(value, set())

    def _walk(self, start: str, follow: Callable[[str], bool]) -> set[str]:
        """`start` and all values that it is computed from, as far as `follow` holds."""
        seen, pending = set(), [start]
        while pending:
            value = pending.pop()
            if value in seen or not (value in self.reads or follow(value)):
                continue
            seen.add(value)
            pending.extend(self._sources(value))
        return seen

    def _is_small(self, operation: Operation) -> bool:
        """A remainder by a constant, and the difference of two entries of one array, are no longer ids."""
        if operation.name in ("arith.remsi", "arith.remui"):
            divisor = self.module.producers.get(operation.operands[1])
            return divisor is not None and divisor.name == "arith.constant"
        if operation.name == "arith.subi":
            minuend, subtrahend = (self._entry_of(v) for v in operation.operands)
            return minuend is not None and minuend == subtrahend
        return False

    def _entry_of(self, value: str) -> frozenset[str] | None:
        """The arrays that `value` is an entry of, where nothing but its width or layout has changed."""
        while (operation := self.module.producers.get(value)) and operation.name in UNCHANGED:
            (value,) = operation.operands
        return frozenset(self.roots(self.reads[value])) if value in self.reads else None


def narrow_uses(module: Module) -> Iterator[tuple[Operation, str, str]]:
    """Every value that 32-bit arithmetic or a 32-bit offset uses: operation, value, description."""
    for operation in module.operations:
        name = short_name(operation)
        if name.startswith("buffer_"):
            yield operation, buffer_offset(operation), f"the 32-bit offset of {name}"
        elif name == "tt.addptr" and (module.width(operation.operands[1]) or 64) <= 32:
            yield operation, operation.operands[1], "a 32-bit pointer offset"
        elif name in NARROW_ARITHMETIC and 1 < (module.width(operation.results[0]) or 0) <= 32:
            for value in operation.operands:
                yield operation, value, f"32-bit {name}"


def buffer_offset(operation: Operation) -> str:
    """The offset of a buffer operation: the value that is printed in square brackets after the base."""
    printed = re.search(rf"{VALUE.pattern}\[({VALUE.pattern})\]", operation.code)
    if printed is None:
        raise UnreadableIR(f"no [offset] in {operation.code}")
    return operation.operands[len(VALUE.findall(operation.code[: printed.start(1)]))]


def find_narrow(module: Module, arrays: Set[str]) -> list[Finding]:
    """Uses of 32 bits that a value loaded from one of `arrays` reaches, grouped by array and line.

    `program_id` among them stands for the program's number. That itself fits 32 bits, so only its products are
    found, and only where it was never widened: what is computed from it in 64 bits may well be small again.
    """
    provenance = Provenance(module)
    uses: dict[tuple[str, str], dict[str, None]] = {}
    for operation, value, use in narrow_uses(module):
        found = provenance.loaded_from(value)
        if operation.name in PRODUCTS and provenance.never_widened(value):
            found.add(PROGRAM_ID)
        for array in sorted(found & arrays):
            uses.setdefault((array, operation.location), {})[use] = None
    return [Finding(array, location, tuple(found)) for (array, location), found in uses.items()]
