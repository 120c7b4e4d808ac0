"""Unified paged attention for JAX, with 64-bit indices: prefill, decode and speculative verify in one call."""

from jaxattn.attention import implementations as implementations
from jaxattn.attention import unified_attention as unified_attention
from jaxattn.errors import CheckpointError as CheckpointError
from jaxattn.errors import JaxattnError as JaxattnError
from jaxattn.errors import PoolExhaustedError as PoolExhaustedError
from jaxattn.errors import UnsupportedError as UnsupportedError
from jaxattn.kv_cache import PagedKVCache as PagedKVCache
from jaxattn.kv_cache import write_kv as write_kv
from jaxattn.merge import merge_states as merge_states
from jaxattn.metadata import AttentionMetadata as AttentionMetadata
from jaxattn.metadata import decode_metadata as decode_metadata
from jaxattn.metadata import draft_decode_metadata as draft_decode_metadata
from jaxattn.metadata import draft_extend_metadata as draft_extend_metadata
from jaxattn.metadata import extend_metadata as extend_metadata
from jaxattn.metadata import target_verify_metadata as target_verify_metadata
from jaxattn.page_pool import PagePool as PagePool
from jaxattn.page_table import page_aligned as page_aligned
from jaxattn.page_table import page_table_from_ragged as page_table_from_ragged
from jaxattn.page_table import page_table_from_req_to_token as page_table_from_req_to_token
from jaxattn.page_table import view_pages as view_pages
from jaxattn.tree import ancestor_bits as ancestor_bits
from jaxattn.window_pool import evictable_pages as evictable_pages
from jaxattn.window_pool import to_window_slots as to_window_slots

__version__ = "0.1.0"
__all__ = [
    "AttentionMetadata",
    "CheckpointError",
    "JaxattnError",
    "PagePool",
    "PagedKVCache",
    "PoolExhaustedError",
    "UnsupportedError",
    "ancestor_bits",
    "decode_metadata",
    "draft_decode_metadata",
    "draft_extend_metadata",
    "evictable_pages",
    "extend_metadata",
    "implementations",
    "merge_states",
    "page_aligned",
    "page_table_from_ragged",
    "page_table_from_req_to_token",
    "target_verify_metadata",
    "to_window_slots",
    "unified_attention",
    "view_pages",
    "write_kv",
]
