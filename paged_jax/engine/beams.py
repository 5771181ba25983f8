"""Beams of a request on their rows: `BeamSearch` decides, plans move tables."""

import time

import numpy as np

from paged_jax.engine.detokenize import text_after
from paged_jax.engine.request import Request
from paged_jax.engine.scheduler_state import Fork, SchedulerState
from paged_jax.models.tokenizer import Tokenizer
from paged_jax.outputs import FinishReason


def advance(request: Request, state: SchedulerState, tokenizer: Tokenizer | None) -> int:
    """Chooses the next tokens of all beams once the last of them has its candidates.

    Returns: Tokens that were chosen; 0 while a beam has no candidates.
    """
    beam, live = request.beam, request.live_beams
    assert beam is not None
    listed = [sequence.listed for sequence in live if sequence.listed is not None]
    if len(listed) < len(live):
        return 0
    ids, logprobs = (np.stack(arrays) for arrays in zip(*listed, strict=True))
    chosen = beam.advance(ids, logprobs)
    for sequence in live:
        sequence.listed = None
    if request.first_token_time is None:
        request.first_token_time = time.monotonic()
    if not chosen:
        end(request, tokenizer, None)
        return 0
    before = [(s.tokens, s.row, s.hashes, s.num_published) for s in live]
    is_start = len(live) == 1
    for member, (source, token) in zip(request.sequences, chosen, strict=True):
        tokens, row, hashes, num_published = before[source]
        member.tokens, member.hashes = [*tokens, token], list(hashes)
        if not is_start and member.row is not None and row is not None and row != member.row:
            state.reindexed[member.row] = row
            member.num_published = num_published
    request.live_beams = list(request.sequences)
    first = request.sequences[0]
    if is_start and first.row is not None:
        for member in request.sequences[1:]:
            assert member.row is not None
            state.start(member, member.row)
            # Its token is decoded as its parent's is, in one plan: the block that both write into
            # is counted for both of them.
            member.num_prefill = length = first.num_known - 1
            state.forks.append(Fork(parent=first.row, child=member, num_tokens=length))
        request.unforked = []
    return len(chosen)


def end(request: Request, tokenizer: Tokenizer | None, reason: FinishReason | None) -> None:
    """Gives the sequences of a request the tokens of the best beams, best first.

    Args:
      tokenizer: None leaves their text empty.
      reason: Why it ends before its time; None: the search is over.
    """
    assert request.beam is not None
    found = request.beam.results()
    request.num_beams_found = len(found)
    for sequence in request.sequences[len(found) :]:
        sequence.tokens, sequence.finish_reason = list(request.prompt_token_ids), reason or "length"
    for sequence, beam in zip(request.sequences, found, strict=False):
        sequence.tokens = [*request.prompt_token_ids, *beam.token_ids]
        sequence.cumulative_logprob = beam.cumulative_logprob
        sequence.finish_reason = beam.finish_reason
        if beam.finish_reason == "abort" and reason is not None:
            sequence.finish_reason = reason
        if tokenizer is not None:
            params, ids = request.beam.params, list(beam.token_ids)
            if beam.finish_reason == "stop" and not params.include_stop_str_in_output:
                ids.pop()
            prompt, skips = request.prompt_token_ids, params.skip_special_tokens
            sequence.beam_text = text_after(tokenizer, prompt, ids, skip_special_tokens=skips)
