"""The tiny checkpoints that transformers computed logits and greedy tokens of, in float32."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paged_jax.models.decoder import Decoder
from paged_jax.models.load import load_model, open_checkpoint

TINY = Path(__file__).parents[1] / "data" / "tiny"
NAMES = sorted(path.name for path in TINY.iterdir() if path.is_dir())
LENGTHS = (1, 5, 17, 40)
IN_SHORT_SET = ("deepseek_v3", "gemma3", "gpt2", "gpt_oss", "llama")
"""Each part of a decoder at least once; the others run with the marker `exhaustive`."""
TOLERANCE = 3e-4
"""Of logits, relative to the largest magnitude; seen are 1e-6."""


def short_set_first(*marks: pytest.MarkDecorator) -> list[Any]:
    """All names as parameters, those outside the short set marked, as exhaustive if not told."""
    marks = marks or (pytest.mark.exhaustive,)
    return [n if n in IN_SHORT_SET else pytest.param(n, marks=marks) for n in NAMES]


@functools.cache
def model(name: str) -> Decoder:
    """One of the checkpoints, loaded once."""
    return load_model(open_checkpoint(TINY / name))


@functools.cache
def expected(name: str) -> dict[str, np.ndarray]:
    """By prompt length n: `prompt_n`, `logits_n` of the last positions and `greedy_n`."""
    return dict(np.load(TINY / name / "expected.npz"))


def config(name: str) -> dict[str, Any]:
    """Its config.json."""
    return json.loads((TINY / name / "config.json").read_text())


def assert_logits(got: np.ndarray, name: str, length: int) -> None:
    """The last positions of a prompt's logits [T, V] are those of transformers."""
    want = expected(name)[f"logits_{length}"]
    error = np.max(np.abs(np.asarray(got[-len(want) :]) - want)) / np.max(np.abs(want))
    assert error < TOLERANCE, f"{name}, prompt of {length}: {error:.1e}"
