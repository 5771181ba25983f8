"""Which full blocks of the pool hold the keys and values of which tokens.

A block's key is a hash chained over the token ids from the start of its sequence, so equal keys
mean equal prefixes. The cache is one more owner of each block that it knows, beside rows. It only
keeps books: the scheduler puts the ids into plans. An entry goes through three states:

    publish -> pending -- take_pending --> owned by rows <-- reference / unreference --> reclaimable
                 |                                                                           |
               forget                                                                      evict

Pure: no clock, randomness, JAX or I/O. No operation looks at entries that it is not asked about.
"""

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any, NamedTuple

from paged_jax.shapes import ceil_div

_MAX_CANDIDATES = 8
"""Blocks compared for the tokens after the last whole block: bounds the work of a match."""


@dataclass(frozen=True, kw_only=True)
class Match:
    """Blocks that hold the keys and values of the leading tokens of a prompt."""

    block_ids: tuple[int, ...]
    """In order of position; the last is used in part if `num_tokens % block_size`."""
    num_tokens: int
    """Leading tokens whose keys and values are in the blocks."""


class _Entry(NamedTuple):
    digest: bytes
    parent: bytes
    """Digest of the block before, or the root's."""
    tokens: tuple[int, ...]


class PrefixCache:
    """Finds blocks by content, and orders those that no row owns by their last use.

    Args:
      block_size: Tokens per block.
      root: What else keys and values depend on, such as their dtype.
    """

    def __init__(self, block_size: int, root: bytes = b"") -> None:
        self.block_size = block_size
        self._pack = struct.Struct(f"<{block_size}q").pack
        self._root = root
        self._version = 0
        self._entries: dict[int, _Entry] = {}
        self._blocks: dict[bytes, int] = {}
        # Ordered sets of blocks, that used last at the end.
        self._pending: dict[int, None] = {}
        self._reclaimable: OrderedDict[int, None] = OrderedDict()
        # By digest of the block before and own first token; a dict only where there are several.
        self._children: dict[tuple[bytes, int], int | dict[int, None]] = {}

    def __len__(self) -> int:
        """Entries; a block has at most one."""
        return len(self._entries)

    def __contains__(self, block: int) -> bool:
        """Whether the block has an entry, pending or retained."""
        return block in self._entries

    @property
    def num_reclaimable(self) -> int:
        """Retained blocks that no row owns: what `evict` can give."""
        return len(self._reclaimable)

    def is_reclaimable(self, block: int) -> bool:
        """Whether the cache is the only owner of the block."""
        return block in self._reclaimable

    def match(self, tokens: Sequence[int], salt: str | None, hashes: list[bytes]) -> Match:
        """Finds the longest cached prefix that leaves at least one token to compute.

        After the last whole block it goes on inside the cached block that agrees longest, among
        those used last that follow the same prefix. The blocks may be pending. No entry changes.

        Args:
          salt: Only blocks published under the same salt are found; None is a salt of its own.
          hashes: The caller's memo for these tokens and salt: digests of leading full blocks,
            extended as far as needed. Tokens may be appended between calls, not changed.
        """
        limit = max(len(tokens) - 1, 0)
        parent = self._root_digest(salt)
        block_ids: list[int] = []
        for index in range(len(tokens) // self.block_size):
            self._extend(hashes, tokens, salt, index + 1)
            block = self._blocks.get(hashes[index])
            if block is None:
                break
            entry = self._entries[block]
            if entry.parent != parent or entry.tokens != self._slice(tokens, index):
                break
            block_ids.append(block)
            parent = entry.digest
        num_tokens = len(block_ids) * self.block_size
        if num_tokens < limit:
            end = min(num_tokens + self.block_size, limit)
            block, num_common = self._longest_common(parent, tokens[num_tokens:end])
            num_tokens += num_common
            block_ids += [block] if num_common else []
        num_tokens = min(num_tokens, limit)
        used = ceil_div(num_tokens, self.block_size)
        return Match(block_ids=tuple(block_ids[:used]), num_tokens=num_tokens)

    def publish(
        self,
        tokens: Sequence[int],
        salt: str | None,
        hashes: list[bytes],
        table: Sequence[int],
        start: int,
        end: int,
    ) -> None:
        """Registers full blocks of a row, whose keys and values a dispatch has been asked to write.

        New entries are pending: the next plan retains them. Content that has an entry keeps it, and
        the row's own block stays unknown.

        Args:
          tokens: Of the row, at least `end` blocks full.
          hashes: As in `match`.
          table: The row's block ids.
          start: First block of the table to register.
          end: Block after the last.
        """
        self._extend(hashes, tokens, salt, start)
        parent = hashes[start - 1] if start else self._root_digest(salt)
        blocks, entries, size = self._blocks, self._entries, self.block_size
        # Hundreds of blocks fill in a dispatch: no calls that can be spared.
        for index in range(start, end):
            piece = tuple(tokens[index * size : (index + 1) * size])
            if index == len(hashes):
                hashes.append(hashlib.sha256(parent + self._pack(*piece)).digest())
            digest = hashes[index]
            if digest not in blocks:
                block = table[index]
                assert block not in entries, f"block {block} is known with other content"
                self._enter(block, _Entry(digest, parent, piece))
                self._pending[block] = None
            parent = digest

    def take_pending(self) -> tuple[int, ...]:
        """Blocks to retain in the plan being made, in order of publication; retained from now."""
        taken = tuple(self._pending)
        self._pending.clear()
        return taken

    def forget(self, block_ids: Iterable[int]) -> None:
        """Drops pending entries among these, whose block is freed before a plan can retain it."""
        for block in block_ids:
            if block in self._pending:
                del self._pending[block]
                self._drop(block)

    def has_pending(self, block_ids: Iterable[int]) -> bool:
        """Whether any of these is to be retained by the next plan."""
        return any(block in self._pending for block in block_ids)

    def reference(self, block_ids: Iterable[int]) -> None:
        """Notes that a row owns these and uses them now; unknown blocks are ignored."""
        for block in block_ids:
            if block in self._entries:
                self._reclaimable.pop(block, None)
                siblings = self._children[_family(self._entries[block])]
                if isinstance(siblings, dict):
                    siblings[block] = siblings.pop(block)

    def unreference(self, block_ids: Sequence[int]) -> None:
        """Makes the retained blocks among these reclaimable, as those used last.

        Args:
          block_ids: Blocks that no row owns any more, in the order of their table: a tail is of no
            use without its head and is evicted before it.
        """
        for block in reversed(block_ids):
            if block in self._entries and block not in self._pending:
                self._reclaimable[block] = None
                self._reclaimable.move_to_end(block)

    def evict(self, count: int) -> tuple[int, ...]:
        """Drops the reclaimable entries unused for longest.

        Returns: Blocks to release in the plan being made.
        Raises: ValueError if fewer than `count` blocks are reclaimable.
        """
        if count > self.num_reclaimable:
            raise ValueError(
                f"count ({count}) must be at most num_reclaimable ({self.num_reclaimable})"
            )
        evicted = tuple(self._reclaimable.popitem(last=False)[0] for _ in range(count))
        for block in evicted:
            self._drop(block)
        return evicted

    def clear(self) -> tuple[int, ...]:
        """Forgets everything.

        Returns: The retained blocks, to be released; rows may own some of them still.
        """
        retained = tuple(block for block in self._entries if block not in self._pending)
        self._entries.clear()
        self._blocks.clear()
        self._pending.clear()
        self._reclaimable.clear()
        self._children.clear()
        return retained

    def set_version(self, version: int) -> None:
        """Sets the version of the weights; entries of others are not found and age until evicted.

        Memos of `match` made before must be dropped by their owners.
        """
        self._version = version

    @property
    def version(self) -> int:
        """Version of the weights."""
        return self._version

    def record(self) -> dict[str, Any]:
        """Everything that it knows, as JSON; `load` takes it back."""
        return {
            "root": self._root.hex(),
            "version": self._version,
            "pending": list(self._pending),
            "reclaimable": list(self._reclaimable),
            # Siblings in the order of their use.
            "entries": [
                [block, entry.digest.hex(), entry.parent.hex(), entry.tokens]
                for siblings in self._children.values()
                for block, entry in ((x, self._entries[x]) for x in _members(siblings))
            ],
        }

    def load(self, record: dict[str, Any]) -> None:
        """Knows what the cache knew that made the record, and nothing else."""
        assert record["root"] == self._root.hex()
        self.clear()
        self._version = record["version"]
        for block, digest, parent, tokens in record["entries"]:
            entry = _Entry(bytes.fromhex(digest), bytes.fromhex(parent), tuple(tokens))
            self._enter(block, entry)
        self._pending.update(dict.fromkeys(record["pending"]))
        self._reclaimable.update(dict.fromkeys(record["reclaimable"]))

    def _enter(self, block: int, entry: _Entry) -> None:
        digest, parent, tokens = self._entries[block] = entry
        self._blocks[digest] = block
        family = parent, tokens[0]
        siblings = self._children.setdefault(family, block)
        if isinstance(siblings, dict):
            siblings[block] = None
        elif siblings != block:
            self._children[family] = {siblings: None, block: None}

    def _root_digest(self, salt: str | None) -> bytes:
        """Start of the chain; lengths and a mark before the salt keep the fields apart."""
        header = struct.pack("<qq", self._version, len(self._root))
        # A salt comes from JSON, which can carry lone surrogates.
        suffix = b"" if salt is None else b"\x01" + salt.encode("utf-8", "surrogatepass")
        return hashlib.sha256(header + self._root + suffix).digest()

    def _extend(
        self, hashes: list[bytes], tokens: Sequence[int], salt: str | None, count: int
    ) -> None:
        """Computes the missing ones of the first `count` digests."""
        for index in range(len(hashes), count):
            parent = hashes[-1] if hashes else self._root_digest(salt)
            hashes.append(self._digest(parent, self._slice(tokens, index)))

    def _digest(self, parent: bytes, piece: Sequence[int]) -> bytes:
        return hashlib.sha256(parent + self._pack(*piece)).digest()

    def _slice(self, tokens: Sequence[int], index: int) -> tuple[int, ...]:
        return tuple(tokens[index * self.block_size : (index + 1) * self.block_size])

    def _longest_common(self, parent: bytes, tokens: Sequence[int]) -> tuple[int, int]:
        """The candidate after `parent` that agrees with most leading tokens, and their number."""
        best, most = 0, 0
        siblings = self._children.get((parent, tokens[0]), {})
        for block in islice(reversed(_members(siblings)), _MAX_CANDIDATES):
            num_common = _num_common(self._entries[block].tokens, tokens)
            if num_common > most:
                best, most = block, num_common
        return best, most

    def _drop(self, block: int) -> None:
        entry = self._entries.pop(block)
        del self._blocks[entry.digest]
        siblings = self._children[_family(entry)]
        if isinstance(siblings, dict):
            del siblings[block]
        if not isinstance(siblings, dict) or not siblings:
            del self._children[_family(entry)]


def _family(entry: _Entry) -> tuple[bytes, int]:
    return entry.parent, entry.tokens[0]


def _members(siblings: int | dict[int, None]) -> dict[int, None]:
    return siblings if isinstance(siblings, dict) else {siblings: None}


def _num_common(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = zip(left, right, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
