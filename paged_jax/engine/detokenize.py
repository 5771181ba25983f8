"""From token ids to text, one token at a time, and where a stop string cuts it."""

from collections.abc import Sequence

from paged_jax.models.tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Bytes of the longest UTF-8 character: a decode that still ends in a replacement character after
# that many further tokens is invalid text and not an unfinished character.
_MAX_PENDING = 4


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
    ) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stop_strings)
        # A few tokens of context, because some decoders treat the first token differently.
        self._ids = list(prompt_token_ids[-_MAX_PENDING - 1 :])
        self._prefix = 0  # tokens before this one only give context
        self._read = len(self._ids)  # tokens before this one are decoded into `_decoded`
        self._decoded = ""
        self._emitted = 0
        self._is_stopped = False

    @property
    def text(self) -> str:
        """The text that is certain."""
        return self._decoded[: self._emitted]

    def append(self, token: int) -> str | None:
        """Adds a token; returns the stop string that ends the text, if one does."""
        self._ids.append(token)
        self._decode(is_last=False)
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

    def _decode(self, *, is_last: bool) -> None:
        window = self._ids[self._prefix :]
        before = self._tokenizer.decode(window[: self._read - self._prefix])
        after = self._tokenizer.decode(window)
        is_pending = after.endswith(_REPLACEMENT) and len(self._ids) - self._read < _MAX_PENDING
        if is_last or (not is_pending and len(after) >= len(before)):
            self._decoded += after[len(before) :]
            self._prefix, self._read = self._read, len(self._ids)

    def _advance(self) -> str | None:
        """Cuts at the leftmost stop string, or moves the certain end forward."""
        # Every tail that could begin a stop string was held back, so none begins before this.
        found = [(self._decoded.find(stop, self._emitted), stop) for stop in self._stops]
        found = [(place, stop) for place, stop in found if place >= 0]
        if found:
            place, stop = min(found)
            self._decoded, self._emitted, self._is_stopped = self._decoded[:place], place, True
            return stop
        held = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(self._decoded)), held, -1):
                if self._decoded.endswith(stop[:size]):
                    held = size
                    break
        self._emitted = max(self._emitted, len(self._decoded) - held)
        return None
