"""Blocks outside the pool: images on the host, and checkpoints that go on where they stopped."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from paged_jax import core
from paged_jax.core import CacheSpec, KVCache, PagedCache
from paged_jax.decode import create_row_state, decode_loop
from paged_jax.ledger import Ledger
from paged_jax.models.decoder import Decoder
from paged_jax.models.spec import uniform_spec
from tests.core.transitions import assert_same, ledger_of, state_of

# Three heads of 32: the row of a packed pool has room for four.
L, K, D, N, P = 2, 3, 32, 12, 4
SPEC = CacheSpec(num_layers=L, num_kv_heads=K, head_dim=D)
LAYOUTS = ("split", "packed")
OTHER = {"split": "packed", "packed": "split"}

swap_in = jax.jit(core.swap_in, donate_argnums=0)


def random_pool(seed: int, layout: str = "split", dtype: str = "float32") -> KVCache:
    """Every block holds numbers, the null block too; lanes that no head fills hold 0."""
    cache = core.create_kv_cache(SPEC, N, P, dtype, layout)
    kv = np.random.default_rng(seed).standard_normal(cache.kv.shape, dtype=np.float32)
    kv[..., K * D :] = 0.0
    return dataclasses.replace(cache, kv=jnp.asarray(kv, dtype))


def with_random_tags(cache: KVCache, seed: int) -> KVCache:
    tags = np.random.default_rng(seed).integers(1, 2**31, (N + 1, P), np.int32)
    return dataclasses.replace(cache, tags=jnp.asarray(tags))


def heads(cache: KVCache, ids) -> np.ndarray:
    """Keys and values [2, K, L, B, P, D] of some blocks, by the table of layouts in the design."""
    kv = np.asarray(cache.kv)[:, np.array(ids)]
    if cache.layout == "split":
        return np.stack([[kv[:, :, 2 * h + half, :, :D] for h in range(K)] for half in (0, 1)])
    lanes = [slice(h * D, (h + 1) * D) for h in range(K)]
    return np.stack([[kv[:, :, half, :, lane] for lane in lanes] for half in (0, 1)])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_image_holds_blocks_in_the_order_they_are_named(layout):
    cache = random_pool(0, layout)
    image = core.swap_out(cache, [7, 2, 5])
    assert isinstance(image.kv, np.ndarray)
    np.testing.assert_array_equal(image.kv, np.asarray(cache.kv)[:, [7, 2, 5]])
    assert (image.layout, image.num_kv_heads, image.head_dim) == (layout, K, D)
    assert image.tags is None


@pytest.mark.parametrize("targets", [(7, 2, 5), (1, 12, 3)], ids=["same", "other"])
def test_blocks_come_back_and_the_rest_stays(targets):
    image = core.swap_out(random_pool(0), [7, 2, 5])
    cache = random_pool(1)
    expected = np.array(cache.kv)
    expected[:, targets] = image.kv
    after = swap_in(cache, np.array(targets, np.int32), image)
    assert cache.kv.is_deleted(), "the pool was donated and written in place"
    np.testing.assert_array_equal(after.kv, expected)


def test_padding_goes_to_the_null_block():
    image = core.swap_out(random_pool(0), [0, 9, 0])
    np.testing.assert_array_equal(image.kv, np.asarray(random_pool(0).kv)[:, [0, 9, 0]])
    expected = np.array(random_pool(1).kv)
    expected[:, 4] = image.kv[:, 1]
    after = swap_in(random_pool(1), np.array([0, 4, 0], np.int32), image)
    np.testing.assert_array_equal(np.asarray(after.kv)[:, 1:], expected[:, 1:])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_image_fits_a_pool_of_the_other_layout(layout, dtype):
    source = random_pool(0, layout)
    cache = random_pool(1, OTHER[layout], dtype)
    before = np.array(cache.kv)
    after = swap_in(cache, np.array([1, 12, 3], np.int32), core.swap_out(source, [7, 2, 5]))
    assert (after.layout, after.kv.dtype) == (OTHER[layout], jnp.dtype(dtype))
    expected = heads(source, [7, 2, 5]).astype(dtype)
    np.testing.assert_array_equal(heads(after, [1, 12, 3]), expected)
    # Of a packed pool, that includes the lanes that no head fills.
    np.testing.assert_array_equal(np.asarray(after.kv)[..., K * D :], 0.0)
    rest = [block for block in range(N + 1) if block not in (1, 12, 3)]
    np.testing.assert_array_equal(np.asarray(after.kv)[:, rest], before[:, rest])


def test_an_image_fits_a_pool_with_wider_rows():
    source, target = random_pool(0), random_pool(1)
    # As on a TPU, whose rows are 128 lanes wide.
    wide = dataclasses.replace(target, kv=jnp.pad(target.kv, [(0, 0)] * 4 + [(0, 128 - D)]))
    ids = np.array([7, 2, 5], np.int32)
    after = swap_in(wide, ids, core.swap_out(source, ids))
    np.testing.assert_array_equal(heads(after, ids), heads(source, ids))
    np.testing.assert_array_equal(np.asarray(after.kv)[..., D:], 0.0)
    back = swap_in(random_pool(1), ids, core.swap_out(after, ids))
    np.testing.assert_array_equal(heads(back, ids), heads(source, ids))


@pytest.mark.parametrize(
    ("name", "shape", "heads_and_dim"),
    [
        ("num_layers", (L + 1, N + 1, 2 * K, P, D), (K, D)),
        ("num_kv_heads", (L, N + 1, 2 * K + 2, P, D), (K + 1, D)),
        ("head_dim", (L, N + 1, 2 * K, P, 2 * D), (K, 2 * D)),
        ("block_size", (L, N + 1, 2 * K, 2 * P, D), (K, D)),
    ],
)
def test_an_image_of_another_model_is_refused(name, shape, heads_and_dim):
    num_kv_heads, head_dim = heads_and_dim
    other = KVCache(
        kv=jnp.zeros(shape),
        scales=jnp.zeros(0),
        layout="split",
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )
    image = core.swap_out(other, [1, 2])
    with pytest.raises(ValueError, match=f"{name} of the image .* must be that of the pool"):
        core.swap_in(random_pool(0), [1, 2], image)


def written_pool(dtype: str, layout: str) -> KVCache:
    """Blocks 1 to 3 written in both layers, quantised where the pool is."""
    cache = core.create_kv_cache(SPEC, N, P, dtype, layout)
    rng = np.random.default_rng(5)
    for layer in range(L):
        keys, values = rng.standard_normal((2, 3 * P, K, D), dtype=np.float32)
        cache = core.write(cache, layer, keys, values, np.arange(P, 4 * P, dtype=np.int32))
    return cache


def read_back(cache: KVCache, table: list[int]) -> np.ndarray:
    table = np.array(table, np.int32)
    return np.stack([core.gather(cache, layer, table, 3 * P) for layer in range(L)])


@pytest.mark.parametrize("target", ["int8", "float8_e5m2", "float32"])
@pytest.mark.parametrize("source", ["int8", "float32"])
def test_scales_move_with_their_blocks(source, target):
    image = core.swap_out(written_pool(source, "split"), [1, 2, 3])
    pool = core.create_kv_cache(SPEC, N, P, target, "packed")
    after = swap_in(pool, np.array([7, 4, 12], np.int32), image)
    assert after.kv.dtype.name == target
    expected = read_back(written_pool(source, "split"), [1, 2, 3])
    got = read_back(after, [7, 4, 12])
    if target in (source, "float32"):
        np.testing.assert_array_equal(got, expected)
    else:
        # Rounded once more: half a unit of 2 bits of mantissa, or half a step of 127.
        largest = np.abs(expected).max(axis=-1, keepdims=True)
        error = 1 / 8 if target == "float8_e5m2" else 1 / 254
        assert (np.abs(got - expected) <= error * largest).all()


def test_an_8_bit_cache_is_restored_with_its_scales(tmp_path):
    blocks, _ = core.allocate(core.create_block_state(N, P, 2, 4), jnp.array([3 * P, 0]))
    kv = written_pool("int8", "packed")
    core.save_cache(tmp_path / "cache", PagedCache(blocks=blocks, kv=kv))
    for layout in LAYOUTS:
        restored = core.restore_cache(tmp_path / "cache", layout=layout)
        assert restored.kv.kv.dtype == jnp.int8
        np.testing.assert_array_equal(read_back(restored.kv, [1, 2, 3]), read_back(kv, [1, 2, 3]))


def test_an_image_of_another_number_of_blocks_is_refused():
    image = core.swap_out(random_pool(0), [1])
    with pytest.raises(ValueError, match="ids"):
        core.swap_in(random_pool(1), [1, 2, 5], image)


def test_tags_move_with_their_blocks():
    source, cache = with_random_tags(random_pool(0), 2), with_random_tags(random_pool(1), 3)
    expected = np.array(cache.tags)
    expected[[1, 12, 3]] = np.asarray(source.tags)[[7, 2, 5]]
    image = core.swap_out(source, [7, 2, 5])
    assert isinstance(image.tags, np.ndarray)
    after = swap_in(cache, np.array([1, 12, 3], np.int32), image)
    np.testing.assert_array_equal(after.tags, expected)
    # A pool without tags takes the blocks all the same.
    assert core.swap_in(random_pool(1), [1, 12, 3], image).tags is None


def test_blocks_of_an_image_without_tags_were_written_by_nobody():
    cache = with_random_tags(random_pool(1), 3)
    expected = np.array(cache.tags)
    expected[[1, 12, 3]] = 0
    image = core.swap_out(random_pool(0), [7, 2, 5])
    np.testing.assert_array_equal(core.swap_in(cache, [1, 12, 3], image).tags, expected)


def ledger() -> Ledger:
    """Rows 0 and 1 share [3, 4], of which 1 also has 5; row 2 holds [2]; block 1 is retained."""
    made = Ledger(N, P, 4, 3)
    made.allocate({3: 8})  # blocks 1 and 2
    made.allocate({0: 8})  # 3 and 4
    made.retain([1, 4])
    made.fork(0, 1)
    made.allocate({1: 2})  # 5
    made.free([3])  # 2 goes back, 1 stays
    made.allocate({2: 12})  # 2, 6 and 7
    made.truncate({2: 3, 0: 7})  # 6 and 7 go back
    return made


USED = [1, 2, 3, 4, 5]


def saved_cache(layout: str) -> PagedCache:
    """Free blocks and the null block hold NaN, and so do the slots past the end of row 2."""
    kv = random_pool(0, layout)
    unused = [block for block in range(N + 1) if block not in USED]
    poisoned = np.array(kv.kv)
    poisoned[:, unused] = np.nan
    poisoned[:, 2, :, 3:] = np.nan
    blocks = jax.tree.map(jnp.asarray, state_of(ledger()))
    return PagedCache(blocks=blocks, kv=dataclasses.replace(kv, kv=jnp.asarray(poisoned)))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """The same cache saved in either layout."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for layout in LAYOUTS:
        core.save_cache(folder / layout, saved_cache(layout))
    return folder


def stored_shape(path) -> tuple[int, ...]:
    """Shape of the KV array in a checkpoint, from its metadata."""
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.metadata(path / "kv").item_metadata["kv"].shape


@pytest.mark.parametrize(
    ("saved", "restored", "dtype"),
    [
        ("split", "split", None),
        ("packed", "packed", None),
        ("split", "packed", None),
        ("packed", "split", None),
        ("split", "packed", "bfloat16"),
        ("packed", "packed", "bfloat16"),
    ],
)
def test_a_cache_comes_back_in_any_layout(checkpoints, saved, restored, dtype):
    before = saved_cache(saved)
    after = core.restore_cache(checkpoints / saved, layout=restored, dtype=dtype)
    assert after.blocks.block_size == P
    assert_same(after.blocks, before.blocks)
    core.audit(after.blocks, np.bincount([1, 4], minlength=N + 1))
    assert after.kv.layout == restored
    assert after.kv.kv.dtype == jnp.dtype(dtype or "float32")
    # Every slot of every used block, in every layer: live or not, read by a row or retained.
    expected = heads(before.kv, USED).astype(after.kv.kv.dtype).astype(np.float32)
    np.testing.assert_array_equal(heads(after.kv, USED).astype(np.float32), expected)


def test_a_restored_row_reads_its_tokens(checkpoints):
    before = saved_cache("split")
    after = core.restore_cache(checkpoints / "split", layout="packed")
    tables, lengths = np.asarray(before.blocks.block_tables), np.asarray(before.blocks.lengths)
    assert lengths.tolist() == [7, 10, 3, 0]
    gather = jax.jit(core.gather)
    for row, layer in np.ndindex(4, L):
        where = (jnp.int32(layer), tables[row], jnp.int32(lengths[row]))
        np.testing.assert_array_equal(gather(after.kv, *where), gather(before.kv, *where))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_used_blocks_are_stored(checkpoints, layout):
    shape = saved_cache(layout).kv.kv.shape
    assert stored_shape(checkpoints / layout) == (L, len(USED), *shape[2:])


def test_what_free_blocks_held_does_not_come_back(checkpoints):
    kv = np.asarray(core.restore_cache(checkpoints / "split").kv.kv)
    unused = [block for block in range(N + 1) if block not in USED]
    np.testing.assert_array_equal(kv[:, unused], 0.0)


def test_an_empty_cache_comes_back_empty(tmp_path, monkeypatch):
    blocks = core.create_block_state(N, P, 4, 3)
    kv = random_pool(0, dtype="float16")
    kv = dataclasses.replace(core.with_tags(kv), kv=jnp.full_like(kv.kv, jnp.nan))
    monkeypatch.chdir(tmp_path)
    core.save_cache("below/here", PagedCache(blocks=blocks, kv=kv))
    assert stored_shape(tmp_path / "below" / "here")[1] == 1, "Orbax stores no empty arrays"
    after = core.restore_cache("below/here")
    assert_same(after.blocks, blocks)
    assert after.kv.kv.dtype == jnp.float16
    assert after.kv.tags is None
    assert not np.isnan(np.asarray(after.kv.kv)[:, 1:]).any()


def test_a_path_that_exists_is_refused(tmp_path):
    cache = saved_cache("split")
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(ValueError, match="must not exist yet"):
            core.save_cache(path, cache)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_directory_of_somebody_else_is_refused(tmp_path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "weights", {"weight": np.ones(3)})
    for path in (tmp_path / "absent", tmp_path, tmp_path / "weights"):
        with pytest.raises(ValueError, match="must be a directory that save_cache wrote"):
            core.restore_cache(path)


def test_a_directory_with_metadata_of_somebody_else_is_refused(tmp_path):
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        args = ocp.args.Composite(meta=ocp.args.JsonSave({"format": 1}))
        checkpointer.save(tmp_path / "other", args)
    with pytest.raises(ValueError, match="must be a directory that save_cache wrote"):
        core.restore_cache(tmp_path / "other")


def test_a_format_of_the_future_is_refused(tmp_path):
    core.save_cache(tmp_path / "cache", saved_cache("split"))
    path = tmp_path / "cache" / "meta" / "metadata"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 2}))
    with pytest.raises(ValueError, match="has format 2; this version reads 1"):
        core.restore_cache(tmp_path / "cache")


def test_a_layout_that_does_not_fit_is_refused(checkpoints):
    with pytest.raises(ValueError, match="latent"):
        core.restore_cache(checkpoints / "split", layout="latent")


S, STEPS = 4, 6


@pytest.fixture(scope="module")
def decoding():
    """A loop of 6 steps over a toy whose heads can be packed, and where it stood after one run.

    Row 1 has ended and gave back its blocks, so that the stack is out of order. Row 2 is a fork of
    row 0 in the middle of a block and goes on with another token.
    """
    spec = uniform_spec(
        vocab_size=258,
        hidden_size=32,
        num_layers=1,
        num_heads=2 * K,
        num_kv_heads=K,
        head_dim=D,
        mlp_size=48,
        norm_eps=1e-6,
        max_position_embeddings=512,
    )
    graphdef, shapes = nnx.split(nnx.eval_shape(lambda: Decoder(spec, rngs=nnx.Rngs(7))))
    rng = np.random.default_rng(0)

    def draw(shape: jax.ShapeDtypeStruct) -> jax.Array:
        """A weight; the model's own initialisation would take seconds to compile."""
        return jnp.asarray(rng.standard_normal(shape.shape, np.float32) / 4)

    params = jax.tree.map(draw, shapes)

    def step(params, batch, cache):
        model = nnx.merge(graphdef, params)
        hidden, cache = model(batch, cache)
        return model.logits(hidden), cache

    @functools.partial(jax.jit, donate_argnums=0)
    def run(cache, rows):
        return decode_loop(step, params, cache, rows, num_steps=STEPS)

    blocks = core.create_block_state(N, P, S, 5)
    kv = core.create_kv_cache(dataclasses.replace(SPEC, num_layers=1), N, P, "float32", "split")
    rows = dataclasses.replace(
        create_row_state(S),
        token=np.array([5, 77, 0, 130], np.int32),
        steps_left=np.full(S, 100, np.int32),
        finished=np.array([False, False, True, False]),
    )
    cache, rows, _ = run(PagedCache(blocks=blocks, kv=kv), rows)
    changed = ledger_of(cache.blocks)
    changed.free([1])
    changed.fork(0, 2)
    rows = dataclasses.replace(
        rows,
        token=np.where(np.arange(S) == 2, 200, rows.token),
        position=np.array(changed.lengths, np.int32),
        finished=np.arange(S) == 1,
    )
    blocks = jax.tree.map(jnp.asarray, state_of(changed))
    return run, PagedCache(blocks=blocks, kv=cache.kv), rows


def copied(cache: PagedCache) -> PagedCache:
    """For a call that donates it."""
    return jax.tree.map(jnp.array, cache)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_restored_cache_goes_on_with_the_same_tokens_and_blocks(decoding, tmp_path, layout):
    run, cache, rows = decoding
    core.save_cache(tmp_path / "cache", cache)
    expected, expected_rows, expected_tokens = run(copied(cache), rows)
    assert expected_rows.position.tolist() == [12, 0, 12, 12]
    restored = core.restore_cache(tmp_path / "cache", layout=layout)
    after, rows, tokens = run(restored, rows)
    np.testing.assert_array_equal(tokens, expected_tokens)
    assert_same(after.blocks, expected.blocks)
    for found, wanted in zip(jax.tree.leaves(rows), jax.tree.leaves(expected_rows), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_the_tokens_depend_on_what_the_blocks_hold(decoding):
    run, cache, rows = decoding
    _, _, expected = run(copied(cache), rows)
    kv = dataclasses.replace(cache.kv, kv=jnp.zeros_like(cache.kv.kv))
    _, _, tokens = run(copied(dataclasses.replace(cache, kv=kv)), rows)
    for row in (0, 2, 3):
        assert tokens[:, row].tolist() != expected[:, row].tolist()
