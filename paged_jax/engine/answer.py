"""From what a dispatch sampled to what a request returns."""

import time

from paged_jax.engine.request import Request, Sequence
from paged_jax.engine.step import StepOutputs
from paged_jax.models.tokenizer import Tokenizer
from paged_jax.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
)


def take_token(
    sequence: Sequence,
    token: int,
    result: StepOutputs,
    place: tuple[int, int],
    tokenizer: Tokenizer | None,
) -> FinishReason | None:
    """Adds a sampled token to its sequence; returns why the sequence ends with it, if it does.

    Args:
      result: As numpy arrays.
      place: Step and row of the token in them.
    """
    request = sequence.request
    sequence.tokens.append(token)
    if request.first_token_time is None:
        request.first_token_time = time.monotonic()
    if request.params.logprobs is not None:
        _take_logprobs(sequence, result, place, tokenizer)
    if token in request.stop_ids:
        return "stop"
    stop = sequence.text.append(token) if sequence.text else None
    if stop is not None:
        sequence.stop_reason = stop
        return "stop"
    return "length" if len(sequence.tokens) >= request.max_total_tokens else None


def _take_logprobs(
    sequence: Sequence, result: StepOutputs, place: tuple[int, int], tokenizer: Tokenizer | None
) -> None:
    token = sequence.tokens[-1]
    count = sequence.request.params.logprobs or 0
    entries = {token: (float(result.logprob[place]), int(result.rank[place]))}
    for rank in range(min(count, result.top_ids.shape[-1])):
        listed = (*place, rank)
        entries.setdefault(
            int(result.top_ids[listed]), (float(result.top_logprobs[listed]), rank + 1)
        )
    sequence.cumulative_logprob += entries[token][0]
    decode = tokenizer.decode_token if tokenizer else lambda _: None
    sequence.logprobs.append(
        {
            token_id: Logprob(logprob=value, rank=rank, decoded_token=decode(token_id))
            for token_id, (value, rank) in entries.items()
        }
    )


def end(sequence: Sequence, reason: FinishReason) -> None:
    """Ends a sequence and its text."""
    if sequence.text is not None:
        stop = sequence.text.finish()
        if stop is not None and sequence.stop_reason is None:
            sequence.stop_reason, reason = stop, "stop"
    sequence.finish_reason = reason


def output_of(request: Request, num_blocks: int) -> RequestOutput:
    """What a request has produced so far.

    Args:
      num_blocks: KV blocks that its sequences hold.
    """
    found, is_finished = request.sequences, request.is_finished
    if request.is_beam and is_finished:
        found = found[: max(1, request.num_beams_found)]
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=list(request.prompt_token_ids),
        outputs=[_completion_of(sequence) for sequence in found],
        finished=is_finished,
        metrics=RequestMetrics(
            arrival_time=request.arrival_time,
            first_scheduled_time=request.first_scheduled_time,
            first_token_time=request.first_token_time,
            finished_time=request.finished_time,
            num_preemptions=request.num_preemptions,
        ),
        num_cached_tokens=request.num_cached_tokens or 0,
        num_blocks=num_blocks,
        error=request.error,
    )


def _completion_of(sequence: Sequence) -> CompletionOutput:
    request = sequence.request
    has_logprobs = request.params.logprobs is not None
    text = sequence.text.text if sequence.text else ""
    if sequence.beam_text is not None:
        text = sequence.beam_text
    return CompletionOutput(
        index=sequence.index,
        text=text,
        token_ids=sequence.output_ids,
        cumulative_logprob=(
            sequence.cumulative_logprob if has_logprobs or request.is_beam else None
        ),
        logprobs=list(sequence.logprobs) if has_logprobs else None,
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
    )
