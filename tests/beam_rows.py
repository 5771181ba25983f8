"""Beams that transformers found in float32: prompts, parameters, sequences and scores.

`llama_rows` are of tests/data/tiny/llama, `smollm2_rows` of the embedded model, written by
benchmarks/runners/beams_hf.py.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paged_jax.beam_search_params import BeamSearchParams

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True, kw_only=True)
class BeamRow:
    """One search and its result, best beam first."""

    prompt_token_ids: list[int]
    params: BeamSearchParams
    eos_token_id: int
    sequences: list[list[int]]
    scores: list[float]

    def check(self, found: Iterable[tuple[Iterable[int], float]]) -> None:
        """Compares (token ids, score) of each beam, best first.

        Log-probabilities, which are scores times the penalty, may differ as logits of two float32
        implementations do, over ten tokens.
        """
        beams = [(list(token_ids), score) for token_ids, score in found]
        assert [token_ids for token_ids, _ in beams] == self.sequences
        factors = np.asarray([len(ids) for ids in self.sequences]) ** self.params.length_penalty
        found_scores = np.asarray([score for _, score in beams])
        np.testing.assert_allclose(
            found_scores * factors, np.asarray(self.scores) * factors, atol=2e-3, rtol=0
        )


def llama_rows() -> list[BeamRow]:
    """Rows of tests/data/beams_llama.json; no beam of them meets its end-of-sequence token."""
    rows = json.loads((DATA / "beams_llama.json").read_text())
    return [_row(row, row["prompt"]) for row in rows]


def smollm2_rows() -> list[BeamRow]:
    """Rows of tests/data/beams_smollm2.json; in those of chats some or all beams end early."""
    found = json.loads((DATA / "beams_smollm2.json").read_text())
    return [_row(row, found["prompts"][row["prompt"]]["token_ids"]) for row in found["rows"]]


def _row(row: dict[str, Any], prompt_token_ids: list[int]) -> BeamRow:
    params = BeamSearchParams(
        beam_width=row["width"],
        max_tokens=row["max_tokens"],
        length_penalty=row["length_penalty"],
        early_stopping=row["early_stopping"],
    )
    return BeamRow(
        prompt_token_ids=prompt_token_ids,
        params=params,
        eos_token_id=row["eos"],
        sequences=row["sequences"],
        scores=row["scores"],
    )
