"""Other attention kernels, measured beside ours when their packages are installed.

A peer exports `unavailable(shape) -> str | None` (why it cannot run here or for that shape) and
`candidates(inputs) -> iterator of Candidate`, one for each setting worth trying. A peer under torch exports
`measure(names) -> rows by name` in place of the latter; what such peers share is in `torch_process`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple


class Candidate(NamedTuple):
    """One way to compute a case: `function(*arguments)` makes `calls` calls, `output(result)` is the first's."""

    settings: str
    function: Callable
    arguments: tuple
    calls: int
    output: Callable[[Any], Any]


def refusal(settings: str, raised: Exception) -> str:
    """A setting that is out, and the error that it raised, on one line."""
    reason = (str(raised).splitlines() or [""])[0][:160]
    return f"{settings}: {type(raised).__name__}: {reason}"
