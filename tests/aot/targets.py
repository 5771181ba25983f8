"""Compiles a function for an accelerator that is not attached, and reports what came of it.

The compilers are libraries and need no device: XLA:TPU and Mosaic are in the wheel `libtpu`. What
they cannot say is whether a program computes the right numbers, or how fast; interpret mode and
hardware answer that.
"""

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    AxisType,
    SingleDeviceSharding,
    use_abstract_mesh,
)

from tests.hlo import pool_faults


@dataclass(frozen=True, kw_only=True)
class Target:
    """How to name a device to its compiler."""

    platform: str
    topology: str


TARGETS = {
    "v5e": Target(platform="tpu", topology="v5e:2x2"),
    "v5p": Target(platform="tpu", topology="v5p:2x2x1"),
    "v6e": Target(platform="tpu", topology="v6e:2x2"),
    "v7x": Target(platform="tpu", topology="tpu7x:2x2x1"),
}

# Read when the compiler is loaded, which is later than JAX's import.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # no question to a metadata server that is not there
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # two processes may compile at once
    "TPU_STDERR_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the compiler made of a program; bytes on one device."""

    temp_bytes: int
    alias_bytes: int  # of outputs that live in a donated argument
    code_bytes: int
    faults: tuple[str, ...]  # copies and layouts of pools, see `tests.hlo.pool_faults`


@functools.cache
def device_of(target: str) -> Any:
    """A device to compile for; RuntimeError without the target's compiler."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # JAX would otherwise ask the compiler's library for the device that it has not got.
    jax.config.update("jax_platforms", "cpu")
    spec = TARGETS[target]
    try:
        found = topologies.get_topology_desc(platform=spec.platform, topology_name=spec.topology)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise RuntimeError(
            f"no compiler for {target}: install the extra 'aot' in an environment of its own"
        ) from error
    return found.devices[0]


def compile_for(
    target: str, fn: Callable, args: Sequence[Any], donate: Sequence[int] = ()
) -> jax.stages.Compiled:
    """Compiles `fn(*args)` for one device of a target.

    Args:
      target: A key of `TARGETS`.
      args: Pytrees of `jax.ShapeDtypeStruct`.
      donate: Positions of donated arguments.
    Raises: RuntimeError without the target's compiler; what lowering or the compiler raises, as it
      is, when a program does not fit (VMEM, SMEM) or asks for what the hardware has not got.
    """
    device, platform = device_of(target), TARGETS[target].platform
    sharding = SingleDeviceSharding(device)
    args = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tuple(args)
    )
    # Kernels may ask which device they are traced for; the mesh is how JAX tells them.
    abstract = AbstractDevice(
        device_kind=device.device_kind, num_cores=device.num_cores, platform=platform
    )
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=abstract)
    with use_abstract_mesh(mesh):
        traced = jax.jit(fn, donate_argnums=tuple(donate)).trace(*args)
        lowered = traced.lower(lowering_platforms=(platform,))
    return lowered.compile()


def report(compiled: jax.stages.Compiled, pools: Sequence[tuple[int, ...]]) -> Report:
    """Sizes of a program, and what it does to pools that it should leave where they are.

    Args:
      pools: Shapes `[L, ...]`; above 256 MiB, lest the compiler keep one in VMEM, where its copies
        are not temporaries.
    """
    memory, text = compiled.memory_analysis(), compiled.as_text()
    return Report(
        temp_bytes=memory.temp_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
        faults=tuple(fault for shape in pools for fault in pool_faults(text, shape)),
    )


def reason(error: BaseException) -> str:
    """What a compiler's message is about, in a word or a short line."""
    text = " ".join(str(error).split())
    for memory in ("smem", "vmem", "hbm"):
        if "memory space " + memory in text or "space=" + memory in text:
            return f"out of {memory.upper()}"
    return f"{type(error).__name__}: {text[:160]}"
