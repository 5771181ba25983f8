"""Calls every GPU kernel once on a small case: what compute-sanitizer is run over.

    compute-sanitizer --tool memcheck python benchmarks/gpu_sanitize.py
    python benchmarks/gpu_sanitize.py --trace          # anywhere: are the calls legal?

Outputs are not looked at; tests/kernels/test_gpu_device.py does that.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp

from pallas_kernels.gpu import device
from pallas_kernels.gpu.config import DecodeConfig, MosaicDecodeConfig
from pallas_kernels.gpu.mosaic_decode import paged_decode as mosaic_decode
from pallas_kernels.gpu.mosaic_prefill import paged_prefill as mosaic_prefill
from pallas_kernels.gpu.triton_copy import copy_blocks
from pallas_kernels.gpu.triton_decode import paged_decode
from pallas_kernels.gpu.triton_prefill import paged_prefill

HOPPER, BLACKWELL = (9, 0), (10, 0)
LENS, NEW = (17, 0, 40), (3, 0, 18)
BLOCK_SIZE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 16, 4, 2, 64
OPTIONS = {"sm_scale": HEAD_DIM**-0.5, "num_kv_heads": NUM_KV_HEADS}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", action="store_true", help="run nothing")
    options = parser.parse_args(arguments)
    if not options.trace and jax.default_backend() != "gpu":
        print(f"this runs on a GPU, and JAX found {jax.default_backend()}", file=sys.stderr)
        return 2
    for name, call in calls().items():
        try:
            if options.trace:
                jax.eval_shape(call)
            else:
                jax.block_until_ready(call())
            print(f"{'traced' if options.trace else 'ran'} {name}")
        except NotImplementedError as error:
            print(f"refused {name}: {error}")
    return 0


def calls() -> dict[str, Callable[[], Any]]:
    """The calls by name; tables end at the last block of the pool."""
    width = -(-max(LENS) // BLOCK_SIZE)
    num_blocks = len(LENS) * width
    kv = jnp.ones((1, num_blocks + 1, 2 * NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM), jnp.bfloat16)
    tables = jnp.arange(1, num_blocks + 1, dtype=jnp.int32).reshape(len(LENS), width)
    lens = jnp.asarray(LENS, jnp.int32)
    starts = jnp.asarray([sum(NEW[:row]) for row in range(len(NEW) + 1)], jnp.int32)

    def queries(count: int) -> jax.Array:
        return jnp.ones((count, NUM_HEADS, HEAD_DIM), jnp.bfloat16)

    decode = queries(len(LENS)), kv, 0, tables, lens
    prefill = queries(sum(NEW) + 1), kv, 0, tables, lens, starts
    pairs = jnp.asarray([1, 2], jnp.int32), jnp.asarray([num_blocks, num_blocks - 1], jnp.int32)
    found: dict[str, Callable[[], Any]] = {
        "triton decode": lambda: paged_decode(
            *decode, config=DecodeConfig(num_programs=4), **OPTIONS
        ),
        "triton prefill": lambda: paged_prefill(*prefill, **OPTIONS),
        "triton copy": lambda: copy_blocks((kv,), *pairs),
    }
    capability = device.capability()
    if capability is None or capability >= HOPPER:  # the compiler would end the process
        found["mosaic decode"] = lambda: mosaic_decode(
            *decode, config=MosaicDecodeConfig(num_programs=4), **OPTIONS
        )
    if capability is None or HOPPER <= capability < BLACKWELL:
        found["mosaic prefill"] = lambda: mosaic_prefill(*prefill, **OPTIONS)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
