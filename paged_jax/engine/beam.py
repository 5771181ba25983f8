"""Beam search on the host: which beams go on, which have ended and when it is over.

Each step, every continuation of every live beam is ranked by its log-probability:

    rank     0 .. W-1            W ..
    EOS      ends, is scored     is dropped
    other    |<- the first W of all ranks are the live beams of the next step

At the length limit the ranks below W end, whatever their token. Of the beams that have ended the W
best by length-penalised score are kept.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from paged_jax.beam_search_params import BeamSearchParams
from paged_jax.outputs import FinishReason


@dataclass(frozen=True, kw_only=True)
class Beam:
    """A generated sequence and its place in the ranking."""

    token_ids: tuple[int, ...]
    """Every chosen token, the end-of-sequence token included."""
    score: float
    """`cumulative_logprob / len(token_ids) ** length_penalty`."""
    cumulative_logprob: float
    finish_reason: FinishReason


class BeamSearch:
    """One prompt's search; it decides as `_beam_search` of transformers 5 does without sampling.

    Scores are float32, as there. Equal ones are ordered by beam, then by token id, and a beam that
    ended earlier comes first: lowest flattened index first, an order that torch.topk leaves open.

    Transformers fills missing beams with placeholders of score -1e9 and can return them when the
    vocabulary is tiny. Here they are never returned: such a search gives fewer beams.

    Source: transformers 5.19, generation/utils.py.
    """

    def __init__(
        self,
        prompt_len: int,
        params: BeamSearchParams,
        eos_token_ids: frozenset[int],
        max_total_tokens: int,
    ) -> None:
        """Starts with one live beam, the prompt.

        Args:
          prompt_len: Tokens of the prompt.
          params: Width, limits and scoring.
          eos_token_ids: Tokens that end a beam, unless `params.ignore_eos`.
          max_total_tokens: Most tokens of prompt and output together.
        Raises: ValueError if the prompt leaves no room for a token.
        """
        if prompt_len >= max_total_tokens:
            raise ValueError(
                f"prompt_len ({prompt_len}) must be below max_total_tokens ({max_total_tokens})"
            )
        self.params = params
        self._eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        self._max_len = min(params.max_tokens, max_total_tokens - prompt_len)
        self._live = [_Live((), np.float32(0))]
        self._ended: list[Beam] = []  # best first, at most beam_width

    @property
    def num_candidates(self) -> int:
        """Most likely tokens that `advance` needs of each beam: `beam_width` that do not end it.

        Twice the width, and more when there are more end-of-sequence tokens than beams.
        """
        width = self.params.beam_width
        return width + max(width, len(self._eos_token_ids))

    @property
    def is_done(self) -> bool:
        """Whether no beam is live any more."""
        return not self._live

    def advance(self, top_ids: np.ndarray, top_logprobs: np.ndarray) -> tuple[tuple[int, int], ...]:
        """Extends the live beams by one token.

        Args:
          top_ids: [B, C] i32, the most likely tokens of each live beam, in any order. B is 1 at the
            first step and `beam_width` after it; C at least `num_candidates`, or the vocabulary.
          top_logprobs: [B, C] f32, their log-softmax under the model's own logits.
        Returns: For each live beam of the next step the index of the beam it extends, and its
          token; always `beam_width` of them, or none when the search is over.
        """
        assert self._live, "the search is over"
        width = self.params.beam_width
        candidates = self._rank(top_ids, top_logprobs)
        length = len(self._live[0].token_ids) + 1
        if length == self._max_len:
            ended, going = candidates[:width], []
        else:
            ended = [c for c in candidates[:width] if c.token in self._eos_token_ids]
            going = [c for c in candidates if c.token not in self._eos_token_ids][:width]
        self._end(self._extend(c) for c in ended)
        if not going or self._is_settled(going[0].logprob, length):
            self._live = []
            return ()
        # A tiny vocabulary: rows that must be filled, and whose continuations have no chance.
        going += [going[0]._replace(logprob=np.float32(-np.inf))] * (width - len(going))
        self._live = [self._extend(c) for c in going]
        return tuple((c.beam, c.token) for c in going)

    def results(self) -> list[Beam]:
        """The beams that have ended, best first, at most `beam_width`.

        Before the search is over, live beams take the places that are left, best first, with the
        finish reason "abort".
        """
        live = [b for b in self._live if b.token_ids and np.isfinite(b.logprob)]
        aborted = [self._scored(beam, "abort") for beam in live]
        return (self._ended + aborted)[: self.params.beam_width]

    def record(self) -> dict[str, Any]:
        """The search so far, as JSON."""
        return {
            "params": dataclasses.asdict(self.params),
            "eos_token_ids": sorted(self._eos_token_ids),
            "live": [[beam.token_ids, float(beam.logprob)] for beam in self._live],
            "ended": [dataclasses.asdict(beam) for beam in self._ended],
        }

    @classmethod
    def of_record(
        cls, record: dict[str, Any], prompt_len: int, max_total_tokens: int
    ) -> "BeamSearch":
        """The search that made the record, which goes on as it would have."""
        params = BeamSearchParams(**record["params"])
        search = cls(prompt_len, params, frozenset(record["eos_token_ids"]), max_total_tokens)
        search._live = [_Live(tuple(ids), np.float32(value)) for ids, value in record["live"]]
        search._ended = [
            Beam(**beam | {"token_ids": tuple(beam["token_ids"])}) for beam in record["ended"]
        ]
        return search

    def _rank(self, top_ids: np.ndarray, top_logprobs: np.ndarray) -> list["_Candidate"]:
        """Every continuation that is possible, the most likely first."""
        before = np.asarray([beam.logprob for beam in self._live], np.float32)
        logprobs = (before[:, None] + np.asarray(top_logprobs, np.float32)).ravel()
        beams = np.repeat(np.arange(len(before)), top_ids.shape[1])
        tokens = top_ids.ravel()
        order = np.lexsort((tokens, beams, -logprobs))  # the last key counts first
        return [
            _Candidate(int(beams[i]), int(tokens[i]), np.float32(logprobs[i]))
            for i in order
            if np.isfinite(logprobs[i])
        ]

    def _extend(self, candidate: "_Candidate") -> "_Live":
        parent = self._live[candidate.beam]
        return _Live((*parent.token_ids, candidate.token), candidate.logprob)

    def _end(self, beams: Iterable["_Live"]) -> None:
        """Adds beams that end; the sort is stable, so that older ones stay first among equals."""
        for beam in beams:
            is_stop = beam.token_ids[-1] in self._eos_token_ids
            self._ended.append(self._scored(beam, "stop" if is_stop else "length"))
        self._ended.sort(key=lambda beam: -beam.score)
        del self._ended[self.params.beam_width :]

    def _is_settled(self, best_logprob: np.float32, length: int) -> bool:
        """Whether what has ended is the result, by `early_stopping`."""
        if len(self._ended) < self.params.beam_width:
            return False
        if self.params.early_stopping is True:
            return True
        is_patient = self.params.early_stopping == "never" and self.params.length_penalty > 0
        best = self._score(best_logprob, self._max_len if is_patient else length)
        return best <= self._ended[-1].score

    def _scored(self, beam: "_Live", reason: FinishReason) -> Beam:
        return Beam(
            token_ids=beam.token_ids,
            score=self._score(beam.logprob, len(beam.token_ids)),
            cumulative_logprob=float(beam.logprob),
            finish_reason=reason,
        )

    def _score(self, logprob: np.float32, length: int) -> float:
        return float(logprob / np.float32(length**self.params.length_penalty))


class _Live(NamedTuple):
    token_ids: tuple[int, ...]
    logprob: np.float32  # -inf: only fills a row


class _Candidate(NamedTuple):
    beam: int
    token: int
    logprob: np.float32
