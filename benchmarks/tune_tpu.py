"""What tune.py must know of TPUs; tune_gpu.py has the same functions for GPUs."""

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh
from tune_case import Case, Model

from pallas_kernels.tpu import config as chip_config
from pallas_kernels.tpu.config import DecodeConfig
from pallas_kernels.tpu.decode import paged_decode as paged_decode
from pallas_kernels.tpu.heads import LANES, SUBLANES, heads_of
from pallas_kernels.tpu.prefill import paged_prefill as paged_prefill

TUNED = Path(__file__).resolve().parents[1] / "pallas_kernels" / "tpu" / "tuned"
TOY_HEAD_DIM = 128
TWO_CORES = ("TPU v4", "TPU v5", "TPU v5p")  # kinds whose devices have two TensorCores


def traced_for(kind: str) -> contextlib.AbstractContextManager:
    """Lets kernels ask about a device that need not be there."""
    num_cores = 2 if kind in TWO_CORES else 1
    device = AbstractDevice(device_kind=kind, num_cores=num_cores, platform="tpu")
    axes = {"axis_types": (AxisType.Auto,), "abstract_device": device}
    return use_abstract_mesh(AbstractMesh((1,), ("x",), **axes))


def facts() -> Any:
    """Of the device that is traced for."""
    return pltpu.get_tpu_info()


def table_name(info: Any) -> str:
    """Name of the device's table."""
    return chip_config.device_name(info)


def memory_bytes(info: Any) -> int:
    """Memory of the device."""
    return info.hbm_capacity_bytes


def least_seconds(info: Any, num_bytes: int, num_flops: int) -> float:
    """To read the bytes or make the products in bfloat16, whichever takes longer."""
    # The facts are those of one core.
    least = max(num_bytes / info.mem_bw_bytes_per_second, num_flops / info.bf16_ops_per_second)
    return least / info.num_cores


def interpret_params() -> Any:
    """What a kernel takes to be interpreted."""
    return pltpu.InterpretParams()


def pool_rows(model: Model) -> tuple[int, int, int]:
    """Rows of a pool, their width, and rows of scales; narrow heads lie side by side in a row."""
    per_row = max(1, LANES // model.head_dim)
    scales = 2 * model.num_kv_heads
    scales += 0 if scales in (2, 4) else -scales % SUBLANES  # what a kernel can copy
    return 2 * -(-model.num_kv_heads // per_row), per_row * model.head_dim, scales


def ask(case: Case, pool: dict[str, jax.Array], candidate: Any) -> tuple[Any, str, Any]:
    """See `Case.ask`."""
    model, load = case.model, case.load
    queries = model.num_heads, model.head_dim
    heads = heads_of(queries, pool["kv"], model.num_kv_heads, pool.get("scales"))
    args, limits = (heads, pool["kv"], case.q_dtype), {"max_tokens": load.context_len}
    with mock.patch.object(chip_config, "lookup", return_value=candidate):
        if case.kernel == "decode":
            config = chip_config.decode_config(*args, num_rows=load.num_rows, **limits)
        else:
            config = chip_config.prefill_config(*args, num_tokens=load.num_tokens, **limits)
    return heads, chip_config.key(*args), config


def grid(heads: Any, start: Any) -> dict[str, set[int]]:
    """Values of fields to try around a config."""
    divisors = [n for n in range(1, heads.pool_heads + 1) if heads.pool_heads % n == 0]
    tiles = [2**i for i in range(4, 10) if 256 <= 2**i * heads.queries <= 1024]
    if isinstance(start, DecodeConfig):
        return {
            "block_tokens": {256, 512, 1024, 2048, start.block_tokens},
            "heads_per_tile": {n for n in divisors if n == 1 or n * heads.queries <= 64},
            "num_buffers": {2, 3, 4},
        }
    return {
        "tile_tokens": {*tiles, start.tile_tokens},
        "chunk_tokens": {256, 512, 1024, start.chunk_tokens},
        "heads_per_step": {1, heads.pool_heads},
    }


def entry_of(config: Any) -> dict[str, int]:
    """What a table holds; the limit on vector memory follows from it."""
    entry = dataclasses.asdict(config)
    del entry["vmem_limit_bytes"]
    return entry


def run_layers(layer: Callable[..., jax.Array], num_layers: Any, _: Case, q: jax.Array) -> Any:
    """Layer after layer; one program for any number."""
    return jax.lax.fori_loop(jnp.int32(0), num_layers, layer, q)
