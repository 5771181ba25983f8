import json
import subprocess
import sys
from types import MappingProxyType

import pytest

from paged_jax.engine.events import Event, JsonlEvents, read_events

EVENTS = [
    Event(time=0.5, dispatch=0, kind="add", request_id="a", count=7),
    Event(time=0.75, dispatch=1, kind="allocate", request_id="a", ids=(3, 1), count=2),
    Event(
        time=1.0,
        dispatch=1,
        kind="dispatch",
        data={"num_tokens": 7, "num_rows": 1, "num_free": 0, "seconds": 0.25},
    ),
]


def test_events_are_read_as_they_were_written(tmp_path):
    path = tmp_path / "events.jsonl"
    with JsonlEvents(path) as events:
        for event in EVENTS:
            events(event)
    assert list(read_events(path)) == EVENTS


def test_an_event_is_one_line_without_what_says_nothing(tmp_path):
    path = tmp_path / "events.jsonl"
    with JsonlEvents(path) as events:
        events(EVENTS[0])
        events(Event(time=0.0, dispatch=0, kind="evict", ids=(2,), count=1))
    first, second = map(json.loads, path.read_text().splitlines())
    assert first == {"time": 0.5, "dispatch": 0, "kind": "add", "request_id": "a", "count": 7}
    assert second == {"time": 0.0, "dispatch": 0, "kind": "evict", "ids": [2], "count": 1}


def test_any_mapping_may_be_the_data(tmp_path):
    path = tmp_path / "events.jsonl"
    data = MappingProxyType({"num_free": 3})
    with JsonlEvents(path) as events:
        events(Event(time=0.0, dispatch=0, kind="dispatch", data=data))
    [event] = read_events(path)
    assert event.data == data


def test_a_line_can_be_read_before_the_file_is_closed(tmp_path):
    path = tmp_path / "events.jsonl"
    with JsonlEvents(path) as events:
        events(EVENTS[0])
        assert list(read_events(path)) == EVENTS[:1]


def test_nothing_is_written_after_close(tmp_path):
    events = JsonlEvents(tmp_path / "events.jsonl")
    events.close()
    with pytest.raises(ValueError, match="closed"):
        events(EVENTS[0])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "line 2 is no event"),
        ('{"time": 0, "dispatch": 0, "kind": "sing"}', r"kind \('sing'\) must be one of abort, "),
        ('{"time": 0, "dispatch": 0, "kind": "add", "colour": 1}', "colour"),
        ("[]", "line 2 is no event"),
    ],
)
def test_a_line_that_is_no_event_is_named(tmp_path, line, reason):
    path = tmp_path / "events.jsonl"
    path.write_text('{"time": 0, "dispatch": 0, "kind": "add"}\n' + line + "\n")
    with pytest.raises(ValueError, match=reason):
        list(read_events(path))


def test_events_scheduler_and_ledger_load_no_jax():
    modules = "paged_jax.engine.events, paged_jax.engine.scheduler, paged_jax.ledger"
    code = f"import sys, {modules}; print('jax' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "False\n"


def test_the_engine_is_still_found_in_its_package():
    import paged_jax.engine

    assert paged_jax.engine.Engine.__name__ == "Engine"
    with pytest.raises(AttributeError, match=r"paged_jax\.engine"):
        _ = paged_jax.engine.Engin
