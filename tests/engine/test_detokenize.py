"""Text as it grows: nothing lost, nothing twice, nothing taken back."""

import itertools

import pytest

from paged_jax.engine.detokenize import TextStream, text_after
from paged_jax.models.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def byte_tokenizer() -> Tokenizer:
    """One token per byte: id b is byte b; 256 and 257 are special."""
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = _byte_alphabet()
    vocabulary = {character: byte for byte, character in alphabet.items()}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<bos>", "<eos>"])
    return Tokenizer(backend, special_tokens={}, eos_token_ids=(257,), chat_template=None)


def _byte_alphabet() -> dict[int, str]:
    """Byte to the printable character that stands for it in byte-level vocabularies."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in kept]
    return {b: chr(b) for b in kept} | {b: chr(256 + i) for i, b in enumerate(moved)}


def feed(tokenizer, ids, stop=(), prompt=()):
    """(texts after each token, final text, stop string or None, tokens fed)."""
    stream = TextStream(tokenizer, list(prompt), stop)
    texts = []
    for count, token in enumerate(ids, 1):
        found = stream.append(token)
        texts.append(stream.text)
        if found is not None:
            return texts, stream.text, found, count
    found = stream.finish()
    return texts, stream.text, found, len(ids)


def assert_grows(texts, final):
    for earlier, later in itertools.pairwise([*texts, final]):
        assert later.startswith(earlier)


@pytest.mark.parametrize("text", ["Q 山b川 👨‍👩‍👦 ü", "plain", "é", "\n\n", " leading", ""])
def test_bytes_of_a_character_are_held_until_it_is_whole(byte_tokenizer, text):
    texts, final, found, _ = feed(byte_tokenizer, list(text.encode()))
    assert final == text
    assert found is None
    assert all("\ufffd" not in part for part in texts)
    assert_grows(texts, final)


@pytest.mark.parametrize(
    "raw",
    [
        b"ab\xff ok",
        b"\xe5\xb1",
        b"x\xf0\x9f\x98",
        b"\xf0\x9f\x98a",
        b"\xe2\x28\xa1",
        b"\xff\xff\xff\xff\xff\xffz",
        bytes(range(128, 256)),
    ],
)
def test_invalid_bytes_come_out_as_a_whole_decode_gives_them(byte_tokenizer, raw):
    texts, final, _, _ = feed(byte_tokenizer, list(raw))
    assert final == byte_tokenizer.decode(list(raw))
    assert_grows(texts, final)


def test_random_bytes_equal_the_whole_decode(byte_tokenizer, rng):
    for _ in range(50):
        raw = rng.integers(0, 256, 60).tolist()
        texts, final, _, _ = feed(byte_tokenizer, raw)
        assert final == byte_tokenizer.decode(raw)
        assert_grows(texts, final)


@pytest.mark.parametrize(
    ("text", "stop", "expected", "reason"),
    [
        ("Done\n\n", ["\n"], "Done", "\n"),
        ("ab@@@cd", ["@@"], "ab", "@@"),
        ("one STOP two", ["two", "STOP"], "one ", "STOP"),
        ("say Bob?", ["Bob:"], "say Bob?", None),
        ("say Bo", ["Bob:"], "say Bo", None),
        (" x y z w", ["x y z"], " ", "x y z"),
        ("aaab", ["aab"], "a", "aab"),
        ("abcabd", ["abd", "bca"], "a", "bca"),
    ],
)
def test_text_is_cut_at_the_leftmost_stop(byte_tokenizer, text, stop, expected, reason):
    texts, final, found, _ = feed(byte_tokenizer, list(text.encode()), stop)
    assert final == expected
    assert found == reason
    assert_grows(texts, final)
    assert all(expected.startswith(part) for part in texts)


def test_the_prompt_is_context_and_not_output(byte_tokenizer):
    _, final, found, _ = feed(byte_tokenizer, list(b" world"), ["hello"], prompt=b"hello")
    assert final == " world"
    assert found is None


def test_special_tokens_are_skipped(byte_tokenizer):
    _, final, _, _ = feed(byte_tokenizer, [104, 256, 105, 257])
    assert final == "hi"


# Vocabularies of SentencePiece, whose decoders strip the space of the first token they are given.

PIECES = ["\u2581Hello", "\u2581world", "!", "\u2581the", "\u2581", "s"]
HELLO, WORLD, MARK, THE, SPACE, S, END = range(7)


@pytest.fixture(scope="module", params=["Metaspace", "Strip"])
def metaspace(request) -> Tokenizer:
    """One token per piece and a special one, with either decoder that is in use."""
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers import decoders, models

    vocabulary = {piece: i for i, piece in enumerate(PIECES)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="!"))
    backend.decoder = decoders.Metaspace()
    if request.param == "Strip":
        steps = [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["</s>"])
    return Tokenizer(backend, special_tokens={}, eos_token_ids=(END,), chat_template=None)


@pytest.mark.parametrize(
    ("prompt", "ids", "expected"),
    [
        ([HELLO], [THE, WORLD, MARK], " the world!"),
        ([HELLO, WORLD, MARK] * 3, [THE, S], " thes"),
        ([END], [THE, WORLD], "the world"),  # the first words of all
        ([HELLO, *[END] * 9], [THE, WORLD], " the world"),
        ([HELLO], [HELLO, END, END, WORLD, MARK], " Hello world!"),
        ([SPACE], [THE, SPACE, SPACE, THE], " the   the"),
        ([HELLO], [SPACE, THE], "  the"),
        ([HELLO], [], ""),
    ],
)
def test_no_space_between_words_is_lost(metaspace, prompt, ids, expected):
    texts, final, _, _ = feed(metaspace, ids, prompt=prompt)
    assert metaspace.decode(prompt + ids)[len(metaspace.decode(prompt)) :] == final == expected
    assert_grows(texts, final)
    assert text_after(metaspace, prompt, ids, skip_special_tokens=True) == expected
    marked = metaspace.decode(prompt + ids, False)[len(metaspace.decode(prompt, False)) :]
    assert text_after(metaspace, prompt, ids, skip_special_tokens=False) == marked


def test_random_pieces_equal_the_whole_decode(metaspace, rng):
    for _ in range(100):
        drawn = rng.integers(0, 7, 30).tolist()
        prompt, ids = drawn[: rng.integers(1, 20)], drawn[20:]
        texts, final, _, _ = feed(metaspace, ids, prompt=prompt)
        assert final == metaspace.decode(prompt + ids)[len(metaspace.decode(prompt)) :]
        assert_grows(texts, final)


def test_bytes_among_pieces_are_held_until_they_are_a_character():
    """A line end is a byte there, and one bad byte spoils its good neighbours in the decoder."""
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers import decoders, models

    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), "\u2581a"]
    model = models.BPE({token: i for i, token in enumerate(tokens)}, [])
    backend = tokenizers.Tokenizer(model)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer = Tokenizer(backend, special_tokens={})
    ids = [256, *"\n山👩".encode(), 256, 10, *"é".encode()]
    texts, final, _, _ = feed(tokenizer, ids, prompt=[256])
    assert final == " a\n山👩 a\né"
    assert all("\ufffd" not in part for part in texts)
    assert_grows(texts, final)


def test_a_character_that_the_prompt_begins_is_finished(byte_tokenizer):
    begun, rest = "é".encode(), b"x"
    _, final, _, _ = feed(byte_tokenizer, [begun[1], *rest], prompt=[*b"ab", begun[0]])
    assert final == "éx"
    _, final, _, _ = feed(byte_tokenizer, list("éx".encode()), prompt=list("\ufffd".encode()))
    assert final == "éx"
