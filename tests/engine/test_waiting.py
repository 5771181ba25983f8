"""The queue of those that wait: by rank, whoever leaves in between."""

import random

import pytest

from paged_jax.engine.request import Request, Sequence
from paged_jax.engine.waiting import WaitingQueue
from paged_jax.sampling_params import SamplingParams


def sequence_of(*rank: int) -> Sequence:
    request = Request(
        request_id=str(rank),
        prompt=None,
        prompt_token_ids=[0],
        params=SamplingParams(),
        max_total_tokens=2,
        seed=0,
        order=0,
        arrival_time=0.0,
    )
    return Sequence(request=request, tokens=[0], rank=rank)  # type: ignore[arg-type]


def popped(queue: WaitingQueue) -> list[Sequence]:
    return [queue.pop() for _ in range(len(queue))]


def test_the_lowest_rank_comes_first():
    ranks = [(0, 2, 0), (-1, 9, 0), (0, 0, 1), (0, 0, 0), (1, 0, 0)]
    queue, sequences = WaitingQueue(), [sequence_of(*rank) for rank in ranks]
    for sequence in sequences:
        queue.push(sequence)
    expected = sorted(sequences, key=lambda sequence: sequence.rank)
    assert list(queue) == expected
    assert len(queue) == 5, "a look takes nobody out"
    assert popped(queue) == expected
    assert not queue
    with pytest.raises(IndexError):
        queue.pop()


def test_whoever_leaves_is_gone_and_may_return():
    queue = WaitingQueue()
    first, second = sequence_of(0, 0, 0), sequence_of(0, 1, 0)
    queue.push(first)
    queue.push(second)
    queue.discard(first)
    queue.discard(first)  # no matter whether it is in
    assert first not in queue
    assert list(queue) == [second]
    first.rank = (0, 2, 0)
    queue.push(first)
    assert first in queue
    assert popped(queue) == [second, first], "at the rank that it has now"


def test_nobody_is_in_it_twice():
    queue, sequence = WaitingQueue(), sequence_of(0, 0, 0)
    queue.push(sequence)
    with pytest.raises(AssertionError):
        queue.push(sequence)
    assert queue.pop() is sequence
    with pytest.raises(IndexError):
        queue.pop()


def test_random_histories_agree_with_a_sorted_list():
    draws = random.Random(0)
    queue, inside, outside = WaitingQueue(), [], [sequence_of(0, i, 0) for i in range(60)]
    for _ in range(5000):
        kind = draws.choice(["push", "pop", "discard"])
        if kind == "push" and outside:
            sequence = outside.pop(draws.randrange(len(outside)))
            sequence.rank = (draws.randrange(2), *sequence.rank[1:])
            queue.push(sequence)
            inside.append(sequence)
        elif kind == "pop" and inside:
            sequence = min(inside, key=lambda sequence: sequence.rank)
            assert queue.pop() is sequence
            inside.remove(sequence)
            outside.append(sequence)
        elif kind == "discard" and inside:
            sequence = inside.pop(draws.randrange(len(inside)))
            queue.discard(sequence)
            outside.append(sequence)
        assert len(queue) == len(inside)
    assert popped(queue) == sorted(inside, key=lambda sequence: sequence.rank)


def test_those_that_left_take_no_room():
    queue = WaitingQueue()
    stays = sequence_of(0, 0, 0)
    queue.push(stays)
    for order in range(1, 20_000):
        sequence = sequence_of(0, order, 0)
        queue.push(sequence)
        queue.discard(sequence)
    assert len(queue._heap) < 100
    assert popped(queue) == [stays]
