"""How to choose tokens and when to stop; vLLM's names, defaults and rules."""

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_LOGPROBS = 20
"""Most likely tokens that can be listed per position."""

MAX_CHOICES = 64
"""Choices of one request."""

MAX_TEMPERATURE = 1e6
"""Far past uniform, and finite in float32."""

MAX_BIASES = 1024
"""Tokens that one request can bias."""

MOST_BIAS = 100.0
"""Larger ones are as good as a ban or a command, and are taken for this, as in vLLM."""

MAX_STRINGS = 256
"""Stop strings of one request, and bad words: each costs time for every token."""

MAX_STRING_CHARS = 4096
"""Of one of them."""

REPETITION_RANGE = (1e-3, 1e3)
"""vLLM takes any above 0; these keep logits finite."""

_FLAGS = (
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "detokenize",
)


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What the text must be; exactly one of these, under vLLM's names."""

    json: str | Mapping[str, Any] | None = None
    """A JSON schema, as text or parsed."""
    regex: str | None = None
    choice: Sequence[str] | None = None
    """The text is one of these."""
    grammar: str | None = None
    """In Lark's syntax, as llguidance has it."""
    json_object: bool | None = None
    """True: any JSON object."""
    disable_any_whitespace: bool = False
    """JSON without blanks between its parts."""

    def __post_init__(self) -> None:
        given = [name for name in CONSTRAINTS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs ({', '.join(given) or 'nothing'}) must have exactly one of "
                f"{', '.join(CONSTRAINTS)}"
            )
        (name,) = given
        value = getattr(self, name)
        is_right = {
            "json": isinstance(value, Mapping) or _is_text(value),
            "choice": isinstance(value, Sequence)
            and not isinstance(value, str)
            and len(value) > 0
            and all(map(_is_text, value)),
            "json_object": value is True,
        }.get(name, _is_text(value))
        if not isinstance(self.disable_any_whitespace, bool):
            raise ValueError(
                f"structured_outputs.disable_any_whitespace ({self.disable_any_whitespace!r}) must "
                "be True or False"
            )
        if not is_right:
            raise ValueError(f"structured_outputs.{name} ({value!r}) is not of its kind")


CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object")
"""Fields of `StructuredOutputsParams` that say what is wanted."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling fields of one request; values are checked here, token ids at submission."""

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
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None

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
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                _check_int(name, count, 0, MAX_LOGPROBS)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        for name in ("presence_penalty", "frequency_penalty"):
            _check_number(name, getattr(self, name), -2.0, 2.0)
        _check_number("repetition_penalty", self.repetition_penalty, *REPETITION_RANGE)
        _check_int("min_tokens", self.min_tokens, 0, self.max_tokens, "; max_tokens is the most")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} ({getattr(self, name)!r}) must be True or False")
        self._check_lists()
        self._check_text()
        if isinstance(self.structured_outputs, Mapping):
            try:
                found = StructuredOutputsParams(**self.structured_outputs)
            except TypeError as error:
                raise ValueError(f"structured_outputs: {error}") from None
            object.__setattr__(self, "structured_outputs", found)
        elif not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise ValueError(
                f"structured_outputs ({self.structured_outputs!r}) must be StructuredOutputsParams "
                "or a mapping of its fields"
            )

    def _check_lists(self) -> None:
        for name in ("stop_token_ids", "allowed_token_ids"):
            ids = getattr(self, name)
            if ids is None:
                continue
            if not _is_list(ids) or not all(_is_int(token) and token >= 0 for token in ids):
                raise ValueError(f"{name} ({ids!r}) must be a list of token ids")
        if self.allowed_token_ids is not None and not len(self.allowed_token_ids):
            raise ValueError("allowed_token_ids ([]) must name at least one token, or be None")
        bias = self.logit_bias
        if bias is None:
            return
        if not isinstance(bias, Mapping) or not all(
            _is_int(token) and token >= 0 for token in bias
        ):
            raise ValueError(f"logit_bias ({bias!r}) must map token ids to numbers")
        if len(bias) > MAX_BIASES:
            raise ValueError(f"logit_bias ({len(bias)} tokens) must have {MAX_BIASES} at most")
        for token, value in bias.items():
            # JSON may hold any number; NaN is none.
            if not _is_number(value) or math.isnan(value):
                raise ValueError(f"logit_bias of token {token} ({value!r}) must be a number")

    def _check_text(self) -> None:
        is_listed = self.stop is None or isinstance(self.stop, Sequence)
        if not is_listed or not all(map(_is_text, self.stop_strings)):
            raise ValueError(f"stop ({self.stop!r}) must be a non-empty string or a list of such")
        words = self.bad_words
        if words is not None and (not _is_list(words) or not all(map(_is_text, words))):
            raise ValueError(f"bad_words ({words!r}) must be a list of non-empty strings")
        for name, strings in (("stop", self.stop_strings), ("bad_words", words or ())):
            if len(strings) > MAX_STRINGS or any(len(s) > MAX_STRING_CHARS for s in strings):
                raise ValueError(
                    f"{name} ({len(strings)} strings) must have {MAX_STRINGS} at most, of "
                    f"{MAX_STRING_CHARS} characters at most"
                )
        if self.stop_strings and not self.detokenize:
            raise ValueError(f"stop ({self.stop!r}) needs detokenize=True")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _is_text(value: Any) -> bool:
    """Whether it is text, some, and no lone surrogates, which JSON and UTF-8 cannot hold."""
    if not isinstance(value, str) or not value:
        return False
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _is_int(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _check_number(name: str, value: float, least: float, most: float) -> None:
    # The comparison also refuses NaN.
    if not _is_number(value) or not (least <= value <= most):
        raise ValueError(f"{name} ({value!r}) must be a number in [{least:g}, {most:g}]")


def _check_int(name: str, value: int, least: int, most: int | None, hint: str = "") -> None:
    if not _is_int(value) or value < least or (most is not None and value > most):
        rule = f"at least {least}" if most is None else f"in [{least}, {most}]"
        raise ValueError(f"{name} ({value!r}) must be an integer {rule}{hint}")
