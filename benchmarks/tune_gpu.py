"""What tune.py must know of GPUs, whose kernels are those in Triton."""

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh
from tune_case import Case, Model

from pallas_kernels.gpu import config as chip_config
from pallas_kernels.gpu import device
from pallas_kernels.gpu.config import NUM_PROGRAMS, DecodeConfig
from pallas_kernels.gpu.heads import heads_of
from pallas_kernels.gpu.triton_decode import paged_decode as paged_decode
from pallas_kernels.gpu.triton_prefill import paged_prefill as paged_prefill

TUNED = Path(__file__).resolve().parents[1] / "pallas_kernels" / "gpu" / "tuned"
TOY_HEAD_DIM = 16
TOY_MEMORY_BYTES = 1 << 30
COPY_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """Of the device that is measured, or traced for."""

    name: str
    memory_bytes: int
    bandwidth: float | None  # bytes per second of a copy, read and written; None: not there


def traced_for(kind: str) -> contextlib.AbstractContextManager:
    """Lets kernels ask about a device that need not be there."""
    axes = {
        "axis_types": (AxisType.Auto,),
        "abstract_device": AbstractDevice(device_kind=kind, num_cores=None, platform="gpu"),
    }
    return use_abstract_mesh(AbstractMesh((1,), ("x",), **axes))


def facts() -> Facts:
    """Measures the bandwidth if a GPU is here."""
    name = device.name()
    if name is None:
        raise ValueError("no GPU is here, and none is traced for")
    if jax.default_backend() != "gpu":
        return Facts(name=name, memory_bytes=TOY_MEMORY_BYTES, bandwidth=None)
    from kernel_gpu import copy_bandwidth

    limit = jax.devices()[0].memory_stats()["bytes_limit"]
    return Facts(name=name, memory_bytes=limit, bandwidth=copy_bandwidth(COPY_BYTES))


def table_name(info: Facts) -> str:
    """Name of the device's table."""
    return info.name


def memory_bytes(info: Facts) -> int:
    """Memory of the device."""
    return info.memory_bytes


def least_seconds(info: Facts, num_bytes: int, _: int) -> float | None:
    """To read the bytes at the bandwidth of a copy; how fast it multiplies is not known."""
    return None if info.bandwidth is None else num_bytes / info.bandwidth


def interpret_params() -> bool:
    """What a kernel takes to be interpreted."""
    return True


def pool_rows(model: Model) -> tuple[int, int, int]:
    """Rows of a pool, their width, and rows of scales."""
    return 2 * model.num_kv_heads, model.head_dim, 2 * model.num_kv_heads


def ask(case: Case, pool: dict[str, jax.Array], candidate: Any) -> tuple[Any, str, Any]:
    """See `Case.ask`."""
    queries = case.model.num_heads, case.model.head_dim
    heads = heads_of(queries, pool["kv"], case.model.num_kv_heads, pool.get("scales"))
    args = heads, pool["kv"], case.q_dtype
    choose = chip_config.decode_config if case.kernel == "decode" else chip_config.prefill_config
    with mock.patch.object(chip_config, "lookup", return_value=candidate):
        return heads, chip_config.key(*args), choose(*args)


def grid(_: Any, start: Any) -> dict[str, set[int]]:
    """Values of fields to try around a config."""
    # Stages count double, because of the table's indirection: 2 to 4 are one buffer, 5 are two.
    common = {"num_warps": {4, 8}, "num_stages": {3, 5, start.num_stages}}
    if isinstance(start, DecodeConfig):
        return {
            "block_k": {32, 64, 128, start.block_k},
            "num_warps": {2, *common["num_warps"]},
            "num_stages": common["num_stages"],
            "num_programs": {NUM_PROGRAMS * n // 5 for n in (2, 3, 5, 10)},  # per multiprocessor
        }
    return {
        "tile_rows": {16, 32, 64, 128, start.tile_rows},
        "block_k": {32, 64, 128, start.block_k},
        **common,
    }


def entry_of(config: Any) -> dict[str, int]:
    """What a table holds."""
    return dataclasses.asdict(config)


def run_layers(layer: Callable[..., jax.Array], _: Any, case: Case, q: jax.Array) -> Any:
    """All layers, unrolled: a loop on the device would wait for the host between them."""
    for i in range(case.load.num_layers):
        q = layer(i, q)
    return q
