"""Who runs in the next dispatch. Pure: no clock, randomness, JAX or I/O."""

import heapq

from paged_jax.config import ResolvedConfig
from paged_jax.engine.block_budget import BlockBudget
from paged_jax.engine.choices import start_choices
from paged_jax.engine.request import Sequence
from paged_jax.engine.scheduler_state import SchedulerState
from paged_jax.plan import Plan, Segment
from paged_jax.shapes import ceil_div

MAX_BYPASSED = 8
"""Admissions past a sequence that does not fit, before everybody behind it waits for it."""

MAX_SKIPPED = 4
"""Sequences that do not fit and are looked past in one plan."""


def schedule(state: SchedulerState, now: float, config: ResolvedConfig) -> Plan:
    """Plans one dispatch and moves sequences between the queues accordingly.

    Running sequences come first, those that decode before those in prefill, each by rank; then
    waiting ones are admitted by rank while budget, rows and blocks last. One that does not fit may
    be overtaken `MAX_BYPASSED` times, then everybody behind it waits. When a running sequence
    cannot grow, the running one of the last rank is preempted, which may be the sequence itself:
    the first rank always advances. Nobody is admitted in a dispatch that preempts.

    Args:
      state: Changed by what is planned; call `state.apply(plan, ...)` when it is issued.
      now: On the clock of deadlines.
      config: Sizes and policies.
    Returns: The plan. Its blocks are certain to be there: it counts frees before growth, as the
      step does.
    """
    expired = _expire(state, now)
    round_ = _Round(state, config)
    in_prefill = []
    for sequence in list(state.running):  # those preempted meanwhile leave it
        if sequence.num_computed < sequence.num_prefill:
            in_prefill.append(sequence)
        elif sequence.row is not None:
            round_.continue_running(sequence)
    for sequence in in_prefill:
        if sequence.row is not None:
            round_.continue_running(sequence)
    if not round_.preempted:
        round_.admit()
    return round_.plan(expired)


def _expire(state: SchedulerState, now: float) -> tuple[str, ...]:
    expired = []
    while state.deadlines and state.deadlines[0][0] <= now:
        *_, request = heapq.heappop(state.deadlines)
        if not request.is_finished:
            expired.append(request.request_id)
            for sequence in request.sequences:
                state.drop(sequence)
    return tuple(expired)


class _Round:
    """Budget, rows and blocks left while one plan is made."""

    def __init__(self, state: SchedulerState, config: ResolvedConfig) -> None:
        self.state = state
        self.config = config
        self.budget = config.max_num_batched_tokens
        self.planned: dict[Sequence, Segment] = {}
        self.costs: dict[Sequence, int] = {}
        """Blocks that planned segments take, where they take any."""
        self.preempted: list[Sequence] = []
        self.capped: list[Sequence] = []
        self.swapped_out: list[tuple[str, int, int]] = []
        self.swapped_in: list[tuple[str, int, int, int]] = []
        self.shares: list[tuple[int, tuple[int, ...], int]] = []
        self.restored: list[tuple[int, int]] = []
        self.blocks = BlockBudget(state)
        self._prompt_ends: list[Sequence] = []  # after which other choices start
        for fork in state.forks:
            fork.child.num_computed = fork.num_tokens

    def continue_running(self, sequence: Sequence) -> None:
        """Plans the next tokens of a sequence, at the expense of those behind it."""
        request, num_unread = sequence.request, sequence.num_unread
        expected = len(sequence.tokens) + num_unread
        left = count = expected - sequence.num_computed
        if count > self.budget:
            count = self.budget
        if not count:
            return
        # Some wait for their last token; one that will end by length waits to be read.
        if num_unread and (expected >= request.max_total_tokens or request.waits_for_tokens):
            return
        cost = self.blocks.cost(sequence, count)
        while cost and cost > self.blocks.available:
            victim = self.state.running[-1]
            group = _group(victim)
            if sequence in group and all(other in group for other in self.state.running):
                # They hold every block that is not free: no wait can help but for their own tokens,
                # and for rows of the past that the next plan frees.
                if self.state.released or any(member.num_unread for member in group):
                    return
                self.capped += group
                self.blocks.keep_tables(group)
                for member in group:
                    self._take_out(member)
                    self.state.drop(member)
                return
            self._preempt(group)
            if sequence in group:
                return
            cost = self.blocks.cost(sequence, count)
        self._add(sequence, count, cost, is_sampled=count == left)

    def admit(self) -> None:
        """Gives rows to waiting sequences."""
        state, skipped = self.state, []
        if not (state.waiting and state.free_rows and self.budget):
            return
        # Blocks that prefills under way will still take are not given to anybody else, nor is one
        # for each row that decodes: who comes in would soon be preempted, and computed again.
        size = self.config.block_size
        reserved = sum(
            ceil_div(s.num_known, size) - ceil_div(self._end(s), size)
            if s.num_computed < s.num_prefill
            else 1
            for s in state.running
        )
        while state.waiting and state.free_rows and self.budget and len(skipped) < MAX_SKIPPED:
            sequence = state.waiting.pop()
            whole = ceil_div(sequence.num_known, self.config.block_size)
            if whole > self.config.num_blocks:
                # Submission checked the prompt; this one filled the pool and was then preempted.
                self.capped += _group(sequence)
                for member in _group(sequence):
                    state.drop(member)
                continue
            taken = self._try_admission(sequence, reserved)
            if taken is not None:
                reserved += taken
                if skipped:
                    skipped[0].num_bypassed += 1
            else:
                skipped.append(sequence)
            if skipped and skipped[0].num_bypassed >= MAX_BYPASSED:
                break
        for sequence in skipped:
            state.waiting.push(sequence)

    def plan(self, expired: tuple[str, ...]) -> Plan:
        """What was planned, and what follows from it."""
        state, cache = self.state, self.state.cache
        for sequence in self.preempted:
            state.requeue(sequence)
        self._extend_decodes()
        ends = [(s, self.planned[s]) for s in self._prompt_ends if s in self.planned]
        next_forks, children = start_choices(state, ends)
        self.planned |= dict(children)
        evicted, retained = (), ()
        if cache is not None:
            evicted, retained = cache.evict(max(0, -self.blocks.num_free)), cache.take_pending()
        forks, branches, truncated = [], [], []
        for fork in state.forks:
            row = fork.child.row
            if row is None:
                continue
            # A choice has sampled its first token already, a beam is its parent's copy.
            (forks if fork.child.request.is_beam else branches).append((fork.parent, row))
            if fork.num_tokens < state.ledger.lengths[fork.parent]:
                truncated.append((row, fork.num_tokens))
        reindexed = sorted(state.reindexed.items())
        state.forks, state.reindexed = next_forks, {}
        return Plan(
            free_rows=tuple(sorted(self.blocks.freed)),
            release_ids=evicted,
            retain_ids=retained,
            shares=tuple(self.shares),
            forks=tuple(forks),
            branches=tuple(branches),
            reindexed=tuple(reindexed),
            truncated=tuple(truncated),
            restored=tuple(self.restored),
            segments=tuple(self.planned.values()),  # those that decode were planned first
            preempted=tuple(sequence.key for sequence in self.preempted),
            swapped_out=tuple(self.swapped_out),
            swapped_in=tuple(self.swapped_in),
            capped=tuple(sequence.key for sequence in self.capped),
            expired=expired,
        )

    def _try_admission(self, sequence: Sequence, reserved: int) -> int | None:
        """Admits a sequence if it fits; returns the blocks that its prompt takes in later plans."""
        state, size = self.state, self.config.block_size
        members = _group(sequence)
        if len(members) > len(state.free_rows):
            return None
        blocks, start, first = self._reused(sequence)
        shared_tokens = start if first is None else first * size
        # The last block that is shared may hold more than is used of it: it is copied.
        whole = ceil_div(sequence.num_known, size) - len(blocks) + bool(shared_tokens % size)
        num_reclaimed = 0
        if state.cache is not None:
            num_reclaimed = sum(map(state.cache.is_reclaimable, blocks))
        room = self.blocks.available - reserved
        if whole + num_reclaimed > room and shared_tokens % size:
            # One that fills the pool has no room for a copy: it computes the last block instead.
            num_reclaimed -= state.cache is not None and state.cache.is_reclaimable(blocks[-1])
            blocks = blocks[:-1]
            start = shared_tokens = len(blocks) * size
        if whole + num_reclaimed > room:
            return None
        for member in members:
            member.row = heapq.heappop(state.free_rows)
        row = sequence.row
        assert row is not None
        state.start(sequence, row)
        if blocks:
            assert state.cache is not None
            state.cache.reference(blocks)
            self.shares.append((row, blocks, shared_tokens))
        left = sequence.num_known - start
        count = min(left, self.budget)
        cost = ceil_div(start + count, size) - len(blocks)
        cost += bool(shared_tokens % size)
        taken = cost
        if first is not None:
            self.swapped_in.append((*sequence.key, row, first))
            self.restored.append((row, start - first * size))
            restored = ceil_div(start, size) - first
            self.blocks.num_free -= restored
            cost -= restored
        state.forget_image(sequence)
        sequence.num_computed = start
        sequence.num_published = shared_tokens // size
        sequence.num_bypassed = 0
        self._count_hits(sequence, shared_tokens)
        self._add(sequence, count, cost, is_sampled=count == left, is_admission=True)
        return whole - taken

    def _reused(self, sequence: Sequence) -> tuple[tuple[int, ...], int, int | None]:
        """What a sequence need not compute: cached blocks, leading tokens of which there is KV, and
        the first logical block that comes from its image on the host, None without one."""
        cache, size = self.state.cache, self.config.block_size
        blocks: tuple[int, ...] = ()
        start = 0
        request = sequence.request
        if cache is not None and not request.lacks_prompt_logprobs:
            match = cache.match(sequence.tokens, request.cache_salt, sequence.hashes)
            blocks, start = match.block_ids, match.num_tokens
        swapped = sequence.swapped_tokens
        if swapped <= start:
            return blocks, start, None
        # Whole blocks of the cache come first, the rest from the image.
        first = start // size
        return blocks[:first], swapped, first

    def _count_hits(self, sequence: Sequence, num_tokens: int) -> None:
        """Counts what the cache had of a prompt, when its request runs for the first time."""
        request, state = sequence.request, self.state
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(num_tokens, sequence.num_prompt)
            if state.cache is not None:
                state.num_queried_tokens += sequence.num_prompt
                state.num_hit_tokens += request.num_cached_tokens

    def _add(
        self,
        sequence: Sequence,
        count: int,
        cost: int,
        *,
        is_sampled: bool,
        is_admission: bool = False,
    ) -> None:
        row, start, request = sequence.row, sequence.num_computed, sequence.request
        assert row is not None
        is_decode = start >= sequence.num_prefill
        self.planned[sequence] = Segment(
            request.request_id,
            row,
            start,
            count,
            is_decode,
            is_sampled,
            is_admission,
            sequence.index,
            is_decode and request.beam is not None,
        )
        self.budget -= count
        if cost:
            self.costs[sequence] = cost
            self.blocks.num_free -= cost
        if request.unforked and is_sampled:
            self._prompt_ends.append(sequence)

    def _take_out(self, sequence: Sequence) -> None:
        """Takes a sequence out of the plan."""
        segment = self.planned.pop(sequence, None)
        if segment is not None:
            self.budget += segment.num_tokens
            self.blocks.num_free += self.costs.pop(sequence, 0)

    def _preempt(self, group: list[Sequence]) -> None:
        """Takes rows away from a sequence, or from all beams of a request, and frees them."""
        state, size = self.state, self.config.block_size
        request = group[0].request
        request.num_preemptions += 1
        self.blocks.keep_tables(group)
        for sequence in group:
            self._take_out(sequence)
            self.preempted.append(sequence)
            row = sequence.row
            if row is None:
                continue
            # A row that has yet to be forked holds nothing.
            held = 0 if sequence in self.blocks.forks else sequence.num_computed
            blocks = ceil_div(held, size)
            state.release(sequence)
            if self._is_swapped(sequence, held):
                sequence.swapped_tokens = held
                state.num_swapped_blocks += blocks
                self.swapped_out.append((*sequence.key, row))
            if state.cache is not None:
                # Freed at once: what was published last cannot be retained any more.
                state.cache.forget(state.ledger.tables[row])
            self.blocks.free(row)
        if request.is_beam:
            request.unforked = request.sequences[1:]

    def _is_swapped(self, sequence: Sequence, num_tokens: int) -> bool:
        mode, state = self.config.preemption_mode, self.state
        blocks = ceil_div(num_tokens, self.config.block_size)
        has_room = state.num_swapped_blocks + blocks <= self.config.swap_blocks
        if mode == "recompute" or not num_tokens or sequence.request.is_beam or not has_room:
            return False
        recomputed, swapped = state.costs.recomputed_token, state.costs.swapped_block
        if mode == "swap" or swapped is None or recomputed is None:
            return True
        return blocks * swapped < num_tokens * recomputed

    def _extend_decodes(self) -> None:
        """Lets a plan that only decodes run several steps, if the blocks for them are there."""
        most, size = self.config.decode_steps, self.config.block_size
        if most == 1 or self.preempted or self.capped:
            return
        counts = []
        cost = 0
        for sequence, segment in self.planned.items():
            if not segment.is_decode or segment.is_given:
                return
            left = sequence.request.max_total_tokens - len(sequence.tokens) - sequence.num_unread
            if sequence.guide is not None:
                left = 1
            counts.append(count := left if left < most else most)
            # Of its blocks those for one token are planned.
            cost += (segment.start % size + count - 1) // size
        if cost > self.blocks.available:
            return
        self.blocks.num_free -= cost
        for segment, count in zip(self.planned.values(), counts, strict=True):
            segment.num_tokens = count

    def _end(self, sequence: Sequence) -> int:
        segment = self.planned.get(sequence)
        return sequence.num_computed + (segment.num_tokens if segment else 0)


def _group(sequence: Sequence) -> list[Sequence]:
    """Those that run and lose their rows together: all beams of a request, or one alone."""
    return list(sequence.request.sequences) if sequence.request.is_beam else [sequence]
