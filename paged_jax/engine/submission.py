"""What a request must satisfy to be taken in."""

import numbers
import time
from collections.abc import Mapping
from collections.abc import Sequence as Listed
from typing import Any

import numpy as np

from paged_jax.beam_search_params import BeamSearchParams
from paged_jax.config import ResolvedConfig
from paged_jax.engine.answer import text_stream
from paged_jax.engine.beam import BeamSearch
from paged_jax.engine.request import Request, Sequence
from paged_jax.engine.rules import check_rules
from paged_jax.models.tokenizer import Tokenizer
from paged_jax.sampling_params import MAX_LOGPROBS, SamplingParams
from paged_jax.shapes import ceil_div

_FOREVER = 1e9
"""Seconds; integers beyond floats are legal too."""

Prompt = str | Listed[int] | Mapping[str, Any]
"""Text, token ids, or a mapping with `prompt_token_ids` or `prompt`."""


def check_request(
    request_id: str,
    prompt: Prompt,
    params: SamplingParams,
    config: ResolvedConfig,
    vocab_size: int,
    tokenizer: Tokenizer | None,
    eos_token_ids: frozenset[int] = frozenset(),
    *,
    priority: int = 0,
    timeout: float | None = None,
) -> Request:
    """Checks a request before anything is allocated for it.

    Raises: ValueError that names the field and the rule.
    """
    if not isinstance(request_id, str):
        raise ValueError(f"request_id ({request_id!r}) must be text")
    if not isinstance(params, SamplingParams):
        raise ValueError(f"params must be SamplingParams, not {type(params).__name__}")
    text, ids, salt = _parse_prompt(prompt, tokenizer)
    if isinstance(priority, bool) or not isinstance(priority, numbers.Integral):
        raise ValueError(f"priority ({priority!r}) must be an integer")
    if timeout is not None:
        is_number = isinstance(timeout, numbers.Real) and not isinstance(timeout, bool)
        if not is_number or not timeout > 0:
            raise ValueError(f"timeout ({timeout!r}) must be a number of seconds above 0")
    if not ids:
        raise ValueError("prompt is empty: it must hold at least one token")
    for token in ids:
        if not 0 <= token < vocab_size:
            raise ValueError(f"prompt token id {token} is outside the vocabulary [0, {vocab_size})")
    if len(ids) >= config.max_model_len:
        raise ValueError(
            f"prompt ({len(ids)} tokens) must be shorter than max_model_len "
            f"({config.max_model_len})"
        )
    blocks = ceil_div(len(ids), config.block_size)
    if blocks > config.num_blocks:
        raise ValueError(
            f"prompt ({len(ids)} tokens) needs {blocks} KV blocks of {config.block_size} and "
            f"the pool has {config.num_blocks}: it can never run; raise num_blocks"
        )
    if params.stop_strings and tokenizer is None:
        raise ValueError("stop needs a tokenizer, and this model has none")
    eos = frozenset() if params.ignore_eos else eos_token_ids
    rules = check_rules(params, tokenizer, vocab_size, eos_token_ids)
    limit = config.max_model_len
    if params.max_tokens is not None:
        limit = min(limit, len(ids) + params.max_tokens)
    now = time.monotonic()
    request = Request(
        request_id=request_id,
        prompt=text,
        prompt_token_ids=ids,
        params=params,
        max_total_tokens=limit,
        seed=params.seed or 0,
        order=-1,
        arrival_time=now,
        priority=int(priority),
        deadline=None if timeout is None else now + min(timeout, _FOREVER),
        stop_ids=eos | rules.stop_ids,
        named_stop_ids=rules.stop_ids - eos,
        banned=rules.banned,
        guide=rules.guide,
        num_logprobs=params.logprobs,
        prompt_logprobs=None if params.prompt_logprobs is None else [None],
        cache_salt=salt,
    )
    for index in range(params.n):
        request.sequences.append(
            Sequence(
                request=request,
                index=index,
                tokens=list(ids),
                text=text_stream(request, tokenizer),
                guide=rules.guide.copy() if rules.guide else None,
            )
        )
    return request


def check_beam_request(
    request_id: str,
    prompt: Prompt,
    params: BeamSearchParams,
    config: ResolvedConfig,
    vocab_size: int,
    tokenizer: Tokenizer | None,
    eos_token_ids: frozenset[int] = frozenset(),
    *,
    priority: int = 0,
    timeout: float | None = None,
) -> Request:
    """The same for a beam search.

    Raises: ValueError that names the field and the rule.
    """
    if params.beam_width > config.max_num_seqs:
        raise ValueError(
            f"beam_width ({params.beam_width}) must be at most max_num_seqs ({config.max_num_seqs})"
        )
    request = check_request(
        request_id,
        prompt,
        SamplingParams(temperature=0.0, max_tokens=params.max_tokens),
        config,
        vocab_size,
        tokenizer,
        eos_token_ids,
        priority=priority,
        timeout=timeout,
    )
    ids = request.prompt_token_ids
    beam = BeamSearch(len(ids), params, eos_token_ids, request.max_total_tokens)
    if beam.num_candidates > MAX_LOGPROBS:
        raise ValueError(
            f"beam_width ({params.beam_width}) with {len(eos_token_ids)} end-of-sequence tokens "
            f"needs {beam.num_candidates} candidates a beam, and {MAX_LOGPROBS} are listed"
        )
    request.beam, request.num_logprobs = beam, beam.num_candidates
    request.stop_ids = frozenset()
    request.sequences = [
        Sequence(request=request, index=index, tokens=list(ids))
        for index in range(params.beam_width)
    ]
    request.live_beams = request.sequences[:1]
    return request


def _parse_prompt(
    prompt: Prompt, tokenizer: Tokenizer | None
) -> tuple[str | None, list[int], str | None]:
    """Text, token ids and cache salt."""
    text = salt = None
    if isinstance(prompt, Mapping):
        unknown = sorted(prompt.keys() - {"prompt", "prompt_token_ids", "cache_salt"})
        if unknown:
            raise ValueError(f"prompt has unknown key {unknown[0]!r}")
        text = prompt.get("prompt")
        if text is not None and not isinstance(text, str):
            raise ValueError(f"prompt ({text!r}) must be text")
        salt = prompt.get("cache_salt")
        if salt is not None and not isinstance(salt, str):
            raise ValueError(f"cache_salt ({salt!r}) must be text")
        ids = prompt.get("prompt_token_ids")
        prompt = text if ids is None else ids  # type: ignore[assignment]
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("this model has no tokenizer: give prompt_token_ids, not text")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"prompt is no valid text: {error}") from error
        return prompt, tokenizer.encode(prompt), salt
    is_listed = isinstance(prompt, Listed) or (isinstance(prompt, np.ndarray) and prompt.ndim == 1)
    if not is_listed or isinstance(prompt, bytes | bytearray):
        raise ValueError(f"prompt ({prompt!r}) must be text or a list of token ids")
    for token in prompt:
        if isinstance(token, bool) or not isinstance(token, numbers.Integral):
            raise ValueError(f"prompt token id {token!r} must be an integer")
    return text, [int(token) for token in prompt], salt
