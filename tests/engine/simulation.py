"""The scheduler with a pool on paper: a slot holds a number that stands for all tokens up to it.

Tokens are a function of what came before them, so each request has one right answer, and whatever
reads a slot can tell whether it holds what it should. `Simulation` follows the engine: a plan is
issued, and its results are read when `num_unread` later ones have been issued, or nothing is left.
"""

import dataclasses
import functools
from collections import Counter, deque
from dataclasses import dataclass

import numpy as np

from paged_jax.config import ResolvedConfig
from paged_jax.engine.request import Request, Sequence
from paged_jax.engine.scheduler import MAX_BYPASSED, schedule
from paged_jax.engine.scheduler_state import SchedulerState
from paged_jax.plan import Plan
from paged_jax.sampling_params import SamplingParams
from paged_jax.shapes import ceil_div

CONFIG = ResolvedConfig(
    max_model_len=64, block_size=4, num_blocks=12, max_num_seqs=4, max_num_batched_tokens=16
)
VOCAB = 7
STOP = 0


def with_options(**options) -> ResolvedConfig:
    return dataclasses.replace(CONFIG, **options)


def prefix_of(tokens) -> int:
    """What the slot of the last of these tokens holds."""
    return functools.reduce(lambda before, token: hash((before, token)), tokens, 1)


def next_token(tokens, seed: int, index: int) -> int:
    """What choice `index` of a request says next; one in seven is a stop."""
    return hash((prefix_of(tokens), seed, index)) % VOCAB


def answer(prompt, max_tokens: int, seed: int, index: int) -> list[int]:
    """All that a choice says, alone."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens, seed, index))
        if tokens[-1] == STOP:
            break
    return tokens[len(prompt) :]


def long_answers(count: int, least: int, length: int) -> list[list[int]]:
    """Prompts whose requests, added in this order, say at least so many tokens."""
    found: list[list[int]] = []
    rng = np.random.default_rng(0)
    while len(found) < count:
        prompt = rng.integers(1, 7, length).tolist()
        if len(answer(prompt, least, len(found), 0)) == least:
            found.append(prompt)
    return found


@dataclass
class Unread:
    """A dispatch of which the host knows only the plan."""

    plan: Plan
    sequences: list[Sequence]
    sampled: list[list[int]]


class Simulation:
    """Runs plans, and checks after each of them all that must hold."""

    def __init__(self, config: ResolvedConfig, *, num_unread: int = 0) -> None:
        self.config = config
        self.state = SchedulerState.create(config)
        self.requests: dict[str, Request] = {}
        self.ended: dict[tuple[str, int], tuple[str, list[int]]] = {}
        """Of each choice: how it ended and what it had said."""
        self.cached: dict[str, int] = {}
        """Of each request that was admitted: prompt tokens that were cached."""
        self.num_preemptions = 0
        self._num_added = 0
        self._num_unread = num_unread
        self._unread: deque[Unread] = deque()
        self._num_idle = 0
        self._passed: Counter[tuple[str, int]] = Counter()
        # The device.
        self._slots: dict[int, list[int | None]] = {
            block: [None] * config.block_size for block in range(1, config.num_blocks + 1)
        }
        self._said: dict[Sequence, list[int]] = {}
        self._stopped: set[Sequence] = set()
        self._images: dict[tuple[str, int], list[list[int | None]]] = {}

    def add(self, prompt, max_tokens: int, *, n: int = 1, priority: int = 0, deadline=None) -> str:
        """Puts a request into the queue; returns its name, which is a number in order."""
        order = self._num_added
        self._num_added += 1
        prompt = [1] * prompt if isinstance(prompt, int) else list(prompt)
        request = Request(
            request_id=str(order),
            prompt=None,
            prompt_token_ids=prompt,
            params=SamplingParams(n=n),
            max_total_tokens=len(prompt) + max_tokens,
            seed=order,
            order=order,
            arrival_time=0.0,
            priority=priority,
            deadline=deadline,
        )
        request.sequences = [
            Sequence(request=request, index=index, tokens=list(prompt)) for index in range(n)
        ]
        self.requests[request.request_id] = request
        self.state.add(request)
        return request.request_id

    def abort(self, name: str) -> None:
        """Ends a request at once."""
        for sequence in self.requests[name].sequences:
            if sequence.finish_reason is None:
                self._end(sequence, "abort")

    def step(self, now: float = 0.0) -> Plan:
        """Plans, issues, and reads what is due."""
        state = self.state
        before = {s: (s.num_computed, s.num_expected) for r in self._live() for s in r.sequences}
        running, waiting = list(state.running), list(state.waiting)
        plan = schedule(state, now, self.config)
        for name in plan.expired:
            assert self.requests[name].deadline <= now
            for sequence in self.requests[name].sequences:
                if sequence.finish_reason is None:
                    self._end(sequence, "timeout")
        assert all(r.deadline is None or r.deadline > now for r in self._live())
        for name, index in plan.capped:
            sequence = self.requests[name].sequences[index]
            # Only what the whole pool cannot hold ends so.
            assert sequence.num_expected > self.config.num_blocks * self.config.block_size
            self._end(sequence, "capped")
        sequences = [self.requests[s.request_id].sequences[s.index] for s in plan.segments]
        self._check_segments(plan, sequences, before)
        self._check_order(plan, sequences, running, waiting)
        self._issue(plan, sequences)
        self._check_blocks()
        self._check_rows()
        self.num_preemptions += len(plan.preempted)
        is_idle = not (plan.segments or plan.capped or plan.expired or self._unread)
        self._num_idle = self._num_idle + 1 if is_idle and self.requests else 0
        assert self._num_idle < 3, "work is pending and nothing happens"
        return plan

    def drain(self) -> None:
        """Reads what is left and gives the last blocks back, as the engine does."""
        while self._unread:
            self._read(self._unread.popleft())
        for _ in range(3):
            self.step()
        assert not self.state.released

    def assert_idle(self) -> None:
        """Every row is free, every block free or cached, and nothing on the host."""
        self.drain()
        state = self.state
        assert not self.requests
        assert not state.running
        assert not len(state.waiting)
        assert sorted(state.free_rows) == list(range(self.config.max_num_seqs))
        assert state.ledger.num_free + state.num_cached == self.config.num_blocks
        assert state.num_swapped_blocks == len(self._images) == 0
        assert state.num_hit_tokens <= state.num_queried_tokens

    # The device.

    def _issue(self, plan: Plan, sequences: list[Sequence]) -> None:
        ledger = self.state.ledger
        for name, index, row in plan.swapped_out:
            self._images[name, index] = [list(self._slots[block]) for block in ledger.tables[row]]
        allocation = self.state.apply(plan, sequences)
        assert allocation.ok, "a plan's blocks must be there"
        for source, target in allocation.copies.values():
            self._slots[target] = list(self._slots[source])
        for name, index, row, first in plan.swapped_in:
            image = self._images.pop((name, index))
            blocks = ledger.tables[row][first : len(image)]
            for block, slots in zip(blocks, image[first:], strict=True):
                self._slots[block] = list(slots)
        sampled = []
        for segment, sequence in zip(plan.segments, sequences, strict=True):
            if segment.is_admission:
                self._images.pop(sequence.key, None)
                said = self._said.get(sequence, sequence.tokens)
                assert said[: sequence.num_known] == sequence.tokens
                self._said[sequence] = list(sequence.tokens)
                self._stopped.discard(sequence)
            sampled.append(self._run(segment, sequence))
        if plan.segments:
            self._unread.append(Unread(plan, sequences, sampled))
        while len(self._unread) > (self._num_unread if plan.segments else 0):
            self._read(self._unread.popleft())

    def _run(self, segment, sequence: Sequence) -> list[int]:
        """Writes the slots of a segment after a look at all that it reads."""
        said, size = self._said[sequence], self.config.block_size
        seed, index = sequence.request.seed, sequence.index
        found = []
        if segment.source is not None:
            self._check_read(segment.source, said, segment.start)
            found = [next_token(said, seed, index)]
        elif segment.is_decode:
            table = self.state.ledger.tables[segment.row]
            for position in range(segment.start, segment.start + segment.num_tokens):
                if sequence in self._stopped:
                    break
                self._check_read(segment.row, said, position)
                self._slots[table[position // size]][position % size] = prefix_of(said)
                found.append(next_token(said, seed, index))
                said.append(found[-1])
                if found[-1] == STOP:
                    self._stopped.add(sequence)
            return found
        else:
            self._check_read(segment.row, said, segment.start)
            table = self.state.ledger.tables[segment.row]
            for position in range(segment.start, segment.start + segment.num_tokens):
                self._slots[table[position // size]][position % size] = prefix_of(
                    said[: position + 1]
                )
            found = [next_token(said, seed, index)] if segment.is_sampled else []
        said += found
        if STOP in found:
            self._stopped.add(sequence)
        return found

    def _check_read(self, row: int, said: list[int], end: int) -> None:
        table, size, expected = self.state.ledger.tables[row], self.config.block_size, 1
        for position in range(end):
            expected = hash((expected, said[position]))
            found = self._slots[table[position // size]][position % size]
            assert found == expected, f"row {row} reads foreign tokens at position {position}"

    def _read(self, unread: Unread) -> None:
        for segment, sequence, found in zip(
            unread.plan.segments, unread.sequences, unread.sampled, strict=True
        ):
            sequence.num_unread -= segment.num_sampled
            if not segment.num_sampled or sequence.finish_reason is not None:
                continue
            for token in found:
                sequence.tokens.append(token)
                is_full = sequence.num_known >= sequence.request.max_total_tokens
                if token == STOP or is_full:
                    self.state.publish(sequence)
                    self._end(sequence, "stop" if token == STOP else "length")
                    break
            else:
                self.state.publish(sequence)

    def _end(self, sequence: Sequence, how: str) -> None:
        assert sequence.key not in self.ended
        self.ended[sequence.key] = how, sequence.output_ids
        sequence.finish_reason = how  # type: ignore[assignment]
        self.state.drop(sequence)
        self._images.pop(sequence.key, None)
        request = sequence.request
        if how in ("stop", "length"):
            prompt, limit = request.prompt_token_ids, request.max_total_tokens - sequence.num_prompt
            said = answer(prompt, limit, request.seed, sequence.index)
            assert sequence.output_ids == said
        if request.is_finished:
            self.requests.pop(request.request_id)
            assert sum(key[0] == request.request_id for key in self.ended) == request.params.n

    # What must hold.

    def _live(self) -> list[Request]:
        return list(self.requests.values())

    def _check_segments(self, plan: Plan, sequences: list[Sequence], before) -> None:
        config, size = self.config, self.config.block_size
        assert plan.num_tokens <= config.max_num_batched_tokens
        rows = [segment.row for segment in plan.segments]
        assert len(set(rows)) == len(rows) <= config.max_num_seqs
        decode = [segment.is_decode for segment in plan.segments]
        assert decode == sorted(decode, reverse=True), "decode rows come first"
        assert all(decode) or plan.num_steps == 1, "several steps are for decoding alone"
        assert plan.num_steps <= config.decode_steps
        shares = {row: (ids, count) for row, ids, count in plan.shares}
        restored = {
            row: (count, first * size)
            for row, count in plan.restored
            for *_, other, first in plan.swapped_in
            if other == row
        }
        for segment, sequence in zip(plan.segments, sequences, strict=True):
            computed, expected = before[sequence]
            start = segment.start
            if segment.source is not None:
                assert sequence.index > 0
                assert segment.is_admission and segment.num_tokens == 0  # noqa: PT018
                assert start == sequence.num_prompt
                continue
            if segment.is_admission:
                _, cached = shares.get(segment.row, ((), 0))
                count, first = restored.get(segment.row, (0, 0))
                assert start == (first + count if count else cached)
                assert cached < sequence.num_known, "one token at least is computed"
                hits = min(cached, sequence.num_prompt)
                self.cached.setdefault(segment.request_id, hits)
                if sequence.request.num_preemptions == 0 and sequence.index == 0:
                    assert cached <= sequence.num_prompt - 1
            else:
                forks = [f for f in plan.branches if f[1] == segment.row]
                assert start == (sequence.num_prompt if forks else computed)
            if segment.is_decode:
                assert segment.is_sampled
                assert expected + segment.num_tokens <= sequence.request.max_total_tokens
                assert start + 1 == expected, "it decodes the token sampled last"
            else:
                assert start + segment.num_tokens <= sequence.num_known
                assert segment.is_sampled == (start + segment.num_tokens == sequence.num_known)

    def _check_order(self, plan: Plan, sequences, running, waiting) -> None:
        admitted = [
            sequence
            for segment, sequence in zip(plan.segments, sequences, strict=True)
            if segment.is_admission and segment.source is None
        ]
        assert not (plan.preempted and admitted), "nobody is admitted where somebody loses a row"
        running = [s for s in running if s.finish_reason is None]
        if running and running[0].key not in plan.capped:
            first, others = running[0], {s.key for s in running[1:]}
            is_ending = first.num_expected >= first.request.max_total_tokens
            # Alone with the pool, it may wait for its own tokens, and for rows that are freed next.
            is_last = others <= {*plan.preempted}
            is_due = first.num_unread and (is_ending or is_last)
            assert first in sequences or is_due or (is_last and self.state.released), (
                "the first rank always advances"
            )
        if plan.preempted:
            names = {*plan.preempted}
            ranks = [s.rank for s in running if s.key not in names]
            lost = [self.requests[name].sequences[index].rank for name, index in names]
            assert not ranks or max(ranks) < min(lost), "the last rank loses its row"
        left = [s for s in waiting if s in self.state.waiting]
        if left:
            head = left[0]
            self._passed[head.key] += sum(s.rank > head.rank for s in admitted)
            assert self._passed[head.key] <= MAX_BYPASSED
        for sequence in admitted:
            self._passed.pop(sequence.key, None)

    def _check_blocks(self) -> None:
        state, ledger = self.state, self.state.ledger
        owners = Counter(block for table in ledger.tables for block in table)
        num_reclaimable = 0
        for block in range(1, self.config.num_blocks + 1):
            is_kept = state.cache is not None and block in state.cache
            is_kept = is_kept and not state.cache.has_pending([block])
            num_reclaimable += is_kept and not owners[block]
            assert ledger.refcounts[block] == owners[block] + is_kept
        free = [b for b in range(1, self.config.num_blocks + 1) if not ledger.refcounts[b]]
        assert sorted(ledger.free_blocks) == free, "a block is free, or owned, or neither"
        assert state.num_cached == num_reclaimable
        assert 0 <= state.num_swapped_blocks <= self.config.swap_blocks
        assert state.num_swapped_blocks == sum(map(len, self._images.values()))

    def _check_rows(self) -> None:
        state, ledger = self.state, self.state.ledger
        live = [sequence.row for sequence in state.running]
        assert sorted([*live, *state.released, *state.free_rows]) == list(
            range(self.config.max_num_seqs)
        ), "a row is of one sequence, or to be freed, or free"
        assert [s.rank for s in state.running] == sorted(s.rank for s in state.running)
        for sequence in state.running:
            table = ledger.tables[sequence.row]
            assert len(table) == ceil_div(sequence.num_computed, self.config.block_size)
            assert ledger.lengths[sequence.row] == sequence.num_computed
        for row in state.free_rows:
            assert not ledger.tables[row]
