"""How to choose tokens and when to stop; vLLM's names, defaults and rules."""

import dataclasses
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MAX_LOGPROBS = 20
"""Most likely tokens that can be listed per position."""

MAX_CHOICES = 64
"""Choices of one request."""

MAX_TEMPERATURE = 1e6
"""Far past uniform, and finite in float32."""

# Fields that act today. Every other field must keep its default: none is ignored in silence.
_BUILT = frozenset(
    {
        "n",
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "max_tokens",
        "stop",
        "ignore_eos",
        "logprobs",
    }
)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling fields of one request. Values are checked here, support at submission."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    """None and -1: the engine gives one."""
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    structured_outputs: Any = None

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _check_number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise ValueError("top_p (0.0) must be in (0, 1]")
        _check_int("top_k", self.top_k, -1, None, "; 0 and -1 mean off")
        _check_int("n", self.n, 1, MAX_CHOICES)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, None)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        is_listed = self.stop is None or isinstance(self.stop, Sequence)
        if not is_listed or not all(isinstance(s, str) and s for s in self.stop_strings):
            raise ValueError(f"stop ({self.stop!r}) must be a non-empty string or a list of such")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def check_supported(self) -> None:
        """Raises NotImplementedError for a field that is set and does not act yet."""
        for field in dataclasses.fields(self):
            given, default = getattr(self, field.name), field.default
            # Only numbers and flags are compared: an array would compare to an array.
            is_default = given is default or (default is not None and given == default)
            if field.name not in _BUILT and not is_default:
                raise NotImplementedError(
                    f"SamplingParams.{field.name} is not built yet; leave it at {field.default!r}"
                )


def _check_number(name: str, value: float, least: float, most: float) -> None:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    # The comparison also refuses NaN.
    if not is_number or not (least <= value <= most):
        raise ValueError(f"{name} ({value!r}) must be a number in [{least:g}, {most:g}]")


def _check_int(name: str, value: int, least: int, most: int | None, hint: str = "") -> None:
    is_int = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_int or value < least or (most is not None and value > most):
        rule = f"at least {least}" if most is None else f"in [{least}, {most}]"
        raise ValueError(f"{name} ({value!r}) must be an integer {rule}{hint}")
