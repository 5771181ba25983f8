"""From a body to what the engine is asked for."""

import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paged_jax.async_llm import AsyncLLM
from paged_jax.engine.submission import Prompt
from paged_jax.sampling_params import MAX_LOGPROBS, SamplingParams
from paged_jax.server.errors import ApiError, refusal
from paged_jax.server.fields import ChatBody, CompletionBody, Sampling, TokenizeBody

_SAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "max_tokens",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "allowed_token_ids",
    "bad_words",
    "prompt_logprobs",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "structured_outputs",
)
"""Fields that a body and `SamplingParams` have in common."""

_RESERVED = frozenset(
    (
        "messages",
        "tools",
        "add_generation_prompt",
        "chat_template",
        "documents",
        "self",
        "tokenizer",
    )
)
"""Variables of chat templates that have fields of their own, and arguments of `render`."""


_SCHEMA_KEYS = frozenset(("name", "description", "schema", "strict"))
"""Of OpenAI's `json_schema`; whatever `strict` says, the text keeps to the schema."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A checked body: prompts, how to continue them, and how to answer."""

    id: str
    model: str
    prompts: list[Prompt]
    params: SamplingParams
    priority: int = 0
    is_stream: bool = False
    has_usage: bool = False
    """Whether a stream ends with its usage."""
    has_running_usage: bool = False
    """Whether each chunk has it too."""
    has_token_ids: bool = False
    names_ids: bool = False
    """Whether log-probabilities call tokens by their ids."""
    is_echo: bool = False
    is_scoring: bool = False
    """Whether nothing was asked for but the echo."""
    num_prompt_logprobs: int | None = None
    """To be listed per prompt token, beside an echo; None: not asked for."""
    names: Mapping[str, str] = field(default_factory=dict)
    """What the body calls a sampling field, where that is another name."""
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def request_ids(self) -> list[str]:
        """Names of the engine's requests, one per prompt."""
        return [f"{self.id}-{i}" for i in range(len(self.prompts))]


def completion_job(body: CompletionBody, llm: AsyncLLM, model: str, max_prompts: int) -> Job:
    """Of a completion. Raises: ApiError, ValueError."""
    if body.suffix:
        raise ApiError(501, "suffix is not built", param="suffix")
    if body.best_of not in (None, body.n or 1):
        raise ApiError(501, "best_of other than n is not built", param="best_of")
    given: Any = body.prompt
    is_one = isinstance(given, str) or (given and isinstance(given[0], int))
    prompts: list[Prompt] = [given] if is_one else list(given)
    if not prompts:
        raise ApiError(400, "prompt is empty: it must hold at least one token", param="prompt")
    if len(prompts) > max_prompts:
        message = f"prompt ({len(prompts)} prompts) must have {max_prompts} at most"
        raise ApiError(400, message, param="prompt")
    if body.add_special_tokens is False:
        prompts = [_without_bos(prompt, llm) for prompt in prompts]
    more: dict[str, Any] = {"logprobs": body.logprobs}
    is_scoring = bool(body.echo) and body.max_tokens == 0
    if is_scoring:
        more["max_tokens"] = 1
    if body.echo and body.logprobs is not None:
        more["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    names = _names(body)
    return Job(
        id=f"cmpl-{uuid.uuid4().hex}",
        prompts=[_salted(prompt, body.cache_salt) for prompt in prompts],
        params=_params(body, more, names),
        names=names,
        is_echo=bool(body.echo),
        is_scoring=is_scoring,
        **_common(body, model),
    )


def chat_job(body: ChatBody, llm: AsyncLLM, model: str) -> Job:
    """Of a chat. Raises: ApiError, ValueError."""
    for name in ("functions", "function_call", "audio", "prediction", "web_search_options"):
        if getattr(body, name) is not None:
            raise ApiError(501, f"{name} is not built", param=name)
    if body.modalities not in (None, ["text"]):
        raise ApiError(501, 'modalities other than ["text"] are not built', param="modalities")
    if body.top_logprobs is not None:
        if not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        if not 0 <= body.top_logprobs <= MAX_LOGPROBS:
            message = f"top_logprobs ({body.top_logprobs}) must be in [0, {MAX_LOGPROBS}]"
            raise ApiError(400, message, param="top_logprobs")
    more: dict[str, Any] = {"max_tokens": body.max_tokens}
    names = _names(body)
    if body.max_completion_tokens is not None:
        more["max_tokens"] = body.max_completion_tokens
        names["max_tokens"] = "max_completion_tokens"
    if body.logprobs:
        more["logprobs"] = body.top_logprobs or 0
    return Job(
        id=f"chatcmpl-{uuid.uuid4().hex}",
        names=names,
        prompts=[_salted(rendered(body, llm, _tools(body)), body.cache_salt)],
        params=_params(body, more, names),
        **_common(body, model),
    )


def rendered(
    body: ChatBody | TokenizeBody, llm: AsyncLLM, tools: list[dict[str, Any]] | None
) -> Prompt:
    """The prompt of a conversation. Raises: ApiError, ValueError."""
    options = dict(body.chat_template_kwargs or {})
    for name in options:
        if name in _RESERVED or not name.isidentifier():
            message = f"chat_template_kwargs cannot set {name!r}"
            raise ApiError(400, message, param="chat_template_kwargs")
    if body.add_generation_prompt is not None:
        options["add_generation_prompt"] = body.add_generation_prompt
    if isinstance(body, ChatBody) and body.reasoning_effort is not None:
        options["reasoning_effort"] = body.reasoning_effort
    try:
        return llm.render(body.messages or [], tools, **options)
    except ValueError as error:
        raise ApiError(400, str(error), param="messages") from None


def check_tools(tools: list[dict[str, Any]] | None) -> None:
    """Raises: ApiError for what is no list of functions."""
    for i, tool in enumerate(tools or []):
        function = tool.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if tool.get("type") != "function" or not isinstance(name, str) or not name:
            message = f'tools[{i}] must be {{"type": "function", "function": {{"name": ...}}}}'
            raise ApiError(400, message, param="tools")


def _tools(body: ChatBody) -> list[dict[str, Any]] | None:
    """What the template is told that the model may call."""
    check_tools(body.tools)
    choice = body.tool_choice
    if choice in (None, "auto"):
        return body.tools or None
    if choice == "none":
        return None
    if choice == "required" or isinstance(choice, dict):
        raise ApiError(
            501, 'tool_choice other than "auto" and "none" is not built', param="tool_choice"
        )
    raise ApiError(400, f'tool_choice ({choice!r}) must be "auto" or "none"', param="tool_choice")


def _common(body: Sampling, model: str) -> dict[str, Any]:
    options = body.stream_options
    if options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")
    if options and options.continuous_usage_stats and not options.include_usage:
        message = "stream_options.continuous_usage_stats needs include_usage: true"
        raise ApiError(400, message, param="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise ApiError(400, "prompt_logprobs cannot be streamed", param="prompt_logprobs")
    return {
        "model": model,
        "priority": body.priority or 0,
        "is_stream": bool(body.stream),
        "has_usage": bool(options and options.include_usage),
        "has_running_usage": bool(options and options.continuous_usage_stats),
        "has_token_ids": bool(body.return_token_ids),
        "names_ids": bool(body.return_tokens_as_token_ids),
        "num_prompt_logprobs": body.prompt_logprobs,
    }


def _params(body: Sampling, more: Mapping[str, Any], names: Mapping[str, str]) -> SamplingParams:
    """Sampling fields that were given; `more` goes before the body's own."""
    given = {name: getattr(body, name) for name in _SAME}
    fields = {name: value for name, value in given.items() if value is not None} | dict(more)
    if body.logit_bias is not None:
        fields["logit_bias"] = {_token_id(key): bias for key, bias in body.logit_bias.items()}
    if (wanted := _structure(body)) is not None:
        fields["structured_outputs"] = wanted
    try:
        return SamplingParams(**fields)
    except ValueError as error:
        raise refusal(str(error), names) from None


def _names(body: Sampling) -> dict[str, str]:
    return {"structured_outputs": "response_format"} if body.structured_outputs is None else {}


def _structure(body: Sampling) -> dict[str, Any] | None:
    """What `response_format` asks of the text, as vLLM's `structured_outputs` says it."""
    wanted = body.response_format
    if wanted is not None and wanted.type != "json_schema" and wanted.json_schema is not None:
        message = 'response_format.json_schema needs the type "json_schema"'
        raise ApiError(400, message, param="response_format")
    if wanted is None or wanted.type == "text":
        return None
    if body.structured_outputs is not None:
        message = "response_format cannot be given together with structured_outputs"
        raise ApiError(400, message, param="response_format")
    if wanted.type == "json_object":
        return {"json_object": True}
    unknown = sorted((wanted.json_schema or {}).keys() - _SCHEMA_KEYS)
    if unknown:
        message = f"response_format.json_schema has an unknown key, {unknown[0]!r}"
        raise ApiError(400, message, param="response_format")
    schema = (wanted.json_schema or {}).get("schema")
    if not isinstance(schema, Mapping):
        message = "response_format.json_schema must have a schema, which is a JSON object"
        raise ApiError(400, message, param="response_format")
    return {"json": schema}


def _token_id(key: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,18}", key):
        message = f"logit_bias ({key!r}) must map token ids to numbers"
        raise ApiError(400, message, param="logit_bias")
    return int(key)


def _without_bos(prompt: Prompt, llm: AsyncLLM) -> Prompt:
    tokenizer = llm.get_tokenizer()
    if not isinstance(prompt, str) or tokenizer is None:
        return prompt
    return {"prompt": prompt, "prompt_token_ids": tokenizer.encode(prompt, False)}


def _salted(prompt: Prompt, salt: str | None) -> Prompt:
    if salt is None:
        return prompt
    if isinstance(prompt, Mapping):
        return {**prompt, "cache_salt": salt}
    key = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
    return {key: prompt, "cache_salt": salt}
