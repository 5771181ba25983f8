import json
from pathlib import Path

import pytest
import tokenizers

from paged_jax.models.gguf import open_gguf
from paged_jax.models.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_gguf

ROWS = json.loads((Path(__file__).parents[1] / "data" / "smollm2.json").read_text())["rows"]
ALPHABET = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
SPECIAL = ["<unk>", "<s>", "</s>"]  # ids 0, 1, 2


def metadata(pre="gpt-2", merges=(), **values):
    """A tokenizer of bytes, three control tokens and one user-defined token."""
    pieces = ["".join(merge.split()) for merge in merges]
    tokens = [*SPECIAL, *ALPHABET, *pieces, "<tool>"]
    kinds = [3] * len(SPECIAL) + [1] * (len(ALPHABET) + len(pieces)) + [4]
    pairs = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": kinds,
        "merges": list(merges),
        "bos_token_id": 1,
        "eos_token_id": 2,
        **values,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in pairs.items() if value is not None}


def words(pre, text):
    """The text cut as the pre-tokeniser does it."""
    backend = tokenizer_from_gguf(metadata(pre))._backend
    return [text[begin:end] for _, (begin, end) in backend.pre_tokenizer.pre_tokenize_str(text)]


def chat(template):
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"<s>": 0}, []))
    return Tokenizer(backend, special_tokens={"bos_token": "<s>"}, chat_template=template)


HELLO = [{"role": "user", "content": "Hello"}]


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


@pytest.mark.parametrize("pre", ["gpt-2", "default", "smollm", "llama-bpe", "llama3", "qwen2"])
@pytest.mark.parametrize("text", ["", "Zoë: 45 🙂\r\n\n  don't  ", "日本語 \t x", "\x00\x7f"])
def test_any_text_survives_a_round_trip(pre, text):
    tokenizer = tokenizer_from_gguf(metadata(pre))
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "it's 1234 IT'S", ["it", "'s", " 1234", " IT", "'", "S"]),
        ("smollm", "it's 1234", ["it", "'s", " ", "1", "2", "3", "4"]),
        ("llama-bpe", "it's 1234 IT'S", ["it", "'s", " ", "123", "4", " IT", "'S"]),
        ("llama-bpe", "(a)  b!\n\n c", ["(a", ")", " ", " b", "!\n\n", " c"]),
        ("qwen2", "x 12", ["x", " ", "1", "2"]),
    ],
)
def test_words_are_cut_as_the_model_was_trained(pre, text, expected):
    assert words(pre, text) == expected


def test_merges_apply_in_order():
    tokenizer = tokenizer_from_gguf(metadata(merges=["a b", "ab c", "b c"]))
    assert [tokenizer.decode_token(i) for i in tokenizer.encode("abcbc")] == ["abc", "bc"]


def test_llama3_keeps_words_that_are_tokens():
    merges = ["b c", "a b", "ab c"]  # merging in order gives a, bc
    known = tokenizer_from_gguf(metadata("llama-bpe", merges)).encode("abc", False)
    merged = tokenizer_from_gguf(metadata("gpt-2", merges)).encode("abc", False)
    assert (len(known), len(merged)) == (1, 2)


def test_qwen2_composes_characters():
    tokenizer = tokenizer_from_gguf(metadata("qwen2"))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("é")


def test_bos_is_added_exactly_when_the_model_wants_it():
    text = tokenizer_from_gguf(metadata()).encode("a")
    assert len(text) == 1
    wanting = tokenizer_from_gguf(metadata(add_bos_token=True, add_eos_token=True))
    assert wanting.encode("a") == [1, *text, 2]
    assert wanting.encode("a", add_special_tokens=False) == text
    assert wanting.encode("<s>a", add_special_tokens=False) == [1, *text]
    assert tokenizer_from_gguf(metadata("llama-bpe")).encode("a") == [1, *text]
    assert tokenizer_from_gguf(metadata("llama-bpe", add_bos_token=False)).encode("a") == text


def test_control_tokens_are_hidden_and_user_defined_ones_shown():
    tokenizer = tokenizer_from_gguf(metadata())
    ids = tokenizer.encode("a<tool></s>")
    assert ids[1:] == [tokenizer.vocab_size - 1, 2]
    assert tokenizer.decode(ids) == "a<tool>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<tool></s>"


def test_part_of_a_character_shows_as_the_replacement_character():
    tokenizer = tokenizer_from_gguf(metadata())
    ids = tokenizer.encode("🙂")
    assert [tokenizer.decode_token(i) for i in ids] == ["\ufffd"] * 4
    assert tokenizer.decode(ids) == "🙂"


def test_every_end_token_is_reported():
    tokenizer = tokenizer_from_gguf(metadata(eot_token_id=0, eom_token_id=2))
    assert tokenizer.eos_token_ids == (2, 0)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"model": "llama", "pre": None}, "'llama' is not supported yet .supported: 'gpt2'"),
        ({"pre": "tekken"}, "'tekken' is not supported .supported: default, gpt-2, smollm"),
        ({"pre": None}, r"tokenizer\.ggml\.pre is missing"),
        ({"tokens": [*SPECIAL, *ALPHABET], "merges": ["x y"]}, "bad merges"),
        ({"eos_token_id": 10_000}, "names token 10000 of 260"),
        ({"add_bos_token": True, "bos_token_id": None}, "adds a token it lacks: bos_token_id"),
    ],
)
def test_what_cannot_be_built_is_refused(values, reason):
    with pytest.raises(ValueError, match=reason):
        tokenizer_from_gguf(metadata(**values))


def test_templates_speak_hugging_faces_dialect():
    template = (
        "{{ bos_token }}\n"
        "{% for message in messages %}\n"
        "    {% if message.role == 'skip' %}{% continue %}{% endif %}\n"
        "{% generation %}{{ message.content }}{% endgeneration %}\n"
        "{% endfor %}\n"
        "{{ tools | tojson }}{{ extra }}{% if add_generation_prompt %}>{% endif %}"
    )
    messages = [{"role": "skip", "content": "no"}, {"role": "assistant", "content": None}, *HELLO]
    text = chat(template).apply_chat_template(messages, tools=[{"é": "<&>"}], extra=7)
    assert text == '<s>\nHello[{"é": "<&>"}]7>'
    assert (
        chat("x{% if add_generation_prompt %}>{% endif %}").apply_chat_template(
            HELLO, add_generation_prompt=False
        )
        == "x"
    )


def test_templates_can_ask_for_the_date():
    assert chat("{{ strftime_now('%Y') }}").apply_chat_template(HELLO).isdigit()


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "^the chat template failed: roles must"),
        ("{% for %}", "^the chat template failed: [^\n]+$"),
        ("{{ messages[0].content + 1 }}", "the chat template failed"),
        ("{{ messages.append(1) }}", "the chat template failed"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        (None, "no chat template"),
    ],
)
def test_a_failing_template_is_a_value_error(template, reason):
    with pytest.raises(ValueError, match=reason):
        chat(template).apply_chat_template(HELLO)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "non-empty list"),
        ("Hello", "non-empty list"),
        ({"role": "user", "content": "Hello"}, "non-empty list"),
        (["Hello"], r"messages\[0\] must be a mapping, not str"),
        ([*HELLO, {"content": "x"}], r"messages\[1\]\['role'\] must be a string"),
        ([{"role": "user"}], r"messages\[0\]\['content'\] must be a string or None"),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\]\['content'\] must be a string"),
    ],
)
def test_malformed_messages_are_refused(messages, reason):
    with pytest.raises(ValueError, match=reason):
        chat("x").apply_chat_template(messages)


@pytest.fixture
def directory(tmp_path):
    backend = tokenizer_from_gguf(metadata(add_bos_token=True))._backend
    backend.enable_truncation(2)
    backend.enable_padding()
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write_config(directory, **config):
    (directory / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")


def test_a_directory_reads_as_it_was_saved(directory):
    write_config(
        directory,
        bos_token="<s>",
        eos_token={"__type": "AddedToken", "content": "</s>"},
        pad_token=None,
        chat_template="{{ bos_token }}{{ messages[0].content }}",
    )
    tokenizer = load_tokenizer(directory)
    assert tokenizer is not None
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.vocab_size == 260
    assert tokenizer.apply_chat_template(HELLO) == "<s>Hello"
    ids = tokenizer.encode("Hello")
    assert ids[0] == 1
    assert len(ids) == 6  # neither truncated nor padded
    assert tokenizer.decode(ids) == "Hello"


def test_the_template_file_goes_before_the_config(directory):
    write_config(directory, chat_template="config")
    assert Tokenizer.from_directory(directory).chat_template == "config"
    (directory / "chat_template.jinja").write_text("file", "utf-8")
    assert Tokenizer.from_directory(directory).chat_template == "file"


def test_of_several_templates_the_default_is_taken(directory):
    templates = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    write_config(directory, chat_template=templates)
    assert Tokenizer.from_directory(directory).chat_template == "d"


def test_a_directory_without_config_has_no_end_token(directory):
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.eos_token_ids == ()
    assert tokenizer.bos_token_id is None
    assert tokenizer.chat_template is None


def test_a_directory_without_tokenizer_has_none(tmp_path):
    assert load_tokenizer(tmp_path) is None
    with pytest.raises(ValueError, match=r"cannot read .*tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_file_is_named(directory, name):
    (directory / name).write_text("{", "utf-8")
    with pytest.raises(ValueError, match=f"^cannot read {directory / name}: [^\n]+$"):
        Tokenizer.from_directory(directory)
