"""Shadow tags: for each slot of a pool, which token was written there last; a debugging aid.

A tag is a hash of who wrote and at which position. Tags are written with the keys and values,
through the same slots, and move with their blocks in copies and swaps. A row that finds another tag
than it wrote reads somebody else's keys and values: the block was reused, aliased or not copied.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.core.audit import AuditError
from paged_jax.core.kv import KVCache
from paged_jax.core.state import BlockState


def with_tags(cache: KVCache) -> KVCache:
    """Adds tags i32[N+1, P] to a pool, all 0: nothing written."""
    return dataclasses.replace(
        cache, tags=jnp.zeros((cache.num_blocks + 1, cache.block_size), jnp.int32)
    )


def make_tags(owners: jax.Array, positions: jax.Array) -> jax.Array:
    """i32[T], a hash of owner and position that is never 0.

    Args:
      owners: i32[T], a number for whoever writes the token, such as a request.
      positions: i32[T].
    """
    mixed = _mix(owners.astype(jnp.uint32), positions.astype(jnp.uint32), jnp.uint32)
    return jax.lax.bitcast_convert_type(mixed, jnp.int32)


def expected_tags(owner: int, positions: np.ndarray) -> list[int]:
    """The tags of one owner at host positions: `make_tags` without a device."""
    owners = np.full(positions.shape, owner).astype(np.uint32)
    return _mix(owners, positions.astype(np.uint32), np.uint32).view(np.int32).tolist()


def _mix(owners: Any, positions: Any, u32: Callable[[int], Any]) -> Any:
    """Knuth's multiplicative hash on each word, then the 32-bit finaliser of MurmurHash3."""
    mixed = owners * u32(2654435761) ^ (positions * u32(2246822519) + u32(1))
    mixed = (mixed ^ (mixed >> u32(16))) * u32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> u32(13))) * u32(0xC2B2AE35)
    return (mixed ^ (mixed >> u32(16))) | u32(1)


def write_tags(cache: KVCache, slots: jax.Array, tags: jax.Array) -> KVCache:
    """Writes tags i32[T] into slots i32[T], as `write` does keys and values.

    Raises: ValueError for a pool without tags.
    """
    if cache.tags is None:
        raise ValueError("the pool has no tags; add them with with_tags")
    block, offset = slots // cache.block_size, slots % cache.block_size
    written = cache.tags.at[block, offset].set(tags, mode="promise_in_bounds")
    return dataclasses.replace(cache, tags=written)


def check_tags(
    cache: KVCache, state: BlockState, expected: Sequence[Sequence[int] | Any | None]
) -> None:
    """Checks, on the host, that every row reads the tags that it should.

    Args:
      expected: For each row, its tags in order of position; None: not checked.
    Raises: AuditError naming the first wrong row and position, and where the tag it found belongs;
      ValueError for a pool without tags.
    """
    if cache.tags is None:
        raise ValueError("the pool has no tags; add them with with_tags")
    if len(expected) != state.max_seqs:
        raise ValueError(
            f"expected ({len(expected)}) must have an entry per row ({state.max_seqs})"
        )
    tags, tables = np.asarray(cache.tags), np.asarray(state.block_tables)
    lengths, size = np.asarray(state.lengths), state.block_size
    for row, wanted in enumerate(expected):
        if wanted is None:
            continue
        if len(wanted) != lengths[row]:
            raise AuditError(f"row {row} has {lengths[row]} tokens and must have {len(wanted)}")
        position = np.arange(len(wanted))
        block, offset = tables[row, position // size], position % size
        wrong = np.flatnonzero(tags[block, offset] != np.asarray(wanted, np.int32))
        if wrong.size:
            first = int(wrong[0])
            found = int(tags[block[first], offset[first]])
            raise AuditError(
                f"row {row} reads position {first} from block {block[first]}, offset "
                f"{offset[first]}, and finds {_owner(found, expected)} there "
                f"({wrong.size} of {len(wanted)} positions are wrong)"
            )


def _owner(tag: int, expected: Sequence[Sequence[int] | Any]) -> str:
    if tag == 0:
        return "a slot that nobody has written"
    for row, tags in enumerate(expected):
        places = np.flatnonzero(np.asarray(tags) == tag)
        if places.size:
            return f"position {places[0]} of row {row}"
    return "a token of no present row"
