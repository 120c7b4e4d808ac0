"""Pieces of MLIR's printed form: types, source locations, splitting outside of brackets."""

import re


class UnreadableIR(ValueError):
    """The text holds something that the reader does not know."""


def split_outermost(text: str, separator: str) -> list[str]:
    """Split where `separator` stands outside of all brackets.

    Example:
        >>> split_outermost("tensor<4xi32, #a>, i64", ",")
        ['tensor<4xi32, #a>', 'i64']
    """
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        if depth == 0 and text.startswith(separator, i):
            parts.append(text[start:i].strip())
            start = i + len(separator)
        if character in "<({[":
            depth += 1
        elif character in ")}]" or (character == ">" and text[i - 1] != "-"):
            depth -= 1
    return [*parts, text[start:].strip()]


def closing_bracket(text: str, start: int) -> int:
    """Index of the round bracket that closes the one just before `start`."""
    depth = 1
    for i in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i
    raise UnreadableIR(f"no closing bracket in {text!r}")


def element_type(text: str) -> str:
    """Element type of a printed tensor or memory descriptor; any other type is its own element.

    Example:
        >>> element_type("tensor<64x!tt.ptr<bf16>, #blocked>")
        '!tt.ptr<bf16>'
    """
    match = re.match(r"(?:tensor|!ttg\.memdesc)<(?:\d+x)*(.*?)(?:, [#%@].*)?>$", text)
    return match[1] if match else text


def integer_width(element: str) -> int | None:
    """Bits of a printed integer type, None for anything else."""
    if element == "index":
        return 64
    match = re.fullmatch(r"[su]?i(\d+)", element)
    return int(match[1]) if match else None


def type_list(text: str) -> list[str]:
    """Types of a printed list, with or without its round brackets."""
    text = text.strip()
    return split_outermost(text[1:-1] if text.startswith("(") else text, ",") if text else []


def result_types(name: str, code: str, count: int) -> list[str]:
    """Types of an operation's `count` results, from its printed form without locations and strings."""
    signature = split_outermost(code, " : ")[-1]
    if name == "arith.constant" and " : " not in code:
        return ["i1"]
    if " : " not in code:
        return [""] * count
    if name in ("arith.cmpi", "arith.cmpf"):
        return [signature.replace(element_type(signature), "i1", 1)]
    for arrow in ("->", " to "):
        if len(parts := split_outermost(signature, arrow)) > 1:
            types = type_list(parts[-1])
            return types * count if len(types) == 1 else types
    types = type_list(signature)
    if name == "tt.load":
        pointer = element_type(types[0])
        return [types[0].replace(pointer, pointer.removeprefix("!tt.ptr<").removesuffix(">"), 1)]
    if len(types) == count:
        return types
    # addptr and select name two types: the result has the first's, and the last's
    return [types[-1] if name == "arith.select" else types[0]] * count


def cut_locations(line: str) -> tuple[str, str]:
    """A line without its `loc(...)`, and what the last of them held."""
    kept, last, position = [], "", 0
    for match in re.finditer(r" ?\bloc\(", line):
        if match.start() >= position:
            end = closing_bracket(line, match.end())
            kept.append(line[position : match.start()])
            last, position = line[match.end() : end], end + 1
    return "".join([*kept, line[position:]]).rstrip(), last


def resolve_location(text: str, aliases: dict[str, str]) -> str:
    """`file.py:12` of what a `loc(...)` holds; a frame inside Triton's library gives way to its caller."""
    if text.startswith("#loc"):
        return resolve_location(cut_locations(" " + aliases.get(text, ""))[1], aliases)
    if match := re.match(r"callsite\((.*) at (.*)\)$", text):
        callee, caller = (resolve_location(part, aliases) for part in match.groups())
        return caller if not callee or "/triton/language/" in callee else callee
    if match := re.match(r'"([^"]*)":(\d+):\d+', text):
        return f"{match[1]}:{match[2]}"
    if match := re.match(r'"[^"]*"\((.*)\)$', text):
        return resolve_location(match[1], aliases)
    return ""
