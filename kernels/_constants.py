"""What an attention kernel is specialised on: a plain frozen record, passed to it as one constant."""

import dataclasses
from typing import Any

# Numbers of stored formats; 0 means that the compiler converts the type itself.
CODES = {
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 2,
    "float8_e5m2": 3,
    "float8_e5m2fnuz": 4,
    "int8": 5,
    "float16": 6,
    "bfloat16": 7,
    "float32": 0,
}
# What a reduction must know of the unit that a run begins and does not end: its pieces, q_start, q_len, first packed
# row, KV head, and where partial results of that run are. A unit that no run cuts has no pieces.
CUT_UNIT_FIELDS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConstants:
    """Static facts of one attention launch. `rows` are (query token, head of the group) pairs, token-major."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    page_size: int
    num_pages: int
    table_width: int
    num_sequences: int
    num_tokens: int

    # The schedule, see `jaxattn.plan`: blocks of rows, tiles of keys, programs.
    block_rows: int
    # Rows of a tile that a block fills.
    rows_in_block: int
    tile: int
    programs: int
    runs: int
    # KV heads side by side, and how often a block is on the line for all of them.
    heads_abreast: int
    heads_in_line: int
    longest_line: int
    num_blocks: int
    # Rows of a block that exist at all, which is what partial results are stored for.
    stored_rows: int
    # Keys between fixed cut points, 0 where the cut points follow from the load balance.
    chunk: int
    # Every unit lies within one run, so there are no partial results.
    uncut: bool
    stages: int
    # Long runs of tiles without any mask are expected, and worth a loop of their own, or a branch within the loop.
    bare_tiles: bool
    one_loop: bool = False
    bare_ids: bool = False
    # Load two neighbouring columns of an 8-bit V as one element: 16-bit ones can be transposed by hardware.
    paired_values: bool = False
    # Instructions that convert four 8-bit values of K or V at once, empty without; see `triton.walk`.
    k_unpack: str = ""
    v_unpack: str = ""
    # Up to so many page ids of a tile are numbers of their own; see `triton.keys`.
    scalar_pages: int = 0
    # Instructions around the product of q and K by which two halves of a program take turns, empty without.
    begin_turn: str = ""
    end_turn: str = ""
    # Write neutral values to the rows of the token buffer that belong to no sequence.
    fill: bool

    softmax_scale: float
    causal: bool
    window: int = 0
    softcap: float = 0.0
    tree_words: int = 0
    # A block is one node of a tree, and its draft keys are those of its path, in order, as if they followed the prefix.
    path_keys: bool = False
    sinks: bool = False
    alibi: bool = False
    q_descale: bool = False
    k_descale: bool = False
    v_descale: bool = False
    output_scale: bool = False

    # Dtypes of the products and of the output, as the kernel's language knows them; numbers of stored formats.
    compute: Any
    q_format: int
    k_format: int
    v_format: int
    v_dtype: Any = None
    out_dtype: Any
    out_format: int
    precision: str | None
    # Scale query rows by powers of two into the range of the compute type.
    scale_rows: bool
    # Weights are 2**(score - max + shift): keeps small ones out of float16's subnormals.
    weight_shift: float

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def modified(self) -> bool:
        """Whether scores are more than a multiple of the product of q and k."""
        return self.softcap > 0 or self.alibi

    @property
    def capacity(self) -> int:
        """Keys that a row of the page table can hold."""
        return self.table_width * self.page_size

    @property
    def padded_dim(self) -> int:
        """Columns of a K tile."""
        return padded(self.head_dim)

    @property
    def product_dim(self) -> int:
        """Columns of q and K in one product: half of them where K is unpacked into two tiles."""
        return self.padded_dim // 2 if self.k_unpack else self.padded_dim

    @property
    def padded_value_dim(self) -> int:
        """Columns of a V tile."""
        return padded(self.value_dim)

    @property
    def pages_in_tile(self) -> int:
        """Page ids that a tile of keys needs; one for each key of a path."""
        return self.tile if self.path_keys else pages_in_tile(self.tile, self.page_size)

    @property
    def padded_nodes(self) -> int:
        """Draft nodes that the words of a tree have bits for."""
        return padded(64 * self.tree_words)

    @property
    def few_pages(self) -> bool:
        """Whether each page id of a tile is a number of its own rather than an element of a tensor."""
        return not self.path_keys and self.pages_in_tile <= max(1, self.scalar_pages)

    @property
    def pages_at_once(self) -> int:
        """Page ids that are checked at once, each time awaited: more where tiles have many."""
        return min(max(32 * self.pages_in_tile, 256), 1024)

    @property
    def units(self) -> int:
        """Upper bound of the (block, KV head) units."""
        return self.num_blocks * self.num_kv_heads

    @property
    def described_by_unit(self) -> bool:
        """Whether cut units are described at their own numbers, which are fewer than those of programs."""
        return self.units < self.programs

    @property
    def tiles_in_chunk(self) -> int:
        """Tiles between two fixed cut points."""
        return self.chunk // self.tile


def pages_in_tile(tile: int, page_size: int) -> int:
    """Page ids that a tile of keys needs; one for each key where tiles and pages do not nest."""
    if page_size % tile == 0:
        return 1
    return tile // page_size if tile % page_size == 0 else tile


def padded(size: int, least: int = 16) -> int:
    """Smallest power of two that is at least `size` and `least`."""
    return max(least, 1 << (size - 1).bit_length())
