"""Debug mode finds planted faults that the block state alone does not show.

The model neither reads nor writes the pool: tags are written by the step, beside any model.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged_jax import ops
from paged_jax.config import EngineConfig
from paged_jax.core import AuditError, CacheSpec
from paged_jax.engine import Engine
from paged_jax.engine import step as step_module
from tests.engine.harness import PLAIN, assert_idle, run_all
from tests.engine.plans import GREEDY, Player, decode, prefill

VOCAB = 8


class Parrot(nnx.Module):
    """Repeats its last token for ever."""

    def cache_spec(self) -> CacheSpec:
        return CacheSpec(num_layers=1, num_kv_heads=1, head_dim=1)

    def __call__(self, batch, cache):
        return jax.nn.one_hot(batch.tokens, VOCAB), cache

    def logits(self, hidden):
        return hidden


PROMPT = [1, 2, 3, 4, 5, 6]


def make_parrot(debug: bool = True) -> Engine:
    """An engine of 12 blocks of 4 tokens and 4 rows, with one program for all plans."""
    sizes = {"block_size": 4, "num_blocks": 12, "max_num_seqs": 4}
    limits = {"max_model_len": 16, "max_num_batched_tokens": 16}
    engine = Engine(Parrot(), EngineConfig(debug=debug, **PLAIN, **sizes, **limits))
    engine.runner.programs = engine.runner.programs[-1:]
    return engine


def forked(monkeypatch: pytest.MonkeyPatch) -> Player:
    """Rows 0 and 1 share six tokens of request a in blocks 1 and 2; row 3 holds three of c in 3."""
    player = Player(make_parrot(), monkeypatch)
    for name in "abc":
        player.add(name, PROMPT)
    player.play(prefill("a", 0, 0, 6), prefill("c", 3, 0, 3, is_sampled=False))
    player.play(forks=((0, 1),))
    return player


def append_to_both(player: Player) -> None:
    """Rows 0 and 1 write into block 2: row 1 copies it to block 4."""
    player.play(decode("a", 0, 6), decode("b", 1, 6))


def assert_found(player: Player, message: str) -> None:
    with pytest.raises(AuditError) as error:
        append_to_both(player)
    assert str(error.value) == message


def test_nothing_is_found_where_nothing_is_wrong(monkeypatch):
    player = forked(monkeypatch)
    append_to_both(player)
    assert player.tables == {0: [1, 2], 1: [1, 4], 3: [3]}
    assert [player.read_by(row) for row in (0, 1, 3)] == ["a 0-6", "a 0-5, b 6", "c 0-2"]
    assert player.tokens == {"a": [6, 6], "b": [6], "c": []}


def test_a_copy_that_the_step_skips_is_found(monkeypatch):
    # A step of its own, traced without copies: steps are shared by engines of equal models.
    monkeypatch.setattr("paged_jax.engine.runner.make_step", step_module._build_step)
    monkeypatch.setattr(ops, "copy_kv", lambda cache, src, dst: cache)
    assert_found(
        forked(monkeypatch),
        "row 1 reads position 4 from block 4, offset 0, and finds a slot that nobody has written "
        "there (2 of 7 positions are wrong)",
    )


def test_a_slot_that_somebody_else_wrote_is_found(monkeypatch):
    player = forked(monkeypatch)
    kv = player.engine.runner.kv
    tag_of_c = kv.tags[3, 2]
    player.engine.runner.kv = dataclasses.replace(kv, tags=kv.tags.at[1, 3].set(tag_of_c))
    assert_found(
        player,
        "row 0 reads position 3 from block 1, offset 3, and finds position 2 of row 3 there "
        "(1 of 7 positions are wrong)",
    )


def test_tables_that_are_wrong_on_device_and_host_alike_are_found(monkeypatch):
    player = forked(monkeypatch)
    runner, tables = player.engine.runner, player.ledger.tables
    # Rows 1 and 3 change a block: every count and sum is still right.
    tables[1][0], tables[3][0] = 3, 1
    block_tables = runner.blocks.block_tables.at[1, 0].set(3).at[3, 0].set(1)
    runner.blocks = dataclasses.replace(runner.blocks, block_tables=block_tables)
    assert_found(
        player,
        "row 1 reads position 0 from block 3, offset 0, and finds position 0 of row 3 there "
        "(4 of 7 positions are wrong)",
    )


def test_a_block_that_is_owned_and_free_is_found(monkeypatch):
    player = forked(monkeypatch)
    blocks = player.engine.runner.blocks
    player.engine.runner.blocks = dataclasses.replace(
        blocks, free_blocks=blocks.free_blocks.at[0].set(3)
    )
    assert_found(player, "block 3: is free and has owners (count 1)")


def test_ids_that_are_not_those_of_the_ledger_are_found(monkeypatch):
    player = forked(monkeypatch)
    blocks = player.engine.runner.blocks
    swapped = blocks.free_blocks.at[jnp.array([0, 1])].set(blocks.free_blocks[jnp.array([1, 0])])
    player.engine.runner.blocks = dataclasses.replace(blocks, free_blocks=swapped)
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        append_to_both(player)


def test_after_a_fault_the_engine_starts_over(monkeypatch):
    player = forked(monkeypatch)
    kv = player.engine.runner.kv
    player.engine.runner.kv = dataclasses.replace(kv, tags=jnp.zeros_like(kv.tags))
    with pytest.raises(AuditError, match=r"row 0 reads position 0 .* nobody has written"):
        append_to_both(player)
    monkeypatch.undo()
    engine = player.engine
    assert engine.stats()["num_free"] == engine.stats()["num_blocks"]
    # Nobody is lost: who was in goes on with the tokens that were read.
    engine.error = None
    requests = [("d", [1, 2, 3, 4, 5, 0], GREEDY), ("e", [1, 7, 6], GREEDY)]
    run = run_all(engine, requests)
    assert (run.tokens("d"), run.tokens("e")) == ([0] * 10, [6] * 12)
    assert [run.tokens(name) for name in "abc"] == [[6] * 10] * 3
    assert_idle(engine)


def test_blocks_that_no_row_holds_are_counted_as_long_as_they_are_retained(monkeypatch):
    player = forked(monkeypatch)
    player.play(retain_ids=(2, 1))
    player.play(free_rows=(0, 1))
    player.play(shares=((2, (1, 2), 6),))
    assert player.read_by(2) == "a 0-5"
    player.play(release_ids=(1,), free_rows=(2,))
    player.play(release_ids=(2,))
    assert player.ledger.num_free == 11, "all but the block of row 3"


def test_a_retained_block_is_known_by_the_row_that_reads_most_of_it(monkeypatch):
    player = forked(monkeypatch)
    player.play(truncated=((1, 5),))
    player.play(retain_ids=(1, 2))
    player.play(free_rows=(0, 1), shares=((2, (1, 2), 6),))
    assert player.read_by(2) == "a 0-5"


def test_blocks_that_only_rows_hold_can_be_shared(monkeypatch):
    player = forked(monkeypatch)
    player.play(shares=((2, (1,), 4),))
    assert player.read_by(2) == "a 0-3"


@pytest.mark.parametrize("debug", [True, False])
def test_only_debug_mode_carries_tags(debug):
    tags = make_parrot(debug).runner.kv.tags
    if debug:
        assert (tags.shape, tags.dtype) == ((13, 4), jnp.int32)
        assert not np.asarray(tags).any()
    else:
        assert tags is None
