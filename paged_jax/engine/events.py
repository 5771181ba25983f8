"""What an engine did and when: small facts, handed to a callable or written to a file."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, Literal, get_args

Kind = Literal[
    "add",
    "admit",
    "allocate",
    "free",
    "fork",
    "copy",
    "evict",
    "preempt",
    "swap_out",
    "swap_in",
    "first_token",
    "finish",
    "abort",
    "fault",
    "dispatch",
]
_KINDS = frozenset(get_args(Kind))


@dataclass(frozen=True, kw_only=True)
class Event:
    """One fact.

    `data` of a "dispatch" holds num_tokens, num_rows, num_decode (tokens and rows that it ran),
    num_running, num_waiting, num_swapped (requests after it), num_free, num_cached (blocks after
    it), and the seconds that it took; of what concerns a row, its number.
    """

    time: float
    """Seconds of `time.monotonic`; of the simulated clock in a simulation."""
    dispatch: int
    """Number of the dispatch in which it happened."""
    kind: Kind
    request_id: str | None = None
    ids: tuple[int, ...] = ()
    """Blocks concerned; of a "copy" source and destination."""
    count: int = 0
    """Blocks; tokens of an "add" (prompt), an "admit" (cached), a "first_token", and an end."""
    data: Mapping[str, float] = field(default_factory=dict)


class JsonlEvents:
    """Writes each event as a line of JSON; lines are on disk as they are complete.

    Fields at their defaults are left out. A context manager, so that the file is closed.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self._file = open(path, "w", buffering=1, encoding="utf-8")  # noqa: SIM115 - see close

    def __call__(self, event: Event) -> None:
        """Writes one event."""
        fields = {name: value for name, value in vars(event).items() if value or name in _ALWAYS}
        self._file.write(json.dumps(fields, separators=(",", ":"), default=dict) + "\n")

    def close(self) -> None:
        """Closes the file; nothing can be written afterwards."""
        self._file.close()

    def __enter__(self) -> "JsonlEvents":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_ALWAYS = ("time", "dispatch", "kind")


def read_events(path: str | PathLike[str]) -> Iterator[Event]:
    """The events of a file, in the order in which they were written.

    Raises: ValueError that names the line which is no event.
    """
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield _event(json.loads(line))
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{path}, line {number} is no event: {error}") from error


def _event(fields: dict[str, Any]) -> Event:
    kind = fields["kind"]
    if kind not in _KINDS:
        raise ValueError(f"kind ({kind!r}) must be one of {', '.join(sorted(_KINDS))}")
    return Event(**{**fields, "ids": tuple(fields.get("ids", ()))})
