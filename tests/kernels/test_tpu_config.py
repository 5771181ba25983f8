"""Sizes of tiles and buffers: legal for what is served on every chip, and those of the table."""

import contextlib
import dataclasses
import functools
import importlib.util
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from pallas_kernels.tpu import config
from pallas_kernels.tpu.config import DecodeConfig, PrefillConfig
from pallas_kernels.tpu.heads import heads_of
from pallas_kernels.tpu.tables import SMEM_TABLE_BYTES
from tests.aot.shapes import NUM_TOKENS, POOLS, SHAPES

MIB = 1 << 20
DEFAULT_VMEM_BYTES = 16 * MIB  # without a limit of the kernel's own
ROOT = Path(__file__).resolve().parents[2]

# Kind of device: TensorCores, bytes of vector memory. The last is no device that JAX knows.
CHIPS = {
    "TPU v5 lite": (1, 128 * MIB),
    "TPU v5p": (2, 64 * MIB),
    "TPU v6e": (1, 128 * MIB),
    "TPU7x": (1, 64 * MIB),
    "unknown": (1, 64 * MIB),
}
POOL_CASES = [
    (name, block_size, dtype)
    for name, shape in SHAPES.items()
    for dtype in POOLS
    for block_size in shape.block_sizes
    if jnp.dtype(dtype).itemsize > 1 or block_size == 128
]


def on(kind):
    """Traces for a device that is not there."""
    if kind == "unknown":
        return contextlib.nullcontext()
    device = AbstractDevice(device_kind=kind, num_cores=CHIPS[kind][0], platform="tpu")
    axes = {"axis_types": (AxisType.Auto,), "abstract_device": device}
    return use_abstract_mesh(AbstractMesh((1,), ("x",), **axes))


@dataclasses.dataclass(kw_only=True)
class Pool:
    """What configs are asked for; a pool without memory."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    dtype: str = "bfloat16"

    @functools.cached_property
    def heads(self):
        return self.ask(lambda heads, kv, q_dtype: heads)

    @property
    def key(self):
        return self.ask(config.key)

    @property
    def token_bytes(self):
        """Keys and values of a token in a layer, without scales."""
        return 2 * self.heads.pool_heads * self.heads.width * jnp.dtype(self.dtype).itemsize

    @property
    def q_dtype(self):
        return jnp.dtype("float32" if self.dtype == "float32" else "bfloat16")

    def ask(self, fn, **options):
        per_row = max(1, 128 // self.head_dim)
        rows = 2 * -(-self.num_kv_heads // per_row)
        shape, found = (1, 2, rows, self.block_size, per_row * self.head_dim), []

        def trace(kv):
            heads = heads_of((self.num_heads, self.head_dim), kv, self.num_kv_heads)
            found.append(fn(heads, kv, self.q_dtype, **options))

        jax.eval_shape(trace, jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype)))
        return found[0]

    def decode(self, *, rows=64, max_tokens=8192):
        return self.ask(config.decode_config, num_rows=rows, max_tokens=max_tokens)

    def prefill(self, *, tokens=NUM_TOKENS, max_tokens=8192):
        return self.ask(config.prefill_config, num_tokens=tokens, max_tokens=max_tokens)


def pool_of(name, block_size, dtype):
    shape = SHAPES[name]
    numbers = {f: getattr(shape, f) for f in ("num_heads", "num_kv_heads", "head_dim")}
    return Pool(**numbers, block_size=block_size, dtype=dtype)


def check_vmem(kind, found, needed):
    """`needed` bytes are there, and a fifth beside them for what the compiler spills."""
    limit = found.vmem_limit_bytes
    assert limit is None or DEFAULT_VMEM_BYTES < limit < CHIPS[kind][1]
    assert needed * 5 // 4 <= (limit or DEFAULT_VMEM_BYTES)


def check_decode(kind, pool, found, *, rows, max_tokens):
    heads = pool.heads
    assert found.block_tokens > 0
    assert found.block_tokens % pool.block_size == 0
    assert heads.pool_heads % found.heads_per_tile == 0
    assert found.num_buffers >= 2
    assert found.num_cores == CHIPS[kind][0]
    table_bytes = 4 * rows * max_tokens // pool.block_size
    scalars = 4 * rows * -(-max_tokens // found.block_tokens) + 4 * rows
    scalars += table_bytes if table_bytes <= SMEM_TABLE_BYTES else 8 * max_tokens // pool.block_size
    assert scalars <= MIB * 7 // 8
    scales = 8 * pool.num_kv_heads if jnp.dtype(pool.dtype).itemsize == 1 else 0
    tile_rows = -(-found.heads_per_tile * heads.queries // 8) * 8
    num_tiles = heads.pool_heads // found.heads_per_tile
    row_bytes = num_tiles * tile_rows * heads.width * 4  # queries or outputs of a row
    needed = found.num_buffers * (found.block_tokens * (pool.token_bytes + scales) + row_bytes)
    check_vmem(kind, found, needed + 4 * row_bytes)


def check_prefill(kind, pool, found, *, tokens):
    heads, steps = pool.heads, found.heads_per_step
    assert found.tile_tokens >= 16
    assert math.log2(found.tile_tokens).is_integer()
    assert found.tile_tokens == 16 or found.tile_tokens < 2 * tokens
    assert found.chunk_tokens > 0
    assert found.chunk_tokens % pool.block_size == 0
    assert heads.pool_heads % steps == 0
    buffers = 2 * found.chunk_tokens * pool.token_bytes * steps // heads.pool_heads
    tile_rows = steps * found.tile_tokens * heads.queries
    # Queries and outputs come and go in two buffers each; maxima, sums and sums of values stay.
    tiles = tile_rows * heads.width * 4 * pool.q_dtype.itemsize
    state = tile_rows * (2 * 128 + heads.width) * 4
    check_vmem(kind, found, buffers + tiles + state)


@pytest.mark.parametrize("kind", CHIPS)
def test_what_is_served_gets_legal_sizes(kind):
    for name, block_size, dtype in POOL_CASES:
        shape, pool = SHAPES[name], pool_of(name, block_size, dtype)
        with on(kind):
            for rows in (1, shape.decode_rows):
                sizes = {"rows": rows, "max_tokens": shape.context_len}
                check_decode(kind, pool, pool.decode(**sizes), **sizes)
            for tokens in (1, 100, NUM_TOKENS):
                found = pool.prefill(tokens=tokens, max_tokens=shape.context_len)
                check_prefill(kind, pool, found, tokens=tokens)


@pytest.mark.parametrize("max_tokens", [16, 128, 1000])
def test_tables_shorter_than_an_item_get_short_items(max_tokens):
    for block_size, unit in ((8, 128), (16, 128), (24, 24), (128, 128), (256, 256)):
        pool = Pool(block_size=block_size)
        want = max(unit, max_tokens // unit * unit)
        assert pool.decode(max_tokens=max_tokens).block_tokens == want
        want = max(unit, min(max_tokens, 512) // unit * unit)
        assert pool.prefill(max_tokens=max_tokens).chunk_tokens == want


def test_items_are_of_four_mebibytes_and_tiles_of_eight_rows():
    found = Pool().decode()
    assert found.block_tokens * Pool().token_bytes == 4 * MIB
    assert found.heads_per_tile == 2  # heads of four queries
    assert Pool(num_heads=64, num_kv_heads=4).decode().heads_per_tile == 1
    assert Pool(num_heads=8).decode().heads_per_tile == 8
    found = Pool().prefill()
    assert (found.tile_tokens, found.chunk_tokens, found.heads_per_step) == (128, 512, 8)
    assert Pool(block_size=128).prefill().heads_per_step == 1


@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("kind", CHIPS)
def test_256_rows_of_4096_blocks_are_served(kind, block_size):
    pool, sizes = Pool(block_size=block_size), {"rows": 256, "max_tokens": 4096 * block_size}
    with on(kind):
        check_decode(kind, pool, pool.decode(**sizes), **sizes)


@pytest.mark.parametrize(("kind", "vmem"), [("TPU v5p", 64 * MIB), ("TPU v6e", 128 * MIB)])
def test_a_work_list_that_cannot_fit_is_refused_with_its_sizes(kind, vmem):
    pattern = (
        f"16384 rows of 1048576 tokens needs more than {320 * 1024} bytes of scalar memory, "
        f"even in the largest items that {vmem} bytes of vector memory hold"
    )
    with on(kind), pytest.raises(NotImplementedError, match=pattern):
        Pool().decode(rows=16384, max_tokens=MIB)
    with on("TPU v5p"), pytest.raises(NotImplementedError, match="256 rows of 524288 tokens"):
        Pool(head_dim=256, dtype="float32").decode(rows=256, max_tokens=MIB // 2)


DECODE = {"block_tokens": 256, "heads_per_tile": 4, "num_buffers": 3, "num_cores": 1}
PREFILL = {"tile_tokens": 32, "chunk_tokens": 256, "heads_per_step": 2}


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    """Writes a table file; None takes it away."""
    monkeypatch.setattr(config, "resources", SimpleNamespace(files=lambda _: tmp_path))
    (tmp_path / "tuned").mkdir()

    def write(content, name="v6e"):
        config._table.cache_clear()
        if content is not None:
            text = content if isinstance(content, str) else json.dumps(content)
            (tmp_path / "tuned" / f"{name}.json").write_text(text)

    yield write
    config._table.cache_clear()


def sizes_on(kind):
    with on(kind):
        return Pool().decode(), Pool().prefill()


def test_entries_of_the_chip_are_used(tuned):
    tuned(None)
    from_shapes = sizes_on("TPU v6e")
    kernels = {"paged_decode": {Pool().key: DECODE}, "paged_prefill": {Pool().key: PREFILL}}
    tuned(kernels)
    assert sizes_on("TPU v6e") == (DecodeConfig(**DECODE), PrefillConfig(**PREFILL))
    # Not for another chip or another pool, nor where the chip is not known.
    for kind in ("TPU v5 lite", "unknown"):
        for found, want in zip(sizes_on(kind), from_shapes, strict=True):
            limit = found.vmem_limit_bytes
            assert found == dataclasses.replace(want, vmem_limit_bytes=limit)
    with on("TPU v6e"):
        for other in (Pool(block_size=32), Pool(dtype="float32"), Pool(num_heads=16)):
            assert other.key != Pool().key
            assert other.decode().num_buffers == 2
    # A table too long for the list makes items longer.
    with on("TPU v6e"):
        found = Pool().decode(rows=256, max_tokens=131072)
    assert (found.block_tokens, found.num_buffers) == (512, 3)
    # An entry is for one kernel.
    tuned({"paged_prefill": kernels["paged_prefill"]})
    assert sizes_on("TPU v6e") == (from_shapes[0], PrefillConfig(**PREFILL))


def test_large_buffers_of_an_entry_ask_for_memory(tuned):
    tuned({"paged_decode": {Pool().key: DECODE | {"block_tokens": 2048}}})
    with on("TPU v6e"):
        found = Pool().decode()
        check_decode("TPU v6e", Pool(), found, rows=64, max_tokens=8192)
    assert found.vmem_limit_bytes == 96 * MIB


@pytest.mark.parametrize(
    "content",
    [
        None, "", "{", "[]", "3", "null", '"text"', '{"paged_decode": 3}',
        '{"paged_decode": ["text"], "paged_prefill": null}', "\x00", {}, {"paged_decode": {}},
    ],
)  # fmt: skip
def test_a_table_that_cannot_be_read_is_no_table(tuned, content):
    tuned(None)
    want = sizes_on("TPU v6e")
    tuned(content)
    assert sizes_on("TPU v6e") == want


MISFITS = {
    "of_another_version": {"swizzle": 3},
    "part_of_a_block": {"block_tokens": 24, "chunk_tokens": 24},
    "part_of_a_register": {"block_tokens": 16, "chunk_tokens": 16},
    "no_divisor": {"heads_per_tile": 3, "heads_per_step": 3},
}


@pytest.mark.parametrize("name", MISFITS)
def test_an_entry_that_does_not_fit_is_left_out(tuned, name):
    tuned(None)
    want, changed = sizes_on("TPU v6e"), MISFITS[name]
    is_new = name == "of_another_version"
    decode, prefill = (
        entry | {f: value for f, value in changed.items() if is_new or f in entry}
        for entry in (DECODE, PREFILL)
    )
    tuned({"paged_decode": {Pool().key: decode}, "paged_prefill": {Pool().key: prefill}})
    assert sizes_on("TPU v6e") == want


@pytest.mark.parametrize("entry", [None, 3, "text", [], [256, 4], {"block_tokens": 256}])
def test_an_entry_without_the_fields_of_a_config_is_left_out(monkeypatch, entry):
    monkeypatch.setattr(config, "_table", lambda device: {"paged_decode": {Pool().key: entry}})
    with on("TPU v6e"):
        assert config.lookup("paged_decode", Pool().key, DecodeConfig) is None


WRONG_VALUES = [
    ("block_tokens", "256"), ("block_tokens", None), ("block_tokens", 256.0), ("block_tokens", 0),
    ("block_tokens", -256), ("block_tokens", 1 << 20), ("heads_per_tile", 0),
    ("heads_per_tile", -1), ("num_buffers", "2"), ("num_buffers", 0), ("num_buffers", 200),
    ("num_cores", 0), ("tile_tokens", "32"), ("tile_tokens", 0), ("tile_tokens", -16),
    ("tile_tokens", 48), ("chunk_tokens", "256"), ("chunk_tokens", 0), ("chunk_tokens", 1 << 20),
    ("heads_per_step", 0),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), WRONG_VALUES)
def test_an_entry_with_a_value_that_cannot_be_is_left_out(monkeypatch, field, value):
    # As users import it: the hook of these tests would check types of fields.
    spec = importlib.util.spec_from_file_location("config_without_hook", config.__file__)
    plain = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plain)
    kernel, entry, ask = "paged_prefill", PREFILL, plain.prefill_config
    sizes = {"num_tokens": 64, "max_tokens": 8192}
    if field in DECODE:
        kernel, entry, ask = "paged_decode", DECODE, plain.decode_config
        sizes = {"num_rows": 64, "max_tokens": 8192}
    found = []
    for table in ({}, {kernel: {Pool().key: entry | {field: value}}}):
        monkeypatch.setattr(plain, "_table", lambda device, table=table: table)
        with on("TPU v6e"):
            found.append(Pool().ask(ask, **sizes))
    assert found[1] == found[0]


@pytest.mark.parametrize(("kind", "name"), [("TPU v5 lite", "v5e"), ("TPU7x", "7x")])
def test_tables_are_named_after_the_chip(tuned, kind, name):
    tuned({"paged_decode": {Pool().key: DECODE}}, name)
    assert sizes_on(kind)[0].num_buffers == 3


def test_both_cores_of_a_v5p_share_the_list():
    assert [sizes_on(kind)[0].num_cores for kind in ("TPU v5p", "TPU v6e")] == [2, 1]


@pytest.fixture
def tune(monkeypatch):
    """The script that fills the tables."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.delitem(sys.modules, "tune", raising=False)
    import tune

    return tune


def test_tune_refuses_to_measure_without_a_tpu(tune, monkeypatch, capsys):
    monkeypatch.setattr(tune, "inputs_of", lambda *_: pytest.fail("allocates"))
    assert tune.main([]) == 2
    assert "measures on a TPU, and JAX found" in capsys.readouterr().err


def test_tune_says_what_it_would_do(tune, monkeypatch, capsys):
    monkeypatch.setattr(tune, "inputs_of", lambda *_: pytest.fail("allocates"))
    asked = ["--shapes", "llama3-8b", "--block-sizes", "16,128", "--pool-dtypes", "int8,bfloat16"]
    assert tune.main(["--dry-run", "--device-kind", "TPU v5p", *asked]) == 0
    text = capsys.readouterr().out
    assert "decode llama3-8b, blocks of 16, bfloat16: entry J8 Q4 C128 P16 bfloat16" in text
    assert "decode llama3-8b, blocks of 16, int8: left out, block_size 16" in text
    assert "block_tokens=1024 heads_per_tile=8 num_buffers=4 num_cores=2" in text
    assert "tile_tokens=64 chunk_tokens=1024 heads_per_step=1" in text


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernel", ["decode", "prefill"])
def test_tune_measures_and_adds_an_entry_that_is_used(tune, tuned, kernel, tmp_path, capsys):
    path = tmp_path / "tuned" / "v6e.json"
    others = {"paged_copy": {"some": {"z": 1, "a": 2}}, f"paged_{kernel}": {"other": {"x": 3}}}
    tuned(others)
    options = ["--interpret", "--kernels", kernel, "--repeats", "1", "--output", str(path)]
    assert tune.main([*options, "--min-gain", "-0.999"]) == 0
    key = Pool(num_heads=2, num_kv_heads=1, block_size=128).key
    found = json.loads(path.read_text())
    entry = found[f"paged_{kernel}"].pop(key)
    assert found == others
    assert "from shapes" in capsys.readouterr().out
    config._table.cache_clear()
    pool = Pool(num_heads=2, num_kv_heads=1, block_size=128)
    with on("TPU v6e"):
        used = pool.decode() if kernel == "decode" else pool.prefill(tokens=16)
    assert dataclasses.asdict(used) == entry | {"vmem_limit_bytes": None}
    assert list(path.parent.iterdir()) == [path]


def test_tune_keeps_an_entry_only_for_more_than_the_gain(tune, tmp_path):
    times = {"from shapes": 100.0, "a": 98.5, "b": 98.2}
    assert tune.choose(times, 0.02) is None
    assert tune.choose(times | {"c": 98.0}, 0.02) == "c"
    assert tune.choose({"a": 3.0, "b": 2.0}, 0.02) == "b"  # the others do not compile
    path = tmp_path / "v6e.json"
    tune.merge(path, "paged_decode", "key", DecodeConfig(block_tokens=256, heads_per_tile=1))
    tune.merge(path, "paged_decode", "another", DecodeConfig(block_tokens=512, heads_per_tile=1))
    tune.merge(path, "paged_decode", "key", None)
    assert list(json.loads(path.read_text())["paged_decode"]) == ["another"]
