"""The functional core: a paged KV cache as immutable pytrees and pure transitions."""

from paged_jax.core import checked
from paged_jax.core.allocation import Allocation, allocate, fit, needed
from paged_jax.core.audit import AuditError, audit
from paged_jax.core.batch import Batch, make_batch, make_decode_batch
from paged_jax.core.describe import describe
from paged_jax.core.kv import (
    CacheSpec,
    KVCache,
    PagedCache,
    check_kv_dtype,
    copy_blocks,
    create_kv_cache,
    gather,
    kv_shape,
    quantize,
    write,
)
from paged_jax.core.rows import fork, free, reindex, release, retain, share, truncate
from paged_jax.core.state import (
    FAULT_FREE_BLOCK,
    FAULT_OCCUPIED,
    FAULT_OUT_OF_RANGE,
    FAULT_REPEATED,
    REASON_OUT_OF_BLOCKS,
    REASON_ROW_TOO_LONG,
    BlockState,
    create_block_state,
    slot_mapping,
    translate,
)
from paged_jax.core.storage import restore_cache, save_cache, swap_in, swap_out
from paged_jax.core.tags import check_tags, expected_tags, make_tags, with_tags, write_tags

__all__ = [
    "FAULT_FREE_BLOCK",
    "FAULT_OCCUPIED",
    "FAULT_OUT_OF_RANGE",
    "FAULT_REPEATED",
    "REASON_OUT_OF_BLOCKS",
    "REASON_ROW_TOO_LONG",
    "Allocation",
    "AuditError",
    "Batch",
    "BlockState",
    "CacheSpec",
    "KVCache",
    "PagedCache",
    "allocate",
    "audit",
    "check_kv_dtype",
    "check_tags",
    "checked",
    "copy_blocks",
    "create_block_state",
    "create_kv_cache",
    "describe",
    "expected_tags",
    "fit",
    "fork",
    "free",
    "gather",
    "kv_shape",
    "make_batch",
    "make_decode_batch",
    "make_tags",
    "needed",
    "quantize",
    "reindex",
    "release",
    "restore_cache",
    "retain",
    "save_cache",
    "share",
    "slot_mapping",
    "swap_in",
    "swap_out",
    "translate",
    "truncate",
    "with_tags",
    "write",
    "write_tags",
]
