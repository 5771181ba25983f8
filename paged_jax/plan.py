"""The one message from the scheduler to the device: what a dispatch does, in order."""

from dataclasses import dataclass


# Hundreds are made per dispatch: not frozen and not by keyword only, which would triple the time.
@dataclass(slots=True)
class Segment:
    """Consecutive tokens of one row in a dispatch."""

    request_id: str
    row: int
    start: int
    """Position of the first token."""
    num_tokens: int
    is_decode: bool
    """True: tokens that the device samples, the first of them sampled last for this row; several
    in a plan in which every segment decodes. False: tokens of the host."""
    is_sampled: bool
    """Whether the segment ends at the last known token, so that the next one is sampled."""
    is_admission: bool
    """Whether the row starts a request here, so that its sampling fields must be set."""
    index: int = 0
    """Of the choice, for a request that has several."""
    is_given: bool = False
    """Whether the token of a decode segment comes from the host, as a beam's does."""
    source: int | None = None
    """Row of another segment from whose last token this one samples; it has no token itself."""

    @property
    def num_sampled(self) -> int:
        """Tokens that are sampled."""
        return self.num_tokens if self.is_decode else int(self.is_sampled)


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
    """(parent, child): empty rows that become copies of others."""
    branches: tuple[tuple[int, int], ...] = ()
    """(parent, child): the same of the blocks alone, for rows that have sampled a token already."""
    reindexed: tuple[tuple[int, int], ...] = ()
    """(row, source): rows that take the table of another."""
    truncated: tuple[tuple[int, int], ...] = ()
    """(row, tokens to keep)."""
    restored: tuple[tuple[int, int], ...] = ()
    """(row, tokens): room for tokens whose KV comes from the host, allocated before all others."""
    segments: tuple[Segment, ...] = ()
    """Decode segments first; a row stands at most once."""
    preempted: tuple[tuple[str, int], ...] = ()
    """(request, choice) that lost their row and wait again."""
    swapped_out: tuple[tuple[str, int, int], ...] = ()
    """(request, choice, row) of those whose blocks are read to the host first."""
    swapped_in: tuple[tuple[str, int, int, int], ...] = ()
    """(request, choice, row, first): logical blocks from `first` on come from the host's image."""
    capped: tuple[tuple[str, int], ...] = ()
    """(request, choice) that end now, because the whole pool cannot hold their next token."""
    expired: tuple[str, ...] = ()
    """Requests that end now, because their time is over."""

    @property
    def new_tokens(self) -> dict[int, int]:
        """Tokens to allocate per row."""
        return {segment.row: segment.num_tokens for segment in self.segments}

    @property
    def num_tokens(self) -> int:
        """Tokens that the dispatch runs at once."""
        return sum(1 if s.is_decode else s.num_tokens for s in self.segments)

    @property
    def num_steps(self) -> int:
        """Decode steps that the dispatch runs one after the other."""
        return max((s.num_tokens for s in self.segments if s.is_decode), default=1)

    @property
    def num_decode(self) -> int:
        """Segments that decode."""
        return sum(segment.is_decode for segment in self.segments)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do on the device."""
        return not (self.free_rows or self.retain_ids or self.has_moves or self.segments)

    @property
    def has_moves(self) -> bool:
        """Whether blocks change hands in other ways than that rows end, are cached and grow."""
        return bool(
            self.release_ids
            or self.shares
            or self.forks
            or self.branches
            or self.reindexed
            or self.truncated
            or self.restored
        )
