"""What sizes are measured on: models, loads, and the arrays of a case."""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from pools import filled

MAX_POOL_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Model:
    """Attention of a model; its layers without a window."""

    num_heads: int
    num_kv_heads: int
    head_dim: int = 128
    soft_cap: float | None = None
    has_sinks: bool = False


SHAPES = {
    "llama3-8b": Model(num_heads=32, num_kv_heads=8),
    "llama3-70b": Model(num_heads=64, num_kv_heads=8),
    "qwen3-0.6b": Model(num_heads=16, num_kv_heads=8),
    "gemma2-9b": Model(num_heads=16, num_kv_heads=8, head_dim=256, soft_cap=50.0),
    "gemma3-4b": Model(num_heads=8, num_kv_heads=4, head_dim=256),
    "smollm2": Model(num_heads=9, num_kv_heads=3, head_dim=64),
    "gpt-oss-20b": Model(num_heads=64, num_kv_heads=8, head_dim=64, has_sinks=True),
}


@dataclass(frozen=True, kw_only=True)
class Load:
    """How much a step has to do; lengths spread evenly from half to one and a half of the mean."""

    num_rows: int = 64  # of decode
    num_tokens: int = 2048  # new ones of prefill, 256 a row
    mean_len: int = 2048
    context_len: int = 8192  # what a row of block tables can name
    num_layers: int = 8


@dataclass(frozen=True, kw_only=True)
class Case:
    """What an entry is measured on; `chip` is the module `tune_tpu` or `tune_gpu`."""

    chip: Any
    kernel: str
    shape: str
    model: Model
    block_size: int
    pool_dtype: str
    load: Load = Load()

    def __str__(self) -> str:
        return f"{self.kernel} {self.shape}, blocks of {self.block_size}, {self.pool_dtype}"

    @property
    def q_dtype(self) -> str:
        """Of queries and outputs."""
        return "float32" if self.pool_dtype == "float32" else "bfloat16"

    @functools.cached_property
    def block_bytes(self) -> int:
        """Bytes of a block of one layer, scales included."""
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in self.pool(1, 1).values())

    def pool(self, num_layers: int, num_blocks: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of the pool and its scales."""
        rows, width, scale_rows = self.chip.pool_rows(self.model)
        dtype, blocks = jnp.dtype(self.pool_dtype), (num_layers, num_blocks)
        found = {"kv": jax.ShapeDtypeStruct((*blocks, rows, self.block_size, width), dtype)}
        if dtype.itemsize == 1:
            shape = (*blocks, scale_rows, self.block_size)
            found["scales"] = jax.ShapeDtypeStruct(shape, jnp.float32)
        return found

    def ask(self, candidate: Any) -> tuple[Any, str, Any]:
        """Its heads, the key of its entry, and the sizes that a kernel takes if that is the entry.

        Raises: NotImplementedError for a pool that no kernel can serve.
        """
        found: list[Any] = []
        jax.eval_shape(
            lambda pool: found.extend(self.chip.ask(self, pool, candidate)), self.pool(1, 1)
        )
        return tuple(found)


def inputs_of(case: Case, memory_bytes: int) -> tuple[dict[str, jax.Array], int, int]:
    """Arrays of a step, bytes that a layer must read, and what it must multiply and add."""
    load, model, rng = case.load, case.model, np.random.default_rng(0)
    limit = min(MAX_POOL_BYTES, memory_bytes // 4)
    is_decode = case.kernel == "decode"
    row_bytes = -(-load.mean_len // case.block_size) * case.block_bytes
    num_rows = load.num_rows if is_decode else load.num_tokens // 256
    num_rows = max(1, min(num_rows, limit // row_bytes))
    lens = rng.permutation(np.linspace(load.mean_len // 2, load.mean_len * 3 // 2, num_rows))
    lens = lens.astype(np.int32)
    is_used = np.arange(load.context_len // case.block_size) < -(-lens // case.block_size)[:, None]
    num_blocks = int(is_used.sum())
    tables = np.zeros(is_used.shape, np.int32)
    tables[is_used] = 1 + rng.permutation(num_blocks)
    new = np.minimum(lens, 1 if is_decode else load.num_tokens // num_rows)
    num_layers = max(1, min(load.num_layers, limit // (num_blocks * case.block_bytes)))
    q_shape = (num_rows if is_decode else load.num_tokens, model.num_heads, model.head_dim)
    arrays = {
        "q": jax.random.normal(jax.random.key(0), q_shape, jnp.dtype(case.q_dtype)),
        "block_tables": jnp.asarray(tables),
        "context_lens": jnp.asarray(lens),
        "starts": jnp.asarray(np.cumsum([0, *new]), jnp.int32),
    }
    pool = case.pool(num_layers, num_blocks + 1)
    arrays["kv"] = filled(pool["kv"].shape, pool["kv"].dtype)
    if "scales" in pool:
        arrays["scales"] = jnp.full(pool["scales"].shape, 0.02, jnp.float32)
    if model.has_sinks:
        arrays["sinks"] = jnp.zeros(model.num_heads, jnp.float32)
    pairs = int(np.sum(new * lens - new * (new - 1) // 2))  # of a query and a key it sees
    num_flops = 4 * model.num_heads * model.head_dim * pairs
    return arrays, num_blocks * case.block_bytes, num_flops


def layer_of(case: Case, config: Any, interpret: Any, arrays: dict[str, jax.Array]) -> Any:
    """A function from a layer's index and queries to its outputs."""
    model, kv = case.model, arrays["kv"]
    options: dict[str, Any] = {n: arrays[n] for n in ("scales", "sinks") if n in arrays}
    options |= {"num_kv_heads": model.num_kv_heads, "soft_cap": model.soft_cap}
    options |= {"sm_scale": model.head_dim**-0.5, "config": config, "interpret": interpret}

    def layer(i: Any, q: jax.Array) -> jax.Array:
        args = (q, kv, jax.lax.rem(jnp.asarray(i, jnp.int32), jnp.int32(kv.shape[0])))
        args += (arrays["block_tables"], arrays["context_lens"])
        if case.kernel == "decode":
            return case.chip.paged_decode(*args, **options)[0]
        return case.chip.paged_prefill(*args, arrays["starts"], **options)[0]

    return layer
