"""A request while the engine holds it, and its choices, which run on their own."""

from dataclasses import dataclass, field

import numpy as np

from paged_jax.engine.beam import BeamSearch
from paged_jax.engine.detokenize import TextStream
from paged_jax.engine.guide import Guide
from paged_jax.outputs import FinishReason, Logprob
from paged_jax.sampling_params import SamplingParams


@dataclass(kw_only=True, eq=False, slots=True)
class Request:
    """What was asked for, and the sequences that answer it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    max_total_tokens: int
    """Prompt and output tokens at which a sequence ends by length."""
    seed: int
    order: int
    """Position in the order of arrival; kept through preemption."""
    arrival_time: float
    priority: int = 0
    deadline: float | None = None
    """Time at which the request ends, on the clock of `arrival_time`."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end a sequence."""
    named_stop_ids: frozenset[int] = frozenset()
    """Those that are told as the reason, because the request named them."""
    banned: np.ndarray | None = None
    """bool[V], tokens that are never sampled."""
    guide: Guide | None = None
    """At the beginning of the output, where the next token depends on the last in ways that only
    the host knows; each sequence has a copy."""
    num_logprobs: int | None = None
    """Most likely tokens to be told per position besides the sampled one; None: nothing."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """One per prompt token that was computed, None for the first; None: not asked for."""
    cache_salt: str | None = None
    """Only requests of one salt share cached blocks."""
    sequences: list["Sequence"] = field(default_factory=list)
    """Choices in order of their index."""
    unforked: list["Sequence"] = field(default_factory=list)
    """Choices that start where the first one has computed the prompt."""
    num_cached_tokens: int | None = None
    """Prompt tokens that the prefix cache had when the request first ran."""
    num_preemptions: int = 0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    error: str | None = None
    """What went wrong, for a request that ended so."""
    num_beams_found: int = 0
    """Sequences that a finished beam search has found."""
    beam: BeamSearch | None = None
    """Decides which tokens follow, for a beam request."""
    live_beams: list["Sequence"] = field(default_factory=list)
    """Sequences that go on: the first alone, and all of them once it has its candidates."""

    @property
    def is_beam(self) -> bool:
        """Whether its sequences wait for each other, and for the host, after every token."""
        return self.beam is not None

    @property
    def is_guided(self) -> bool:
        """Whether the host says for each token what it may be."""
        return self.guide is not None

    @property
    def waits_for_tokens(self) -> bool:
        """Whether each of its tokens is read before the next is sampled."""
        return self.is_beam or self.is_guided

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether prompt tokens must be computed for what is told of them."""
        found = self.prompt_logprobs
        return found is not None and len(found) < len(self.prompt_token_ids)

    @property
    def has_logit_options(self) -> bool:
        """Whether its tokens are chosen by other logits than the model's."""
        params = self.params
        return bool(
            self.banned is not None
            or self.is_guided
            or params.logit_bias
            or (params.min_tokens and self.stop_ids)
            or params.presence_penalty
            or params.frequency_penalty
            or params.repetition_penalty != 1.0
        )

    @property
    def is_finished(self) -> bool:
        """Whether all choices have ended."""
        return all(sequence.finish_reason is not None for sequence in self.sequences)


@dataclass(kw_only=True, eq=False, slots=True)
class Sequence:
    """One choice: tokens known so far, how many of them have KV, and where they live.

    tokens     p p p p o o o .         `num_known` = 7, of which the host has read all
    in flight                ? ?       `num_unread` = 2: sampled, not read yet
    KV         x x x x x x x x         `num_computed` = 8 once all dispatches have run
    """

    request: Request
    index: int = 0
    tokens: list[int]
    """Prompt and output."""
    text: TextStream | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    rank: tuple[int, int, int] = (0, 0, 0)
    """Who goes first: lower is sooner."""
    row: int | None = None
    num_computed: int = 0
    """Leading tokens whose KV is in the pool when all dispatches that were issued have run."""
    num_unread: int = 0
    """Tokens sampled by dispatches that have not been read."""
    num_prefill: int = 0
    """Tokens known at admission, which the host provides; later ones are on the device."""
    hashes: list[bytes] = field(default_factory=list)
    """Of its full blocks; the prefix cache's memo."""
    num_published: int = 0
    """Leading blocks that the prefix cache knows."""
    swapped_tokens: int = 0
    """Leading tokens whose KV is on the host."""
    lost_blocks: tuple[int, ...] = ()
    """Blocks of a row that it has just lost, until its end has been told."""
    num_bypassed: int = 0
    """How often a later arrival was admitted while this one did not fit."""
    listed: tuple[np.ndarray, np.ndarray] | None = None
    """Candidates of a beam and their log-probabilities, until all beams have theirs."""
    guide: Guide | None = None
    """Has seen the output tokens that were read."""
    beam_text: str | None = None
    """Text of a finished beam."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    @property
    def key(self) -> tuple[str, int]:
        """What plans call it."""
        return self.request.request_id, self.index

    @property
    def num_prompt(self) -> int:
        """Prompt tokens."""
        return len(self.request.prompt_token_ids)

    @property
    def owner(self) -> int:
        """A number that tells it from all other sequences, for shadow tags."""
        return 64 * self.request.order + self.index

    @property
    def output_ids(self) -> list[int]:
        """Output tokens read so far."""
        return self.tokens[self.num_prompt :]

    @property
    def num_known(self) -> int:
        """Prompt and output tokens read so far."""
        return len(self.tokens)

    @property
    def num_expected(self) -> int:
        """Tokens when all dispatches that were issued have run."""
        return len(self.tokens) + self.num_unread

    @property
    def num_cacheable(self) -> int:
        """Leading tokens that are known and whose KV is written for certain.

        The device may have stopped at the last token that was read, without its KV.
        """
        if self.request.is_beam:
            return min(self.num_computed, self.num_prompt)  # the rest changes hands every step
        return min(self.num_computed, max(len(self.tokens) - 1, self.num_prefill))
