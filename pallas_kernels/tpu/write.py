"""Writes new tokens into the KV pool in place, for decode and prefill alike.

A tile of a few positions is the least that is read and written, so a token is written by reading
its tile, replacing the token and writing the tile back. Tokens that follow one another inside a
tile are one item:

    slots   36 37 38 39 | 40 41 |  0 | 96 | 17        tile 8, P 16; slots below 16 are padding
    items   36, 4 tokens  40, 2        96   17        with one token each

Grid (1,). The pool and the new tokens stay in HBM, the items are scalars in SMEM. Items pass
through a ring of VMEM buffers: while one is merged, old tiles and new tokens of later ones are on
their way in, and merged tiles of earlier ones on their way out. An item that fills its tile reads
no old one.

Bytes per item: the tile of all pool rows three times, or twice when the item fills it.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import compat
from pallas_kernels.tpu.hbm import HBM, in_hbm
from pallas_kernels.tpu.heads import LANES, SUBLANES, check_pool, check_scales
from pallas_kernels.tpu.scalars import divide

MAX_BUFFERS = 8

LIST_BYTES = 960 * 1024
"""Scalar memory for items: all of it but what the compiler wants."""

RING_BYTES = 8 << 20
"""Half of the VMEM that a kernel gets unless it asks for more."""


class WriteItems(NamedTuple):
    """Runs of tokens with consecutive slots in one tile; entries past the last one are zero."""

    tokens: jax.Array  # i32[T], first token of the run
    slots: jax.Array  # i32[T], its slot
    lengths: jax.Array  # i32[T]
    counts: jax.Array  # i32[2]: items; 1 if two of them within MAX_BUFFERS share a tile, else 0


def write_items(
    slots: jax.Array, tile: int, block_size: int, num_tokens: jax.Array | int | None = None
) -> WriteItems:
    """Groups tokens into items; depends on nothing of a layer, so that XLA shares it among layers.

    Args:
      slots: i32[T], `block * P + offset`; padding lies in block 0 and is left out.
      tile: Positions that are written together, a divisor of `block_size`.
      block_size: Positions per block P.
      num_tokens: Tokens that count; those from it on are padding.
    """
    size = slots.shape[0]
    token = jnp.arange(size, dtype=jnp.int32)
    is_live = slots >= block_size
    if num_tokens is not None:
        is_live &= token < num_tokens
    follows = jnp.pad(slots[1:] == slots[:-1] + 1, (1, 0))
    is_start = is_live & ~(follows & (slots % tile != 0))
    item = jnp.cumsum(is_start, dtype=jnp.int32) - 1
    start = jnp.where(is_start, item, size)
    zeros = jnp.zeros(size, jnp.int32)
    tokens = zeros.at[start].set(token, mode="drop")
    first_slots = zeros.at[start].set(slots, mode="drop")
    lengths = zeros.at[jnp.where(is_live, item, size)].add(1, mode="drop")
    # Tokens of one sequence that do not stand together, as when rows take turns: an old tile must
    # then not be read while another item's write to it is on its way.
    tiles = jnp.where(lengths > 0, first_slots // tile, -1 - token)
    is_shared = jnp.zeros((), bool)
    for distance in range(1, min(MAX_BUFFERS, size)):
        is_shared |= jnp.any(tiles[distance:] == tiles[:-distance])
    counts = jnp.stack([jnp.sum(is_start, dtype=jnp.int32), is_shared.astype(jnp.int32)])
    return WriteItems(tokens, first_slots, lengths, counts)


def write_rows(
    kv: jax.Array,
    layer: jax.Array | int,
    rows: jax.Array,
    slots: jax.Array,
    *,
    num_tokens: jax.Array | int | None = None,
    tile: int | None = None,
    num_buffers: int | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Returns `kv.at[layer, slots // P, :, slots % P].set(rows)` without the tokens of block 0.

    Args:
      kv: [L, N+1, R, P, C], float32, bfloat16 or 8-bit; updated in place where it is donated.
      layer: Layer to write, in 0..L-1; not checked.
      rows: [T, R, C] in the pool's dtype.
      slots: i32[T], `block * P + offset`, unique and below (N+1) * P, which is not checked; block 0
        for padding. Fastest where the tokens of a sequence stand together in order.
      num_tokens: Tokens that count, a scalar; all of them by default.
      tile: Positions written together, a multiple of 8 that divides P; 8 by default, which moves
        the fewest bytes for single tokens. Long runs take fewer items with a larger one.
      num_buffers: Items in flight, at most 8; by default as many as fit in 8 MiB.
      interpret: False, or what `pallas_call` takes.
    Raises: ValueError for shapes, dtypes or options that do not fit together; NotImplementedError
      for a pool or a number of tokens that the kernel cannot serve.
    """
    tile = SUBLANES if tile is None else tile
    _check_rows(kv, rows, slots, tile)
    if slots.shape[0] == 0:
        return kv
    # The tile of the first or last token may begin or end outside of the rows.
    padded = jnp.pad(rows, [(tile, tile), (0, 0), (0, 0)])

    def new_window(new_ref, first):
        return new_ref.at[pl.ds(first, tile)]

    def to_tile(window, _):
        return jnp.swapaxes(window, 0, 1)  # [tile, R, C] -> [R, tile, C]

    items = write_items(slots, tile, kv.shape[3], num_tokens)
    body = functools.partial(
        _write_kernel, tile=tile, block_size=kv.shape[3], new_window=new_window, to_tile=to_tile
    )
    window = (tile, *rows.shape[1:])
    return _launch(body, kv, layer, padded, items, tile, window, num_buffers, interpret)


def write_scales(
    scales: jax.Array,
    layer: jax.Array | int,
    new: jax.Array,
    slots: jax.Array,
    *,
    num_tokens: jax.Array | int | None = None,
    num_buffers: int | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Returns `scales.at[layer, slots // P, :, slots % P].set(new)` without the tokens of block 0.

    Args:
      scales: f32[L, N+1, 2K, P], P a multiple of 128; updated in place where it is donated.
      new: f32[T, 2K].
      layer, slots, num_tokens, num_buffers, interpret: As for `write_rows`.
    Raises: ValueError for shapes or dtypes that do not fit together; NotImplementedError for scales
      or a number of tokens that the kernel cannot serve.
    """
    _check_scales(scales, new, slots)
    count = slots.shape[0]
    if count == 0:
        return scales
    # Two aligned windows hold any 128 tokens, also those before the first and past the last.
    back = LANES + -count % LANES
    padded = jnp.pad(new.T, [(0, 0), (LANES, back)])  # [2K, 128 + T + back]

    def new_window(new_ref, first):
        return new_ref.at[:, pl.ds(pl.multiple_of(divide(first, LANES) * LANES, LANES), 2 * LANES)]

    def to_tile(window, first):
        shift = jax.lax.rem(first, LANES)
        lane = jax.lax.broadcasted_iota(jnp.int32, (window.shape[0], LANES), 1)
        # Lane l takes window[l + shift].
        left, right = (
            pltpu.roll(half, jax.lax.rem(LANES - shift, LANES), 1)
            for half in (window[:, :LANES], window[:, LANES:])
        )
        return jnp.where(lane + shift < LANES, left, right)

    items = write_items(slots, LANES, scales.shape[3], num_tokens)
    body = functools.partial(
        _write_kernel,
        tile=LANES,
        block_size=scales.shape[3],
        new_window=new_window,
        to_tile=to_tile,
    )
    window = (new.shape[1], 2 * LANES)
    return _launch(body, scales, layer, padded, items, LANES, window, num_buffers, interpret)


def _write_kernel(
    # Scalar prefetch, i32 in SMEM.
    layer_ref,  # [1]
    tokens_ref,  # [T]
    slots_ref,  # [T]
    lengths_ref,  # [T]
    counts_ref,  # [2]
    # Inputs.
    new_ref,  # padded new tokens, HBM
    _,  # the pool, read through the output that it is aliased to
    # Outputs.
    pool_ref,  # [L, N+1, R, P, C] or [L, N+1, 2K, P] HBM
    # Scratch of B buffers.
    new_buf,  # [B, tile, R, C] or [B, 2K, 256] VMEM
    tile_buf,  # [B, R, tile, C] or [B, 2K, 128] VMEM
    new_sems,  # [B]
    read_sems,  # [B]
    write_sems,  # [B]
    *,
    tile: int,
    block_size: int,
    new_window: Callable,
    to_tile: Callable,
):
    num_buffers = tile_buf.shape[0]
    num_items = counts_ref[0]
    # Items that share a tile go one by one.
    depth = jnp.where(counts_ref[1] == 0, num_buffers, 1)
    ahead = divide(depth, 2)  # the rest of the ring is on its way out

    def first_position(i):
        return jax.lax.rem(slots_ref[i], tile)

    def first_row(i):
        return tokens_ref[i] - first_position(i) + tile  # of the padding in front

    def tile_ref(i):
        offset = jax.lax.rem(slots_ref[i], block_size) - first_position(i)
        positions = pl.ds(pl.multiple_of(offset, tile), tile)
        return pool_ref.at[layer_ref[0], jax.lax.div(slots_ref[i], block_size), :, positions]

    def new_copy(i, buffer):
        window = new_window(new_ref, first_row(i))
        return pltpu.make_async_copy(window, new_buf.at[buffer], new_sems.at[buffer])

    def read_copy(i, buffer):
        return pltpu.make_async_copy(tile_ref(i), tile_buf.at[buffer], read_sems.at[buffer])

    def write_copy(i, buffer):
        return pltpu.make_async_copy(tile_buf.at[buffer], tile_ref(i), write_sems.at[buffer])

    def start_reads(i):
        buffer = jax.lax.rem(i, num_buffers)
        new_copy(i, buffer).start()

        @pl.when(lengths_ref[i] < tile)
        def _():
            read_copy(i, buffer).start()

    def merge(i):
        buffer = jax.lax.rem(i, num_buffers)
        new_copy(i, buffer).wait()

        @pl.when(lengths_ref[i] < tile)
        def _():
            read_copy(i, buffer).wait()

        new = to_tile(new_buf[buffer], first_row(i))
        position = jax.lax.broadcasted_iota(jnp.int32, new.shape, 1) - first_position(i)
        is_new = (position >= 0) & (position < lengths_ref[i])
        tile_buf[buffer] = jnp.where(is_new, new, tile_buf[buffer])
        write_copy(i, buffer).start()

    def finish(i):
        write_copy(i, jax.lax.rem(i, num_buffers)).wait()

    @pl.loop(0, jnp.minimum(ahead, num_items))
    def _(i):
        start_reads(i)

    @pl.loop(0, num_items)
    def _(i):
        @pl.when(i + ahead >= depth)
        def _():
            finish(i + ahead - depth)

        @pl.when(i + ahead < num_items)
        def _():
            start_reads(i + ahead)

        merge(i)

    @pl.loop(jnp.maximum(num_items + ahead - depth, 0), num_items)
    def _(i):
        finish(i)


def _launch(body, pool, layer, new, items, tile, window, num_buffers, interpret):
    if 4 * len(items) * items.slots.size > LIST_BYTES:
        raise NotImplementedError(
            f"{items.slots.size} tokens in one write; scalar memory holds lists of "
            f"{LIST_BYTES // (4 * len(items))}"
        )
    _, _, rows, _, *width = pool.shape
    buffer_bytes = math.prod((rows, tile, *width)) * pool.dtype.itemsize
    buffer_bytes += math.prod(window) * new.dtype.itemsize
    if num_buffers is None:
        num_buffers = max(1, min(MAX_BUFFERS, RING_BYTES // buffer_bytes))
    if not 1 <= num_buffers <= MAX_BUFFERS:
        raise ValueError(f"num_buffers ({num_buffers}) must be in 1..{MAX_BUFFERS}")
    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1 + len(items),
            grid=(1,),
            in_specs=[HBM, HBM],
            out_specs=HBM,
            scratch_shapes=[
                pltpu.VMEM((num_buffers, *window), new.dtype),
                pltpu.VMEM((num_buffers, rows, tile, *width), pool.dtype),
                *[pltpu.SemaphoreType.DMA((num_buffers,)) for _ in range(3)],
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        input_output_aliases={2 + len(items): 0},
        compiler_params=compat.tpu_compiler_params(
            ("arbitrary",), None, is_checked=bool(interpret)
        ),
        interpret=interpret,
        name="paged_write",
    )(jnp.asarray(layer, jnp.int32).reshape(1), *items, new, in_hbm(pool, interpret))


def _check_rows(kv: jax.Array, rows: jax.Array, slots: jax.Array, tile: int) -> None:
    check_pool(kv, None)
    _, _, pool_rows, block_size, width = kv.shape
    if rows.shape != (*slots.shape, pool_rows, width) or rows.dtype != kv.dtype:
        raise ValueError(
            f"rows ({rows.dtype}{rows.shape}) must be [T, R, C] of slots {slots.shape} and pool "
            f"({kv.dtype}{kv.shape})"
        )
    if tile < SUBLANES or tile % SUBLANES or block_size % tile:
        raise ValueError(
            f"tile ({tile}) must be a multiple of {SUBLANES} that divides block_size ({block_size})"
        )


def _check_scales(scales: jax.Array, new: jax.Array, slots: jax.Array) -> None:
    pairs = scales.shape[2]
    if scales.dtype != jnp.float32 or new.dtype != jnp.float32:
        raise ValueError(f"scales ({scales.dtype}) and new ({new.dtype}) must be float32")
    if new.shape != (*slots.shape, pairs):
        raise ValueError(
            f"new {new.shape} must be [T, 2K] of slots {slots.shape} and scales {scales.shape}"
        )
    check_scales(scales)
