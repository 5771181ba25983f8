"""Sizes of the GPU kernels: checked, taken from the device's table, or else from shapes."""

import contextlib
import dataclasses
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from pallas_kernels.gpu import config, device
from pallas_kernels.gpu.config import DecodeConfig, PrefillConfig
from pallas_kernels.gpu.heads import heads_of

H100 = "NVIDIA H100 80GB HBM3"
DECODE = {"block_k": 32, "num_warps": 2, "num_stages": 4, "num_programs": 264}
PREFILL = {"tile_rows": 128, "block_k": 32, "num_warps": 8, "num_stages": 2}
KEY = "H32 K8 D128 P16 bfloat16 bfloat16"


def on(kind):
    """Traces for a device that is not there; None: for one that is not known."""
    if kind is None:
        return contextlib.nullcontext()
    axes = {
        "axis_types": (AxisType.Auto,),
        "abstract_device": AbstractDevice(device_kind=kind, num_cores=None, platform="gpu"),
    }
    return use_abstract_mesh(AbstractMesh((1,), ("x",), **axes))


def ask(fn, *, num_heads=32, num_kv_heads=8, head_dim=128, dtype="bfloat16", q_dtype="bfloat16"):
    """What `fn` says of a pool without memory."""
    found = []

    def trace(kv, scales):
        heads = heads_of((num_heads, head_dim), kv, num_kv_heads, scales)
        found.append(fn(heads, kv, jnp.dtype(q_dtype)))

    shape = (1, 2, 2 * num_kv_heads, 16, head_dim)
    jax.eval_shape(
        trace,
        jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)),
        jax.ShapeDtypeStruct(shape[:-1], jnp.float32),
    )
    return found[0]


def sizes_on(kind, **pool):
    with on(kind):
        return ask(config.decode_config, **pool), ask(config.prefill_config, **pool)


@pytest.mark.parametrize("value", [0, -16, True])
@pytest.mark.parametrize("make", [DecodeConfig, PrefillConfig])
def test_sizes_are_integers_of_at_least_one(make, value):
    for field in dataclasses.fields(make):
        with pytest.raises(ValueError, match=rf"{field.name} \({value!r}\) must be an integer of"):
            make(**{field.name: value})


@pytest.mark.parametrize(
    ("make", "field"),
    [(DecodeConfig, "block_k"), (PrefillConfig, "block_k"), (PrefillConfig, "tile_rows")],
)
def test_tiles_are_powers_of_two_that_tensor_cores_take(make, field):
    for value in (1, 8, 24, 96):
        message = rf"{field} \({value}\) must be a power of two from 16 on"
        with pytest.raises(ValueError, match=message):
            make(**{field: value})
    assert [getattr(make(**{field: value}), field) for value in (16, 128)] == [16, 128]


@pytest.mark.parametrize("make", [DecodeConfig, PrefillConfig])
def test_warps_are_a_power_of_two_and_stages_any_number(make):
    with pytest.raises(ValueError, match=r"num_warps \(3\) must be a power of two from 1 on"):
        make(num_warps=3)
    assert make(num_warps=1, num_stages=5) == make(num_stages=5, num_warps=1)
    assert DecodeConfig(num_programs=1).num_programs == 1


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    """Writes a table file; None takes it away."""
    monkeypatch.setattr(config, "resources", SimpleNamespace(files=lambda _: tmp_path))
    (tmp_path / "tuned").mkdir()

    def write(content, name="h100"):
        config._table.cache_clear()
        if content is not None:
            text = content if isinstance(content, str) else json.dumps(content)
            (tmp_path / "tuned" / f"{name}.json").write_text(text)

    yield write
    config._table.cache_clear()


def test_entries_of_the_device_are_used(tuned):
    tuned(None)
    from_shapes = sizes_on(None)
    assert sizes_on(H100) == from_shapes
    assert ask(config.key) == KEY
    tuned({"paged_decode": {KEY: DECODE}, "paged_prefill": {KEY: PREFILL}})
    assert sizes_on(H100) == (DecodeConfig(**DECODE), PrefillConfig(**PREFILL))
    # Not for another device or another pool, nor where the device is not known.
    for kind in (None, "NVIDIA A100-SXM4-80GB", "some other"):
        assert sizes_on(kind) == from_shapes
    for other in ({"num_heads": 16}, {"dtype": "float16"}, {"q_dtype": "float16"}):
        assert sizes_on(H100, **other) == sizes_on(None, **other)
    # Each kernel has its own; a field that an entry lacks has its default.
    tuned({"paged_prefill": {KEY: {"block_k": 128}}})
    assert sizes_on(H100) == (from_shapes[0], PrefillConfig(block_k=128))


@pytest.mark.parametrize(
    "content",
    [
        None, "", "{", "[]", "3", "null", '"text"', '{"paged_decode": 3}', "\x00", {},
        '{"paged_decode": ["text"], "paged_prefill": null}', {"paged_decode": {}},
        # An entry of another version, one of no config, and sizes that are none.
        *(
            {"paged_decode": {KEY: entry}, "paged_prefill": {KEY: entry}}
            for entry in (None, 3, "text", [], [32, 4], {"swizzle": 3}, {"block_k": 24},
                          {"block_k": "32"}, {"num_warps": 0}, {"num_stages": None})
        ),
    ],
    ids=repr,
)  # fmt: skip
def test_what_cannot_be_read_or_used_is_no_entry(tuned, content):
    tuned(None)
    want = sizes_on(H100)
    tuned(content)
    assert sizes_on(H100) == want


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (H100, "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA GeForce RTX 4090", "nvidia_geforce_rtx_4090"),
        ("a/../b", "a_b"),
        (None, None),
    ],
)
def test_tables_are_named_after_the_device(kind, name):
    with on(kind):
        assert device.name() == name


def test_tiles_are_smaller_where_registers_are_few():
    assert sizes_on(None) == (DecodeConfig(), PrefillConfig())
    wide, exact = sizes_on(None, head_dim=256), sizes_on(None, dtype="float32", q_dtype="float32")
    assert wide[0].block_k == exact[0].block_k == 32
    assert (wide[1].num_warps, PrefillConfig().num_warps) == (8, 4)
    # Without tensor cores.
    assert (exact[1].tile_rows, exact[1].block_k) == (16, 16)
    many = sizes_on(None, num_heads=96, num_kv_heads=1)
    assert (many[0], many[1].num_warps) == (DecodeConfig(), 8)
