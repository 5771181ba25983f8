import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.config import EngineConfig, ResolvedConfig
from paged_jax.core import kv

FIELDS = [field.name for field in dataclasses.fields(EngineConfig)]

SIZES = [
    "max_model_len",
    "block_size",
    "num_blocks",
    "kv_cache_memory_bytes",
    "max_num_seqs",
    "max_num_batched_tokens",
    "decode_steps",
    "tensor_parallel_size",
]
SWITCHES = ["strict_compile", "debug", "enable_prefix_caching", "overlap"]
NAMED = {
    "scheduling_policy": ["fcfs", "priority"],
    "preemption_mode": ["recompute", "swap", "auto"],
}


KV_DTYPES = {
    "auto": None,
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "int8": "int8",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "float8_e4m3fn": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "float8_e5m2": "float8_e5m2",
}


def test_defaults_are_valid():
    assert EngineConfig.from_options({}) == EngineConfig()


def test_options_become_fields():
    config = EngineConfig.from_options({"block_size": 4, "debug": True})
    assert (config.block_size, config.debug) == (4, True)


def test_an_unknown_option_is_refused_with_the_list_of_options():
    with pytest.raises(ValueError, match="unknown option 'max_num_seq'") as caught:
        EngineConfig.from_options({"max_num_seq": 4})
    listed = str(caught.value).split("options: ")[1].split(", ")
    assert listed == FIELDS


@pytest.mark.parametrize(("name", "expected"), KV_DTYPES.items())
def test_a_kv_dtype_has_the_names_of_vllm_and_jax(name, expected):
    assert EngineConfig(kv_cache_dtype=name).kv_dtype == expected
    assert expected is None or jnp.dtype(expected).name in kv.KV_DTYPES


@pytest.mark.parametrize("value", ["fp8_e3m4", "INT8", "", None, 8, np.dtype("int8"), ["int8"]])
def test_an_unknown_kv_dtype_is_refused_with_what_there_is(value):
    with pytest.raises(ValueError, match="kv_cache_dtype") as caught:
        EngineConfig(kv_cache_dtype=value)
    assert repr(value) in str(caught.value)
    assert str(caught.value).endswith("one of " + ", ".join(KV_DTYPES))


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [0, -1, 1.5, "8", True])
def test_a_size_must_be_a_positive_integer(name, value):
    with pytest.raises(ValueError, match=name) as caught:
        EngineConfig(**{name: value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_is_true_or_false(name):
    assert getattr(EngineConfig(**{"warmup": "all", name: True}), name) is True
    for value in (1, None, "yes"):
        with pytest.raises(ValueError, match=f"{name}.* must be True or False") as caught:
            EngineConfig(**{name: value})
        assert repr(value) in str(caught.value)


@pytest.mark.parametrize("name", NAMED)
def test_a_policy_is_one_of_its_names(name):
    for value in NAMED[name]:
        assert getattr(EngineConfig(**{name: value}), name) == value
    assert getattr(EngineConfig(), name) == NAMED[name][0]
    for value in ("lifo", None, True):
        with pytest.raises(ValueError, match=f"one of {', '.join(NAMED[name])}") as caught:
            EngineConfig(**{name: value})
        assert f"{name} ({value!r})" in str(caught.value)


@pytest.mark.parametrize("value", [-0.1, float("nan"), "4", True, None])
def test_swap_space_is_a_number_of_gib(value):
    with pytest.raises(ValueError, match=r"swap_space .* GiB of at least 0") as caught:
        EngineConfig(swap_space=value)
    assert repr(value) in str(caught.value)
    assert EngineConfig(swap_space=0).swap_space == 0


@pytest.mark.parametrize("value", [-1, 1.5, "2", True, None])
def test_retries_are_counted(value):
    with pytest.raises(ValueError, match=r"max_step_retries .* integer of at least 0") as caught:
        EngineConfig(max_step_retries=value)
    assert repr(value) in str(caught.value)
    assert EngineConfig(max_step_retries=0).max_step_retries == 0


def test_max_model_len_leaves_room_for_an_output_token():
    with pytest.raises(ValueError, match=r"max_model_len \(1\) must be at least 2"):
        EngineConfig(max_model_len=1)
    assert EngineConfig(max_model_len=2).max_model_len == 2


def test_a_dispatch_must_hold_a_token_of_every_request():
    with pytest.raises(ValueError, match=r"max_num_batched_tokens \(7\) must be at least"):
        EngineConfig(max_num_batched_tokens=7, max_num_seqs=8)
    assert EngineConfig(max_num_batched_tokens=8, max_num_seqs=8)


@pytest.mark.parametrize("value", [0.0, -0.5, 1.01, float("nan")])
def test_memory_utilization_is_a_fraction(value):
    with pytest.raises(ValueError, match="gpu_memory_utilization"):
        EngineConfig(gpu_memory_utilization=value)


def test_all_memory_may_be_used():
    assert EngineConfig(gpu_memory_utilization=1.0)


def test_warmup_is_lazy_or_all():
    assert EngineConfig(warmup="all").warmup == "all"
    with pytest.raises(ValueError, match="warmup"):
        EngineConfig(warmup="eager")


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().block_size = 8


@pytest.mark.parametrize(("length", "blocks"), [(15, 1), (16, 1), (17, 2)])
def test_a_table_row_holds_the_longest_request(length, blocks):
    config = ResolvedConfig(
        max_model_len=length,
        block_size=16,
        num_blocks=8,
        max_num_seqs=2,
        max_num_batched_tokens=64,
    )
    assert config.max_blocks_per_seq == blocks
