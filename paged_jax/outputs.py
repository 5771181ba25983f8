"""What a request returns; vLLM's names."""

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "timeout", "error"]


@dataclass(frozen=True, kw_only=True)
class Logprob:
    """Log-probability of a token under the model's own distribution."""

    logprob: float
    rank: int
    """1 for the most likely token."""
    decoded_token: str | None = None


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One generated sequence."""

    index: int
    text: str
    """Without the stop string; empty when the model has no tokenizer."""
    token_ids: list[int]
    """Every sampled token, the stop token included."""
    cumulative_logprob: float | None
    """None unless `logprobs` was asked for."""
    logprobs: list[dict[int, Logprob]] | None
    """Per token: the chosen one and the most likely ones."""
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    """The stop string, or the stop token id; None for end of sequence and length."""


@dataclass(frozen=True, kw_only=True)
class RequestMetrics:
    """When things happened, in seconds of `time.monotonic`."""

    arrival_time: float
    first_scheduled_time: float | None
    first_token_time: float | None
    finished_time: float | None
    num_preemptions: int


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """A request and what it has produced so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache."""
    error: str | None = None
    """What went wrong, with the finish reason "error"."""
    num_blocks: int = field(default=0)
    """KV blocks held when this output was made, just before they are freed if finished."""
