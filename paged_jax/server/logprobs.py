"""Log-probabilities in the two forms of OpenAI's API, and in vLLM's for prompts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paged_jax.outputs import Logprob

FLOOR = -9999.0
"""Stands for minus infinity, which JSON does not have."""

Entries = Mapping[int, Logprob] | None
"""Of one token: itself first, then the most likely ones. None for the first of a prompt."""


class Names:
    """What tokens are called.

    Args:
      token_bytes: Bytes of a token, or None without a tokenizer.
      as_ids: Call them "token_id:17".
    """

    def __init__(self, token_bytes: Callable[[int], bytes] | None, *, as_ids: bool) -> None:
        self._token_bytes = token_bytes
        self._as_ids = as_ids or token_bytes is None

    def name(self, token: int, entry: Logprob | None) -> str:
        """What a token is called."""
        return f"token_id:{token}" if self._as_ids else self.text(token, entry)

    def text(self, token: int, entry: Logprob | None) -> str:
        """The text of a token."""
        if entry is not None and entry.decoded_token is not None:
            return entry.decoded_token
        return self.bytes(token).decode("utf-8", "replace")

    def bytes(self, token: int) -> bytes:
        """The bytes of a token; of a part of a character those that the text cannot show."""
        return b"" if self._token_bytes is None else self._token_bytes(token)


def completion_logprobs(
    tokens: Sequence[int], entries: Sequence[Entries], count: int, names: Names, offset: int
) -> tuple[dict[str, Any], int]:
    """`logprobs` of a completion, and the characters up to the end of the last token.

    Args:
      count: Most likely tokens to list.
      offset: Characters in front of the first token.
    """
    found: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for token, listed in zip(tokens, entries, strict=True):
        entry = listed[token] if listed else None
        found["tokens"].append(names.name(token, entry))
        found["text_offset"].append(offset)
        offset += len(names.text(token, entry))
        found["token_logprobs"].append(floored(listed[token]) if listed else None)
        found["top_logprobs"].append(_by_name(token, listed, count, names) if listed else None)
    return found, offset


def _by_name(
    token: int, listed: Mapping[int, Logprob], count: int, names: Names
) -> dict[str, float]:
    """The token and the `count` most likely ones; of two that look alike the likelier."""
    ranked = sorted(listed.items(), key=lambda item: item[1].rank)
    found: dict[str, float] = {}
    for other, entry in ranked:
        if other == token or entry.rank <= count:
            found.setdefault(names.name(other, entry), floored(entry))
    return found


def chat_logprobs(
    tokens: Sequence[int], entries: Sequence[Entries], count: int, names: Names
) -> dict[str, Any]:
    """`logprobs` of a chat's choice."""
    content = []
    for token, listed in zip(tokens, entries, strict=True):
        assert listed is not None
        ranked = sorted(listed.items(), key=lambda item: item[1].rank)
        top = [_item(other, entry, names) for other, entry in ranked if entry.rank <= count]
        content.append({**_item(token, listed[token], names), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _item(token: int, entry: Logprob, names: Names) -> dict[str, Any]:
    return {
        "token": names.name(token, entry),
        "logprob": floored(entry),
        "bytes": list(names.bytes(token)),
    }


def prompt_logprobs(entries: Sequence[Entries], count: int) -> list[dict[str, Any] | None]:
    """`prompt_logprobs`, as vLLM has them: per token a mapping from ids, the token's own first."""
    return [None if listed is None else _by_id(listed, count) for listed in entries]


def _by_id(listed: Mapping[int, Logprob], count: int) -> dict[str, Any]:
    return {
        str(token): {
            "logprob": floored(entry),
            "rank": entry.rank,
            "decoded_token": entry.decoded_token,
        }
        for i, (token, entry) in enumerate(listed.items())
        if i == 0 or entry.rank <= count
    }


def floored(entry: Logprob) -> float:
    """The log-probability as a finite number."""
    return max(entry.logprob, FLOOR)
