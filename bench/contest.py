"""One case with everybody who enters: each is checked, its best setting is found, then all are timed in turn."""

import dataclasses
from collections.abc import Callable, Iterable

import jax

from bench import shapes, step
from bench.inputs import TOLERANCE, make_inputs, sampled_error
from bench.peers import Candidate, cudnn, dense, fa3, fa3_dense, jax_paged, ours, refusal
from bench.timing import Timing, device_time

PEERS = {"fa3": fa3, "fa3-dense": fa3_dense, "cudnn": cudnn, "jax-paged": jax_paged, "dense": dense}


@dataclasses.dataclass(frozen=True)
class Contest:
    """Candidates of each entrant, or the reason why it does not enter; and what a right answer is."""

    entrants: dict[str, str | Iterable[Candidate]]
    error: Callable[..., float]
    tolerance: float


@dataclasses.dataclass(frozen=True)
class Entry:
    """The best setting of one entrant, compiled, and its times; or why there is none."""

    settings: str = ""
    function: Callable | None = None
    error: float = 0.0
    timing: Timing | None = None
    refused: str | None = None


def make_contest(name: str, implementations: Iterable[str], peers: Iterable[str]) -> Contest:
    """Draw the inputs of a case and list who enters."""
    if step.is_step(name):
        drawn = step.make_step(name)
        entrants = {
            i: step.unavailable(i) or step.candidates(drawn, i)
            for i in implementations
            if i in step.IMPLEMENTATIONS
        }
        return Contest(entrants, drawn.error, 0.0)
    return contest_of(shapes.parse(name), implementations, peers)


def contest_of(shape: shapes.Shape, implementations: Iterable[str], peers: Iterable[str]) -> Contest:
    """Draw the inputs of an attention call and list who enters."""
    inputs = make_inputs(shape)
    entrants = {i: ours.candidates(inputs, i) for i in implementations}
    for peer in peers:
        entrants[peer] = PEERS[peer].unavailable(shape) or PEERS[peer].candidates(inputs)
    return Contest(entrants, lambda out: sampled_error(inputs, out), TOLERANCE[shape.kv_dtype])


def first_round(contest: Contest, iterations: int) -> dict[str, Entry]:
    """The best right answer of each entrant."""
    return {
        who: Entry(refused=entrant) if isinstance(entrant, str) else _best(contest, entrant, iterations)
        for who, entrant in contest.entrants.items()
    }


def _best(contest: Contest, candidates: Iterable[Candidate], iterations: int) -> Entry:
    best, refusals = None, []
    for candidate in candidates:
        function = jax.jit(candidate.function)
        try:
            error = contest.error(candidate.output(function(*candidate.arguments)))
        except Exception as raised:  # peers and compilers raise what they like; each is a finding
            refusals.append(refusal(candidate.settings, raised))
            continue
        if not error <= contest.tolerance:
            refusals.append(f"{candidate.settings}: wrong answer, error {error:.1e}")
            continue
        measured = device_time(function, candidate.arguments, calls=candidate.calls, iterations=iterations)
        if best is None or measured.median < best.timing.median:
            best = Entry(candidate.settings, function, error, measured)
    return best or Entry(refused="; ".join(refusals).removeprefix(": ") or "no setting fits the case")


def next_round(contest: Contest, entries: dict[str, Entry], iterations: int) -> dict[str, Entry]:
    """Time every entry once more, on inputs drawn anew with the same seed."""
    return {
        who: entry if entry.timing is None else _again(contest.entrants[who], entry, iterations)
        for who, entry in entries.items()
    }


def _again(candidates: Iterable[Candidate], entry: Entry, iterations: int) -> Entry:
    candidate = next(c for c in candidates if c.settings == entry.settings)
    measured = device_time(entry.function, candidate.arguments, calls=candidate.calls, iterations=iterations)
    return dataclasses.replace(entry, timing=entry.timing + measured)
