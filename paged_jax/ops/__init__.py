"""Operations on a KV pool and on logits, with argument checks and backends."""

from paged_jax.ops.attention import paged_decode, paged_prefill
from paged_jax.ops.dispatch import BACKENDS, Backend
from paged_jax.ops.grouped import grouped_product
from paged_jax.ops.logits import LogitOptions, adjust_logits, create_logit_options
from paged_jax.ops.rope import rope, rope_tables
from paged_jax.ops.sample import GREEDY_BELOW, sample, top_logprobs
from paged_jax.ops.store import copy_kv, write_kv

__all__ = [
    "BACKENDS",
    "GREEDY_BELOW",
    "Backend",
    "LogitOptions",
    "adjust_logits",
    "copy_kv",
    "create_logit_options",
    "grouped_product",
    "paged_decode",
    "paged_prefill",
    "rope",
    "rope_tables",
    "sample",
    "top_logprobs",
    "write_kv",
]
