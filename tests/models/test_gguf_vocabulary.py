"""Vocabularies of GGUF files: byte-level ones, and those of SentencePiece."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from paged_jax.models import gguf_pre_tokenizer
from paged_jax.models.gguf import open_gguf
from paged_jax.models.tokenizer import tokenizer_from_gguf

DATA = Path(__file__).parents[1] / "data"
ROWS = json.loads((DATA / "smollm2.json").read_text())["rows"]
# Pieces by their scores, best first, and what Hugging Face transformers makes of texts with them.
REFERENCE = json.loads((DATA / "sentencepiece.json").read_text())
ALPHABET = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
SPECIAL = ["<unk>", "<s>", "</s>"]  # ids 0, 1, 2
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def metadata(pre="gpt-2", merges=(), **values):
    """A tokenizer of bytes, three control tokens and one user-defined token."""
    pieces = ["".join(merge.split()) for merge in merges or ()]
    tokens = [*SPECIAL, *ALPHABET, *pieces, "<tool>"]
    kinds = [3] * len(SPECIAL) + [1] * (len(ALPHABET) + len(pieces)) + [4]
    pairs = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": kinds,
        "merges": None if merges is None else list(merges),
        "bos_token_id": 1,
        "eos_token_id": 2,
        **values,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in pairs.items() if value is not None}


def sentencepiece(pieces, scores=None, **values):
    """A tokenizer of pieces, best first unless they have scores."""
    tokens = [*SPECIAL, *BYTES, *pieces]
    num_others = len(tokens) - len(pieces)
    pairs = {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * num_others + [-float(i) for i in scores or range(len(pieces))],
        "token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        **values,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in pairs.items() if value is not None}


def words(pre, text):
    """The text cut as the pre-tokeniser does it."""
    backend = tokenizer_from_gguf(metadata(pre))._backend
    return [text[begin:end] for _, (begin, end) in backend.pre_tokenizer.pre_tokenize_str(text)]


# A real file.


@pytest.fixture(scope="module")
def smollm2(smollm2_path):
    return open_gguf(smollm2_path).tokenizer()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["prompt"][:20])
def test_the_embedded_model_gives_the_reference_tokens(smollm2, row):
    text = row["prompt"]
    if row["kind"] == "chat":
        text = smollm2.apply_chat_template([{"role": "user", "content": text}])
    assert text == row["rendered"]
    assert smollm2.encode(text, add_special_tokens=False) == row["prompt_token_ids"]
    assert smollm2.encode(text) == row["prompt_token_ids"]  # it wants no BOS
    assert smollm2.decode(row["prompt_token_ids"], skip_special_tokens=False) == text
    assert smollm2.decode(row["token_ids"]) == row["text"]


def test_the_embedded_model_knows_its_tokens(smollm2):
    assert smollm2.vocab_size == 49152
    assert smollm2.bos_token_id == 1
    assert smollm2.eos_token_ids == (2,)
    assert smollm2.decode_token(2) == "<|im_end|>"
    assert smollm2.decode_token(7042) == " Paris"


# Byte-level vocabularies.


@pytest.mark.parametrize("pre", sorted(gguf_pre_tokenizer._BY_NAME))
def test_any_text_survives_a_round_trip(pre):
    tokenizer = tokenizer_from_gguf(metadata(pre))
    for text in ("", "Zoë: 45 🙂\r\n\n  don't  ", "日本語 \t x", "\x00\x7f", "a 1234567. (b)!\n"):
        adds = tokenizer.encode("")
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert len(tokenizer.encode(text)) == len(adds) + len(text.encode())


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "it's 1234 IT'S", ["it", "'s", " 1234", " IT", "'", "S"]),
        ("gpt-2", "a\n\nb  c", ["a", "\n", "\n", "b", " ", " c"]),
        ("smollm", "it's 1234", ["it", "'s", " ", "1", "2", "3", "4"]),
        ("default", "a 12345 ½!?", ["a", " ", "123", "45", " ", "½", "!?"]),
        ("falcon", "a 12345 `$", ["a", " ", "123", "45", " ", "`$"]),
        ("llama-bpe", "it's 1234 IT'S", ["it", "'s", " ", "123", "4", " IT", "'S"]),
        ("llama-bpe", "(a)  b!\n\n c", ["(a", ")", " ", " b", "!\n\n", " c"]),
        ("minicpm5", "x 12345", ["x", " ", "123", "45"]),
        ("qwen2", "x 12", ["x", " ", "1", "2"]),
        ("qwen2", "हिन्दी", ["ह", "िन", "्द", "ी"]),  # a vowel sign is no letter
        ("qwen35", "हिन्दी", ["हिन्दी"]),
        ("seed-coder", "a.\nb", ["a", ".", "\n", "b"]),
        ("bailingmoe", "a\n\nb", ["a", "\n\n", "b"]),
        ("bailingmoe", "a.\n\nb", ["a", ".\n\n", "b"]),
        ("exaone-moe", "one two 12", ["one two", " ", "1", "2"]),
        ("tekken", "aB don't 12 x/", ["a", "B", " don", "'t", " ", "1", "2", " x", "/"]),
        ("gpt-4o", "HelloWorld don't 1234", ["Hello", "World", " don't", " ", "123", "4"]),
        ("tiny_aya", "1234567", ["1", "234", "567"]),
        ("deepseek-llm", "Hi there\n中文12", ["Hi", " there", "\n", "中文", "12"]),
        ("deepseek-coder", "Hi, 中文12", ["Hi", ",", " ", "中文", "1", "2"]),
        ("deepseek-v3", "(foo) 中文1234", ["(foo", ")", " ", "中文", "123", "4"]),
        ("bloom", "a b(c) d, e", ["a", " b", "(", "c", ")", " d", ",", " e"]),
        ("viking", "a 12", ["a", " ", "1", "2"]),
    ],
)
def test_words_are_cut_as_the_model_was_trained(pre, text, expected):
    assert words(pre, text) == expected


def test_the_table_of_the_module_is_true():
    text = "It's 1234\n"
    assert words("gpt-2", text) == ["It", "'s", " 1234", "\n"]
    assert words("llama-bpe", text) == ["It", "'s", " ", "123", "4", "\n"]
    assert words("qwen2", text) == ["It", "'s", " ", "1", "2", "3", "4", "\n"]


def test_merges_apply_in_order():
    tokenizer = tokenizer_from_gguf(metadata(merges=["a b", "ab c", "b c"]))
    assert [tokenizer.decode_token(i) for i in tokenizer.encode("abcbc")] == ["abc", "bc"]


def test_llama3_keeps_words_that_are_tokens():
    merges = ["b c", "a b", "ab c"]  # merging in order gives a, bc
    known = tokenizer_from_gguf(metadata("llama-bpe", merges)).encode("abc", False)
    merged = tokenizer_from_gguf(metadata("gpt-2", merges)).encode("abc", False)
    assert (len(known), len(merged)) == (1, 2)


@pytest.mark.parametrize("pre", ["qwen2", "command-r", "olmo"])
def test_some_models_compose_characters(pre):
    tokenizer = tokenizer_from_gguf(metadata(pre))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("é")
    plain = tokenizer_from_gguf(metadata("gpt-2"))
    assert plain.encode("e\u0301") != plain.encode("é")


def test_part_of_a_character_shows_as_the_replacement_character():
    tokenizer = tokenizer_from_gguf(metadata())
    ids = tokenizer.encode("🙂")
    assert [tokenizer.decode_token(i) for i in ids] == ["\ufffd"] * 4
    assert tokenizer.decode(ids) == "🙂"


# SentencePiece's vocabularies.


def by_score(text, tokens, scores):
    """Merges the best neighbours, the leftmost of equals, until there are none."""
    parts = list(text)
    while True:
        unions = [a + b for a, b in itertools.pairwise(parts)]
        found = [(-scores[tokens[w]], i) for i, w in enumerate(unions) if w in tokens]
        if not found:
            break
        _, i = min(found)
        parts[i : i + 2] = [unions[i]]
    ids = [[tokens[p]] if p in tokens else [tokens[BYTES[b]] for b in p.encode()] for p in parts]
    return list(itertools.chain(*ids))


@pytest.mark.parametrize("is_shuffled", [False, True])
def test_pieces_merge_by_score(rng: np.random.Generator, is_shuffled):
    for _ in range(25):
        pieces = ["a", "b", "\u2581"]
        for _ in range(rng.integers(3, 20)):
            union = "".join(rng.choice(pieces, 2))
            if union not in pieces and len(union) < 9:
                pieces.append(union)
        ranks = rng.permutation(len(pieces)) if is_shuffled else range(len(pieces))
        values = sentencepiece(pieces, [int(rank) for rank in ranks])
        tokenizer = tokenizer_from_gguf(values)
        ids = {token: i for i, token in enumerate(values["tokenizer.ggml.tokens"])}
        for _ in range(20):
            text = "".join(rng.choice(list("aab b?é"), rng.integers(1, 20)))
            found = tokenizer.encode(text, add_special_tokens=False)
            escaped = "\u2581" + text.replace(" ", "\u2581")
            assert found == by_score(escaped, ids, values["tokenizer.ggml.scores"])
            assert tokenizer.decode(found) == text


@pytest.mark.parametrize("row", REFERENCE["llama"], ids=lambda row: row["text"])
def test_llama_matches_transformers(row):
    tokenizer = tokenizer_from_gguf(sentencepiece(REFERENCE["pieces"]))
    assert tokenizer.encode(row["text"], add_special_tokens=False) == row["ids"]
    assert tokenizer.decode(row["ids"], skip_special_tokens=False) == row["decoded"]


@pytest.mark.parametrize("row", REFERENCE["gemma"], ids=lambda row: row["text"])
def test_gemma_matches_transformers(row):
    tokenizer = tokenizer_from_gguf(sentencepiece(REFERENCE["pieces"], add_space_prefix=False))
    assert tokenizer.encode(row["text"], add_special_tokens=False) == row["ids"]
    assert tokenizer.decode(row["ids"], skip_special_tokens=False) == row["decoded"]
    assert tokenizer.decode(row["ids"]) == row["shown"]


def test_a_space_stands_before_every_text():
    tokenizer = tokenizer_from_gguf(sentencepiece(["\u2581", "a", "\u2581a"]))
    space, a, spaced_a = (tokenizer.vocab_size - i for i in (3, 2, 1))
    assert tokenizer.encode("aa") == [1, spaced_a, a]  # BOS unless the file says otherwise
    assert tokenizer.encode(" a") == [1, space, spaced_a]
    # Behind special tokens too, as llama.cpp has it.
    assert tokenizer.encode("a</s>a") == [1, spaced_a, 2, spaced_a]
    assert tokenizer.encode("") == [1]
    assert tokenizer.decode([1, spaced_a, 2, spaced_a]) == "a a"
    assert tokenizer.decode([1, space, spaced_a]) == " a"


def test_unknown_characters_are_bytes_or_the_unknown_token():
    tokenizer = tokenizer_from_gguf(sentencepiece(["a"], add_space_prefix=False))
    ids = tokenizer.encode("é\n", add_special_tokens=False)
    assert ids == [3 + byte for byte in "é\n".encode()]
    assert tokenizer.decode(ids) == "é\n"
    assert [tokenizer.decode_token(i) for i in ids] == ["\ufffd", "\ufffd", "\n"]
    # Text that looks like a byte token is none.
    assert tokenizer.encode("<0x61>", False) == [3 + byte for byte in b"<0x61>"]

    values = sentencepiece(["a"], add_space_prefix=False)
    values |= {
        f"tokenizer.ggml.{key}": values[f"tokenizer.ggml.{key}"][:3] + last
        for key, last in [("tokens", ["a"]), ("scores", [0.0]), ("token_type", [1])]
    }
    assert tokenizer_from_gguf(values).encode("aé日a", False) == [3, 0, 3]


def test_roles_have_defaults_where_llama_vocabularies_have_them():
    tokenizer = tokenizer_from_gguf(sentencepiece(["a"]))
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_ids == (2,)
    named = tokenizer_from_gguf(sentencepiece(["a", "</e>"], eos_token_id=260, bos_token_id=2))
    assert named.eos_token_ids == (260,)
    assert named.bos_token_id == 2


# Special tokens and templates, of either kind.


def test_bos_is_added_exactly_when_the_model_wants_it():
    text = tokenizer_from_gguf(metadata()).encode("a")
    assert len(text) == 1
    wanting = tokenizer_from_gguf(metadata(add_bos_token=True, add_eos_token=True))
    assert wanting.encode("a") == [1, *text, 2]
    assert wanting.encode("a", add_special_tokens=False) == text
    assert wanting.encode("<s>a", add_special_tokens=False) == [1, *text]
    assert tokenizer_from_gguf(metadata("llama-bpe")).encode("a") == [1, *text]
    assert tokenizer_from_gguf(metadata("llama-bpe", add_bos_token=False)).encode("a") == text
    piece = tokenizer_from_gguf(sentencepiece(["\u2581a"], add_bos_token=False))
    assert piece.encode("a", add_special_tokens=False) == piece.encode("a")


def test_control_tokens_are_hidden_and_user_defined_ones_shown():
    tokenizer = tokenizer_from_gguf(metadata())
    ids = tokenizer.encode("a<tool></s>")
    assert ids[1:] == [tokenizer.vocab_size - 1, 2]
    assert tokenizer.decode(ids) == "a<tool>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<tool></s>"


def test_every_end_token_is_reported():
    tokenizer = tokenizer_from_gguf(metadata(eot_token_id=0, eom_token_id=2))
    assert tokenizer.eos_token_ids == (2, 0)
    alone = tokenizer_from_gguf(metadata(bos_token_id=None))
    assert alone.eos_token_ids == (2,)
    assert alone.bos_token_id is None


def with_control(*texts, **values):
    tokens, kinds = [*SPECIAL, *ALPHABET, *texts], [3] * 3 + [1] * 256 + [3] * len(texts)
    return metadata(tokens=tokens, token_type=kinds, **values)


def test_files_that_name_no_end_of_turn_have_the_known_ones():
    assert tokenizer_from_gguf(with_control("<|im_end|>", "<x>")).eos_token_ids == (2, 259)
    assert tokenizer_from_gguf(with_control("<|end|>")).eos_token_ids == (2, 259)
    assert tokenizer_from_gguf(with_control("<|end|>", "<|return|>")).eos_token_ids == (2,)
    assert tokenizer_from_gguf(with_control("<|im_end|>", eot_token_id=1)).eos_token_ids == (2, 1)
    normal = metadata(tokens=[*SPECIAL, *ALPHABET, "<|im_end|>"], token_type=[3] * 3 + [1] * 257)
    assert tokenizer_from_gguf(normal).eos_token_ids == (2,)


def test_templates_are_read_by_name():
    values = metadata()
    assert tokenizer_from_gguf(values).chat_template is None
    values["tokenizer.chat_template"] = "d"
    assert tokenizer_from_gguf(values).chat_template == "d"
    values["tokenizer.chat_templates"] = ["default", "tool_use"]
    values["tokenizer.chat_template.tool_use"] = "t"
    assert tokenizer_from_gguf(values).chat_template == {"default": "d", "tool_use": "t"}


@pytest.mark.parametrize(
    "values",
    [
        metadata("deepseek-llm", ["a b", "ab c"], add_bos_token=True),
        metadata("qwen2"),
        sentencepiece(REFERENCE["pieces"]),
        sentencepiece(REFERENCE["pieces"], add_space_prefix=False),
    ],
)
def test_what_is_built_can_be_saved_as_tokenizer_json(values):
    built = tokenizer_from_gguf(values)._backend
    read = tokenizers.Tokenizer.from_str(built.to_str())
    for text in ("abc  the cat, Zoë</s>日本 12\n", "", " <s>x"):
        ids = built.encode(text).ids
        assert read.encode(text).ids == ids
        assert read.decode(ids) == built.decode(ids)


BAD_ROLE = 10_000


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"model": "bert"}, "'bert' is not supported .supported: 'gpt2', 'llama'"),
        ({"pre": "tekken2"}, "pre-tokenizer 'tekken2' is not supported .supported: a.x-4.0, bail"),
        ({"pre": None}, r"tokenizer\.ggml\.pre is missing"),
        ({"merges": None}, r"tokenizer\.ggml\.merges is missing"),
        ({"tokens": [*SPECIAL, *ALPHABET], "merges": ["x y"]}, "bad merges"),
        ({"tokens": [*SPECIAL, *ALPHABET, "a"]}, "has the token 'a' twice"),
        ({"token_type": [3, 3]}, "2 token types for 260 tokens"),
        ({"tokens": "abc"}, r"tokenizer\.ggml\.tokens holds items of a wrong type"),
        ({"tokens": [1, 2]}, r"tokenizer\.ggml\.tokens holds items of a wrong type"),
        ({"token_type": ["x"] * 260}, r"tokenizer\.ggml\.token_type holds items of a wrong type"),
        ({"model": ["gpt2"]}, "is not supported"),
        ({"pre": 3}, "is not supported"),
        ({"eos_token_id": "x"}, "names token 'x' of 260"),
        ({"eos_token_id": -1}, "names token -1 of 260"),
        ({"eos_token_id": BAD_ROLE}, "names token 10000 of 260"),
        ({"add_bos_token": True, "bos_token_id": None}, "adds a token it lacks: bos_token_id"),
        ({"model": "llama"}, r"tokenizer\.ggml\.scores is missing"),
        ({"model": "llama", "scores": [0.0]}, "1 scores for 260 tokens"),
    ],
)
def test_what_cannot_be_built_is_refused(values, reason):
    with pytest.raises(ValueError, match=reason):
        tokenizer_from_gguf(metadata(**values))


def test_a_role_that_only_templates_use_may_be_out_of_range():
    tokenizer = tokenizer_from_gguf(metadata(padding_token_id=BAD_ROLE))
    assert tokenizer.encode("a")
