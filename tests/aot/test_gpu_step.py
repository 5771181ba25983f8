"""A whole engine step of Llama 3 8B compiles for GPUs: one CUDA graph, nothing large is moved.

Nothing is allocated. All 32 layers are compiled, which the model unrolls; that takes a minute each.
"""

import collections
import itertools
import math
from dataclasses import dataclass

import pytest

from paged_jax.engine.step import step_options
from tests.aot import resources
from tests.aot.resources import CommandBuffers, Kernel
from tests.aot.step import NUM_ROWS, llama_step
from tests.aot.targets import Report, compile_for, device_of, report
from tests.hlo import moved_sizes

pytestmark = [
    pytest.mark.usefixtures("optimized"),
    pytest.mark.aot,
    pytest.mark.aot_gpu,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]

NUM_LAYERS = 32
MAX_LAYER_LAUNCHES = {"decode": 13, "with prefill": 15}
"""Launches from one layer's decode to the next one's."""

SMALLEST_WEIGHT = 1 << 20
"""Numbers; what is smaller, such as the scale of a norm, may be copied."""


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A step: what the compiler says of it, its launches, and its Pallas kernels."""

    report: Report
    buffers: CommandBuffers
    calls: collections.Counter[str]
    kernels: tuple[Kernel, ...]
    moved: set[int]  # sizes of arrays that are copied, transposed or converted
    pool_bytes: int
    weights: set[int]  # sizes


def compile_step(target: str, num_tokens: int, dump_dir, num_layers: int = NUM_LAYERS) -> Compiled:
    """Compiles the step of T tokens and R rows; T = R is a decode step."""
    device_of(target)  # before anything asks JAX for a device
    made = llama_step(num_tokens, 64, num_layers, "gpu")
    options = resources.dump_options(dump_dir) | step_options("cuda")
    compiled = compile_for(target, made.fn, made.args, made.donate, options)
    hlo = compiled.as_text()
    assert hlo is not None
    calls = collections.Counter(resources.pallas_calls(hlo))
    weights = {math.prod(x.shape) for x in made.args[0]}
    return Compiled(
        report=report(compiled, [made.pools[0].shape]),
        buffers=resources.command_buffers(dump_dir),
        calls=calls,
        kernels=resources.kernels(dump_dir, calls),
        moved=moved_sizes(hlo),
        pool_bytes=made.pool_bytes,
        weights={size for size in weights if size >= SMALLEST_WEIGHT},
    )


@pytest.mark.parametrize("target", ["h100", "b200"])
@pytest.mark.parametrize(
    ("num_tokens", "kind"), [(NUM_ROWS, "decode"), (512, "with prefill")], ids=lambda x: str(x)
)
def test_step_moves_no_pool_and_is_one_graph(target, num_tokens, kind, tmp_path):
    made = compile_step(target, num_tokens, tmp_path)
    assert made.report.faults == ()
    assert made.report.alias_bytes >= made.pool_bytes
    assert made.report.temp_bytes < made.pool_bytes // NUM_LAYERS
    assert made.moved & made.weights == set()

    expected = {"paged_decode": NUM_LAYERS, "paged_decode_join": NUM_LAYERS}
    if num_tokens > NUM_ROWS:
        expected["paged_prefill"] = NUM_LAYERS
    assert {name: made.calls[name] for name in expected} == expected
    assert [kernel for kernel in made.kernels if kernel.spill_bytes] == []
    print(
        f"{target}, {kind}: {len(made.buffers.inside)} launches in {made.buffers.count} graphs and "
        f"{len(made.buffers.outside)} outside, {_layer_launches(made.buffers)} a layer; "
        f"{made.report.temp_bytes >> 20} MiB of temporaries"
    )
    assert _layer_launches(made.buffers) <= MAX_LAYER_LAUNCHES[kind]
    assert made.buffers.outside == ()
    assert made.buffers.count == 1


def _layer_launches(buffers: CommandBuffers) -> int:
    """Launches from one layer to the next; the first layers also make what all of them use."""
    names = [launch.split()[-1] for launch in buffers.inside + buffers.outside]
    layers = [i for i, name in enumerate(names) if name == "paged_decode"]
    steps = [b - a for a, b in itertools.pairwise(layers)]
    return collections.Counter(steps).most_common(1)[0][0]
