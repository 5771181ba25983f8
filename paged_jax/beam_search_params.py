"""How to search with beams: vLLM's names, and early stopping as Hugging Face has it."""

import numbers
from dataclasses import dataclass
from typing import Literal

from paged_jax.sampling_params import MAX_LOGPROBS

MAX_BEAM_WIDTH = MAX_LOGPROBS // 2
"""The search looks at twice as many tokens of each beam as it keeps beams."""

MAX_LENGTH_PENALTY = 5.0
"""Its power of any length up to ten million tokens is finite in float32."""


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """Fields of one beam search, checked here."""

    beam_width: int
    """Beams kept at every step, and the most that are returned."""
    max_tokens: int = 16
    ignore_eos: bool = False
    temperature: float = 0.0
    """Only 0: the search ranks by the model's own distribution and draws nothing."""
    length_penalty: float = 1.0
    """A beam's score is its log-probability over its length to this power: above 0 favours long
    beams, below 0 short ones."""
    early_stopping: bool | Literal["never"] = False
    """When the search ends before its length limit, `beam_width` beams having ended. True: at once.
    False: when the best live beam scores worse than the worst of them at its present length.
    "never": when it would at any length, judged by the longest one if `length_penalty` > 0."""
    include_stop_str_in_output: bool = False
    """Whether `text` has what stands for the end-of-sequence token, unless it is a special token
    that is skipped. `token_ids` always has the token."""
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _check_int("beam_width", self.beam_width, MAX_BEAM_WIDTH)
        _check_int("max_tokens", self.max_tokens, None)
        _check_number("temperature", self.temperature, 0.0, "0; beam search draws nothing")
        limit = MAX_LENGTH_PENALTY
        rule = f"a number in [-{limit:g}, {limit:g}]"
        _check_number("length_penalty", self.length_penalty, limit, rule)
        stopping = self.early_stopping
        if not isinstance(stopping, bool) and stopping != "never":
            raise ValueError(f'early_stopping ({stopping!r}) must be True, False or "never"')
        flags = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")
        for name in flags:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} ({getattr(self, name)!r}) must be True or False")


def _check_int(name: str, value: int, most: int | None) -> None:
    is_int = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_int or value < 1 or (most is not None and value > most):
        rule = "at least 1" if most is None else f"in [1, {most}]"
        raise ValueError(f"{name} ({value!r}) must be an integer {rule}")


def _check_number(name: str, value: float, limit: float, rule: str) -> None:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    # The comparison also refuses NaN.
    if not is_number or not abs(value) <= limit:
        raise ValueError(f"{name} ({value!r}) must be {rule}")
