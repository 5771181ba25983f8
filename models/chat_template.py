"""From a conversation to prompt text: chat templates, in the Jinja dialect of Hugging Face.

A template is a program that comes with a checkpoint. It runs in Jinja's sandbox, which keeps it
from Python's internals and from changing what it is given; time and memory it may waste.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


@functools.lru_cache(maxsize=16)
def chat_template(source: str) -> "ChatTemplate":
    """A template, compiled once.

    Raises: ValueError if it is no valid Jinja.
    """
    return ChatTemplate(source)


@final
class ChatTemplate:
    """A compiled chat template, and the form in which it takes the content of messages."""

    def __init__(self, source: str) -> None:
        try:
            self._template = _environment().from_string(source)
            tree = _environment().parse(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ValueError(f"the chat template failed: {_one_line(error)}") from error
        asked = {test.name for test in tree.find_all(nodes.Test) if _is(test.node, "content")}
        self._takes_none = "none" in asked
        self._takes_parts = any(
            _is(_unfiltered(loop.iter), "content") for loop in tree.find_all(nodes.For)
        )
        # Without that question the loop would run over the characters of a string.
        self._takes_text = "string" in asked or not self._takes_parts
        # DeepSeek's templates add the arguments of calls to text.
        sums = list(tree.find_all(nodes.Add))
        self._takes_json = any(_is(side, "arguments") for s in sums for side in (s.left, s.right))

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """Text of a conversation.

        Args:
          messages: As `Tokenizer.apply_chat_template` takes them.
          variables: What else the template may name.
        Raises: ValueError if a message is malformed or the template fails.
        """
        if isinstance(messages, str | Mapping) or not messages:
            raise ValueError("messages must be a non-empty list of {'role': ..., 'content': ...}")
        checked = [self._message(f"messages[{i}]", message) for i, message in enumerate(messages)]
        try:
            return self._template.render({**variables, "messages": checked})
        except Exception as error:  # whatever the program does
            raise ValueError(f"the chat template failed: {_one_line(error)}") from error

    def _message(self, place: str, message: Any) -> dict[str, Any]:
        if not isinstance(message, Mapping):
            raise ValueError(f"{place} must be a mapping, not {type(message).__name__}")
        if not isinstance(message.get("role"), str):
            raise ValueError(f"{place}['role'] must be a string")
        # Clients send null for fields that they do not use; templates ask whether those are there.
        known = {key: value for key, value in message.items() if value is not None}
        if "tool_calls" in known:
            calls = _listed(f"{place}['tool_calls']", known["tool_calls"])
            known["tool_calls"] = [self._tool_call(where, call) for where, call in calls]
        elif "content" not in message:
            raise ValueError(f"{place}['content'] must be {_CONTENT}")
        return known | {"content": self._content(f"{place}['content']", message.get("content"))}

    def _content(self, place: str, content: Any) -> str | list[Any] | None:
        if content is None:
            if self._takes_none:
                return None
            content = ""
        if isinstance(content, str):
            return content if self._takes_text else [{"type": "text", "text": content}]
        if not isinstance(content, Sequence):
            raise ValueError(f"{place} must be {_CONTENT}")
        parts = [_text_part(where, part) for where, part in _listed(place, content)]
        return parts if self._takes_parts else "\n".join(part["text"] for part in parts)

    def _tool_call(self, place: str, call: Mapping[str, Any]) -> dict[str, Any]:
        """The call with its arguments in the template's form: an object, seldom JSON."""
        if "function" in call:
            function = call["function"]
            if not isinstance(function, Mapping):
                raise ValueError(f"{place}['function'] must be a mapping")
            return {**call, "function": self._tool_call(f"{place}['function']", function)}
        given = call.get("arguments")
        arguments = {} if given is None else given
        if isinstance(given, str):
            try:
                arguments = json.loads(given) if given.strip() else {}
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{place}['arguments'] is no JSON: {error}") from error
        if not isinstance(arguments, Mapping):
            raise ValueError(f"{place}['arguments'] must be a JSON object")
        if self._takes_json:
            is_json = isinstance(given, str) and given.strip()
            return {**call, "arguments": given if is_json else _tojson(arguments)}
        return {**call, "arguments": arguments}


_CONTENT = "a string, a list of text parts, or None"


def _listed(place: str, items: Any) -> list[tuple[str, Mapping[str, Any]]]:
    """The items with their places; all must be mappings."""
    if not isinstance(items, Sequence) or isinstance(items, str | bytes):
        raise ValueError(f"{place} must be a list, not {type(items).__name__}")
    for i, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise ValueError(f"{place}[{i}] must be a mapping, not {type(item).__name__}")
    return [(f"{place}[{i}]", item) for i, item in enumerate(items)]


def _text_part(place: str, part: Mapping[str, Any]) -> dict[str, Any]:
    kind = part.get("type")
    if kind != "text":
        raise ValueError(f"{place} has type {kind!r}, which is not supported (supported: 'text')")
    if not isinstance(part.get("text"), str):
        raise ValueError(f"{place}['text'] must be a string")
    return dict(part)


def _unfiltered(node: nodes.Node | None) -> nodes.Node | None:
    while isinstance(node, nodes.Filter):
        node = node.node
    return node


def _is(node: nodes.Node | None, name: str) -> bool:
    """Whether an expression is a field of something, or a variable named like it."""
    match node:
        case nodes.Getattr(attr=found) | nodes.Name(name=found):
            return found == name
        case nodes.Getitem(arg=nodes.Const(value=found)):
            return found == name
    return False


class _GenerationTag(Extension):
    """`{% generation %}` marks what a trainer's loss covers: plain text, in a scope of its own."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), True), lineno=line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes <, > and & for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _one_line(error: BaseException) -> str:
    """The message of an error; a syntax error's has several lines."""
    return " ".join(str(error).split()) or type(error).__name__
