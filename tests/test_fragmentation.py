"""The allocators that `benchmarks/fragmentation.py` compares: nothing overlaps, nothing is lost."""

import random
from pathlib import Path

import pytest

from paged_jax.engine.trace import TraceRequest, sharegpt_like

ROOT = Path(__file__).resolve().parents[1]
SLOTS, LONGEST = 256, 64


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    """Makes the scripts importable, as they import each other."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


def make(name: str):
    from allocators import Growing, Paged, Reserving

    return {
        "reserving": lambda: Reserving(SLOTS, LONGEST),
        "growing": lambda: Growing(SLOTS, LONGEST),
        "paged": lambda: Paged(SLOTS, LONGEST, 4, max_seqs=64),
    }[name]()


def owned(allocator) -> dict[int, list[int]]:
    """Slots of each request, in order."""
    if hasattr(allocator, "ledger"):
        size = allocator.block_size
        return {
            request: [
                (block - 1) * size + i
                for block in allocator.ledger.tables[row]
                for i in range(size)
            ]
            for request, row in allocator._rows.items()
        }
    return {
        request: list(range(start, start + length))
        for request, (start, length) in allocator.segments.items()
    }


@pytest.mark.parametrize("name", ["reserving", "growing", "paged"])
def test_slots_belong_to_one_request_and_come_back(name):
    allocator, draw = make(name), random.Random(1)
    tokens: dict[int, int] = {}
    refusals = 0
    for request in range(400):
        start = draw.randint(1, LONGEST - 1)
        wanted, largest = allocator.wanted(start), allocator.largest
        is_in = allocator.admit(request, start)
        assert is_in == (wanted <= largest)
        refusals += not is_in
        if is_in:
            tokens[request] = start
        for other in list(tokens):
            if tokens[other] < LONGEST and draw.random() < 0.7:
                free = allocator.free
                if allocator.grow(other, tokens[other] + 1):
                    tokens[other] += 1
                else:
                    assert free < LONGEST
            elif draw.random() < 0.2:
                allocator.release(other)
                del tokens[other]
        found = owned(allocator)
        assert found.keys() == tokens.keys()
        taken = [slot for slots in found.values() for slot in slots]
        assert len(set(taken)) == len(taken) == SLOTS - allocator.free
        assert all(0 <= slot < SLOTS for slot in taken)
        assert all(len(slots) >= tokens[request] for request, slots in found.items())
        assert 0 <= allocator.largest <= allocator.free
    assert refusals > 10
    for request in list(tokens):
        allocator.release(request)
    assert allocator.free == allocator.largest == SLOTS


def test_a_growing_segment_stays_moves_or_pushes_the_others_together():
    allocator = make("growing")
    for request in range(4):
        assert allocator.admit(request, 64)
    allocator.release(0)
    allocator.release(2)
    assert (allocator.free, allocator.largest) == (128, 64)
    assert allocator.admit(4, 16)  # into the first hole
    assert allocator.grow(4, 17)  # where it is: the hole goes on
    assert allocator.segments[4] == (0, 32)
    assert allocator.moved == 0
    assert allocator.admit(5, 16)
    assert allocator.grow(5, 17)  # behind it is nothing: it moves into the other hole
    assert allocator.segments[5] == (128, 32) or allocator.segments[5] == (32, 32)
    assert allocator.admit(6, 16)
    assert allocator.admit(7, 16)
    while allocator.free >= 16 and allocator.admit(100 + allocator.free, 16):
        pass
    assert allocator.free < 16
    assert not allocator.grow(4, 33)


def test_compaction_copies_the_tokens_that_move():
    allocator = make("growing")
    for request in range(8):
        assert allocator.admit(request, 32)
    for request in (0, 2, 4):
        allocator.release(request)
    assert (allocator.free, allocator.largest) == (96, 32)
    # 64 in one piece: request 7 and its hole are no neighbours, so 1, 3, 5 and 6 are pushed down.
    assert allocator.grow(7, 33)
    assert allocator.moved == 4 * 32 + 32
    assert allocator.segments[7] == (128, 64)
    assert allocator.largest == allocator.free == 64


def test_figures_by_hand():
    from fragmentation import simulate

    trace = [TraceRequest(arrival=0.0, prompt_tokens=10, output_tokens=3) for _ in range(5)]
    figures, curves = simulate(make("reserving"), trace, SLOTS)
    # Four segments of 64; the fifth waits for three steps.
    assert curves.running == [4, 4, 0, 1, 1, 0]
    assert curves.live == [44, 48, 0, 11, 12, 0]
    assert curves.internal == [212, 208, 0, 53, 52, 0]
    assert figures["refused_with_enough_free"] == figures["tokens_moved"] == 0
    figures, curves = simulate(make("paged"), trace, SLOTS)
    assert curves.running == [5, 5, 0]
    assert curves.live == [55, 60, 0]
    assert curves.internal == [5, 0, 0]
    with pytest.raises(ValueError, match="request 0 does not fit into 256 slots alone"):
        simulate(make("paged"), [TraceRequest(arrival=0, prompt_tokens=300, output_tokens=1)], 256)


def test_paging_wastes_least_and_ends_first(tmp_path):
    from fragmentation import plot, run, table

    trace = sharegpt_like(60, request_rate=8.0, seed=2, max_model_len=512)
    figures, curves = run(trace, 4096, 512, 16)
    reserving, growing, paged = figures
    assert paged["steps"] < growing["steps"] < reserving["steps"]
    assert paged["external_waste"] == 0.0
    assert paged["internal_waste"] < growing["internal_waste"] < reserving["internal_waste"]
    assert paged["tokens_moved"] == 0 < growing["tokens_moved"]
    assert table(figures).count("\n") == 4
    for found in curves.values():
        sums = zip(found.live, found.internal, found.external, found.usable, strict=True)
        assert {sum(parts) for parts in sums} == {4096}
    plot(curves, 4096, str(tmp_path / "pool.png"))
    assert (tmp_path / "pool.png").stat().st_size > 10_000
