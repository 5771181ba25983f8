"""From token ids to text, one token at a time, and where a stop string cuts it."""

from collections.abc import Sequence

from paged_jax.models.tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Tokens of the prompt that are decoded in front, because some decoders treat the first token of a
# sequence differently; as many as the longest UTF-8 character has bytes, and more where these have
# no text.
_CONTEXT = 4


class TextStream:
    """The text of a growing sequence; what was once emitted never changes.

    Text is held back while it may still change: bytes of an unfinished character, and a tail that
    may be the beginning of a stop string. At the end everything held is released.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        stop_strings: Sequence[str],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        includes_stop: bool = False,
    ) -> None:
        self._tokenizer, self._skips = tokenizer, skip_special_tokens
        self._includes_stop = includes_stop
        # Tokens that follow each other without what a decoder would put between them.
        self._joined = {} if spaces_between_special_tokens else tokenizer.added_tokens
        self._last: int | None = None
        self._stops = tuple(stop_strings)
        size = _CONTEXT
        while size < len(prompt_token_ids) and not self._text_of(prompt_token_ids[-size:]):
            size *= 2
        self._ids = list(prompt_token_ids[-size:])
        # Decoding restarts at `_prefix`, in front of `_read`; the text before `_read` is `_base`.
        self._prefix = 0
        self._read = len(self._ids)
        self._base = ""
        self._decoded = ""
        self._emitted = 0
        self._unstoppable = 0  # leading text in which no stop string may end
        self._is_stopped = False

    @property
    def text(self) -> str:
        """The text that is certain."""
        return self._decoded[: self._emitted]

    def append(self, token: int, *, may_stop: bool = True) -> str | None:
        """Adds a token; returns the stop string that ends the text, if one does.

        Args:
          may_stop: Whether a stop string may end in the text of this token.
        """
        self._ids.append(token)
        is_joined = token in self._joined and self._last in self._joined
        self._last = token
        self._decode(is_last=False, text=self._joined[token] if is_joined else None)
        if not may_stop:
            self._unstoppable = len(self._decoded)
        return self._advance()

    def finish(self) -> str | None:
        """Releases what was held back; returns the stop string that turned up in it, if any."""
        if self._is_stopped:
            return None
        self._decode(is_last=True)
        stop = self._advance()
        if stop is None:
            self._emitted = len(self._decoded)
        return stop

    def _decode(self, *, is_last: bool, text: str | None = None) -> None:
        before = self._text_of(self._ids[self._prefix : self._read])
        whole = self._text_of(self._ids[self._prefix :])
        if before.endswith(_REPLACEMENT) and not whole.startswith(before):
            # The prompt ends inside a character, which is whole now.
            before = before.rstrip(_REPLACEMENT)
        new = whole[len(before) :]
        if text is not None and new:
            new = text
        if not new:
            # A skipped token: kept in the window, because decoders that join words by a leading
            # space strip it from the first token they are given.
            return
        if is_last or not new.endswith(_REPLACEMENT):
            self._base += new
            self._prefix, self._read = self._read, len(self._ids)
            self._decoded = self._base
        else:
            # Unfinished or invalid bytes: only what comes after them can tell.
            self._decoded = self._base + new.rstrip(_REPLACEMENT)

    def _text_of(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, self._skips)

    def _advance(self) -> str | None:
        """Cuts at the leftmost stop string, or moves the certain end forward."""
        # Every tail that could begin a stop string was held back, so none begins before this.
        found = []
        for stop in self._stops:
            start = max(self._emitted, self._unstoppable - len(stop) + 1)
            found.append((self._decoded.find(stop, start), stop))
        found = [(place, stop) for place, stop in found if place >= 0]
        if found:
            place, stop = min(found)
            end = place + len(stop) if self._includes_stop else place
            self._decoded, self._emitted, self._is_stopped = self._decoded[:end], end, True
            return stop
        held = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(self._decoded)), held, -1):
                if self._decoded.endswith(stop[:size]):
                    held = size
                    break
        self._emitted = max(self._emitted, len(self._decoded) - held)
        return None


def text_after(
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int],
    token_ids: Sequence[int],
    *,
    skip_special_tokens: bool,
) -> str:
    """Text of tokens that follow a prompt, all at once: a `TextStream` gives the same in parts."""
    stream = TextStream(tokenizer, prompt_token_ids, (), skip_special_tokens=skip_special_tokens)
    stream._ids += token_ids
    stream.finish()
    return stream.text
