"""Plans that move blocks between rows: ids worked out by hand, and the tokens that follow.

Every plan runs in debug mode, so the engine also compares its blocks with the ledger and its tags
with the shadow. Blocks hold 4 tokens.
"""

import dataclasses
import functools
import random

import numpy as np
import pytest

from paged_jax import core
from paged_jax.engine import Engine
from paged_jax.ledger import Ledger
from paged_jax.plan import Plan
from tests.core.histories import PARTS, History, plan_of
from tests.core.transitions import assert_same, state_of
from tests.engine.harness import BLOCK, PLAIN, make_engine, run_all
from tests.engine.plans import GREEDY, Player, choice, decode, prefill


def one_program(model) -> Engine:
    """An engine that runs all plans in its largest program, so that no other is compiled."""
    engine = make_engine(model, **PLAIN)
    engine.runner.programs = engine.runner.programs[-1:]
    return engine


@pytest.fixture
def player(toy, monkeypatch) -> Player:
    return Player(one_program(toy), monkeypatch)


@pytest.fixture(scope="module")
def alone(toy):
    """Callable (prompt) -> the tokens that follow it in an engine of its own."""
    engine = one_program(toy)

    @functools.cache
    def run(prompt: tuple[int, ...]) -> list[int]:
        return run_all(engine, [("alone", prompt, GREEDY)]).tokens("alone")

    return lambda prompt: run(tuple(prompt))


@pytest.fixture
def prompt(rng) -> list[int]:
    return rng.integers(0, 258, 10).tolist()


def test_forked_rows_say_what_their_parent_says(player, prompt, alone):
    for name in "abc":
        player.add(name, prompt[:6])
    player.play(prefill("a", 0, 0, 6))
    # Row 2 is a child and then a parent. All three write into block 2, which the lowest keeps.
    player.play(decode("a", 0, 6), decode("b", 2, 6), decode("c", 5, 6), forks=((0, 2), (2, 5)))
    assert player.tables == {0: [1, 2], 2: [1, 3], 5: [1, 4]}
    assert player.ledger.refcounts[:5] == [0, 3, 1, 1, 1]
    for position in range(7, 12):
        # The order of segments need not be that of rows.
        player.play(*(decode(name, row, position) for name, row in (("c", 5), ("a", 0), ("b", 2))))
    reads = [player.read_by(row) for row in (0, 2, 5)]
    assert reads == ["a 0-11", "a 0-5, b 6-11", "a 0-5, c 6-11"]
    expected = alone(prompt[:6])
    assert player.tokens["a"] == expected[:7]
    assert player.tokens["b"] == player.tokens["c"] == expected[1:7]


def test_a_child_goes_on_when_its_parent_is_freed(player, prompt, alone):
    player.add("a", prompt[:6])
    player.add("b", prompt[:6])
    player.play(prefill("a", 0, 0, 6))
    player.play(forks=((0, 3),))  # a plan without tokens runs no model
    assert player.tables == {0: [1, 2], 3: [1, 2]}
    assert player.ledger.lengths[:4] == [6, 0, 0, 6]
    player.play(decode("b", 3, 6), free_rows=(0,))
    assert player.tables == {3: [1, 2]}, "the only owner writes in place"
    player.play(decode("b", 3, 7))
    assert player.read_by(3) == "a 0-5, b 6-7"
    assert player.tokens["b"] == alone(prompt[:6])[1:3]


def test_shared_blocks_are_read_as_their_own_by_later_rows(player, prompt, alone):
    for name in "abc":
        player.add(name, prompt)
    player.play(prefill("a", 0, 0, 10))
    player.play(decode("a", 0, 10), retain_ids=(1, 2))
    player.play(free_rows=(0,))
    assert player.ledger.refcounts[:4] == [0, 1, 1, 0]
    # Row 0 takes both blocks; row 4 takes six of their tokens, writes into block 2 and copies it.
    player.play(
        prefill("b", 0, 8, 2),
        prefill("c", 4, 6, 4),
        shares=((0, (1, 2), 8), (4, (1, 2), 6)),
    )
    # Growth comes before copies: row 0 takes 3, row 4 grows by 4 and copies block 2 to 5.
    assert player.tables == {0: [1, 2, 3], 4: [1, 5, 4]}
    assert player.ledger.refcounts[:6] == [0, 3, 2, 1, 1, 1]
    assert player.read_by(0) == "a 0-7, b 8-9"
    assert player.read_by(4) == "a 0-5, c 6-9"
    player.play(decode("b", 0, 10), decode("c", 4, 10))
    expected = alone(prompt)
    assert player.tokens["a"] == player.tokens["b"] == player.tokens["c"] == expected[:2]


def test_released_blocks_go_back_when_their_last_owner_lets_go(player, prompt):
    player.add("a", prompt)
    player.play(prefill("a", 0, 0, 10))
    # Retained before the row writes into it, block 3 is left for a copy.
    player.play(decode("a", 0, 10), retain_ids=(3, 1, 1))
    assert player.tables == {0: [1, 2, 4]}
    assert player.ledger.refcounts[:5] == [0, 3, 1, 1, 1]
    player.play(decode("a", 0, 11), release_ids=(1,))
    assert player.tables == {0: [1, 2, 4]}
    assert player.ledger.refcounts[:5] == [0, 2, 1, 1, 1]
    player.play(free_rows=(0,), release_ids=(3,))
    assert player.ledger.free_blocks[-3:] == [2, 4, 3]
    player.play(release_ids=(1,))
    assert player.ledger.free_blocks[-4:] == [2, 4, 3, 1]
    assert player.ledger.num_free == 96


def test_more_ids_than_fit_one_small_array_are_retained_and_released(player, rng):
    player.add("a", rng.integers(0, 258, 50))
    player.play(prefill("a", 0, 0, 50))
    ids = (*range(1, 14), 1, 2, 3, 4)  # 17 ids: padded to 32
    player.play(retain_ids=ids)
    player.play(free_rows=(0,))
    assert player.ledger.refcounts[1:14] == [2] * 4 + [1] * 9
    player.play(release_ids=ids)
    assert player.ledger.num_free == 96


def test_reindexed_rows_go_on_from_the_table_of_their_source(player, prompt, alone):
    prompts = {"a": prompt[:6], "b": prompt[3:10]}
    for name, row in (("a", 0), ("b", 1)):
        player.add(name, prompts[name])
        player.play(prefill(name, row, 0, len(prompts[name])))
    assert player.tables == {0: [1, 2], 1: [3, 4]}
    # The host feeds the tokens: only tables change places, as for beams.
    player.play(prefill("a", 1, 6, 1), prefill("b", 0, 7, 1), reindexed=((0, 1), (1, 0)))
    assert player.tables == {0: [3, 4], 1: [1, 2]}
    assert (player.read_by(0), player.read_by(1)) == ("b 0-7", "a 0-6")
    for name in "ab":
        assert player.tokens[name] == alone(prompts[name])[:2]


def test_beams_that_follow_one_beam_share_its_blocks(player, prompt, alone):
    for name, row in (("a", 0), ("b", 1), ("c", 2)):
        player.add(name, prompt[:6] if name == "a" else prompt[2:8])
        player.play(prefill(name, row, 0, 6))
    # All follow row 0; blocks 3 to 6 go back, and are taken again for the copies of block 2.
    player.play(*(prefill("a", row, 6, 1) for row in (0, 1, 2)), reindexed=((2, 0), (0, 0), (1, 0)))
    assert player.tables == {0: [1, 2], 1: [1, 6], 2: [1, 5]}
    assert player.ledger.free_blocks[-2:] == [3, 4]
    assert [player.read_by(row) for row in range(3)] == ["a 0-6"] * 3
    # Three segments of one request: it took the token of each.
    expected = alone(prompt[:6])
    assert player.tokens["a"] == [expected[0], *[expected[1]] * 3]


def test_a_truncated_row_says_the_same_again(player, prompt, alone):
    player.add("a", prompt)
    player.play(prefill("a", 0, 0, 10))
    for position in range(10, 13):
        player.play(decode("a", 0, position))
    assert player.tables == {0: [1, 2, 3, 4]}
    # Blocks 3 and 4 go back in this order, and the two tokens past position 7 take the last.
    player.play(prefill("a", 0, 6, 4), truncated=((0, 6),))
    assert player.tables == {0: [1, 2, 4]}
    player.play(decode("a", 0, 10))
    assert player.read_by(0) == "a 0-10"
    expected = alone(prompt)
    assert player.tokens["a"] == [*expected[:4], *expected[:2]]


def test_truncation_into_a_shared_block_copies_it_at_the_next_token(player, prompt, alone):
    player.add("a", prompt[:8])
    player.add("b", [*prompt[:6], 11, 12])
    player.play(prefill("a", 0, 0, 8))
    player.play(
        decode("a", 0, 8), prefill("b", 1, 6, 2), forks=((0, 1),), truncated=((1, 6), (0, 99))
    )
    # Row 0 grows by block 3; row 1 copies block 2 to 4.
    assert player.tables == {0: [1, 2, 3], 1: [1, 4]}
    assert (player.read_by(0), player.read_by(1)) == ("a 0-8", "a 0-5, b 6-7")
    player.play(decode("a", 0, 9), decode("b", 1, 8))
    assert player.tokens["a"] == alone(prompt[:8])[:3]
    assert player.tokens["b"] == alone([*prompt[:6], 11, 12])[:2]


def test_the_parts_of_a_plan_are_applied_in_their_order(player, prompt, alone):
    for name in "abc":
        player.add(name, prompt)
    player.play(prefill("a", 0, 0, 8), prefill("b", 1, 0, 10))
    player.play(retain_ids=(1,))
    assert player.tables == {0: [1, 2], 1: [3, 4, 5]}
    player.play(
        prefill("c", 1, 3, 7),
        free_rows=(0,),  # pushes 2, keeps 1
        release_ids=(1,),  # pushes 1, which is then the top
        retain_ids=(3, 4),
        shares=((0, (3, 4), 8),),  # onto the row just freed
        forks=((0, 6),),  # of the row just shared
        reindexed=((1, 6), (6, 1)),  # with the row just forked: 6 is [3, 4, 5], 1 is [3, 4]
        truncated=((1, 3), (6, 4)),  # pushes 5
    )
    # Row 1 takes 5 and 1 for its positions 4 to 9, and then 2 for the copy of block 3.
    assert player.tables == {0: [3, 4], 1: [2, 5, 1], 6: [3]}
    assert player.ledger.refcounts[:6] == [0, 1, 1, 3, 2, 1]
    assert [player.read_by(row) for row in (0, 1, 6)] == ["b 0-7", "b 0-2, c 3-9", "b 0-3"]
    assert player.tokens["c"] == alone(prompt)[:1]


def test_choices_start_where_their_prompt_ends(player, prompt, alone):
    player.add("a", prompt[:6], dataclasses.replace(GREEDY, n=3))
    # The others sample from the last token of row 0; they have no tokens of their own yet.
    others = [choice("a", 1, 2, 6, 0), choice("a", 2, 5, 6, 0)]
    player.play(prefill("a", 0, 0, 6), *others)
    assert player.tables == {0: [1, 2]}
    player.play(
        *(decode("a", row, 6, index=index) for index, row in enumerate((0, 2, 5))),
        branches=((0, 2), (0, 5)),
    )
    assert player.tables == {0: [1, 2], 2: [1, 3], 5: [1, 4]}
    reads = [player.read_by(row) for row in (0, 2, 5)]
    assert reads == ["a.0 0-6", "a.0 0-5, a.1 6", "a.0 0-5, a.2 6"]
    assert player.choices["a"] == [alone(prompt[:6])[:2]] * 3


def test_several_decode_steps_say_what_single_ones_say(toy, monkeypatch, prompt, alone):
    engine = make_engine(toy, **{**PLAIN, "decode_steps": 8})
    player = Player(engine, monkeypatch)
    for name, row, count in (("a", 0, 6), ("b", 3, 3)):
        player.add(name, prompt[:count])
        player.play(prefill(name, row, 0, count))
    # Row 0 runs six steps and row 3 two of them, over the end of block 2.
    player.play(decode("a", 0, 6, 6), decode("b", 3, 3, 2))
    assert player.tables == {0: [1, 2, 4], 3: [3, 5]}
    assert (player.read_by(0), player.read_by(3)) == ("a 0-11", "b 0-4")
    player.play(decode("b", 3, 5, 8), decode("a", 0, 12, 1))
    assert player.tokens["a"] == alone(prompt[:6])[:8]
    assert player.tokens["b"] == alone(prompt[:3])[:11]


def allocation(history: History, rng: random.Random) -> dict[int, int]:
    """Tokens for a few rows, as many as one step and the pool can take."""
    counts = {row: rng.randint(1, 7) for row in history.some_rows(rng, history.max_seqs)}
    room = history.width * history.block_size
    counts = {row: min(n, room - len(history.tags[row])) for row, n in counts.items()}
    # Rows take no more blocks than their tokens fill and two more.
    fits = sum(n // history.block_size + 2 for n in counts.values()) <= len(history.naive.stack)
    return counts if fits else {}


def test_any_plan_leaves_each_row_with_its_own_tokens(toy, rng):
    """Random plans of all parts, through the runner; the naive model knows blocks and tags."""
    engine = one_program(toy)
    config, runner = engine.config, engine.runner
    sizes = (config.num_blocks, BLOCK, config.max_num_seqs, config.max_blocks_per_seq)
    history, ledger = History(*sizes), Ledger(*sizes)
    engine.add_request("a", rng.integers(0, 258, 63), GREEDY)
    (sequence,) = engine.state.waiting
    sequence.tokens.append(0)  # so that every position of a row has a token
    draws, reached = random.Random(1), {}
    for step in range(40):
        drawn = history.draw(draws, PARTS[:-1])
        starts = [len(tags) for tags in history.tags]
        drawn["allocate"] = counts = allocation(history, draws)
        assert history.naive.allocate(counts).reason == 0
        sequence.request.order = step  # the writer of all of this plan
        segments = [
            prefill("a", row, starts[row], count, is_sampled=False) for row, count in counts.items()
        ]
        plan = plan_of(drawn)
        plan = Plan(**{**vars(plan), "segments": tuple(s for s in segments if s.num_tokens)})
        runner.issue(plan, [sequence] * len(plan.segments), ())
        ledger.apply(plan)
        written = core.expected_tags(sequence.owner, np.arange(64))
        for row, count in counts.items():
            history.tags[row] += written[starts[row] : starts[row] + count]
        assert_same(runner.blocks, state_of(ledger))
        assert dict(enumerate(ledger.tables)) == history.naive.tables
        core.check_tags(runner.kv, runner.blocks, history.tags)
        for part, entries in drawn.items():
            reached[part] = reached.get(part, 0) + bool(entries)
    assert min(reached.values()) >= 3, reached
