"""Operations on a KV pool and on logits, with argument checks and backends."""

from paged_jax.ops.attention import BACKENDS, Backend, paged_decode, paged_prefill, write_kv
from paged_jax.ops.rope import rope, rope_tables
from paged_jax.ops.sample import GREEDY_BELOW, sample, top_logprobs

__all__ = [
    "BACKENDS",
    "GREEDY_BELOW",
    "Backend",
    "paged_decode",
    "paged_prefill",
    "rope",
    "rope_tables",
    "sample",
    "top_logprobs",
    "write_kv",
]
