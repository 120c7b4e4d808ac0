"""Draws page tables and draft trees into matplotlib `Axes`."""

from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from bench import acceptance

EMPTY = (0.93, 0.93, 0.93)


def color_of(sequence: int):
    """The colour of a sequence in all drawings."""
    return matplotlib.colormaps["tab10"](sequence % 10)


def _cell(ax: Axes, x: float, y: float, text: str, color) -> None:
    ax.add_patch(Rectangle((x, y), 1, 1, facecolor=color, edgecolor="white", linewidth=1.5, alpha=0.75))
    ax.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=8)


def pool(table: np.ndarray, lengths: Sequence[int], page_size: int, num_pages: int, ax: Axes) -> None:
    """The pages of the pool, each with the number of tokens of the sequence that holds it."""
    for page in range(num_pages):
        _cell(ax, page, 0, "", EMPTY)
    for s, length in enumerate(lengths):
        for column in range(-(-length // page_size)):
            used = min(page_size, length - column * page_size)
            _cell(ax, int(table[s, column]), 0, str(used), color_of(s))
    ax.set(
        xlim=(0, num_pages), ylim=(0, 1), yticks=[], xlabel="page of the pool (in a cell: tokens it holds)"
    )
    ax.set_xticks(np.arange(num_pages) + 0.5, range(num_pages))
    ax.tick_params(length=0)


def page_table(table: np.ndarray, lengths: Sequence[int], page_size: int, ax: Axes) -> None:
    """The table: a row for each sequence, live entries in its colour, zeros behind them in grey."""
    for (s, column), page in np.ndenumerate(table):
        _cell(ax, column, s, str(page), color_of(s) if column * page_size < lengths[s] else EMPTY)
    ax.set(xlim=(0, table.shape[1]), ylim=(table.shape[0], 0))
    ax.set_xticks(np.arange(table.shape[1]) + 0.5, range(table.shape[1]))
    labels = [f"{s}: {length} tokens" for s, length in enumerate(lengths)]
    ax.set_yticks(np.arange(table.shape[0]) + 0.5, labels)
    ax.set(xlabel="logical page (in a cell: physical page)", ylabel="sequence")
    ax.tick_params(length=0)


def tree(parents: Sequence[int], ax: Axes, accepted: Sequence[int] = ()) -> None:
    """A draft tree: depth downwards, siblings from left to right, accepted nodes filled."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    depth = [0] * len(parents)
    for node, parent in enumerate(parents):
        depth[node] = depth[parent] + 1 if parent >= 0 else 0
    x: dict[int, float] = {}

    def place(node: int, left: float) -> float:
        """Give the subtree its columns from `left` on; return the next free one."""
        below = children.get(node, [])
        if not below:
            x[node] = left
            return left + 1
        for child in below:
            left = place(child, left)
        x[node] = (x[below[0]] + x[below[-1]]) / 2
        return left

    free = 0.0
    for root in children[-1]:
        free = place(root, free)
    for node, parent in enumerate(parents):
        if parent >= 0:
            taken = node in accepted
            ax.plot(
                [x[parent], x[node]], [depth[parent], depth[node]], color="tab:green" if taken else "gray",
                linewidth=2.5 if taken else 1, zorder=1,
            )  # fmt: skip
        face = "tab:green" if node in accepted else "white"
        ax.scatter(x[node], depth[node], s=320, color=face, edgecolors="black", zorder=2)
        ax.text(x[node], depth[node], str(node), ha="center", va="center", fontsize=9, zorder=3)
    ax.set(ylabel="depth (0: the last verified token)", xticks=[], xlim=(-0.6, free - 0.4))
    ax.set_yticks(range(max(depth) + 1))
    ax.set_ylim(max(depth) + 0.4, -0.4)
    ax.spines[["top", "right", "bottom"]].set_visible(False)


def mask(bits: np.ndarray, ax: Axes) -> None:
    """Ancestor bits `[n, 1]` of one tree of up to 64 nodes: which draft nodes each query row sees."""
    n = len(bits)
    seen = (bits[:, :1] >> np.arange(n, dtype=np.uint64)) & np.uint64(1)
    ax.imshow(seen, cmap="Greens", vmin=0, vmax=1.4)
    ax.set(xlabel="key: draft node", ylabel="query row: draft node", xticks=range(n), yticks=range(n))
    ax.set_xticks(np.arange(n + 1) - 0.5, minor=True)
    ax.set_yticks(np.arange(n + 1) - 0.5, minor=True)
    ax.grid(which="minor", color="white", linewidth=1.5)
    ax.tick_params(which="minor", length=0)


def tokens_per_pass(
    trees: dict[str, Sequence[int]],
    accuracies: Sequence[float],
    later: Sequence[float],
    passes: int,
    ax: Axes,
) -> None:
    """Tokens per pass of each tree over the accuracy of the best guess: exact lines, simulated points.

    Args:
        trees: parents by name.
        accuracies: of the first guess.
        later: of each later guess, as a share of what the earlier ones miss.
        passes: how many are simulated for a point.
        ax: where to draw.
    """
    for marker, (name, parents) in zip("osD^v", trees.items(), strict=False):
        exact, simulated = [], []
        for first in accuracies:
            guesses = [first]
            for share in later:
                guesses.append((1 - sum(guesses)) * share)
            exact.append(acceptance.reach(parents, guesses).sum())
            simulated.append(acceptance.simulated_tokens(parents, guesses, passes).mean())
        (drawn,) = ax.plot(accuracies, exact)
        ax.plot(accuracies, simulated, marker, color=drawn.get_color(), label=name)
    ax.set(xlabel="accuracy of the draft's first guess", ylabel="tokens per verify pass")
    ax.grid(True, alpha=0.3)
    ax.legend(fontsize=8)


def pool_limits(tokens: dict[str, int], ax: Axes) -> None:
    """Tokens at which one layer's keys pass 2^31 elements, by model."""
    names = sorted(tokens, key=tokens.get)
    ax.barh(names, [tokens[name] / 2**20 for name in names], color="tab:blue", alpha=0.75)
    for row, name in enumerate(names):
        ax.annotate(f"{tokens[name] / 2**20:.3g}", (tokens[name] / 2**20, row), (4, 0), fontsize=8,
                    textcoords="offset points", va="center")  # fmt: skip
    ax.set(xlabel="tokens in the pool (millions, 2^20) at which one layer's keys pass 2^31 elements")
    ax.margins(x=0.1)
