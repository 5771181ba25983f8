"""Where a prompt ends, the other choices of its request start."""

import heapq
import itertools
from collections.abc import Iterable

from paged_jax.engine.request import Sequence
from paged_jax.engine.scheduler_state import Fork, SchedulerState
from paged_jax.plan import Segment


def start_choices(
    state: SchedulerState, ends: Iterable[tuple[Sequence, Segment]]
) -> tuple[list[Fork], list[tuple[Sequence, Segment]]]:
    """Gives rows to the choices of requests whose prompt ends in the plan being made.

    They sample from the logits of the first choice, and share its blocks from the next plan on.
    Those for whom no row is free wait as any other sequence does.

    Args:
      ends: First choices, and their segments.
    Returns: Forks for the next plan, and choices with their segments for this one.
    """
    forks, started = [], []
    for first, segment in ends:
        request = first.request
        if first.index:
            continue
        if request.is_beam:
            forks += _resume_beams(state, first)
            continue
        unforked, request.unforked = request.unforked, []
        tokens = segment.start + segment.num_tokens
        for child in unforked:
            child.hashes = list(first.hashes)
            if not state.free_rows:
                state.waiting.push(child)
                continue
            row = heapq.heappop(state.free_rows)
            state.start(child, row)
            forks.append(Fork(parent=segment.row, child=child, num_tokens=tokens))
            child_segment = Segment(
                request_id=request.request_id,
                index=child.index,
                row=row,
                start=tokens,
                num_tokens=0,
                is_decode=False,
                is_sampled=True,
                is_admission=True,
                source=segment.row,
            )
            started.append((child, child_segment))
    return forks, started


def _resume_beams(state: SchedulerState, first: Sequence) -> list[Fork]:
    """After a preemption the first beam is computed again, and the others start from it."""
    request = first.request
    if first.num_known == first.num_prompt:
        return []
    unforked, request.unforked = request.unforked, []
    forks = []
    for member in unforked:
        pairs = zip(first.tokens, member.tokens, strict=False)
        common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        assert member.row is not None
        assert first.row is not None
        state.start(member, member.row)
        tokens = min(common, member.num_known - 1)
        forks.append(Fork(parent=first.row, child=member, num_tokens=tokens))
    return forks
