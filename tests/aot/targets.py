"""Compiles a function for an accelerator that is not attached, and reports what came of it.

The compilers are libraries and need no device: XLA:TPU and Mosaic are in the wheel `libtpu`,
XLA:GPU in `jax-cuda13-pjrt`. What they cannot say is whether a program computes the right numbers,
or how fast; interpret mode and hardware answer that.
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


@dataclass(frozen=True, kw_only=True)
class GpuTarget:
    """A GPU as XLA describes it to itself: what it would ask the driver if there were one."""

    name: str
    capability: tuple[int, int]
    num_sms: int
    bandwidth: int  # bytes per second
    memory_bytes: int
    l2_bytes: int
    clock_ghz: float
    shared_bytes: int  # of an SM; a block may ask for all but one KiB

    @property
    def platform(self) -> str:
        """Platform that programs are lowered for."""
        return "cuda"

    @property
    def block_shared_bytes(self) -> int:
        """The most shared memory that one block may ask for."""
        return self.shared_bytes - 1024

    @property
    def config(self) -> str:
        """A GpuTargetConfigProto in text form."""
        major, minor = self.capability
        # sm_90a and sm_100a: wgmma, tcgen05 and the like, which nothing before Hopper has.
        features = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
        return f"""
            platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }}
            device_description_str: "{self.name}"
            gpu_device_info {{
              driver_version: "13.0.0" runtime_version: "13.0.0"
              compile_time_toolkit_version: "13.0.0"
              cuda_compute_capability {{ major: {major} minor: {minor} {features} }}
              core_count: {self.num_sms} fpus_per_core: {FPUS_PER_SM[major]}
              clock_rate_ghz: {self.clock_ghz} memory_bandwidth: {self.bandwidth}
              device_memory_size: {self.memory_bytes} l2_cache_size: {self.l2_bytes}
              shared_memory_per_core: {self.shared_bytes} shared_memory_per_block: 49152
              shared_memory_per_block_optin: {self.block_shared_bytes}
              registers_per_core_limit: 65536 registers_per_block_limit: 65536
              threads_per_core_limit: 2048 threads_per_block_limit: 1024 threads_per_warp: 32
              block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
            }}"""


FPUS_PER_SM = {8: 64, 9: 128, 10: 128}
"""float32 units by major compute capability."""

# Names, SMs, clocks, memory and its bandwidth: NVIDIA's data sheets and architecture white papers
# of A100 (SXM4 80 GB), H100 (SXM5), H200 and B200. Shared memory, registers and threads: the CUDA
# programming guide's table of compute capabilities.
GPU_TARGETS = {
    "a100": GpuTarget(
        name="NVIDIA A100-SXM4-80GB",
        capability=(8, 0),
        num_sms=108,
        bandwidth=2_039_000_000_000,
        memory_bytes=80 << 30,
        l2_bytes=40 << 20,
        clock_ghz=1.41,
        shared_bytes=164 << 10,
    ),
    "h100": GpuTarget(
        name="NVIDIA H100 80GB HBM3",
        capability=(9, 0),
        num_sms=132,
        bandwidth=3_352_000_000_000,
        memory_bytes=80 << 30,
        l2_bytes=50 << 20,
        clock_ghz=1.98,
        shared_bytes=228 << 10,
    ),
    "h200": GpuTarget(
        name="NVIDIA H200",
        capability=(9, 0),
        num_sms=132,
        bandwidth=4_800_000_000_000,
        memory_bytes=141 << 30,
        l2_bytes=50 << 20,
        clock_ghz=1.98,
        shared_bytes=228 << 10,
    ),
    "b200": GpuTarget(
        name="NVIDIA B200",
        capability=(10, 0),
        num_sms=148,
        bandwidth=7_672_000_000_000,
        memory_bytes=178 << 30,
        l2_bytes=126 << 20,
        clock_ghz=1.965,
        shared_bytes=228 << 10,
    ),
}

# Read when the compiler is loaded, which is later than JAX's import.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # no question to a metadata server that is not there
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # two processes may compile at once
    "TPU_STDERR_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # the compiler needs none of CUDA's other libraries
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
    try:
        if target in GPU_TARGETS:
            config = GPU_TARGETS[target].config
            found = topologies.get_topology_desc(
                platform="cuda", topology_name="1x1x1", topology="1x1x1", target_config=config
            )
        else:
            spec = TARGETS[target]
            found = topologies.get_topology_desc(
                platform=spec.platform, topology_name=spec.topology
            )
    except (RuntimeError, ValueError, NotImplementedError) as error:
        extra = "aot-gpu" if target in GPU_TARGETS else "aot"
        raise RuntimeError(
            f"no compiler for {target}: install the extra '{extra}' in an environment of its own"
        ) from error
    return found.devices[0]


def compile_for(
    target: str,
    fn: Callable,
    args: Sequence[Any],
    donate: Sequence[int] = (),
    options: dict[str, Any] | None = None,
) -> jax.stages.Compiled:
    """Compiles `fn(*args)` for one device of a target.

    Args:
      target: A key of `TARGETS` or `GPU_TARGETS`.
      args: Pytrees of `jax.ShapeDtypeStruct`.
      donate: Positions of donated arguments.
      options: XLA's, by name.
    Raises: RuntimeError without the target's compiler; what lowering or the compiler raises, as it
      is, when a program does not fit (VMEM, SMEM) or asks for what the hardware has not got.
    """
    device = device_of(target)
    platform = (GPU_TARGETS.get(target) or TARGETS[target]).platform
    sharding = SingleDeviceSharding(device)
    args = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tuple(args)
    )
    # Kernels may ask which device they are traced for; the mesh is how JAX tells them.
    mesh = AbstractMesh(
        (1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=_abstract(target, device)
    )
    with use_abstract_mesh(mesh):
        traced = jax.jit(fn, donate_argnums=tuple(donate)).trace(*args)
        lowered = traced.lower(lowering_platforms=(platform,))
    return lowered.compile(compiler_options=options)


class _AbstractGpu(AbstractDevice):
    """Mosaic GPU takes a device without this attribute for a Hopper."""

    compute_capability: str


def _abstract(target: str, device: Any) -> AbstractDevice:
    if target not in GPU_TARGETS:
        return AbstractDevice(
            device_kind=device.device_kind, num_cores=device.num_cores, platform="tpu"
        )
    abstract = _AbstractGpu(device_kind=device.device_kind, num_cores=None, platform="gpu")
    capability = ".".join(map(str, GPU_TARGETS[target].capability))
    object.__setattr__(abstract, "compute_capability", capability)  # the class is frozen
    return abstract


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
