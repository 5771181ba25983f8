"""Tokenizers of Hugging Face directories, BOS, and the ends that stop a model."""

import json
import shutil
from pathlib import Path

import pytest
import tokenizers

from paged_jax.models.tokenizer import Tokenizer, load_tokenizer
from tests.byte_tokenizer import byte_backend

HELLO = [{"role": "user", "content": "Hello"}]
SPECIAL = ["<unk>", "<s>", "</s>"]  # ids 0, 1, 2


def backend(*, adds_bos: bool) -> tokenizers.Tokenizer:
    built = byte_backend(SPECIAL, 260)
    if adds_bos:
        built.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    return built


@pytest.fixture
def directory(tmp_path):
    """With settings of a training run."""
    saved = backend(adds_bos=True)
    saved.enable_truncation(2)
    saved.enable_padding()
    saved.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write_config(directory, name="tokenizer_config.json", **config):
    (directory / name).write_text(json.dumps(config), "utf-8")


# Directories.


def test_a_directory_reads_as_it_was_saved(directory):
    write_config(
        directory,
        bos_token="<s>",
        eos_token={"__type": "AddedToken", "content": "</s>"},
        pad_token=None,
        add_bos_token=True,
        unk_token={},
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
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>Hello"


def test_the_template_file_goes_before_the_config(directory):
    write_config(directory, chat_template="config")
    assert Tokenizer.from_directory(directory).chat_template == "config"
    (directory / "chat_template.jinja").write_text("file", "utf-8")
    assert Tokenizer.from_directory(directory).chat_template == "file"


def test_templates_are_read_by_name(directory):
    templates = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    write_config(directory, chat_template=templates)
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.apply_chat_template(HELLO) == "d"
    assert tokenizer.apply_chat_template(HELLO, tools=[{}]) == "t"
    write_config(directory, chat_template=templates[1:])
    assert Tokenizer.from_directory(directory).chat_template == "d"
    (directory / "chat_template.jinja").write_text("file", "utf-8")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "rag.jinja").write_text("r", "utf-8")
    found = Tokenizer.from_directory(directory).chat_template
    assert found == {"default": "file", "rag": "r"}


def test_special_tokens_may_stand_in_the_older_file(directory):
    write_config(directory, "special_tokens_map.json", bos_token="</s>", eos_token="</s>")
    write_config(directory, bos_token="<s>")
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_ids == (2,)


def test_a_directory_without_config_has_no_end_token(directory):
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.eos_token_ids == ()
    assert tokenizer.bos_token_id is None
    assert tokenizer.chat_template is None


def test_a_directory_without_tokenizer_has_none(tmp_path):
    assert load_tokenizer(tmp_path) is None
    with pytest.raises(ValueError, match=r"cannot read .*tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.model", "spiece.model", "vocab.json", "tekken.json"])
def test_other_forms_of_a_tokenizer_are_refused(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(ValueError, match=f"has {name} but no tokenizer.json, .*save_pretrained"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]
)
@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_broken_file_is_named(directory, name, text):
    (directory / name).write_text(text, "utf-8")
    with pytest.raises(ValueError, match=f"^cannot read {directory / name}: [^\n]+$"):
        Tokenizer.from_directory(directory)


@pytest.mark.parametrize("templates", [[{"name": "x"}], ["x"], 3])
def test_a_broken_list_of_templates_is_refused(directory, templates):
    write_config(directory, chat_template=templates)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: chat_template"):
        Tokenizer.from_directory(directory)


def test_a_broken_template_file_is_named(directory):
    (directory / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=f"cannot read a chat template of {directory}"):
        Tokenizer.from_directory(directory)


# BOS, once.


@pytest.mark.parametrize("asks", [True, False, None])
@pytest.mark.parametrize("adds_bos", [True, False])
def test_bos_is_added_if_either_file_says_so(tmp_path, adds_bos, asks):
    backend(adds_bos=adds_bos).save(str(tmp_path / "tokenizer.json"))
    write_config(tmp_path, bos_token="<s>", add_bos_token=asks)
    tokenizer = Tokenizer.from_directory(tmp_path)
    [a] = tokenizer.encode("a", add_special_tokens=False)
    is_wanted = adds_bos or asks is True
    assert tokenizer.encode("a") == ([1, a] if is_wanted else [a])
    assert tokenizer.encode("") == ([1] if is_wanted else [])


def test_bos_joins_what_a_tokenizer_adds_already(tmp_path):
    saved = backend(adds_bos=False)
    saved.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 2)]
    )
    saved.save(str(tmp_path / "tokenizer.json"))
    write_config(tmp_path, bos_token="<s>", add_bos_token=True)
    assert Tokenizer.from_directory(tmp_path).encode("") == [1, 2]


@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_text_with_bos_gets_no_second_one(adds_bos):
    tokenizer = Tokenizer(backend(adds_bos=adds_bos), special_tokens={"bos_token": "<s>"})
    [a] = tokenizer.encode("a", add_special_tokens=False)
    assert tokenizer.encode("<s>a") == [1, a]
    assert tokenizer.encode("<s>") == [1]
    # Who writes two has two.
    assert tokenizer.encode("<s><s>a") == [1, 1, a]
    assert tokenizer.encode("a<s>")[-2:] == [a, 1]
    assert tokenizer.encode("<s>a", add_special_tokens=False) == [1, a]


def test_a_rendered_chat_has_one_bos_by_either_way():
    tokenizer = Tokenizer(
        backend(adds_bos=True),
        special_tokens={"bos_token": "<s>"},
        chat_template="{{ bos_token }}{{ messages[0].content }}",
    )
    text = tokenizer.apply_chat_template(HELLO)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids.count(1) == 1
    assert tokenizer.encode(text) == ids


# The ends of a model, which several files may name.


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        ({"eos_token_id": [1, 5]}, 1, {1, 5}),
        ({"eos_token_id": 5}, 1, {5}),
        ({}, 1, {1}),
        (None, 3, {3}),
        (None, None, {2}),
    ],
)
def test_the_ends_of_generation_config_go_first(tmp_path, generation, config, ends):
    from paged_jax import LLM
    from tests.llm_harness import OPTIONS

    tiny = Path(__file__).parents[1] / "data" / "tiny" / "llama"
    shutil.copy(tiny / "model.safetensors", tmp_path)
    settings = json.loads((tiny / "config.json").read_text())
    write_config(tmp_path, "config.json", **settings | {"eos_token_id": config})
    if generation is not None:
        write_config(tmp_path, "generation_config.json", **generation)
    backend(adds_bos=False).save(str(tmp_path / "tokenizer.json"))
    write_config(tmp_path, eos_token="</s>")
    with LLM(str(tmp_path), **OPTIONS) as llm:
        assert llm.engine.eos_token_ids == ends


def test_every_end_stops_the_model_and_is_no_text(toy):
    from paged_jax import LLM
    from tests.llm_harness import GREEDY, OPTIONS, run

    backend = byte_backend([], 258)

    def answer(*ends):
        tokenizer = Tokenizer(backend, special_tokens={}, eos_token_ids=ends)
        with LLM(toy, tokenizer=tokenizer, **OPTIONS) as llm:
            return run(llm, [[1, 2, 3]], GREEDY)[0].outputs[0]

    free = answer()
    assert free.finish_reason == "length"
    end = free.token_ids[2]
    before = free.token_ids[: free.token_ids.index(end)]
    stopped = answer(256, end)
    assert stopped.token_ids == [*before, end]
    assert stopped.finish_reason == "stop"
    assert stopped.text == backend.decode(before)
