"""From what a dispatch sampled to what a request returns."""

import time
from collections.abc import Mapping
from typing import Any

from paged_jax.engine.detokenize import TextStream
from paged_jax.engine.guide import GuideError
from paged_jax.engine.request import Request, Sequence
from paged_jax.engine.step import StepOutputs
from paged_jax.engine.step_logprobs import LISTED
from paged_jax.models.tokenizer import Tokenizer
from paged_jax.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from paged_jax.plan import Segment


def text_stream(request: Request, tokenizer: Tokenizer | None) -> TextStream | None:
    """For the text of one choice; None where nobody wants it or there is no tokenizer."""
    params = request.params
    if tokenizer is None or not params.detokenize:
        return None
    return TextStream(
        tokenizer,
        request.prompt_token_ids,
        params.stop_strings,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
        includes_stop=params.include_stop_str_in_output,
    )


def error_text(error: Exception) -> str:
    """What `RequestOutput.error` says of it."""
    return f"{type(error).__name__}: {error}"


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
    request, params = sequence.request, sequence.request.params
    sequence.tokens.append(token)
    num_output = len(sequence.tokens) - sequence.num_prompt
    if request.first_token_time is None:
        request.first_token_time = time.monotonic()
    if params.logprobs is not None:
        _take_logprobs(sequence, result, place, tokenizer)
    if sequence.guide is not None:
        try:
            sequence.guide.accept(token)
        except GuideError as error:
            request.error = error_text(error)
            return "error"
    if token in request.stop_ids:
        if token in request.named_stop_ids:
            sequence.stop_reason = token
        if sequence.text and params.include_stop_str_in_output:
            sequence.text.append(token, may_stop=False)
        return "stop"
    stop = None
    if sequence.text:
        stop = sequence.text.append(token, may_stop=num_output > params.min_tokens)
    if stop is not None:
        sequence.stop_reason = stop
        return "stop"
    if sequence.guide is not None and sequence.guide.is_over:
        return "stop"
    return "length" if len(sequence.tokens) >= request.max_total_tokens else None


def _take_logprobs(
    sequence: Sequence, result: StepOutputs, place: tuple[int, int], tokenizer: Tokenizer | None
) -> None:
    token, params = sequence.tokens[-1], sequence.request.params
    listed = {name: getattr(result, name) for name in LISTED}
    tokenizer = tokenizer if params.detokenize else None
    entries = _logprobs(token, params.logprobs or 0, listed, place, tokenizer)
    sequence.cumulative_logprob += entries[token].logprob
    sequence.logprobs.append(entries)


def take_prompt_logprobs(
    request: Request,
    segment: Segment,
    listed: Mapping[str, Any],
    place: int,
    tokenizer: Tokenizer | None,
) -> None:
    """Adds what is told of the prompt tokens that follow those of a segment.

    Args:
      listed: `StepOutputs.prompt`, as numpy arrays.
      place: Of the segment's first token in them.
    """
    found = request.prompt_logprobs
    assert found is not None
    tokenizer = tokenizer if request.params.detokenize else None
    count = request.params.prompt_logprobs or 0
    for i in range(segment.num_tokens):
        # What is computed once more after a preemption has been told.
        position = segment.start + i + 1
        if position == len(found) and position < len(request.prompt_token_ids):
            token = request.prompt_token_ids[position]
            found.append(_logprobs(token, count, listed, (place + i,), tokenizer))


def _logprobs(
    token: int,
    count: int,
    listed: Mapping[str, Any],
    place: tuple[int, ...],
    tokenizer: Tokenizer | None,
) -> dict[int, Logprob]:
    """The token and the `count` most likely ones."""
    entries = {token: (float(listed["logprob"][place]), int(listed["rank"][place]))}
    top_ids, top_logprobs = listed["top_ids"][place], listed["top_logprobs"][place]
    for rank in range(min(count, len(top_ids))):
        entries.setdefault(int(top_ids[rank]), (float(top_logprobs[rank]), rank + 1))
    decode = tokenizer.decode_token if tokenizer else lambda _: None
    return {
        token_id: Logprob(logprob=value, rank=rank, decoded_token=decode(token_id))
        for token_id, (value, rank) in entries.items()
    }


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
        prompt_logprobs=request.prompt_logprobs and list(request.prompt_logprobs),
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
