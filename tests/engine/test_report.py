import pytest

from paged_jax.engine.events import Event
from paged_jax.engine.occupancy import BlockUse, KVWaste, block_uses
from paged_jax.engine.report import RunLog, latencies, percentile, summary
from paged_jax.ledger import Ledger


def event(time, kind, request_id=None, **fields):
    return Event(time=time, dispatch=0, kind=kind, request_id=request_id, **fields)


def dispatch(time, num_tokens, num_rows):
    return event(time, "dispatch", data={"num_tokens": num_tokens, "num_rows": num_rows})


RUN = [
    event(10.0, "add", "a", count=6),
    event(10.5, "add", "b", count=4),
    dispatch(11.0, 10, 2),
    event(11.0, "first_token", "a", count=1),
    event(11.5, "first_token", "b", count=1),
    event(11.5, "preempt", "b"),
    dispatch(11.5, 0, 0),
    dispatch(12.0, 2, 2),
    event(12.0, "finish", "a", count=2),
    event(13.0, "add", "c", count=4),
    event(14.0, "abort", "c"),
    event(14.0, "finish", "b", count=3),
]


def test_latencies_count_from_arrival():
    found = latencies(RUN)
    assert found.finished_at == [12.0, 14.0]
    assert found.first_token == [1.0, 1.0]
    assert found.total == [2.0, 3.5]


def test_a_name_may_be_used_again():
    again = [event(20.0, "add", "a"), event(21.0, "first_token", "a"), event(22.0, "finish", "a")]
    found = latencies(RUN + again)
    assert (found.first_token[-1], found.total[-1]) == (1.0, 2.0)


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([], 50, 0.0),
        ([3.0], 99, 3.0),
        ([4.0, 1.0, 3.0, 2.0], 50, 2.5),
        ([4.0, 1.0, 3.0, 2.0], 0, 1.0),
        ([4.0, 1.0, 3.0, 2.0], 100, 4.0),
        (list(range(101)), 99, 99.0),
    ],
)
def test_percentiles_are_interpolated(values, percent, expected):
    assert percentile(values, percent) == expected


def test_the_summary_adds_up():
    figures = summary(RUN)
    assert figures["num_requests"] == 2
    assert figures["prompt_tokens"] == 14
    assert figures["output_tokens"] == 5
    assert figures["seconds"] == 4.0
    assert figures["output_tokens_per_s"] == 1.25
    assert figures["ttft_p50_s"] == 1.0
    assert figures["latency_p50_s"] == 2.75
    # The empty dispatch does not count.
    assert figures["num_dispatches"] == 2
    assert figures["mean_batch_rows"] == 2.0
    assert figures["mean_batch_tokens"] == 6.0
    assert figures["num_preemptions"] == 1


def test_no_events_are_no_figures():
    assert set(summary([]).values()) == {0}


@pytest.fixture
def ledger():
    """Rows 0 and 1 share block 1 and have a tail each, block 4 is cached, 5 and 6 are free."""
    made = Ledger(num_blocks=6, block_size=4, max_seqs=3, max_blocks_per_seq=4)
    made.allocate({0: 4})
    made.fork(0, 1)
    made.allocate({0: 1, 1: 3})
    made.allocate({2: 4})
    made.retain([4])
    made.free([2])
    made.retain([1])
    return made


def test_a_block_map_names_owners_and_what_is_cached(ledger):
    assert block_uses(ledger, {0: "a"}) == [
        BlockUse(owners=("a", "row 1"), is_cached=True),
        BlockUse(owners=("a",)),
        BlockUse(owners=("row 1",)),
        BlockUse(is_cached=True),
        BlockUse(),
        BlockUse(),
    ]


def test_waste_is_what_rows_hold_and_do_not_fill(ledger):
    waste = KVWaste(max_model_len=16)
    assert waste.fraction == waste.contiguous_fraction == 0.0
    assert waste.add(ledger) == 3
    # Block 1 is full and counts once; of the tails three slots and one are empty.
    assert waste.fraction == 4 / 12
    # 5 and 7 tokens where 16 would be reserved for each.
    assert waste.contiguous_fraction == 1 - 12 / 32
    ledger.allocate({0: 3, 1: 1})
    waste.add(ledger)
    assert waste.fraction == (4 + 0) / (12 + 12)


def test_a_shared_tail_is_counted_as_far_as_it_is_read():
    ledger = Ledger(num_blocks=2, block_size=8, max_seqs=2, max_blocks_per_seq=2)
    ledger.allocate({0: 5})
    ledger.share(1, [1], 3)
    waste = KVWaste(max_model_len=16)
    waste.add(ledger)
    assert (waste.num_empty, waste.num_slots) == (3, 8)


def test_a_log_forwards_events_and_keeps_the_fullest_moment(ledger):
    seen = []
    log = RunLog(16, forward=seen.append, keeps_blocks=True)
    for one in RUN:
        log(one)
    log.look(ledger, lambda: {0: "a"})
    ledger.free([0])
    log.look(ledger, lambda: {1: "b"})
    assert seen == log.events == RUN
    assert [use.owners for use in log.fullest[:2]] == [("a", "row 1"), ("a",)]
    assert log.figures()["num_requests"] == 2
    assert 0 < log.figures()["kv_waste_fraction"] < 1


def test_a_log_asks_for_no_names_without_a_picture(ledger):
    log = RunLog(16)
    log.look(ledger, lambda: pytest.fail("asked"))
    assert log.fullest == []
