"""Text to token ids and back, and chat messages to text, around the `tokenizers` package.

Built from the `tokenizer.json` of a Hugging Face directory or from the metadata of a GGUF file.
"""

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    import tokenizers

# How byte-level tokenizers spell bytes (GPT-2): printable ones as themselves, others as what
# follows in order from U+0100 on.
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + i): byte for i, byte in enumerate(b for b in range(256) if b not in _PRINTABLE)
}


@final
class Tokenizer:
    """A tokenizer, with the chat template of its model.

    Args:
      backend: The encoder; a BOS token, where the model wants one, is its post-processor's work.
      special_tokens: Texts by role, `bos_token`, `eos_token`, ..., as chat templates name them.
      chat_template: A Jinja template, or several by name.
    """

    def __init__(
        self,
        backend: "tokenizers.Tokenizer",
        *,
        special_tokens: Mapping[str, str],
        eos_token_ids: Iterable[int] = (),
        chat_template: str | Mapping[str, str] | None = None,
    ):
        self._backend = backend
        self._special_tokens = dict(special_tokens)
        bos = self._special_tokens.get("bos_token")
        self.bos_token_id: int | None = None if bos is None else backend.token_to_id(bos)
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys(eos_token_ids))
        self.chat_template = chat_template

    @classmethod
    def from_directory(cls, path: str | PathLike[str]) -> "Tokenizer":
        """Reads `tokenizer.json`, and what of these is there:

        - `tokenizer_config.json`: special tokens, `add_bos_token`, one chat template or several.
        - `special_tokens_map.json`: special tokens that the former does not name.
        - `chat_template.jinja` and `additional_chat_templates/*.jinja`: these before the former's.

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

        config = _read_json(directory / "tokenizer_config.json")
        # Older files; their tokens stand in the newer one too, unless somebody removed them.
        settings = _read_json(directory / "special_tokens_map.json") | config
        texts = {
            key: value.get("content") if isinstance(value, dict) else value
            for key, value in settings.items()
            if key.endswith("_token")
        }
        tokens = {key: text for key, text in texts.items() if isinstance(text, str)}
        bos, eos = (encoder.token_to_id(tokens.get(f"{role}_token", "")) for role in ("bos", "eos"))
        # Some models leave this to their tokenizer's class in Hugging Face transformers.
        added = encoder.encode("").ids
        if bos is not None and config.get("add_bos_token") is True and added[:1] != [bos]:
            put_ends(encoder, [bos], added)
        return cls(
            encoder,
            special_tokens=tokens,
            eos_token_ids=() if eos is None else (eos,),
            chat_template=_chat_templates(directory, config),
        )

    @functools.cached_property
    def vocab_size(self) -> int:
        """Size of the id space: the largest id plus one."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @functools.cached_property
    def _adds_bos(self) -> bool:
        return self._backend.encode("").ids[:1] == [self.bos_token_id]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens written out in it become their ids.

        A text that begins with the text of BOS, as one that a chat template made often does, gets
        no second one: no model was trained on two.

        Args:
          add_special_tokens: Put BOS (and EOS) where the model wants them. False for text from a
            chat template, which has its own.
        """
        ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        is_twice = add_special_tokens and ids[:2] == [self.bos_token_id] * 2
        return ids[1:] if is_twice and self._adds_bos else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def to_json(self) -> str:
        """The encoder in the format of `tokenizer.json`."""
        return self._backend.to_str()

    @functools.cached_property
    def added_tokens(self) -> dict[int, str]:
        """Texts of the tokens that stand beside the vocabulary proper, by id; most are special."""
        added = self._backend.get_added_tokens_decoder()
        return {token_id: token.content for token_id, token in added.items()}

    def decode_token(self, token_id: int) -> str:
        """Text of one token alone, special tokens spelled out; U+FFFD for part of a character."""
        return self._backend.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token alone, also where they are a part of a character."""
        text = self._backend.id_to_token(token_id)
        if text is not None and token_id not in self.added_tokens:
            if self._is_byte_level and all(char in _BYTE_OF for char in text):
                return bytes(_BYTE_OF[char] for char in text)
            if found := re.fullmatch(r"<0x([0-9A-F]{2})>", text):
                return bytes.fromhex(found[1])
        return self.decode_token(token_id).encode()

    @functools.cached_property
    def _is_byte_level(self) -> bool:
        decoder = json.dumps(json.loads(self.to_json()).get("decoder"))
        return '"ByteLevel"' in decoder

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """Renders a conversation as the prompt text that the model was trained on.

        Encode the result with `add_special_tokens=False`: the template writes BOS itself.

        Args:
          messages: Each with `role`; `content`, a string, None or a list of `{"type": "text",
            "text": ...}`; perhaps `tool_calls`, whose arguments may be JSON. Parts are joined by
            line ends unless the template takes lists. Other keys reach the template as they are.
          add_generation_prompt: End with the opening of the assistant's turn.
          tools: JSON schemas of what the model may call; with them, the template named `tool_use`
            goes before `default`.
          chat_template: The name of one of the model's templates, or another template.
          kwargs: Further variables for the template.
        Raises: ValueError if there is no template, it fails, or a message is malformed.
        """
        source = self._choose_template(chat_template, has_tools=tools is not None)
        try:
            from paged_jax.models.chat_template import chat_template as compiled
        except ImportError as error:
            raise ImportError("chat templates need jinja2: pip install 'paged-jax[llm]'") from error
        variables = {"documents": None} | self._special_tokens | kwargs
        variables |= {"tools": tools, "add_generation_prompt": add_generation_prompt}
        return compiled(source).render(messages, variables)

    def _choose_template(self, wanted: str | None, *, has_tools: bool) -> str:
        own = self.chat_template
        named = own if isinstance(own, Mapping) else {} if own is None else {"default": own}
        if wanted is not None:
            return named.get(wanted, wanted)
        for name in ("tool_use", "default") if has_tools else ("default",):
            if name in named:
                return named[name]
        if named:
            raise ValueError(
                f"the model has chat templates by name ({', '.join(named)}) and no default: "
                f"give chat_template"
            )
        raise ValueError("the model has no chat template; use a plain prompt")


def render_prompt(
    tokenizer: Tokenizer | None,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """The prompt that a chat template makes of a conversation: `prompt` and `prompt_token_ids`.

    Raises: ValueError when there is no tokenizer, and as `Tokenizer.apply_chat_template`.
    """
    if tokenizer is None:
        raise ValueError("this model has no tokenizer: chat needs one with a chat template")
    text = tokenizer.apply_chat_template(messages, tools=tools, **options)
    # The template has written BOS where it belongs.
    return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}


def load_tokenizer(path: str | PathLike[str]) -> Tokenizer | None:
    """`Tokenizer.from_directory`, or None where the directory holds no tokenizer.

    Raises: ValueError if it holds one in another form than `tokenizer.json`.
    """
    directory = Path(path)
    if (directory / "tokenizer.json").exists():
        return Tokenizer.from_directory(directory)
    for pattern in ("*.model", "vocab.*", "*.tiktoken", "tekken.json"):
        for other in directory.glob(pattern):
            raise ValueError(
                f"{directory} has {other.name} but no tokenizer.json, which is needed: save one "
                f"with transformers, AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )
    return None


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Builds the tokenizer that a GGUF file's `tokenizer.*` metadata describes.

    Raises: ValueError if the kind of tokenizer is unsupported or its parts contradict each other;
      ImportError without `tokenizers`.
    """
    _import_tokenizers()
    from paged_jax.models.gguf_vocabulary import build_tokenizer

    return build_tokenizer(metadata)


def put_ends(
    encoder: "tokenizers.Tokenizer", prefix: Sequence[int], suffix: Sequence[int] = ()
) -> None:
    """Makes an encoder put these tokens before and after a text, and no others."""
    ids = [*prefix, *suffix]
    # The library reads names in a template, and texts of tokens might mean something else there.
    encoder.post_processor = _import_tokenizers().processors.TemplateProcessing(
        single=[*(f"token{i}" for i in prefix), "$A", *(f"token{i}" for i in suffix)],
        special_tokens=[
            {"id": f"token{i}", "ids": [i], "tokens": [encoder.id_to_token(i)]} for i in set(ids)
        ],
    )


def _chat_templates(directory: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    path, more = directory / "chat_template.jinja", directory / "additional_chat_templates"
    files = {"default": path} if path.exists() else {}
    files |= {file.stem: file for file in sorted(more.glob("*.jinja"))}
    try:
        found = {name: file.read_text("utf-8") for name, file in files.items()}
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read a chat template of {directory}: {error}") from error
    if not found:
        given = config.get("chat_template")
        if given is None or isinstance(given, str):
            return given
        try:
            found = {entry["name"]: entry["template"] for entry in given}
        except (KeyError, TypeError) as error:
            path = directory / "tokenizer_config.json"
            raise ValueError(f"cannot read {path}: chat_template is no list by name") from error
    return found["default"] if found.keys() == {"default"} else found


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty where there is no file."""
    try:
        value = json.loads(path.read_text("utf-8")) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"cannot read {path}: it holds no JSON object")
    return value


def _import_tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(
            "text prompts need the tokenizers package: pip install 'paged-jax[llm]'"
        ) from error
    return tokenizers
