"""Sampling options that act on logits: what a request asks for, as rows on the device.

Only rows whose fields say so are looked at, so nothing is done for other requests. A row is written
where its sequence starts; its mask again for every token of a sequence that has a guide.
"""

import dataclasses
import functools
from collections.abc import Sequence as Listed
from typing import Any

import jax
import numpy as np

from paged_jax.bitmask import pack_mask
from paged_jax.engine.request import Sequence
from paged_jax.ops import LogitOptions, create_logit_options
from paged_jax.plan import Segment
from paged_jax.sampling_params import MAX_BIASES, MOST_BIAS

MAX_MASKS = 8
"""Masks that one call writes."""


def create(max_seqs: int, max_length: int, vocab_size: int) -> LogitOptions:
    """Rows that change nothing."""
    return create_logit_options(max_seqs, max_length, vocab_size, MAX_BIASES)


@functools.partial(jax.jit, donate_argnums=0)
def _write_row(options: LogitOptions, row: Any, values: LogitOptions) -> LogitOptions:
    return jax.tree.map(lambda old, new: old.at[row].set(new, mode="drop"), options, values)


@functools.partial(jax.jit, donate_argnums=0)
def _write_masks(options: LogitOptions, rows: Any, masks: Any) -> LogitOptions:
    allowed = options.allowed.at[rows].set(masks, mode="drop")
    return dataclasses.replace(options, allowed=allowed)


def write(
    options: LogitOptions,
    segments: Listed[Segment],
    sequences: Listed[Sequence],
    vocab_size: int,
) -> LogitOptions:
    """Writes what the next tokens of a plan depend on."""
    masks = {}
    for segment, sequence in zip(segments, sequences, strict=True):
        if segment.is_admission:
            options = write_row(options, segment.row, sequence, vocab_size)
        if sequence.guide is not None and segment.num_sampled:
            masks[segment.row] = _guided_mask(sequence, vocab_size)
    for start in range(0, len(masks), MAX_MASKS):
        part = list(masks.items())[start : start + MAX_MASKS]
        options = _write_masks(options, *_padded_masks(part, options))
    return options


def write_row(options: LogitOptions, row: int, sequence: Sequence, vocab_size: int) -> LogitOptions:
    """Writes what a sequence asks for, if it asks for anything, into its row."""
    if not sequence.request.has_logit_options:
        return options
    return _write_row(options, np.int32(row), row_of(sequence, options, vocab_size))


def warm_up(options: LogitOptions) -> LogitOptions:
    """Runs both programs, and writes nothing."""
    nowhere = np.int32(options.num_prompt.shape[0])
    nothing = jax.tree.map(lambda x: np.zeros(x.shape[1:], x.dtype), options)
    options = _write_row(options, nowhere, nothing)
    return _write_masks(options, *_padded_masks([], options))


def row_of(sequence: Sequence, options: LogitOptions, vocab_size: int) -> LogitOptions:
    """The row of a sequence that starts or goes on with the tokens it knows; numpy arrays."""
    request, params = sequence.request, sequence.request.params
    tokens = np.zeros(options.tokens.shape[1], np.int32)
    tokens[: sequence.num_known] = sequence.tokens
    allowed = np.ones(vocab_size, bool) if request.banned is None else ~request.banned
    deferred = np.zeros(vocab_size, bool)
    if params.min_tokens and sequence.guide is None:
        deferred[list(request.stop_ids)] = True
    # No sequence is longer, and `min_tokens` is any integer.
    min_length = min(sequence.num_prompt + params.min_tokens, request.max_total_tokens)
    bias_ids = np.full(options.bias_ids.shape[1], 2**31 - 1, np.int32)
    biases = np.zeros(options.biases.shape[1], np.float32)
    for i, (token, bias) in enumerate((params.logit_bias or {}).items()):
        bias_ids[i], biases[i] = token, min(MOST_BIAS, max(-MOST_BIAS, bias))
    return LogitOptions(
        tokens=tokens,  # type: ignore[arg-type]
        num_prompt=np.int32(sequence.num_prompt),  # type: ignore[arg-type]
        allowed=pack_mask(allowed),  # type: ignore[arg-type]
        deferred=pack_mask(deferred),  # type: ignore[arg-type]
        min_length=np.int32(min_length),  # type: ignore[arg-type]
        bias_ids=bias_ids,  # type: ignore[arg-type]
        biases=biases,  # type: ignore[arg-type]
        presence=np.float32(params.presence_penalty),  # type: ignore[arg-type]
        frequency=np.float32(params.frequency_penalty),  # type: ignore[arg-type]
        repetition=np.float32(params.repetition_penalty),  # type: ignore[arg-type]
    )


def _guided_mask(sequence: Sequence, vocab_size: int) -> np.ndarray:
    """What the guide allows; without the ends of the sequence before its time, if it can go on."""
    assert sequence.guide is not None
    mask, request = sequence.guide.mask, sequence.request
    if sequence.num_known - sequence.num_prompt < request.params.min_tokens:
        ends = np.zeros(vocab_size, bool)
        ends[list(request.stop_ids | sequence.guide.end_ids)] = True
        longer = mask & ~pack_mask(ends)
        mask = longer if longer.any() else mask
    return mask


def _padded_masks(
    masks: Listed[tuple[int, np.ndarray]], options: LogitOptions
) -> tuple[np.ndarray, np.ndarray]:
    max_seqs, num_words = options.allowed.shape
    rows = np.full(MAX_MASKS, max_seqs, np.int32)
    words = np.zeros((MAX_MASKS, num_words), np.uint32)
    for i, (row, mask) in enumerate(masks):
        rows[i], words[i] = row, mask
    return rows, words
