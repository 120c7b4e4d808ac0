"""Checks by value: of metadata, of slots and of results, on the host or inside `jit`.

Compiled code masks what is out of range; these checks say what it was. Called with concrete arrays they raise
at once. Called while tracing they become `jax.experimental.checkify` checks, which cost nothing in a program
that is not functionalised; `checked` runs a function with them on.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import checkify
from jax.extend.core import jaxpr_as_fun
from jaxtyping import Array, Bool, Float, Int64, Integer, UInt64

from jaxattn.index64 import IndexArray, as_index, index64
from jaxattn.metadata import AttentionMetadata


class Rule(NamedTuple):
    """Where a requirement is broken, and a format string over `fields` that says how."""

    bad: Bool[Array, "..."]
    text: str
    fields: dict[str, Array]


@index64
def check_metadata(
    metadata: AttentionMetadata,
    cache_shape: Sequence[int],
    *,
    num_tokens: int | None = None,
    sliding_window: int | None = None,
) -> None:
    """Check every value of the metadata that attention over a cache of this shape relies on.

    That is: `cu_seqlens_q` starts at 0, rises, and stays within the token buffer; no sequence has more than
    `max_seqlen_q` rows, fewer keys than rows, or more keys than its table row covers; each page that a query
    sees exists; each row of `ancestors` holds its own node, an earlier parent and the parent's ancestors.

    Args:
        metadata: what the attention call gets; for a window layer, `metadata.for_window_pool()`.
        cache_shape: `[N, P, K, D]`.
        num_tokens: rows of the token buffer, `T`; not checked when None.
        sliding_window: the window of the layer: pages left behind by it need not exist.

    Raises:
        ValueError: naming the sequence, the position and the value, when called with concrete arrays; or the
            page size is not that of the cache.

    Example:
        >>> import numpy as np
        >>> from jaxattn.debug import check_metadata
        >>> from jaxattn.metadata import decode_metadata
        >>> metadata = decode_metadata(
        ...     seqused_k=[3], page_size=2, req_to_token=np.array([[4, 5, 18, 19]]), req_pool_indices=[0]
        ... )
        >>> check_metadata(metadata, (8, 2, 1, 64))
        Traceback (most recent call last):
        ...
        ValueError: page_table: sequence 0, page 1 from position 2: expected a page in [0, 8), got 9
    """
    num_pages, page_size = cache_shape[:2]
    if metadata.page_size != page_size:
        raise ValueError(
            f"page_size: expected {page_size}, the page size of the cache, got {metadata.page_size}"
        )
    _enforce(_metadata_rules, metadata, num_pages, num_tokens, sliding_window)


@index64
def check_slots(slots: Integer[IndexArray, "T"], cache_shape: Sequence[int]) -> None:
    """Check that the slots of a write are each -1 or within the pool, and that no live one occurs twice.

    Args:
        slots: `[T]`, what `write_kv` gets.
        cache_shape: `[N, P, K, D]`.

    Raises:
        ValueError: naming the token and the slot, when called with concrete arrays.

    Example:
        >>> import numpy as np
        >>> from jaxattn.debug import check_slots
        >>> check_slots(np.array([-1, 3, 3]), (2, 2, 1, 64))
        Traceback (most recent call last):
        ...
        ValueError: slots: slot 3 is given to 2 tokens; each token needs a slot of its own
    """
    _enforce(_slot_rules, as_index(slots, "slots"), cache_shape[0] * cache_shape[1])


@index64
def check_finite(out: Float[Array, "T H Dv"], metadata: AttentionMetadata) -> None:
    """Check that no row of an attention output, padding included, holds NaN or infinity.

    Args:
        out: `[T, H, Dv]`.
        metadata: what the attention call got.

    Raises:
        ValueError: naming the row, its sequence and position, and the head, when called with concrete arrays.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> from jaxattn.debug import check_finite
        >>> from jaxattn.metadata import decode_metadata
        >>> metadata = decode_metadata(
        ...     seqused_k=[3], page_size=2, req_to_token=np.array([[4, 5, 6, 7]]), req_pool_indices=[0]
        ... )
        >>> check_finite(jnp.full((1, 1, 64), jnp.nan), metadata)
        Traceback (most recent call last):
        ...
        ValueError: out: row 0 (sequence 0, position 2), head 0: expected finite values, got nan
    """
    _enforce(_finite_rules, (out, metadata))


def checked(function: Callable) -> Callable:
    """Compile a function with the checks inside it on, so that a call raises the first that fails.

    The checks of this module and those of the table builders. Nothing is donated, and the call waits for its
    result: a tool for finding faults, not for serving.

    Args:
        function: takes pytrees of arrays, by position.

    Raises:
        ValueError: what the check says.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxattn.debug import check_slots, checked
        >>> step = checked(lambda slots: check_slots(slots, (2, 2, 1, 64)))
        >>> step(jnp.array([0, 7]))
        Traceback (most recent call last):
        ...
        ValueError: slots: token 1: expected -1 for padding or a slot in [0, 4), got 7
    """

    def functionalised(x64, args):
        with jax.enable_x64(x64):
            jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        program = checkify.checkify(jaxpr_as_fun(jaxpr), errors=checkify.user_checks)
        error, flat = program(*jax.tree.leaves(args))
        return error, jax.tree.unflatten(jax.tree.structure(shapes), flat)

    # With x64 off, jax 0.10's checkify gives its own error codes two widths and fails on them.
    compiled = index64(jax.jit(functionalised, static_argnums=0))

    @functools.wraps(function)
    def run(*args):
        error, result = compiled(jax.config.jax_enable_x64, jax.tree.map(jnp.asarray, args))
        _raise(error)
        return result

    return run


def _enforce(rules: Callable[..., list[Rule]], arrays, *static) -> None:
    """Check `rules(arrays, *static)`: now for concrete arrays, else as a part of the traced program."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arrays)):
        _add_checks(rules, arrays, static)
    else:
        _raise(_run_checks(rules, arrays, static))


@functools.partial(jax.jit, static_argnums=(0, 2))
def _run_checks(rules, arrays, static):
    return checkify.checkify(lambda arrays: _add_checks(rules, arrays, static))(arrays)[0]


def _add_checks(rules, arrays, static) -> None:
    for bad, text, fields in rules(arrays, *static):
        size = bad.size
        if size == 0:
            continue
        # Not argmax, which fails when a program is lowered with x64 off.
        first = jnp.min(jnp.where(bad.reshape(-1), jnp.arange(size, dtype=jnp.int64), size))
        at = jnp.minimum(first, size - 1)
        values = {name: jnp.broadcast_to(field, bad.shape).reshape(-1)[at] for name, field in fields.items()}
        checkify.debug_check(first == size, text, **values)


def _raise(error: checkify.Error) -> None:
    if message := error.get():
        raise ValueError(message.removesuffix(" (`check` failed)"))


def _metadata_rules(
    metadata: AttentionMetadata, num_pages: int, num_tokens: int | None, sliding_window
) -> list[Rule]:
    rules = _row_rules(metadata, num_tokens) + _key_rules(metadata, num_pages, sliding_window)
    return rules if metadata.ancestors is None else rules + _tree_rules(metadata, metadata.ancestors)


def _row_rules(metadata: AttentionMetadata, num_tokens: int | None) -> list[Rule]:
    cu_seqlens_q, seqused_k = metadata.cu_seqlens_q, metadata.seqused_k
    sequence = jnp.arange(metadata.num_seqs, dtype=jnp.int64)
    start, stop = cu_seqlens_q[:-1], cu_seqlens_q[1:]
    q_len = stop - start
    rules = [
        Rule(
            cu_seqlens_q[:1] != 0,
            "cu_seqlens_q: expected to start at 0, got {start}",
            {"start": cu_seqlens_q[:1]},
        ),
        Rule(
            q_len < 0,
            "cu_seqlens_q: sequence {sequence}: expected to rise, got rows {start} to {stop}",
            {"sequence": sequence, "start": start, "stop": stop},
        ),
        Rule(
            q_len > metadata.max_seqlen_q,
            f"cu_seqlens_q: sequence {{sequence}}: expected at most max_seqlen_q = {metadata.max_seqlen_q} rows, "
            "got {q_len}",
            {"sequence": sequence, "q_len": q_len},
        ),
        Rule(
            (seqused_k < 0) | ((seqused_k > 0) & (seqused_k < q_len)),
            "seqused_k: sequence {sequence}: expected its {q_len} query rows to be counted, or 0 for padding, "
            "got {keys}",
            {"sequence": sequence, "q_len": q_len, "keys": seqused_k},
        ),
    ]
    if num_tokens is not None:
        rules.append(
            Rule(
                stop > num_tokens,
                f"cu_seqlens_q: sequence {{sequence}}: expected at most the {num_tokens} rows of the token "
                "buffer, got {stop}",
                {"sequence": sequence, "stop": stop},
            )
        )
    return rules


def _key_rules(metadata: AttentionMetadata, num_pages: int, sliding_window: int | None) -> list[Rule]:
    table, keys, page_size = metadata.page_table, metadata.seqused_k, metadata.page_size
    sequence = jnp.arange(metadata.num_seqs, dtype=jnp.int64)
    q_len = jnp.diff(metadata.cu_seqlens_q)
    capacity = table.shape[1] * page_size
    page = jnp.arange(table.shape[1], dtype=jnp.int64)
    seen = (q_len > 0)[:, None] & (page * page_size < keys[:, None])
    if sliding_window is not None:
        seen &= (page + 1) * page_size > (keys - q_len)[:, None] - sliding_window + 1
    return [
        Rule(
            (q_len > 0) & (keys > capacity),
            f"seqused_k: sequence {{sequence}}: expected at most the {capacity} keys of {table.shape[1]} pages of "
            f"{page_size}, got {{keys}}",
            {"sequence": sequence, "keys": keys},
        ),
        Rule(
            seen & ((table < 0) | (table >= num_pages)),
            "page_table: sequence {sequence}, page {page} from position {position}: "
            f"expected a page in [0, {num_pages}), got {{value}}",
            {"sequence": sequence[:, None], "page": page, "position": page * page_size, "value": table},
        ),
    ]


def _tree_rules(metadata: AttentionMetadata, ancestors: UInt64[Array, "T W"]) -> list[Rule]:
    num_tokens, num_words = ancestors.shape
    sequence = metadata.sequence_ids(num_tokens)
    live = sequence >= 0
    row = jnp.arange(num_tokens, dtype=jnp.int64)
    start = metadata.cu_seqlens_q[jnp.maximum(sequence, 0)]
    node = row - start
    word = jnp.arange(num_words, dtype=jnp.int64)
    own = jnp.where(
        word == node[:, None] // 64, jnp.uint64(1) << (node % 64).astype(jnp.uint64)[:, None], jnp.uint64(0)
    )
    others = ancestors & ~own
    parent = _highest_bit(others)
    inherited = ancestors[jnp.where(live & (parent >= 0) & (parent < node), start + parent, row)]
    inherited = jnp.where((parent >= 0)[:, None], inherited, jnp.uint64(0))
    where = "ancestors: sequence {sequence}, node {node}: "
    fields = {"sequence": sequence, "node": node, "parent": parent}
    return [
        Rule(live & ((ancestors & own) == 0).all(axis=1), where + "expected its own bit to be set", fields),
        Rule(
            live & (parent > node),
            where + "expected only bits of earlier nodes besides its own, got bit {parent}",
            fields,
        ),
        Rule(
            live & (parent < node) & (others != inherited).any(axis=1),
            where + "expected the bits of its parent, node {parent}, and its own, got others",
            fields,
        ),
    ]


def _highest_bit(words: UInt64[Array, "T W"]) -> Int64[Array, "T"]:
    """Find the highest bit that is set in each row; -1 where none is."""
    in_word = 63 - jax.lax.clz(words).astype(jnp.int64)
    word = jnp.arange(words.shape[1], dtype=jnp.int64)
    return jnp.where(in_word >= 0, word * 64 + in_word, -1).max(axis=1)


def _slot_rules(slots: Int64[Array, "T"], num_slots: int) -> list[Rule]:
    token = jnp.arange(slots.shape[0], dtype=jnp.int64)
    ordered = jnp.sort(slots)
    repeated = (ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)
    first, stop = (jnp.searchsorted(ordered, ordered[1:], side=side) for side in ("left", "right"))
    return [
        Rule(
            (slots < -1) | (slots >= num_slots),
            f"slots: token {{token}}: expected -1 for padding or a slot in [0, {num_slots}), got {{slot}}",
            {"token": token, "slot": slots},
        ),
        Rule(
            repeated,
            "slots: slot {slot} is given to {count} tokens; each token needs a slot of its own",
            {"slot": ordered[1:], "count": stop - first},
        ),
    ]


def _finite_rules(result: tuple[Float[Array, "T H Dv"], AttentionMetadata]) -> list[Rule]:
    out, metadata = result
    num_tokens, num_heads, _ = out.shape
    values = out.astype(jnp.float32)
    return [
        Rule(
            ~jnp.isfinite(values).all(axis=2),
            "out: row {row} (sequence {sequence}, position {position}), head {head}: "
            "expected finite values, got {value}",
            {
                "row": jnp.arange(num_tokens, dtype=jnp.int64)[:, None],
                "sequence": metadata.sequence_ids(num_tokens)[:, None],
                "position": metadata.positions(num_tokens)[:, None],
                "head": jnp.arange(num_heads, dtype=jnp.int64),
                # Any NaN or infinity survives the sum.
                "value": values.sum(axis=2),
            },
        )
    ]
