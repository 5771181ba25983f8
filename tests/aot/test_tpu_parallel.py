"""The step of a divided Llama 3 compiles for meshes of TPUs: kernels inside, nothing of pool size
moved, two sums a layer over the links, and as many bytes as arithmetic says.

Two layers are compiled; what they add is the same for every layer.
"""

import pytest

from paged_jax.engine.memory import StepShape, step_bytes
from paged_jax.models.footprint import (
    features_per_token,
    kv_bytes_per_token,
    parameters_per_rank,
    summed_bytes_per_token,
)
from tests.aot.parallel import compile_divided
from tests.aot.step import NUM_ROWS

pytestmark = [pytest.mark.aot, pytest.mark.slow, pytest.mark.usefixtures("optimized")]

NUM_LAYERS, POOL_TOKENS = 2, 2**18
DECODE, MIXED = NUM_ROWS, 512
# Model, topology, ranks, tokens; the first of each pair of steps runs in CI.
CASES = [
    ("8B", "v5e:2x2", 4, DECODE),
    ("8B", "v5e:2x2", 4, MIXED),
    ("8B", "v6e:2x2", 4, MIXED),
    ("8B", "v6e:2x2", 4, DECODE),
    ("8B", "tpu7x:2x2x1", 4, DECODE),
    ("8B", "tpu7x:2x2x1", 4, MIXED),
    ("70B", "v6e:2x4", 8, MIXED),
    ("70B", "v6e:2x4", 8, DECODE),
    ("70B", "v6e:4x4", 16, DECODE),
    ("70B", "v6e:4x4", 16, MIXED),
    ("70B", "v5p:4x4x4", 16, MIXED),
    ("70B", "v5p:4x4x4", 16, DECODE),
]


@pytest.mark.parametrize(
    ("name", "topology", "num_ranks", "num_tokens"),
    [
        pytest.param(*case, marks=[pytest.mark.by_hand] if i % 2 else [])
        for i, case in enumerate(CASES)
    ],
)
def test_step_of_a_divided_model(name, topology, num_ranks, num_tokens):
    made = compile_divided(name, topology, num_ranks, num_tokens, NUM_LAYERS, POOL_TOKENS)
    calls = {"copy_blocks": 1, "paged_write": NUM_LAYERS, "paged_decode": NUM_LAYERS}
    if num_tokens > NUM_ROWS:
        calls["paged_prefill"] = NUM_LAYERS
    assert made.kernels == calls
    assert made.faults == ()
    assert made.alias_bytes >= made.pool_bytes + made.option_bytes
    weights = 2 * parameters_per_rank(made.spec, made.share)
    pool = (POOL_TOKENS + 128) * kv_bytes_per_token(made.spec, 2, made.share)
    assert pool == made.pool_bytes
    planned = weights + pool + made.option_bytes
    print(
        f"{name} {topology} tp {num_ranks}, {num_tokens} tokens: arguments {made.argument_bytes} "
        f"(planned {planned}), temporaries {made.temp_bytes}, {dict(made.collectives)}"
    )
    assert abs(made.argument_bytes - planned) < 0.02 * planned
    vocab_size = made.share.vocab_size(made.spec.vocab_size)
    shape = StepShape(vocab_size=vocab_size, num_features=features_per_token(made.spec, made.share))
    # For tpu7x the compiler prefers another tiling of weights and makes copies in it at every call.
    kept = 2**30 if topology.startswith("tpu7x") else step_bytes(shape, NUM_ROWS, num_tokens)
    assert made.temp_bytes < kept
    # Two sums a layer and one after the embedding. Sampling and log-probabilities have the others,
    # of a number per row.
    wide = [(dtype, shape) for dtype, shape in made.sums if len(shape) == 2 and shape[1] > 1]
    assert wide == [("bf16", (num_tokens, made.spec.hidden_size))] * (2 * NUM_LAYERS + 1)
    assert len(wide) * made.spec.hidden_size * 2 == summed_bytes_per_token(made.spec, 2)
    assert len(made.sums) - len(wide) in (8, 11)
    assert set(made.collectives) <= {"all-reduce", "all-gather"}
