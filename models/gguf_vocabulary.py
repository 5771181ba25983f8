"""The vocabulary of a GGUF file's `tokenizer.*` metadata, as an encoder of the tokenizers library.

Two kinds, by `tokenizer.ggml.model`:

- `gpt2`: byte-level BPE. Words, cut by `tokenizer.ggml.pre`, are merged from bytes in the order of
  `merges`.
- `llama`: SentencePiece's BPE. The whole text, spaces written as U+2581, is merged from characters:
  again and again the two neighbours whose union is the token with the best of `scores`. Characters
  that are no token are written as the tokens of their bytes. There is a space in front of the text,
  and in front of what follows a special token in it, unless `add_space_prefix` is false, as for
  Gemma.

Source: the GGUF specification, docs/gguf.md of ggml-org/ggml; defaults and details where it says
nothing, src/llama-vocab.cpp of ggml-org/llama.cpp.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Encoder

from paged_jax.models.gguf_pre_tokenizer import pre_tokenizer
from paged_jax.models.tokenizer import Tokenizer, put_ends

# Values of `tokenizer.ggml.token_type`; the fifth is a token that nothing uses.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _, _BYTE = range(1, 7)
_ROLES = {role: role for role in ("bos", "eos", "eot", "eom")} | {
    "unk": "unknown",
    "pad": "padding",
}
_SPACE = "\u2581"
# What ends a turn, where a file written before there was a key for it does not say so.
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>")


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Builds the tokenizer that the metadata describes.

    Raises: ValueError if its kind is unsupported, a key is missing, or keys contradict each other.
    """
    kind = _value(metadata, "model")
    if not isinstance(kind, str) or kind not in _BUILDERS:
        known = ", ".join(map(repr, _BUILDERS))
        raise ValueError(f"GGUF tokenizer {kind!r} is not supported (supported: {known})")
    tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(_list(metadata, "tokens", str))]
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) < len(tokens):
        twice = next(token for i, token in enumerate(tokens) if vocab[token] != i)
        raise ValueError(f"GGUF tokenizer has the token {twice!r} twice")
    kinds = _list(metadata, "token_type", int, [_NORMAL] * len(tokens))
    if len(kinds) < len(tokens):
        raise ValueError(f"GGUF tokenizer has {len(kinds)} token types for {len(tokens)} tokens")
    ids = _role_ids(metadata, kind, len(tokens))
    encoder, adds_bos = _BUILDERS[kind](metadata, vocab, kinds, ids)

    # Added tokens are looked for in the raw text and keep the ids that the vocabulary gives them.
    for added, is_special in (((_UNKNOWN, _CONTROL), True), ((_USER_DEFINED,), False)):
        texts = [text for text, kind in zip(tokens, kinds, strict=False) if kind in added]
        add = encoder.add_special_tokens if is_special else encoder.add_tokens
        add([AddedToken(text, special=is_special, normalized=False) for text in texts])
    prefix = ["bos"] if _value(metadata, "add_bos_token", adds_bos) else []
    suffix = ["eos"] if _value(metadata, "add_eos_token", False) else []
    if missing := [role for role in prefix + suffix if role not in ids]:
        raise ValueError(f"GGUF tokenizer adds a token it lacks: {missing[0]}_token_id")
    put_ends(encoder, [ids[role] for role in prefix], [ids[role] for role in suffix])

    ends = [ids[role] for role in ("eos", "eot", "eom") if role in ids]
    if "eot" not in ids:
        # In the format of gpt-oss, <|end|> ends a message and <|return|> the turn.
        texts = [text for text in _TURN_ENDS if text != "<|end|>" or "<|return|>" not in vocab]
        turn_ends = [vocab[text] for text in texts if text in vocab]
        ends += [i for i in turn_ends if kinds[i] in (_CONTROL, _USER_DEFINED)]
    return Tokenizer(
        encoder,
        special_tokens={f"{role}_token": tokens[token_id] for role, token_id in ids.items()},
        eos_token_ids=ends,
        chat_template=_chat_templates(metadata),
    )


def _role_ids(metadata: Mapping[str, Any], kind: str, num_tokens: int) -> dict[str, int]:
    """Ids of the tokens with a role, by role."""
    ids = {"unk": 0, "bos": 1, "eos": 2} if kind == "llama" else {}
    for role, name in _ROLES.items():
        token_id = _value(metadata, f"{name}_token_id", None)
        if token_id is None:
            continue
        if isinstance(token_id, int) and 0 <= token_id < num_tokens:
            ids[role] = token_id
        elif role in ("unk", "pad"):
            ids.pop(role, None)  # files exist that name one past the last for none
        else:
            raise ValueError(f"GGUF tokenizer names token {token_id!r:.80} of {num_tokens}")
    return {role: token_id for role, token_id in ids.items() if token_id < num_tokens}


def _byte_level(
    metadata: Mapping[str, Any],
    vocab: Mapping[str, int],
    kinds: Sequence[int],
    ids: Mapping[str, int],
) -> tuple[Encoder, bool]:
    """The encoder of `gpt2`, and whether it adds BOS unless the file says otherwise."""
    rules = pre_tokenizer(_value(metadata, "pre"))
    # A token may begin with the space that separates the two.
    merges = [
        (merge[:cut], merge[cut + 1 :])
        for merge in _list(metadata, "merges", str)
        for cut in [merge.find(" ", 1)]
    ]
    try:
        model = models.BPE(dict(vocab), merges, ignore_merges=rules.has_whole_words)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"GGUF tokenizer has bad merges: {error}") from error
    encoder = Encoder(model)
    if rules.is_nfc:
        encoder.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(cut), behavior="isolated") for cut in rules.cuts]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    encoder.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
    encoder.decoder = decoders.ByteLevel()
    return encoder, rules.adds_bos


def _sentencepiece(
    metadata: Mapping[str, Any],
    vocab: Mapping[str, int],
    kinds: Sequence[int],
    ids: Mapping[str, int],
) -> tuple[Encoder, bool]:
    """The same for `llama`."""
    scores = _list(metadata, "scores", int | float)
    if len(scores) < len(vocab):
        raise ValueError(f"GGUF tokenizer has {len(scores)} scores for {len(vocab)} tokens")
    has_bytes = all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    unknown = next((text for text, i in vocab.items() if i == ids.get("unk")), None)
    if not has_bytes and unknown is None:
        raise ValueError("GGUF tokenizer needs the tokens <0x00> to <0xFF> or an unknown token")
    pieces = {text: i for text, i in vocab.items() if kinds[i] not in (_UNKNOWN, _CONTROL, _BYTE)}
    model = models.BPE(
        dict(vocab),
        _merges(pieces, scores),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=has_bytes,
    )
    encoder = Encoder(model)
    spaces = normalizers.Replace(" ", _SPACE)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if _value(metadata, "add_space_prefix", True):
        spaces = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    encoder.normalizer = spaces
    encoder.decoder = decoders.Sequence(steps)
    return encoder, True


_BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece}


def _merges(pieces: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every cut of a piece into two pieces, those of the best piece first.

    SentencePiece orders merges by the score of their union and equal ones from left to right. The
    library's BPE knows an order of pairs only. That is the same as long as no two tokens have one
    score, but for cuts of one piece that overlap, as in `ab|a|ba` with the piece `aba`: the longer
    left part goes first, which is right there. It could be wrong for a piece that repeats itself,
    in a state that merging from the left does not leave behind.
    """
    found = [
        (-scores[i], -cut, i, (text[:cut], text[cut:]))
        for text, i in pieces.items()
        for cut in range(1, len(text))
        if text[:cut] in pieces and text[cut:] in pieces
    ]
    return [pair for *_, pair in sorted(found)]


def _chat_templates(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    default = metadata.get("tokenizer.chat_template")
    names = [name for name in metadata.get("tokenizer.chat_templates", []) if name != "default"]
    found = {name: metadata.get(f"tokenizer.chat_template.{name}") for name in names}
    named = {name: template for name, template in found.items() if template is not None}
    if wrong := [one for one in (default, *named.values()) if not isinstance(one, str | None)]:
        raise ValueError(f"GGUF chat template ({wrong[0]!r:.80}) must be text")
    if not named:
        return default
    return named if default is None else {"default": default} | named


def _value(metadata: Mapping[str, Any], name: str, default: Any = ...) -> Any:
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if value is ...:
        raise ValueError(f"GGUF metadata key tokenizer.ggml.{name} is missing")
    return value


def _list(metadata: Mapping[str, Any], name: str, kind: Any, default: Any = ...) -> list[Any]:
    """A value whose items are of one type."""
    items = _value(metadata, name, default)
    if not isinstance(items, list) or not all(isinstance(item, kind) for item in items):
        raise ValueError(f"GGUF metadata key tokenizer.ggml.{name} holds items of a wrong type")
    return items
