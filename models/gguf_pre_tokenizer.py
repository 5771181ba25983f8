r"""How GGUF's byte-level vocabularies cut a text into words, by the value of `tokenizer.ggml.pre`.

A name stands for the pre-tokeniser in the tokenizer.json of the model that it was introduced for.
A wrong one cuts words wrongly and does not show, so an unknown name is an error.

    "It's 1234\n"    gpt-2       It 's _1234 \n
                     llama-bpe   It 's _ 123 4 \n
                     qwen2       It 's _ 1 2 3 4 \n

Source: the names and their patterns, src/llama-vocab.cpp of ggml-org/llama.cpp; normalisation,
the tokenizer classes of Hugging Face transformers.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class PreTokenizer:
    """What happens to a text before its words are merged from bytes."""

    cuts: tuple[str, ...]
    """Patterns; each in turn cuts every piece into its matches and what lies between them."""
    is_nfc: bool = False
    """Whether the text is normalised first."""
    has_whole_words: bool = False
    """Whether a word that is a token stays one, whatever the merges say."""
    adds_bos: bool = False
    """What holds where `tokenizer.ggml.add_bos_token` is missing."""


def pre_tokenizer(name: str) -> PreTokenizer:
    """The rules of a name.

    Raises: ValueError if it is unknown; the message lists the known ones.
    """
    if not isinstance(name, str) or name not in _BY_NAME:
        known = ", ".join(sorted(_BY_NAME))
        raise ValueError(f"GGUF pre-tokenizer {name!r} is not supported (supported: {known})")
    return _BY_NAME[name]


def _any(*alternatives: str) -> str:
    return "|".join(alternatives)


_SUFFIXES = "'s|'t|'re|'ve|'m|'ll|'d"  # English contractions
_SPACES = _any(r"\s+(?!\S)", r"\s+")  # all but the space in front of a word, which goes with it
_GPT2 = _any(_SUFFIXES, r" ?\p{L}+", r" ?\p{N}+", r" ?[^\s\p{L}\p{N}]+", _SPACES)


def _words(
    digits: str,
    *,
    letters: str = r"\p{L}+",
    signs: str = r"[^\s\p{L}\p{N}]+[\r\n]*",
    line_ends: str = r"\s*[\r\n]+",
) -> str:
    """Words as OpenAI's cl100k and its descendants cut them: letters with one leading character."""
    led = r"[^\r\n\p{L}\p{N}]?" + letters
    return _any(f"(?i:{_SUFFIXES})", led, digits, f" ?{signs}", line_ends, _SPACES)


def _cased_words(digits: str, suffixes: str = f"(?i:{_SUFFIXES})?") -> str:
    """Words as OpenAI's o200k cuts them: capitals only in front."""
    capitals, small = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    lead = r"[^\r\n\p{L}\p{N}]?"
    return _any(
        f"{lead}{capitals}*{small}+{suffixes}",
        f"{lead}{capitals}+{small}*{suffixes}",
        digits,
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        _SPACES,
    )


_ONE, _UP_TO_THREE, _THREE = r"\p{N}", r"\p{N}{1,3}", "[0-9][0-9][0-9]"
_ASCII_SIGNS = r"!-/:-@\[-`{-~"

# DeepSeek's first tokenizer lists the letters that have a case, of an older Unicode: these blocks
# were not in it yet or are left out.
_CASED = r"[[\p{Lu}\p{Ll}\p{Lt}]&&[^" + (
    r"\x{560}-\x{588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C8F}\x{2D00}-\x{2D2F}\x{A790}-\x{A7FF}"
    r"\x{AB30}-\x{AB6F}\x{10570}-\x{105BF}\x{16E40}-\x{16E7F}\x{1D400}-\x{1D7FF}"
    r"\x{1DF00}-\x{1DFFF}\x{10D50}-\x{10D8F}]]"
)
_ASIAN = r"[\x{800}-\x{9FA5}\x{AC00}-\x{D7FF}]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?{_CASED}+",
    r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+",
    r"\s+$",
    _ASIAN,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, _ONE)
_DEEPSEEK_V3 = (
    _UP_TO_THREE,
    r"[\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}]+",  # Chinese and Japanese
    _any(
        f"[{_ASCII_SIGNS}][A-Za-z]+",
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
        r" ?[\p{P}\p{S}]+[\r\n]*",
        r"\s*[\r\n]+",
        _SPACES,
    ),
)
# Everything up to a space or the end of a clause, in the scripts that BLOOM knows.
_BLOOM = r" ?[^(\s|.,!?)\x{2026}\x{3002}\x{FF0C}\x{3001}\x{964}\x{6D4}\x{60C}]+"

_GROUPS = {
    "gpt-2 phi-2 jais trillion gigachat mellum a.x-4.0 exaone4 granite-docling": PreTokenizer(
        (_GPT2,)
    ),
    "mpt olmo": PreTokenizer((_GPT2,), is_nfc=True),
    "smollm starcoder refact codeshell exaone minerva-7b mellum2": PreTokenizer((_ONE, _GPT2)),
    "command-r": PreTokenizer((_ONE, _GPT2), is_nfc=True),
    "falcon": PreTokenizer((r"[\p{P}$+<=>^~|`]+", _GPT2, _THREE)),
    "default": PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", _THREE)),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2": PreTokenizer(
        (_words(_UP_TO_THREE),), has_whole_words=True, adds_bos=True
    ),
    "dbrx smaug-bpe glm4 chatglm-bpe": PreTokenizer((_words(_UP_TO_THREE),)),
    "minicpm5": PreTokenizer((_UP_TO_THREE, _words(r"\p{N}+")), has_whole_words=True),
    "qwen2": PreTokenizer((_words(_ONE),), is_nfc=True),
    "deepseek-r1-qwen megrez kormo stablelm2 hunyuan solar-open grok-2": PreTokenizer(
        (_words(_ONE),)
    ),
    "qwen35": PreTokenizer(
        (_words(_ONE, letters=r"[\p{L}\p{M}]+", signs=r"[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),),
        is_nfc=True,
    ),
    "seed-coder": PreTokenizer((_words(_ONE, signs=r"[^\s\p{L}\p{N}]+"),)),
    "bailingmoe bailingmoe2 llada-moe": PreTokenizer((_words(_ONE, line_ends=r"\s*[\r\n]"),)),
    "exaone-moe": PreTokenizer(
        (
            _words(
                _ONE,
                letters=r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
                signs=r"[^\s\p{L}\p{N}]+[\r\n/]?",
                line_ends=r"\s*[\r\n]",
            ),
        )
    ),
    "tekken": PreTokenizer((_cased_words(_ONE, suffixes=""),), has_whole_words=True, adds_bos=True),
    "gpt-4o llama4 kanana2 minimax-m2": PreTokenizer((_cased_words(_UP_TO_THREE),)),
    "tiny_aya cohere2moe": PreTokenizer(
        (r"\d{1,3}(?=(?:\d{3})*\b)", _cased_words(_UP_TO_THREE))  # thousands from the right
    ),
    "deepseek-llm": PreTokenizer(_DEEPSEEK_LLM),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
    "deepseek-v3 hunyuan-dense joyai-llm": PreTokenizer(_DEEPSEEK_V3),
    "bloom poro-chat gpt3-finnish": PreTokenizer((_BLOOM,)),
    "viking": PreTokenizer((_BLOOM, _ONE)),
}
_BY_NAME = {name: rules for names, rules in _GROUPS.items() for name in names.split()}
