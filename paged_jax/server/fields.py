"""Bodies of requests: their fields, and how they are read.

`null` means the same as a missing field. Types are strict, unknown fields are refused, and what
values may be is said by `SamplingParams` and the engine.
"""

from typing import Any, Literal, TypeVar

import pydantic_core
from fastapi import Request
from pydantic import BaseModel, ConfigDict, ValidationError

from paged_jax.server.errors import ApiError


class Body(BaseModel):
    """What all bodies have in common."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = None
    """Name of the served model; absent: that one."""


class StreamOptions(BaseModel):
    """How a stream is sent."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = None
    """Send a last chunk with the number of tokens."""
    continuous_usage_stats: bool | None = None
    """Send it with every chunk."""
    include_obfuscation: bool | None = None
    """Taken, and without effect."""


class ResponseFormat(BaseModel):
    """What the text must be."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None
    """`{"name": ..., "schema": ...}`, with the type json_schema."""


class Sampling(Body):
    """What completions and chats share."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    structured_outputs: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    priority: int | None = None
    """Lower is sooner, on a server with `--scheduling-policy priority`."""
    cache_salt: str | None = None
    """Only requests of one salt share cached KV."""
    return_token_ids: bool | None = None
    """Send `token_ids` with each choice, and `prompt_token_ids`."""
    return_tokens_as_token_ids: bool | None = None
    """Call tokens "token_id:17" in log-probabilities."""
    # Of OpenAI's platform; without meaning here, and taken because clients send them.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None


class CompletionBody(Sampling):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    """Text or token ids, or a list of such."""
    logprobs: int | None = None
    """Most likely tokens to list per token."""
    echo: bool | None = None
    """Put the prompt in front of the text."""
    add_special_tokens: bool | None = None
    """Put BOS where the tokenizer has one; absent: true."""
    best_of: int | None = None
    suffix: str | None = None


class ChatBody(Sampling):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    """Goes before max_tokens."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    """With logprobs: most likely tokens to list per token."""
    tools: list[dict[str, Any]] | None = None
    """Go to the chat template; calls in the answer are not parsed."""
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template."""
    reasoning_effort: str | None = None
    """A variable for the chat template."""
    functions: list[Any] | None = None
    function_call: Any = None
    audio: Any = None
    modalities: list[str] | None = None
    prediction: Any = None
    web_search_options: Any = None


class TokenizeBody(Body):
    """POST /tokenize: a prompt, or the messages of a chat."""

    prompt: str | None = None
    add_special_tokens: bool | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: list[int]


_Body = TypeVar("_Body", bound=Body)


async def read_body(request: Request, kind: type[_Body]) -> _Body:
    """The body of a request.

    Raises: ApiError that names the field and the rule.
    """
    raw = await request.body()
    try:
        # Refuses NaN, lone surrogates, what is no UTF-8, and more than some 200 levels.
        value = pydantic_core.from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is no valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = [str(part) for part in first["loc"]] or ["body"]
        if first["type"] == "extra_forbidden":
            message = f"{'.'.join(where)} is an unknown field"
        elif first["type"] == "missing":
            message = f"{'.'.join(where)} is missing"
        else:
            # The branches of a union are no fields.
            where = [part for part in where if part.isidentifier() or part.isdecimal()]
            message = f"{'.'.join(where)}: {first['msg']}"
        raise ApiError(400, message, param=where[0]) from None
