"""The one message from the scheduler to the device: what a dispatch does, in order."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive tokens of one row in a dispatch."""

    request_id: str
    row: int
    start: int
    """Position of the first token."""
    num_tokens: int
    is_decode: bool
    """True: one token, which the device sampled last for this row. False: tokens of the host."""
    is_sampled: bool
    """Whether the segment ends at the last known token, so that the next one is sampled."""
    is_admission: bool
    """Whether the row starts a request here, so that its sampling fields must be set."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A dispatch: what happens to rows and blocks, then tokens to allocate and run.

    Host and device apply the fields in the order in which they stand here; both are deterministic,
    so the host knows every block id at the moment of dispatch and never reads a table back.
    """

    free_rows: tuple[int, ...] = ()
    release_ids: tuple[int, ...] = ()
    """Blocks that an owner other than a row gives up."""
    retain_ids: tuple[int, ...] = ()
    """Blocks that gain an owner other than a row."""
    shares: tuple[tuple[int, tuple[int, ...], int], ...] = ()
    """(row, block ids, tokens): empty rows that adopt blocks."""
    forks: tuple[tuple[int, int], ...] = ()
    """(parent, child)."""
    reindexed: tuple[tuple[int, int], ...] = ()
    """(row, source): rows that take the table of another."""
    truncated: tuple[tuple[int, int], ...] = ()
    """(row, tokens to keep)."""
    segments: tuple[Segment, ...] = ()
    """Decode segments first; a row stands at most once."""
    preempted: tuple[str, ...] = ()
    """Requests that lost their row and wait again."""
    capped: tuple[str, ...] = ()
    """Requests that end now, because the whole pool cannot hold their next token."""

    @property
    def new_tokens(self) -> dict[int, int]:
        """Tokens to allocate per row."""
        return {segment.row: segment.num_tokens for segment in self.segments}

    @property
    def num_tokens(self) -> int:
        """Tokens that the dispatch runs."""
        return sum(segment.num_tokens for segment in self.segments)

    @property
    def num_decode(self) -> int:
        """Segments that decode."""
        return sum(segment.is_decode for segment in self.segments)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do on the device."""
        return not (self.free_rows or self.has_moves or self.segments)

    @property
    def has_moves(self) -> bool:
        """Whether blocks change hands in other ways than that rows end and grow."""
        return bool(
            self.release_ids
            or self.retain_ids
            or self.shares
            or self.forks
            or self.reindexed
            or self.truncated
        )
