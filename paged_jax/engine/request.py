"""A request while the engine holds it."""

from dataclasses import dataclass, field

from paged_jax.engine.detokenize import TextStream
from paged_jax.outputs import FinishReason, Logprob
from paged_jax.sampling_params import SamplingParams


@dataclass(kw_only=True, eq=False)
class Request:
    """Tokens known so far, how many of them have KV, and where they live."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    max_total_tokens: int
    """Prompt and output tokens at which the request ends by length."""
    seed: int
    order: int
    """Position in the order of arrival; kept through preemption."""
    arrival_time: float
    text: TextStream | None = None
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    row: int | None = None
    num_computed: int = 0
    """Leading known tokens whose KV is in the pool."""
    num_prefill: int = 0
    """Tokens known at admission, which the host provides; later ones are on the device."""
    num_preemptions: int = 0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    @property
    def num_known(self) -> int:
        """Prompt and output tokens."""
        return len(self.prompt_token_ids) + len(self.output_ids)

    @property
    def is_decoding(self) -> bool:
        """Whether its next token is the one that the device sampled last."""
        return self.row is not None and self.num_computed >= self.num_prefill

    def known(self, start: int, count: int) -> list[int]:
        """Tokens [start, start + count) of prompt and output."""
        split = len(self.prompt_token_ids)
        if start + count <= split:
            return self.prompt_token_ids[start : start + count]
        return (self.prompt_token_ids + self.output_ids)[start : start + count]
