"""The split-KV plan: how the work of one step is cut into equal runs, computed on the device.

The work of an attention launch is one line of tiles. Query rows (query token, head of the group) are cut into
blocks of `block_rows` rows of one sequence; for each block the line holds the tiles of keys that the block sees.
It is cut into `active` equal runs, whatever the lengths are, and a program walks a run for one KV head: programs
of all heads read the same pages at about the same time. The tiles of a block for one head are called a unit. A
program finds its place on the line through the arrays of a `Schedule`. All shapes are static.

As many runs are active as keep the device busy, but where all units are equally long, a few less can end where
units end: fewer partial results are written and merged then, or none. Where the number of KV heads would leave
much of the device idle, only some of them walk abreast, and the line holds a block once for each such set.

With fixed cut points (`batch_invariant=True`) the line holds chunks of keys in place of tiles: the keys of a
block are cut at multiples of `chunk` and nowhere else.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int64

from jaxattn.index64 import cdiv, index64
from jaxattn.kernels import bookkeeping
from jaxattn.problem import AttentionProblem

# Implementations that read a plan.
PLANNED = ("triton", "pallas")
# A chunk that holds any sequence: keys are not cut at all.
UNCUT = 1 << 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    """The static facts that a schedule depends on."""

    num_sequences: int
    num_tokens: int
    max_seqlen_q: int
    # Sequences with fewer or more query tokens have no block in this schedule.
    min_q_len: int
    max_q_len: int
    num_kv_heads: int
    group: int
    # Keys that a row of the page table can hold.
    capacity: int
    causal: bool
    tree: bool
    sliding_window: int | None
    # Query rows of a block, and keys of a tile.
    block_rows: int
    tile: int
    programs: int
    # KV heads that programs walk side by side, a divisor of their number.
    heads_abreast: int
    # So many runs keep the device as busy as all of them do.
    enough_runs: int
    # Keys between fixed cut points, `UNCUT`, or 0 where the load balance cuts.
    chunk: int

    @property
    def runs(self) -> int:
        """Upper bound of the runs that the line is cut into; a program for each of the heads abreast walks one."""
        return self.programs // self.heads_abreast

    @property
    def heads_in_line(self) -> int:
        """How often a block is on the line."""
        return self.num_kv_heads // self.heads_abreast

    @property
    def blocks_in_sequence(self) -> int:
        """Upper bound of the blocks of one sequence."""
        return cdiv(min(self.max_seqlen_q, self.max_q_len, self.num_tokens) * self.group, self.block_rows)

    @property
    def num_blocks(self) -> int:
        """Upper bound of the blocks of all sequences."""
        sequences = min(self.num_sequences, self.num_tokens // max(self.min_q_len, 1))
        by_sequence = sequences * self.blocks_in_sequence
        return max(1, min(by_sequence, sequences + self.num_tokens * self.group // self.block_rows))

    @property
    def longest_line(self) -> int:
        """Upper bound of the places of the line."""
        return self.num_blocks * self.heads_in_line * max(1, cdiv(self.capacity, self.step))

    @property
    def step(self) -> int:
        """Keys of one place of the line: a chunk or a tile."""
        return self.chunk or self.tile


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionLayers:
    """The attention layers that share a plan, as far as it depends on them: static, hashable, without arrays.

    Arrays are taken for their shapes and dtypes.

    Attributes:
        q: `[T, H, D]` query rows of a layer, or a `jax.ShapeDtypeStruct` of their shape and dtype.
        k_cache: `[N, P, K, D]` pages of a layer, or their shape and dtype.
        v_cache: `[N, P, K, Dv]`, or their shape and dtype; by default those of `k_cache`.
        sliding_windows: the window of each kind of layer, None for full attention.
        causal: as in `unified_attention`.
        batch_invariant: as in `unified_attention`.

    Raises:
        ValueError: a shape does not have the axes named above, the shapes do not fit each other, or no kind of
            layer is given.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxattn.plan import AttentionLayers
        >>> k_cache = jax.ShapeDtypeStruct((32, 4, 2, 64), jnp.bfloat16)
        >>> layers = AttentionLayers(q=jnp.zeros((2, 8, 64), jnp.bfloat16), k_cache=k_cache)
        >>> layers.q.shape, layers.v_cache.shape, layers.sliding_windows
        ((2, 8, 64), (32, 4, 2, 64), (None,))
    """

    q: jax.Array | jax.ShapeDtypeStruct
    k_cache: jax.Array | jax.ShapeDtypeStruct
    v_cache: jax.Array | jax.ShapeDtypeStruct | None = None
    sliding_windows: tuple[int | None, ...] = (None,)
    causal: bool = True
    batch_invariant: bool = False

    def __post_init__(self):
        v_cache = self.k_cache if self.v_cache is None else self.v_cache
        for name, value, axes in (
            ("q", self.q, "[T, H, D]"),
            ("k_cache", self.k_cache, "[N, P, K, D]"),
            ("v_cache", v_cache, "[N, P, K, Dv]"),
        ):
            if len(value.shape) != axes.count(",") + 1:
                raise ValueError(f"{name}: expected shape {axes}, got {list(value.shape)}")
            # A struct with no more than shape and dtype is hashable, and equal whatever it was taken from.
            object.__setattr__(self, name, jax.ShapeDtypeStruct(value.shape, value.dtype))
        object.__setattr__(self, "sliding_windows", tuple(self.sliding_windows))
        heads, kv_heads = self.q.shape[1], self.k_cache.shape[2]
        if kv_heads == 0 or heads % kv_heads:
            raise ValueError(
                f"q: expected a number of query heads that is a multiple of the {kv_heads} KV heads, got {heads}"
            )
        if self.v_cache.shape[:3] != self.k_cache.shape[:3]:
            raise ValueError(
                "v_cache: expected the pages, page size and KV heads of k_cache, "
                f"{self.k_cache.shape[:3]}, got {self.v_cache.shape[:3]}"
            )
        if not self.sliding_windows:
            raise ValueError(
                "sliding_windows: expected one for each kind of layer, got none; (None,) is full attention"
            )

    @property
    def page_size(self) -> int:
        """Tokens in a page of the caches."""
        return self.k_cache.shape[1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """The line of work of one launch. Arrays end with the live blocks; what follows them repeats the end."""

    # Sequence of each block, and the block's number within its sequence.
    block_sequence: Int64[Array, "B"]
    block_index: Int64[Array, "B"]
    # Where each block begins on the line, and where the last one ends.
    tile_start: Int64[Array, "B+1"]
    # The block in which each run begins.
    first_block: Int64[Array, "R"]
    # Runs that the line is cut into.
    active: Int64[Array, "1"]
    spec: ScheduleSpec = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """The schedules of one step, shared by all layers: one for each kind of layer and each launch of it."""

    schedules: tuple[Schedule, ...]

    def find(self, spec: ScheduleSpec) -> Schedule | None:
        """Return the schedule for `spec`, or None where the plan was made for other shapes or settings."""
        return next((schedule for schedule in self.schedules if schedule.spec == spec), None)


def build_schedule(
    spec: ScheduleSpec, cu_seqlens_q: Int64[Array, "S+1"], seqused_k: Int64[Array, "S"]
) -> Schedule:
    """Lay out the line of work of `spec`; call it inside an `index64` scope."""
    q_len = cu_seqlens_q[1:] - cu_seqlens_q[:-1]
    scheduled = (q_len >= spec.min_q_len) & (q_len <= spec.max_q_len)
    blocks = jnp.where(scheduled, cdiv(q_len * spec.group, spec.block_rows), 0)
    block_end = jnp.cumsum(blocks)
    block = jnp.arange(spec.num_blocks, dtype=jnp.int64)
    live = block < block_end[-1]
    sequence = jnp.searchsorted(block_end, block, side="right").astype(jnp.int64)
    sequence = jnp.minimum(sequence, spec.num_sequences - 1)
    index = jnp.where(live, block - (block_end - blocks)[sequence], 0)
    sequence = jnp.where(live, sequence, 0)

    places = jnp.where(live, _places(spec, q_len[sequence], seqused_k[sequence], index), 0)
    tile_end = jnp.cumsum(places * spec.heads_in_line)
    work = tile_end[-1]
    run = jnp.arange(spec.runs, dtype=jnp.int64)
    shortest = jnp.min(jnp.where(live, places, work))
    active = _active(spec, jnp.sum(live) * spec.heads_in_line, shortest, jnp.max(places), work)
    place = jnp.minimum(run, active - 1) * work // jnp.maximum(active, 1)
    first_block = jnp.searchsorted(tile_end, place, side="right").astype(jnp.int64)
    return Schedule(
        block_sequence=sequence,
        block_index=index,
        tile_start=jnp.concatenate([jnp.zeros(1, jnp.int64), tile_end]),
        first_block=jnp.minimum(first_block, spec.num_blocks - 1),
        active=active[None],
        spec=spec,
    )


def _active(spec: ScheduleSpec, units, shortest, longest, work):
    """Choose how many runs there are: as many as can be, or so many that they end where equally long units do."""
    active = jnp.minimum(work, spec.runs)
    if spec.chunk:
        return active
    units = jnp.maximum(units, 1)
    units_in_run = cdiv(units, spec.runs)
    in_whole_units = jnp.where(units % units_in_run == 0, units // units_in_run, 0)
    even = jnp.where(units <= spec.runs, spec.runs // units * units, in_whole_units)
    return jnp.where((shortest == longest) & (even >= spec.enough_runs), jnp.minimum(even, work), active)


def _places(spec: ScheduleSpec, q_len, seqused_k, index):
    """Count the places that a block has on the line of one KV head; one where it sees no key at all."""
    first_token = index * spec.block_rows // spec.group
    last_token = jnp.minimum(((index + 1) * spec.block_rows - 1) // spec.group, q_len - 1)
    start, stop = key_range(
        seqused_k - q_len,
        jnp.minimum(seqused_k, spec.capacity),
        first_token,
        last_token,
        causal=spec.causal,
        tree=spec.tree,
        sliding_window=spec.sliding_window,
    )
    return jnp.maximum(cdiv(stop, spec.step) - start // spec.step, 1)


def key_range(
    context, keys, first_token, last_token, *, causal: bool, tree: bool, sliding_window: int | None
) -> tuple:
    """Return the first key that the tokens [first_token, last_token] of a sequence can see, and one past the last.

    Args:
        context: position of the sequence's first query row.
        keys: keys of the sequence.
        first_token: the first of the tokens.
        last_token: the last of the tokens.
        causal: a row sees no key behind it.
        tree: rows are nodes of a draft tree.
        sliding_window: keys that a row sees, itself counted; None for all.
    """
    stop = jnp.minimum(keys, context + last_token + 1) if causal else keys
    stop = jnp.maximum(stop, 0)
    start = jnp.zeros_like(stop)
    if sliding_window is not None:
        # A tree row sits at or after the context, so its window starts at or after that of the context.
        position = context if tree else context + first_token
        start = jnp.minimum(jnp.maximum(position - sliding_window + 1, 0), stop)
    return start, stop


def schedule_specs(
    layers: AttentionLayers,
    *,
    num_sequences: int,
    max_pages: int,
    page_size: int,
    max_seqlen_q: int,
    tree_words: int = 0,
) -> tuple[ScheduleSpec, ...]:
    """List the schedules that the attention of `layers` asks for in a batch of these sizes, each once.

    A batch in which no row can see a key asks for none.

    Args:
        layers: the layers.
        num_sequences: S, padding sequences included.
        max_pages: columns M of the page table.
        page_size: tokens in a page of the table.
        max_seqlen_q: upper bound of the query rows of a sequence.
        tree_words: columns W of `ancestors`, 0 without a tree.

    Raises:
        ValueError: the caches have pages of another size.
    """
    from jaxattn.kernels._output import is_empty
    from jaxattn.kernels.tuning import device
    from jaxattn.kernels.tuning.launches import attention_launches

    if layers.page_size != page_size:
        raise ValueError(
            f"k_cache: expected the page size of the tables, {page_size}, got {layers.page_size}; "
            f"view the cache through view_pages(cache, {page_size})"
        )
    tokens = layers.q.shape[0]
    problem = AttentionProblem(
        q=layers.q,
        k_cache=layers.k_cache,
        v_cache=layers.v_cache,
        page_table=jax.ShapeDtypeStruct((num_sequences, max_pages), jnp.int64),
        cu_seqlens_q=jax.ShapeDtypeStruct((num_sequences + 1,), jnp.int64),
        seqused_k=jax.ShapeDtypeStruct((num_sequences,), jnp.int64),
        ancestors=jax.ShapeDtypeStruct((tokens, tree_words), jnp.uint64) if tree_words else None,
        softmax_scale=1.0,
        max_seqlen_q=max_seqlen_q,
        out_dtype=layers.q.dtype,
        causal=layers.causal,
        batch_invariant=layers.batch_invariant,
    )
    if is_empty(problem):
        return ()
    specs = (
        launch.spec
        for window in layers.sliding_windows
        for launch in attention_launches(dataclasses.replace(problem, sliding_window=window), device())
    )
    return tuple(dict.fromkeys(specs))


def build_schedules(
    specs: tuple[ScheduleSpec, ...], cu_seqlens_q: Int64[Array, "S+1"], seqused_k: Int64[Array, "S"]
) -> tuple[Schedule, ...]:
    """Build a schedule for each of `specs`: in kernels where Triton keeps the books, in XLA elsewhere.

    Call it inside an `index64` scope.
    """
    build = build_schedule
    if bookkeeping() == "triton":
        from jaxattn.kernels.triton.plan import build_schedule as build
    return tuple(build(spec, cu_seqlens_q, seqused_k) for spec in specs)


@index64
def make_plan(
    metadata,
    q,
    k_cache,
    v_cache=None,
    *,
    sliding_windows: tuple[int | None, ...] = (None,),
    causal: bool = True,
    batch_invariant: bool = False,
) -> Plan:
    """Plan one step for all layers; put the result into `dataclasses.replace(metadata, plan=...)`.

    For metadata that is there already, such as that of `advance`. A builder of `jaxattn.metadata` makes the same
    plan along with the tables where it is given `plan_for=AttentionLayers(...)`, which on a GPU takes one launch
    for both. A call of `unified_attention` whose plan does not fit its arguments computes its own.

    Args:
        metadata: the step's `AttentionMetadata`.
        q: query rows of a layer, or their shape and dtype, as in `AttentionLayers`.
        k_cache: as there.
        v_cache: as there; by default those of `k_cache`.
        sliding_windows: as there, the window of each kind of layer.
        causal: as there.
        batch_invariant: as there.

    Returns:
        A `Plan`, a pytree of int64 arrays.

    Raises:
        ValueError: as `AttentionLayers`, or the caches have pages of another size than the tables.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np
        >>> from jaxattn.metadata import decode_metadata
        >>> from jaxattn.plan import make_plan
        >>> metadata = decode_metadata(
        ...     seqused_k=np.array([40, 3]), kv_indptr=np.array([0, 40, 43]), kv_indices=np.arange(43),
        ...     page_size=4, max_pages=16,
        ... )
        >>> q = jax.ShapeDtypeStruct((2, 8, 64), jnp.bfloat16)
        >>> k_cache = jax.ShapeDtypeStruct((32, 4, 2, 64), jnp.bfloat16)
        >>> plan = make_plan(metadata, q, k_cache)
        >>> plan.schedules[0].block_sequence.tolist()
        [0, 1]
    """
    layers = AttentionLayers(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        sliding_windows=sliding_windows,
        causal=causal,
        batch_invariant=batch_invariant,
    )
    specs = schedule_specs(
        layers,
        num_sequences=metadata.num_seqs,
        max_pages=metadata.page_table.shape[1],
        page_size=metadata.page_size,
        max_seqlen_q=metadata.max_seqlen_q,
        tree_words=0 if metadata.ancestors is None else metadata.ancestors.shape[1],
    )
    return Plan(build_schedules(specs, metadata.cu_seqlens_q, metadata.seqused_k))
