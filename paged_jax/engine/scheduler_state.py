"""Queues, rows and blocks as the scheduler sees them, and what changes them between plans."""

import bisect
import heapq
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from paged_jax.config import ResolvedConfig
from paged_jax.engine.prefix_cache import PrefixCache
from paged_jax.engine.request import Request, Sequence
from paged_jax.engine.waiting import WaitingQueue
from paged_jax.ledger import Ledger, LedgerAllocation
from paged_jax.plan import Plan
from paged_jax.shapes import ceil_div


@dataclass(frozen=True, kw_only=True)
class Fork:
    """A row that starts with the leading tokens of another, in the next plan."""

    parent: int
    child: Sequence
    num_tokens: int


@dataclass(kw_only=True)
class Costs:
    """What preemption has cost so far, in seconds; None: nothing measured."""

    recomputed_token: float | None = None
    swapped_block: float | None = None
    """There and back."""


@dataclass(kw_only=True)
class SchedulerState:
    """Everything that a plan is made from."""

    ledger: Ledger
    cache: PrefixCache | None
    free_rows: list[int]
    """A heap of rows that hold nothing and that nobody was promised."""
    is_by_priority: bool = False
    waiting: WaitingQueue = field(default_factory=WaitingQueue)
    running: list[Sequence] = field(default_factory=list)
    """By rank."""
    released: dict[int, None] = field(default_factory=dict)
    """Rows whose sequence is gone, in that order, to be freed by a next plan."""
    forks: list[Fork] = field(default_factory=list)
    reindexed: dict[int, int] = field(default_factory=dict)
    """Row to the row whose table it takes in the next plan."""
    deadlines: list[tuple[float, int, Request]] = field(default_factory=list)
    """A heap."""
    num_swapped_blocks: int = 0
    """Blocks on the host."""
    num_queried_tokens: int = 0
    """Prompt tokens that the prefix cache was asked for."""
    num_hit_tokens: int = 0
    """Those that it had."""
    costs: Costs = field(default_factory=Costs)

    @classmethod
    def create(cls, config: ResolvedConfig, root: bytes = b"") -> "SchedulerState":
        """Everything free, nothing queued; `root` tells the prefix cache of what KV depends on."""
        ledger = Ledger(
            config.num_blocks, config.block_size, config.max_num_seqs, config.max_blocks_per_seq
        )
        cache = PrefixCache(config.block_size, root) if config.enable_prefix_caching else None
        return cls(
            ledger=ledger,
            cache=cache,
            free_rows=list(range(config.max_num_seqs)),
            is_by_priority=config.scheduling_policy == "priority",
        )

    @property
    def num_cached(self) -> int:
        """Blocks that hold cached tokens and that no row owns."""
        return self.cache.num_reclaimable if self.cache is not None else 0

    def add(self, request: Request) -> None:
        """Puts a request into the queue, by its first sequence."""
        for sequence in request.sequences:
            rank = request.priority if self.is_by_priority else 0
            sequence.rank = (rank, request.order, sequence.index)
        request.unforked = request.sequences[1:]
        self.waiting.push(request.sequences[0])
        self._watch(request)

    def restore(self, request: Request) -> None:
        """Puts an unfinished request of another state into the queue, with the tokens it knows."""
        for sequence in request.sequences:
            sequence.row = sequence.listed = None
            sequence.num_computed = sequence.num_unread = sequence.num_published = 0
            # An image may go on with tokens that were sampled and are lost.
            kept = sequence.num_known
            if request.lacks_prompt_logprobs:
                kept = len(request.prompt_logprobs or ())
            sequence.swapped_tokens = max(0, min(sequence.swapped_tokens, kept - 1))
            self.num_swapped_blocks += ceil_div(sequence.swapped_tokens, self.ledger.block_size)
        if request.is_beam:
            request.unforked = request.sequences[1:]
        for sequence in request.sequences:
            if sequence.finish_reason is None and sequence not in request.unforked:
                self.waiting.push(sequence)
        self._watch(request)

    def restart(self, requests: Collection[Request]) -> None:
        """Takes all rows away; everybody waits, in order, and nothing computed is used again."""
        for request in requests:
            for sequence in request.sequences:
                if sequence.row is not None:
                    self.release(sequence)
                sequence.swapped_tokens = 0
                sequence.hashes = []
        self.waiting, self.deadlines, self.forks, self.reindexed = WaitingQueue(), [], [], {}
        self.num_swapped_blocks = 0
        for request in requests:
            self.restore(request)

    def _watch(self, request: Request) -> None:
        if request.deadline is not None:
            heapq.heappush(self.deadlines, (request.deadline, request.order, request))
            if len(self.deadlines) > 2 * (len(self.waiting) + len(self.running)) + 64:
                # Those that ended in time stay in the heap until they come up, or are too many.
                self.deadlines = [x for x in self.deadlines if not x[2].is_finished]
                heapq.heapify(self.deadlines)

    def drop(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it is; its blocks are freed by a next plan."""
        self.waiting.discard(sequence)
        if sequence in sequence.request.unforked:
            sequence.request.unforked.remove(sequence)
        self.forks = [fork for fork in self.forks if fork.child is not sequence]
        if sequence.row is not None:
            self.release(sequence)
        self.forget_image(sequence)

    def release(self, sequence: Sequence) -> None:
        """Takes the row away; its blocks are freed by a next plan."""
        assert sequence.row is not None
        if sequence in self.running:
            self.running.remove(sequence)
        self.reindexed.pop(sequence.row, None)
        self.released[sequence.row] = None
        sequence.lost_blocks = tuple(self.ledger.tables[sequence.row])
        sequence.row = None

    def forget_image(self, sequence: Sequence) -> None:
        """Gives back what a sequence holds on the host."""
        self.num_swapped_blocks -= ceil_div(sequence.swapped_tokens, self.ledger.block_size)
        sequence.swapped_tokens = 0

    def start(self, sequence: Sequence, row: int) -> None:
        """Gives a row to a sequence, which then runs."""
        sequence.row = row
        sequence.lost_blocks = ()
        sequence.num_prefill = sequence.num_known
        bisect.insort(self.running, sequence, key=lambda other: other.rank)

    def requeue(self, sequence: Sequence) -> None:
        """Sends a sequence that lost its row back to its place in the queue, beams as one."""
        sequence.num_computed = sequence.num_published = 0
        sequence.lost_blocks = ()
        if sequence.index == 0 or not sequence.request.is_beam:
            self.waiting.push(sequence)

    def apply(self, plan: Plan, sequences: Iterable[Sequence]) -> LedgerAllocation:
        """Follows a plan when it is issued: blocks, tokens in flight, and what is now cached.

        Args:
          plan: From `schedule`.
          sequences: One per segment.
        """
        allocation = self.ledger.apply(plan)
        if self.cache is not None:
            # Cached blocks that were shared to be copied.
            sources = [source for source, _ in allocation.copies.values()]
            self.cache.unreference([x for x in sources if self.ledger.refcounts[x] == 1])
        for segment, sequence in zip(plan.segments, sequences, strict=True):
            count = segment.num_tokens
            sequence.num_computed += count
            if segment.is_decode:
                sequence.num_unread += count
                continue
            sequence.num_unread += segment.is_sampled
            self.publish(sequence)
        return allocation

    def publish(self, sequence: Sequence) -> None:
        """Makes the full blocks of known tokens available to others."""
        size = self.ledger.block_size
        # Called for every row of every dispatch: most have filled no block since.
        if sequence.num_computed // size <= sequence.num_published:
            return
        end = sequence.num_cacheable // size
        if end > sequence.num_published and self.cache is not None and sequence.row is not None:
            request = sequence.request
            table, start = self.ledger.tables[sequence.row], sequence.num_published
            self.cache.publish(
                sequence.tokens, request.cache_salt, sequence.hashes, table, start, end
            )
            sequence.num_published = end
