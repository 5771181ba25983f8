"""What a request must satisfy to be taken in."""

import numbers
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paged_jax.config import ResolvedConfig
from paged_jax.engine.detokenize import TextStream
from paged_jax.engine.request import Request
from paged_jax.models.tokenizer import Tokenizer
from paged_jax.sampling_params import SamplingParams
from paged_jax.shapes import ceil_div

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a mapping with `prompt_token_ids` or `prompt`."""


def check_request(
    request_id: str,
    prompt: Prompt,
    params: SamplingParams,
    config: ResolvedConfig,
    vocab_size: int,
    tokenizer: Tokenizer | None,
) -> Request:
    """Checks a request before anything is allocated for it.

    Raises: ValueError that names the field and the rule; NotImplementedError for a sampling field
      that does not act yet.
    """
    if not isinstance(params, SamplingParams):
        raise ValueError(f"params must be SamplingParams, not {type(params).__name__}")
    params.check_supported()
    text, ids = _parse_prompt(prompt, tokenizer)
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
    stream = None
    if tokenizer is not None:
        stream = TextStream(tokenizer, ids, params.stop_strings)
    limit = config.max_model_len
    if params.max_tokens is not None:
        limit = min(limit, len(ids) + params.max_tokens)
    return Request(
        request_id=request_id,
        prompt=text,
        prompt_token_ids=ids,
        params=params,
        max_total_tokens=limit,
        seed=params.seed or 0,
        order=-1,
        arrival_time=time.monotonic(),
        text=stream,
    )


def _parse_prompt(prompt: Prompt, tokenizer: Tokenizer | None) -> tuple[str | None, list[int]]:
    text = None
    if isinstance(prompt, Mapping):
        unknown = sorted(prompt.keys() - {"prompt", "prompt_token_ids"})
        if unknown:
            raise ValueError(f"prompt has unknown key {unknown[0]!r}")
        text = prompt.get("prompt")
        if text is not None and not isinstance(text, str):
            raise ValueError(f"prompt ({text!r}) must be text")
        ids = prompt.get("prompt_token_ids")
        prompt = text if ids is None else ids  # type: ignore[assignment]
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("this model has no tokenizer: give prompt_token_ids, not text")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"prompt is no valid text: {error}") from error
        return prompt, tokenizer.encode(prompt)
    is_listed = isinstance(prompt, Sequence) or (
        isinstance(prompt, np.ndarray) and prompt.ndim == 1
    )
    if not is_listed or isinstance(prompt, bytes | bytearray):
        raise ValueError(f"prompt ({prompt!r}) must be text or a list of token ids")
    for token in prompt:
        if isinstance(token, bool) or not isinstance(token, numbers.Integral):
            raise ValueError(f"prompt token id {token!r} must be an integer")
    return text, [int(token) for token in prompt]
