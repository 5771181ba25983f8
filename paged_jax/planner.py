"""What fits on a device before there is one: the arithmetic of the engine on a model's config."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from paged_jax.config import EngineConfig
from paged_jax.engine.memory import Budget, StepShape, block_bytes, size
from paged_jax.engine.pool import (
    beside_pool,
    check_block_size,
    default_block_size,
    default_tokens,
    served_length,
)
from paged_jax.models.decoder import cache_spec
from paged_jax.models.footprint import (
    features_per_token,
    kv_bytes_per_token,
    parameters_per_rank,
)
from paged_jax.models.hub import resolve_model
from paged_jax.models.load import open_checkpoint
from paged_jax.models.parallel import Share
from paged_jax.models.registry import read_spec
from paged_jax.models.spec import AttentionSpec, DecoderSpec
from paged_jax.shapes import ceil_div

GIB = 2**30

DEVICES: dict[str, tuple[str, int]] = {
    "a100": ("gpu", 80 * GIB),
    "a100-40": ("gpu", 40 * GIB),
    "l4": ("gpu", 24 * GIB),
    "l40s": ("gpu", 48 * GIB),
    "h100": ("gpu", 80 * GIB),
    "h200": ("gpu", 141 * 10**9),
    "b200": ("gpu", 180 * GIB),
    "v4": ("tpu", 32 * GIB),
    "v5e": ("tpu", 16 * GIB),
    "v5p": ("tpu", 95 * GIB),
    "v6e": ("tpu", 32 * GIB),
    "tpu7x": ("tpu", 96 * GIB),
}
"""Platform and memory of a device as JAX counts them: of tpu7x, half a chip."""

RANKS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of devices that are tried."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked of a model: the options of `EngineConfig`, and how many at a time."""

    platform: str = "gpu"
    concurrency: int = 1
    """Requests of `max_model_len` tokens that must fit at once."""
    dtype: str = "auto"
    kv_dtype: str = "auto"
    max_model_len: int | None = None
    block_size: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one of `tp` equal devices holds; bytes unless said otherwise."""

    tp: int
    platform: str
    dtype: str
    kv_dtype: str
    max_model_len: int
    budget: Budget
    weights: int
    num_kv_heads: int
    """KV heads of the model, padded for `tp` (K' of docs/parallelism.md)."""
    kv_heads_per_device: int
    kv_bytes_per_token: int
    """Without scales and padding of the platform."""
    block_size: int
    block_bytes: int
    pool_blocks: int
    """With the null block; not more than the largest batch can use."""
    block_tables: int
    """Of `max_num_seqs` rows; on TPU they lie in scalar memory while they fit."""
    logits: int
    """Of a step's largest batch, float32."""

    @property
    def num_blocks(self) -> int:
        """Blocks that requests can have."""
        return self.pool_blocks - 1

    @property
    def pool(self) -> int:
        """Bytes of the pool."""
        return self.pool_blocks * self.block_bytes

    @property
    def tokens(self) -> int:
        """Token positions of the pool."""
        return self.num_blocks * self.block_size

    def concurrency(self, length: int) -> int:
        """Requests of so many tokens that fit at once."""
        return self.num_blocks // ceil_div(length, self.block_size)

    @property
    def contiguous(self) -> int:
        """Requests that fit where each reserves `max_model_len` in one piece."""
        return self.tokens // self.max_model_len


class DoesNotFitError(ValueError):
    """Weights and KV need more than there is; the message has the arithmetic."""


def read_config(model: str) -> dict[str, Any]:
    """The config of a model; of a directory its config.json is enough.

    Raises: ValueError for what is no model.
    """
    path = Path(model)
    if path.suffix != ".json":
        path = resolve_model(model)
    if path.is_dir() and (path / "config.json").is_file():
        path = path / "config.json"
    if path.suffix == ".json":
        return json.loads(path.read_text("utf-8"))
    return open_checkpoint(path).config


def plan(config: dict[str, Any], request: Request, hbm: int, tp: int) -> Plan:
    """The plan for `tp` devices of `hbm` bytes each.

    Raises: ValueError for options that contradict each other or the model; DoesNotFitError.
    """
    spec = read_spec(config)
    dtype, kv_dtype = _dtypes(config, request)
    share = Share(axis="tp", num_ranks=tp) if tp > 1 else None
    kept = cache_spec(spec, share)
    platform, seqs = request.platform, request.max_num_seqs
    length = served_length(request.max_model_len, spec.max_position_embeddings)
    block_size = request.block_size or default_block_size(platform, kept, kv_dtype)
    check_block_size(platform, block_size, kv_dtype)
    tokens = request.max_num_batched_tokens or default_tokens(platform, seqs)
    vocab = spec.vocab_size if share is None else share.vocab_size(spec.vocab_size)
    step = StepShape(vocab_size=vocab, num_features=features_per_token(spec, share))
    weights = parameters_per_rank(spec, share) * dtype.itemsize
    beside = beside_pool(step, tp, seqs, tokens, length, block_size)
    budget = Budget(limit=hbm, utilization=request.gpu_memory_utilization, in_use=weights, **beside)
    per_block = block_bytes(kept, block_size, kv_dtype, platform)
    per_request = ceil_div(length, block_size)
    available = budget.available
    if request.kv_cache_memory_bytes is not None:
        available = request.kv_cache_memory_bytes
        whole = dataclasses.replace(budget, utilization=1.0)
        if available > whole.available:
            raise DoesNotFitError(f"a pool of {size(available)}: {whole.arithmetic()}")
    needed = (request.concurrency * per_request + 1) * per_block
    if needed > available:
        raise DoesNotFitError(
            f"{request.concurrency} x {length} tokens need {size(needed)} of KV "
            f"({request.concurrency} x {per_request} blocks of {size(per_block)}, and the null "
            f"block): {budget.arithmetic()}"
        )
    return Plan(
        tp=tp,
        platform=platform,
        dtype=dtype.name,
        kv_dtype=kv_dtype.name,
        max_model_len=length,
        budget=budget,
        weights=weights,
        num_kv_heads=kept.num_kv_heads * tp // _copies(spec, share),
        kv_heads_per_device=kept.num_kv_heads,
        kv_bytes_per_token=kv_bytes_per_token(spec, kv_dtype.itemsize, share),
        block_size=block_size,
        block_bytes=per_block,
        pool_blocks=min(available // per_block, max(seqs, request.concurrency) * per_request + 1),
        block_tables=4 * seqs * per_request,
        logits=4 * seqs * vocab,
    )


def least_devices(config: dict[str, Any], request: Request, name: str) -> Plan | None:
    """The plan for the fewest devices of a known kind that hold weights and KV; None: not 64."""
    platform, hbm = DEVICES[name]
    for tp in RANKS:
        try:
            return plan(config, dataclasses.replace(request, platform=platform), hbm, tp)
        except DoesNotFitError:
            continue
    return None


def model_kv(config: dict[str, Any], request: Request) -> dict[str, int]:
    """KV bytes per token of the whole model, and if each query head had a key and a value."""
    spec, (_, kv_dtype) = read_spec(config), _dtypes(config, request)
    every = 0
    for layer in spec.layers:
        attention = layer.attention
        if isinstance(attention, AttentionSpec):
            every += 2 * attention.num_heads * attention.head_dim
        else:
            width = attention.nope_dim + attention.rope_dim + attention.v_dim
            every += attention.num_heads * width
    return {
        "model_kv_bytes_per_token": kv_bytes_per_token(spec, kv_dtype.itemsize),
        "every_head_kv_bytes_per_token": every * kv_dtype.itemsize,
    }


def _dtypes(config: dict[str, Any], request: Request) -> tuple[Any, Any]:
    """Of weights and KV."""
    named = request.dtype
    if named == "auto":
        named = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    if named not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype ({named!r}) must be auto, float32, bfloat16 or float16")
    kv = EngineConfig(kv_cache_dtype=request.kv_dtype).kv_dtype
    return jnp.dtype(named), jnp.dtype(kv or named)


def _copies(spec: DecoderSpec, share: Share | None) -> int:
    attention = spec.layers[0].attention
    if share is None:
        return 1
    if not isinstance(attention, AttentionSpec):
        return share.num_ranks
    return share.kv_copies(attention.num_kv_heads)
