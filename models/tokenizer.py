"""Text to token ids and back, and chat messages to text, around the `tokenizers` package.

Built from the `tokenizer.json` of a Hugging Face directory or from the metadata of a GGUF file.
"""

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    import tokenizers


@final
class Tokenizer:
    """A tokenizer, with the chat template of its model.

    Args:
      backend: The encoder; a BOS token, where the model wants one, is its post-processor's work.
      special_tokens: Texts by role, `bos_token`, `eos_token`, ..., as chat templates name them.
      chat_template: A Jinja template.
    """

    def __init__(
        self,
        backend: "tokenizers.Tokenizer",
        *,
        special_tokens: Mapping[str, str],
        eos_token_ids: Iterable[int] = (),
        chat_template: str | None = None,
    ):
        self._backend = backend
        self._special_tokens = dict(special_tokens)
        bos = self._special_tokens.get("bos_token")
        self.bos_token_id: int | None = None if bos is None else backend.token_to_id(bos)
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys(eos_token_ids))
        self.chat_template = chat_template

    @classmethod
    def from_directory(cls, path: str | PathLike[str]) -> "Tokenizer":
        """Reads `tokenizer.json`, and `tokenizer_config.json` and `chat_template.jinja` if there.

        Raises: ValueError if a file is missing or unreadable; ImportError without `tokenizers`.
        """
        directory = Path(path)
        backend = _import_tokenizers().Tokenizer
        try:
            encoder = backend.from_str((directory / "tokenizer.json").read_text("utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"cannot read {directory / 'tokenizer.json'}: {error}") from error
        # The file may carry the settings of a training run.
        encoder.no_truncation()
        encoder.no_padding()

        config_path = directory / "tokenizer_config.json"
        try:
            config = json.loads(config_path.read_text("utf-8")) if config_path.exists() else {}
        except ValueError as error:
            raise ValueError(f"cannot read {config_path}: {error}") from error
        tokens = {
            key: value["content"] if isinstance(value, dict) else value
            for key, value in config.items()
            if key.endswith("_token") and isinstance(value, str | dict)
        }
        template = config.get("chat_template")
        if isinstance(template, list):  # several by name
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        template_path = directory / "chat_template.jinja"
        if template_path.exists():
            template = template_path.read_text("utf-8")
        eos = encoder.token_to_id(tokens.get("eos_token", ""))
        return cls(
            encoder,
            special_tokens=tokens,
            eos_token_ids=() if eos is None else (eos,),
            chat_template=template,
        )

    @functools.cached_property
    def vocab_size(self) -> int:
        """Size of the id space: the largest id plus one."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens written out in it become their ids.

        Args:
          add_special_tokens: Put BOS (and EOS) where the model wants them. False for text from a
            chat template, which has its own.
        """
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def decode_token(self, token_id: int) -> str:
        """Text of one token alone, special tokens spelled out; U+FFFD for part of a character."""
        return self._backend.decode([token_id], skip_special_tokens=False)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> str:
        """Renders a conversation as the prompt text that the model was trained on.

        Encode the result with `add_special_tokens=False`: the template writes BOS itself.

        Args:
          messages: Each with `role` and `content`; other keys reach the template as they are.
          add_generation_prompt: End with the opening of the assistant's turn.
          kwargs: Further variables for the template.
        Raises: ValueError if there is no template, it fails, or a message is malformed.
        """
        if self.chat_template is None:
            raise ValueError("the model has no chat template; use a plain prompt")
        checked = _checked_messages(messages)
        variables = {"documents": None} | self._special_tokens | kwargs
        try:
            return self._compiled_template.render(
                messages=checked,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        except Exception as error:  # a template is a program of the checkpoint's and may raise any
            reason = " ".join(str(error).split())  # a syntax error has several lines
            raise ValueError(f"the chat template failed: {reason}") from error

    @functools.cached_property
    def _compiled_template(self) -> Any:
        return _chat_environment().from_string(self.chat_template)


def load_tokenizer(path: str | PathLike[str]) -> Tokenizer | None:
    """`Tokenizer.from_directory`, or None where the directory holds no `tokenizer.json`."""
    return Tokenizer.from_directory(path) if (Path(path) / "tokenizer.json").exists() else None


@dataclass(frozen=True)
class _PreTokenizer:
    """How one value of `tokenizer.ggml.pre` cuts a text into words before merging."""

    pattern: str | None = None  # of a word; None for GPT-2's, which the library has
    is_digit_split: bool = False  # every digit is a word
    is_nfc: bool = False  # normalise the text first
    has_whole_words: bool = False  # a word that is a token stays one, whatever the merges say
    adds_bos: bool = False  # where `tokenizer.ggml.add_bos_token` is missing


def _words(digits: str) -> str:
    """Pattern of words as OpenAI's cl100k and its descendants cut them, by their run of digits."""
    alternatives = (
        "(?i:'s|'t|'re|'ve|'m|'ll|'d)",  # contractions
        r"[^\r\n\p{L}\p{N}]?\p{L}+",  # letters with one leading character
        digits,
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",  # punctuation, with the line ends after it
        r"\s*[\r\n]+",
        r"\s+(?!\S)",  # spaces, but for the one before a word
        r"\s+",
    )
    return "|".join(alternatives)


_GPT2 = _PreTokenizer()
_LLAMA3 = _PreTokenizer(pattern=_words(r"\p{N}{1,3}"), has_whole_words=True, adds_bos=True)
_PRE_TOKENIZERS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _PreTokenizer(is_digit_split=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _PreTokenizer(pattern=_words(r"\p{N}"), is_nfc=True),
}
_ROLES = {role: role for role in ("bos", "eos", "eot", "eom")} | {
    "unk": "unknown",
    "pad": "padding",
}
_CONTROL, _USER_DEFINED = 3, 4  # values of `tokenizer.ggml.token_type`


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Builds the byte-level BPE tokenizer that a GGUF file's `tokenizer.*` metadata describes.

    Raises: ValueError if the kind of tokenizer is unsupported or its parts contradict each other;
      ImportError without `tokenizers`.
    """
    lib = _import_tokenizers()
    get = functools.partial(_ggml_value, metadata)
    kind = get("model")
    if kind != "gpt2":
        raise ValueError(f"GGUF tokenizer {kind!r} is not supported yet (supported: 'gpt2')")
    pre = get("pre")  # a wrong guess would cut words wrongly and not show
    if pre not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise ValueError(f"GGUF pre-tokenizer {pre!r} is not supported (supported: {known})")
    rules, tokens = _PRE_TOKENIZERS[pre], get("tokens")
    found = {role: get(f"{name}_token_id", None) for role, name in _ROLES.items()}
    ids = {role: token_id for role, token_id in found.items() if token_id is not None}
    if wrong := [token_id for token_id in ids.values() if token_id >= len(tokens)]:
        raise ValueError(f"GGUF tokenizer names token {wrong[0]} of {len(tokens)}")

    merges = [tuple(merge.split(" ", 1)) for merge in get("merges")]
    vocab = {token: i for i, token in enumerate(tokens)}
    try:
        model = lib.models.BPE(vocab, merges, ignore_merges=rules.has_whole_words)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"GGUF tokenizer has bad merges: {error}") from error
    backend = lib.Tokenizer(model)
    if rules.is_nfc:
        backend.normalizer = lib.normalizers.NFC()
    pre_tokenizers = lib.pre_tokenizers
    steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rules.pattern is None)]
    if rules.pattern is not None:
        steps.insert(0, pre_tokenizers.Split(lib.Regex(rules.pattern), behavior="isolated"))
    if rules.is_digit_split:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = lib.decoders.ByteLevel()
    # Added tokens are looked for in the raw text and keep the ids that the vocabulary gives them.
    kinds = get("token_type", [])
    for added, is_special in ((_CONTROL, True), (_USER_DEFINED, False)):
        texts = [token for token, kind in zip(tokens, kinds, strict=False) if kind == added]
        add = backend.add_special_tokens if is_special else backend.add_tokens
        add([lib.AddedToken(text, special=is_special, normalized=False) for text in texts])

    prefix = ["bos"] if get("add_bos_token", rules.adds_bos) else []
    suffix = ["eos"] if get("add_eos_token", False) else []
    if ends := prefix + suffix:
        if missing := [role for role in ends if role not in ids]:
            raise ValueError(f"GGUF tokenizer adds a token it lacks: {missing[0]}_token_id")
        backend.post_processor = lib.processors.TemplateProcessing(
            single=[*prefix, "$A", *suffix],
            special_tokens=[
                {"id": end, "ids": [ids[end]], "tokens": [tokens[ids[end]]]} for end in ends
            ],
        )
    return Tokenizer(
        backend,
        special_tokens={f"{role}_token": tokens[token_id] for role, token_id in ids.items()},
        eos_token_ids=[ids[role] for role in ("eos", "eot", "eom") if role in ids],
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _ggml_value(metadata: Mapping[str, Any], name: str, default: Any = ...) -> Any:
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if value is ...:
        raise ValueError(f"GGUF metadata key tokenizer.ggml.{name} is missing")
    return value


def _checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(messages, str | Mapping) or not messages:
        raise ValueError("messages must be a non-empty list of {'role': ..., 'content': ...}")
    checked = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"messages[{i}] must be a mapping, not {type(message).__name__}")
        if not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{i}]['role'] must be a string")
        content = message.get("content", ...)
        if content is not None and not isinstance(content, str):
            raise ValueError(f"messages[{i}]['content'] must be a string or None")
        checked.append({**message, "content": content or ""})
    return checked


def _chat_environment() -> Any:
    """The Jinja dialect that Hugging Face's chat templates are written in."""
    try:
        import jinja2
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise ImportError("chat templates need jinja2: pip install 'paged-jax[llm]'") from error
    from datetime import datetime

    class GenerationTag(Extension):
        """`{% generation %}` marks what a trainer's loss covers; the text inside is plain."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        # Jinja's own filter escapes <, > and & for HTML.
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", GenerationTag],
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


def _import_tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(
            "text prompts need the tokenizers package: pip install 'paged-jax[llm]'"
        ) from error
    return tokenizers
