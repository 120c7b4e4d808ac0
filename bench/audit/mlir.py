"""Triton's IR, read from its printed form into operations and a graph of values.

Triton's Python bindings expose neither the successors of a branch nor the line of an operation, so the
text is read instead. An operation whose regions are unknown is refused, never skipped.
"""

import re
from collections import defaultdict
from dataclasses import dataclass, field

from bench.audit.mlir_text import (
    UnreadableIR,
    closing_bracket,
    cut_locations,
    element_type,
    integer_width,
    resolve_location,
    result_types,
    split_outermost,
    type_list,
)

NAME = r"%[\w$.\-]+"
VALUE = re.compile(rf"{NAME}(?:#\d+)?")
ASSIGNMENT = re.compile(rf"((?:{NAME}(?::\d+)?(?:, )?)+) = (.*)")
REDUCTIONS = ("tt.reduce", "tt.scan")


@dataclass(frozen=True)
class Operation:
    """One operation: its values by unique name, and the line of the source that it came from."""

    name: str
    code: str
    results: tuple[str, ...]
    operands: tuple[str, ...]
    location: str


@dataclass
class Module:
    """The operations of one kernel.

    `sources[v]` are the values that `v` is computed from, also around loops and out of branches;
    `arguments` maps a value to the name of its kernel argument; `aliases` are the printed `#name = ...`.
    """

    operations: list[Operation] = field(default_factory=list)
    sources: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    types: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    producers: dict[str, Operation] = field(default_factory=dict)

    def element(self, value: str) -> str:
        """Printed element type of a value."""
        return element_type(self.types[value])

    def width(self, value: str) -> int | None:
        """Bits of a value's integer elements, None where they are not integers."""
        return integer_width(self.element(value))


@dataclass
class Region:
    """An open region: yield number i reaches `targets[i]`, and block argument i is fed by `feeds[i]`."""

    operation: Operation
    targets: list[tuple[str, ...]]
    feeds: list[str] = field(default_factory=list)


def read_module(text: str) -> Module:
    """Read the printed IR of one kernel.

    Raises:
        UnreadableIR: the text holds an operation with regions, or a form of one, that is unknown.
    """
    reader = _Reader()
    lines = text.splitlines()
    reader.module.aliases.update(line.split(" = ", 1) for line in lines if re.match(r"#\w+ = ", line))
    for line in lines:
        reader.line(line.strip())
    reader.connect_branches()
    return reader.module


class _Reader:
    """State of one pass over the text: scopes of names, open regions, branches between blocks."""

    def __init__(self):
        self.module = Module()
        self.scopes: list[dict[str, str]] = [{}]
        self.regions: list[Region] = []
        self.blocks: dict[str, list[str]] = {}
        self.branches: list[tuple[str, list[str]]] = []

    def line(self, printed: str) -> None:
        line, location = cut_locations(printed)
        location = resolve_location(location, self.module.aliases)
        if not line or line.startswith(("#", "module", "//")):
            return
        if line.startswith("tt.func"):
            self.function(printed)
        elif line.startswith("^"):
            self.block_header(line)
        elif line.startswith("}"):
            self.close(line)
        else:
            self.operation(line, location)

    def define(self, name: str, type_text: str) -> str:
        """Names are unique only within a region, so a value gets a number of its own."""
        unique = f"{name}@{len(self.module.types)}"
        self.scopes[-1][name] = unique
        self.module.types[unique] = type_text
        return unique

    def look_up(self, code: str) -> list[str]:
        """The values that are named in `code`."""
        found = []
        for name in VALUE.findall(code):
            scope = next((scope for scope in reversed(self.scopes) if name in scope), None)
            if scope is None:
                raise UnreadableIR(f"{name} is used before a definition that the audit understands: {code}")
            found.append(scope[name])
        return found

    def flow(self, values: list[str], targets: list[tuple[str, ...]]) -> None:
        for value, reached in zip(values, targets, strict=True):
            for target in reached:
                self.module.sources[target].add(value)

    def function(self, printed: str) -> None:
        if self.module.arguments:
            raise UnreadableIR("more than one function: the audit needs every call inlined")
        start = printed.index("(") + 1
        for argument in split_outermost(printed[start : closing_bracket(printed, start)], ","):
            text, where = cut_locations(argument)
            name, _, type_text = text.partition(":")
            label = re.match(r'loc\("([^"]+)"[()]', self.module.aliases.get(where, f"loc({where})"))
            value = self.define(name.strip(), type_text.split("{")[0].strip())
            self.module.arguments[value] = label[1] if label else name.strip().removeprefix("%")

    def block_header(self, line: str) -> None:
        label, listed = re.match(r"\^(\w+)(?:\((.*)\))?:", line).groups()
        parts = [part.partition(":") for part in split_outermost(listed or "", ",") if part]
        arguments = [self.define(name.strip(), type_text.strip()) for name, _, type_text in parts]
        if self.regions:
            feeds = self.regions[-1].feeds
            self.flow([feeds[i % len(feeds)] for i in range(len(arguments))], [(a,) for a in arguments])
        else:
            self.blocks[label] = arguments

    def close(self, line: str) -> None:
        if not self.regions:
            return
        region = self.regions.pop()
        self.scopes.pop()
        if line.startswith(("} else {", "} do {")):
            self.open(region)
        elif line.startswith("})"):
            types = result_types(region.operation.name, line[2:], len(region.operation.results))
            self.module.types.update(zip(region.operation.results, types, strict=True))

    def open(self, region: Region) -> None:
        self.regions.append(region)
        self.scopes.append({})

    def operation(self, line: str, location: str) -> None:
        match = ASSIGNMENT.match(line)
        listed, code = match.groups() if match else ("", line)
        name = re.match(r'"?([\w.]+)', code)[1]
        code = re.sub(r'"(?:[^"\\]|\\.)*"', "", code)
        names = []
        for part in filter(None, listed.split(", ")):
            base, _, count = part.partition(":")
            names += [f"{base}#{i}" for i in range(int(count))] if count else [base]
        if code.endswith("{"):
            self.structured(name, names, code.rstrip("({ "), location)
            return
        types = result_types(name, code, len(names)) if names else []
        operation = self.record(name, names, types, code, self.look_up(code), location)
        for result in operation.results:
            self.module.sources[result].update(operation.operands)
        if name == "scf.condition":
            region = self.regions[-1]
            region.feeds = list(operation.operands[1:])
            self.flow(region.feeds, [(result,) for result in region.operation.results])
        elif self.regions and name in ("scf.yield", *(f"{reduction}.return" for reduction in REDUCTIONS)):
            self.flow(list(operation.operands), self.regions[-1].targets)
        for label, passed in re.findall(r"\^(\w+)(?:\(([^)]*)\))?", code):
            self.branches.append((label, self.look_up(passed)))

    def record(
        self, name: str, names: list[str], types: list[str], code: str, operands: list[str], location: str
    ) -> Operation:
        if len(names) != len(types):
            raise UnreadableIR(f"{len(types)} types for {len(names)} results: {code}")
        results = tuple(self.define(*pair) for pair in zip(names, types, strict=True))
        operation = Operation(name, code, results, tuple(operands), location)
        self.module.operations.append(operation)
        self.module.producers.update(dict.fromkeys(results, operation))
        return operation

    def structured(self, name: str, names: list[str], code: str, location: str) -> None:
        """Begin an operation with regions: a loop, a conditional, a reduction."""
        if name in REDUCTIONS:
            # the types follow after the region
            operation = self.record(name, names, [""] * len(names), code, self.look_up(code), location)
            self.open(Region(operation, [(r,) for r in operation.results], list(operation.operands)))
        elif name in ("scf.for", "scf.if", "scf.while"):
            self.control_flow(name, names, code, location)
        else:
            raise UnreadableIR(f"the audit does not know the regions of {name}: {code}")

    def control_flow(self, name: str, names: list[str], code: str, location: str) -> None:
        bindings = re.findall(rf"({NAME}) = ({VALUE.pattern})", code)
        inputs = [self.look_up(value)[0] for _, value in bindings]
        bound = {target for target, _ in bindings}
        operands = [
            v for printed in VALUE.findall(code) if printed not in bound for v in self.look_up(printed)
        ]
        arrow = split_outermost(code, "->")
        types = type_list(split_outermost(arrow[1], " : ")[0]) if len(arrow) > 1 else []
        operation = self.record(name, names, types, code, operands, location)
        region = Region(operation, [(result,) for result in operation.results])
        self.open(region)
        if name == "scf.for":
            step = self.look_up(re.search(rf"step ({VALUE.pattern})", code)[1])[0]
            (counter, _), *bindings = bindings
            lower, *inputs = inputs
            counter = self.define(counter, self.module.types[lower])
            self.flow([lower, step], [(counter,), (counter,)])
        carried = [
            (self.define(target, self.module.types[value]),)
            for (target, _), value in zip(bindings, inputs, strict=True)
        ]
        self.flow(inputs, carried)
        if name == "scf.for":
            self.flow(inputs, region.targets)
            region.targets = [c + t for c, t in zip(carried, region.targets, strict=True)]
        elif name == "scf.while":
            region.targets = carried

    def connect_branches(self) -> None:
        for label, values in self.branches:
            self.flow(values, [(argument,) for argument in self.blocks[label]])
