"""What is planned is what is allocated, and the figures that people know by heart."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import core, planner
from paged_jax.cli import main
from paged_jax.config import EngineConfig
from paged_jax.engine import Engine
from paged_jax.engine.memory import Budget, nbytes, size
from paged_jax.engine.pool import resolve
from paged_jax.models.shard import make_mesh, shard
from tests.models.tiny import TINY, config, model

GIB = 2**30
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
LLAMA_3_8B = {
    **LLAMA,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
LLAMA_2_70B = {
    **LLAMA,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}


@pytest.fixture
def plan_of(tmp_path, capsys):
    """Callable (config, flags) -> (exit code, JSON or what stderr said)."""

    def run(given: dict, *flags: str):
        (tmp_path / "config.json").write_text(json.dumps(given))
        code = main(["plan", str(tmp_path), *flags, "--json"])
        out, err = capsys.readouterr()
        return code, json.loads(out) if code == 0 else err

    return run


def test_figures_of_llama_3_8b(plan_of):
    flags = ("--hbm", "80GiB", "--tp", "1", "--max-model-len", "8192", "--block-size", "16")
    code, found = plan_of(LLAMA_3_8B, *flags, "--kv-cache-memory", "20GiB")
    assert code == 0
    assert found["kv_bytes_per_token"] == 131072
    assert found["block_bytes"] == 2 * 2**20
    assert found["pool_blocks"] == 10240
    assert found["pool"] == 20 * GIB
    assert found["kv_bytes_per_token"] * 8192 == GIB
    assert found["weights"] == 2 * 8_030_261_248
    assert found["concurrency"]["8192"] == 10239 // 512 == 19
    assert found["contiguous"] == 19
    assert found["concurrency"]["256"] == 10239 // 16


def test_figures_of_llama_2_70b(plan_of):
    flags = ("--device", "h200", "--tp", "8", "--concurrency", "32", "--max-model-len", "4096")
    _, found = plan_of(LLAMA_2_70B, *flags)
    tokens = 32 * 4096
    assert found["model_kv_bytes_per_token"] * tokens == 40 * GIB
    assert found["every_head_kv_bytes_per_token"] * tokens == 320 * GIB
    assert found["model_kv_bytes_per_token"] * 2048 == 0.625 * GIB
    assert found["every_head_kv_bytes_per_token"] * 2048 == 5 * GIB
    assert found["num_kv_heads"] == 8
    assert found["kv_heads_per_device"] == 1


# Architecture, KV dtype, ranks, options: dtypes, head dims, padded and replicated heads, experts.
ALLOCATED = [
    ("llama", "auto", 1, {}),
    ("llama", "bfloat16", 2, {"block_size": 4}),
    ("llama", "int8", 1, {"block_size": 1}),
    ("llama_mqa_hd", "float16", 4, {}),
    ("llama_mha", "fp8_e4m3", 2, {}),
    ("qwen3", "auto", 4, {"max_num_seqs": 5}),
    ("gemma2", "auto", 2, {}),
    ("gemma3", "fp8_e5m2", 1, {}),
    ("mixtral", "auto", 8, {}),
    ("gpt_oss", "bfloat16", 2, {}),
    ("gpt2", "auto", 1, {}),
    ("deepseek_v3", "auto", 2, {}),
    ("olmo2", "int8", 4, {}),
]


@pytest.mark.parametrize(("name", "kv_dtype", "tp", "options"), ALLOCATED)
def test_what_is_planned_is_what_is_allocated(name, kv_dtype, tp, options):
    options = {"max_num_seqs": 4, "max_model_len": 48, **options}
    request = planner.Request(platform="cpu", dtype="float32", kv_dtype=kv_dtype, **options)
    planned = planner.plan(config(name), request, 16 * GIB, tp)
    whole = model(name)
    made = shard(whole, make_mesh(tp)) if tp > 1 else whole
    engine = Engine(made, EngineConfig(kv_cache_dtype=kv_dtype, **options))
    runner = engine.runner
    here = jax.devices()[0]

    def held(tree) -> int:
        return sum(
            part.data.nbytes
            for leaf in jax.tree.leaves(tree)
            for part in leaf.addressable_shards
            if part.device == here
        )

    assert planned.weights == held(runner._params)
    assert planned.pool == held((runner.kv.kv, runner.kv.scales))
    assert planned.num_blocks == engine.config.num_blocks
    assert planned.block_size == engine.config.block_size
    states = held((runner.blocks, runner.rows, runner._options))
    # The planner pads the vocabulary of the rows' masks to whole ranks.
    assert states <= planned.budget.states <= states + 4 * options["max_num_seqs"] * 2 * 64 * tp
    assert runner.blocks.block_tables.nbytes == planned.block_tables


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float32", "int8", "fp8_e4m3"])
@pytest.mark.parametrize("heads", [(8, 64), (6, 80), (2, 128), (3, 256), (1, 48)])
def test_a_block_has_the_bytes_of_its_arrays(platform, kv_dtype, heads):
    num_kv_heads, head_dim = heads
    given = {**LLAMA_3_8B, "num_key_value_heads": num_kv_heads, "head_dim": head_dim}
    given |= {"num_attention_heads": 2 * num_kv_heads, "num_hidden_layers": 3}
    size = 128 if platform == "tpu" else 16
    request = planner.Request(platform=platform, kv_dtype=kv_dtype, block_size=size)
    planned = planner.plan(given, request, 80 * GIB, 1)
    spec = core.CacheSpec(num_layers=3, num_kv_heads=num_kv_heads, head_dim=head_dim)
    dtype = jnp.dtype(planned.kv_dtype)
    made = jax.eval_shape(
        lambda: core.create_kv_cache(spec, planned.num_blocks, size, dtype, platform=platform)
    )
    assert planned.pool == nbytes((made.kv, made.scales))


def test_the_engine_keeps_what_a_step_needs_free(monkeypatch):
    """C17: utilization times total, less what is in use, less the step's peak and the states."""
    from paged_jax.engine import pool

    monkeypatch.setattr(pool.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(pool, "_device_stats", lambda: (10 * GIB, 4 * GIB))
    spec = core.CacheSpec(num_layers=2, num_kv_heads=2, head_dim=8)
    options = EngineConfig(max_num_seqs=4096, max_num_batched_tokens=4096, max_model_len=2**16)
    shape = pool.StepShape(vocab_size=1000, num_features=512)
    settled = resolve(options, spec, np.dtype(np.float32), None, 1, shape)
    beside = pool.beside_pool(shape, 1, 4096, 4096, 2**16, 16)
    budget = Budget(limit=10 * GIB, utilization=0.9, in_use=4 * GIB, **beside)
    assert budget.step > 4096 * 1000 * 4
    assert budget.states > 4096 * 2**12 * 4
    assert settled.num_blocks == budget.available // (2 * 4 * 16 * 8 * 4) - 1
    monkeypatch.setattr(pool, "_device_stats", lambda: (10 * GIB, int(8.99 * GIB)))
    with pytest.raises(
        ValueError, match=r"0\.9 of 10 GiB, less 8\.99 GiB in use, .* leaves 0 bytes"
    ):
        resolve(options, spec, np.dtype(np.float32), None, 1, shape)


def test_the_least_devices_are_the_least(plan_of):
    flags = ("--concurrency", "32", "--max-model-len", "4096")
    _, found = plan_of(LLAMA_2_70B, *flags)
    assert set(found["least_devices"]) == set(planner.DEVICES)
    for name, count in found["least_devices"].items():
        platform, hbm = planner.DEVICES[name]
        request = planner.Request(platform=platform, concurrency=32, max_model_len=4096)
        assert planner.plan(LLAMA_2_70B, request, hbm, count).concurrency(4096) >= 32
        if count > 1:
            with pytest.raises(planner.DoesNotFitError):
                planner.plan(LLAMA_2_70B, request, hbm, count // 2)
    assert found["least_devices"]["v5e"] > found["least_devices"]["v5p"]
    _, chosen = plan_of(LLAMA_2_70B, *flags, "--device", "h100")
    assert chosen["tp"] == found["least_devices"]["h100"]


def test_what_does_not_fit_is_refused_with_the_arithmetic(plan_of):
    code, said = plan_of(LLAMA_2_70B, "--hbm", "80GiB", "--tp", "1", "--concurrency", "32")
    assert code == 2
    assert "32 x 2048 tokens need 20 GiB of KV (32 x 128 blocks of 5 MiB" in said
    assert "0.9 of 80 GiB, less 128.5 GiB in use" in said
    assert said.count("\n") == 1
    code, said = plan_of(LLAMA_3_8B, "--hbm", "20GiB", "--tp", "1", "--kv-cache-memory", "6GiB")
    assert code == 2
    assert "a pool of 6 GiB: 1 of 20 GiB, less 14.96 GiB in use" in said


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--device", "abacus"), "--device (abacus) must be one of a100"),
        (("--hbm", "80GiB", "--tp", "0"), "--tp (0) must be at least 1"),
        (("--tp", "2"), "--tp needs --hbm or --device"),
        (("--hbm", "80GiB", "--gpu-memory-utilization", "1.5"), "must be in (0, 1]"),
        (("--hbm", "80GiB", "--max-model-len", "9000"), "max_model_len (9000) exceeds"),
        (("--device", "v5e", "--block-size", "12"), "block_size (12) must be a multiple of 8"),
        (("--device", "v5e", "--kv-dtype", "int8", "--block-size", "64"), "multiple of 128"),
        (("--hbm", "80GiB", "--kv-dtype", "int3"), "kv_cache_dtype ('int3') must be one of"),
        (("--hbm", "80GiB", "--dtype", "int8"), "dtype ('int8') must be auto"),
        (("--device", "v5e", "--platform", "tpu"), "--hbm"),
    ],
)
def test_wrong_flags_are_named(plan_of, flags, message):
    code, said = plan_of(LLAMA_3_8B, *flags)
    assert code == 2
    assert message in said


@pytest.mark.parametrize("text", ["eighty", "80XB", "-3", "GiB"])
def test_what_is_no_size_is_refused(text, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["plan", "x", f"--hbm={text}"])
    assert caught.value.code == 2
    assert "no size" in capsys.readouterr().err


def test_checkpoints_files_and_names_are_read(capsys):
    for path in (TINY / "llama", TINY / "llama" / "config.json"):
        assert main(["plan", str(path), "--hbm", "1G"]) == 0
        out = capsys.readouterr().out
        assert "least devices for 1 x the usual tokens:" in out
        assert "requests at once" in out
    assert main(["plan", "no/such/model", "--hbm", "1G"]) == 2


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1 KiB"),
        (20 * GIB, "20 GiB"),
        (2**50, "1024 TiB"),
    ],
)
def test_bytes_are_said(count, text):
    assert size(count) == text
