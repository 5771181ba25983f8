import io
import json
import re
import shutil
from pathlib import Path

import pytest

from paged_jax import LLM, SamplingParams
from paged_jax.cli import main
from tests.byte_tokenizer import SPECIAL, TEMPLATE, byte_backend

TINY_LLAMA = Path(__file__).parent / "data" / "tiny" / "llama"

COMMANDS = ["chat", "generate", "bench", "download", "info"]
# Two compiled programs serve every test.
ENGINE = [
    *("--max-model-len", "256", "--block-size", "16", "--num-blocks", "32"),
    *("--max-num-seqs", "2", "--max-num-batched-tokens", "32"),
]
FIGURES = (
    r"\[\d+ prompt \+ \d+ output tokens, first after [\d.]+ s.*, \d+ of 32 KV blocks, finish: "
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny random Llama with a tokenizer of bytes and a chat template."""
    path = tmp_path_factory.mktemp("llama")
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(TINY_LLAMA / name, path)
    byte_backend(SPECIAL, 320).save(str(path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return str(path)


@pytest.fixture
def call(capsys):
    """Runs a command; returns exit code, stdout, stderr."""

    def call(*args):
        try:
            code = main(list(args))
        except SystemExit as leave:
            code = leave.code
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return call


def assert_refused(result, *words):
    """Exit code 2, nothing on stdout, and one line on stderr that holds the words."""
    code, out, err = result
    assert (code, out) == (2, "")
    assert err.startswith("paged-jax")
    assert err.count("\n") == 1
    for word in words:
        assert word in err


# Usage.


def test_help_lists_the_commands(call):
    code, out, err = call("--help")
    assert (code, err) == (0, "")
    for name in COMMANDS:
        assert f"\n    {name} " in out


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_explains_itself(call, command):
    code, out, _ = call(command, "--help")
    assert code == 0
    assert f"usage: paged-jax {command}" in out


@pytest.mark.parametrize(
    "args",
    [
        ["chat", "hello", "--max-num-seq", "4"],  # abbreviations are unknown too
        ["generate", "hello", "--bogus"],
        ["info", "--bogus"],
        ["--bogus", "info"],
    ],
    ids=lambda args: args[0],
)
def test_an_unknown_option_is_refused(call, args):
    option = next(arg for arg in args if arg.startswith("--"))
    assert_refused(call(*args), option)


@pytest.mark.parametrize("args", [[], ["sing"]], ids=["none", "unknown"])
def test_a_command_is_needed(call, args):
    assert_refused(call(*args))


def test_an_option_of_the_wrong_type_is_refused(call):
    assert_refused(call("chat", "hello", "--block-size", "x"), "--block-size")


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--block-size", "0", ["block_size (0)", "at least 1"]),
        ("--max-tokens", "0", ["max_tokens (0)", "at least 1"]),
        ("--temperature", "nan", ["temperature (nan)"]),
        ("--warmup", "never", ["warmup ('never')"]),
        ("--kv-cache-dtype", "fp9", ["kv_cache_dtype ('fp9')", "int8, fp8, fp8_e4m3"]),
        ("--dtype", "int3", ["dtype ('int3')", "float32"]),
    ],
)
def test_a_wrong_value_is_refused(call, model, option, value, words):
    code, out, err = call("chat", "hello", "--model", model, option, value)
    # A status line may stand before the error when the model is already being loaded.
    assert_refused((code, out, err.splitlines(keepends=True)[-1]), *words)


# Models.


@pytest.mark.parametrize(
    "args", [["chat", "hello", "--model"], ["generate", "x", "--model"], ["info"]]
)
def test_a_missing_model_is_refused(call, args):
    assert_refused(call(*args, "no/such/model"), "model 'no/such/model'", "smollm2-135m-instruct")


@pytest.mark.parametrize(
    "args", [["chat", "hello", "--model"], ["generate", "x", "--model"], ["info"]]
)
def test_an_unreadable_gguf_file_is_refused(call, tmp_path, args):
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"garbage")
    assert_refused(call(*args, str(path)), f"cannot read GGUF file {path}")


def test_a_directory_without_config_is_refused(call, tmp_path):
    assert_refused(call("chat", "hello", "--model", str(tmp_path)), "it has no config.json")


def test_only_built_in_models_are_downloaded(call):
    assert_refused(call("download", "gpt-5"), "'gpt-5' is not a built-in model")


def test_info_tells_versions_and_devices(call):
    code, out, _ = call("info", "--json")
    assert code == 0
    facts = json.loads(out)
    assert {"paged-jax", "python", "jax", "jaxlib", "flax", "devices"} == facts.keys()
    assert facts["devices"]


def test_info_describes_a_model(call, model):
    code, out, _ = call("info", model, "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["architecture"] == "LlamaForCausalLM"
    assert (facts["num_layers"], facts["num_kv_heads"], facts["head_dim"]) == (2, 2, 16)
    assert facts["kv_bytes_per_token_float32"] == 2 * 2 * 2 * 16 * 4
    _, plain, _ = call("info", model)
    assert "architecture: LlamaForCausalLM\n" in plain


# Text.


def test_chat_prints_the_answer_alone_on_stdout(call, model):
    args = ["chat", "hello", "--model", model, "--max-tokens", "5", "--ignore-eos", *ENGINE]
    code, out, err = call(*args)
    assert code == 0
    # "<s>user:hello</s><s>assistant:" and the answer, through the library.
    options = [arg.removeprefix("--").replace("-", "_") for arg in ENGINE]
    names, values = options[::2], map(int, options[1::2])
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    with LLM(model, **dict(zip(names, values, strict=True))) as llm:
        [expected] = llm.chat([{"role": "user", "content": "hello"}], params, use_tqdm=False)
    assert out == expected.outputs[0].text + "\n"
    assert f"[{len(expected.prompt_token_ids)} prompt + 5 output tokens" in err
    assert re.search(FIGURES, err), err


def test_a_system_message_goes_first(call, model, monkeypatch):
    seen = watch_prompts(monkeypatch)
    code, _, _ = call(
        *("chat", "hello", "--system", "be brief", "--model", model, "--max-tokens", "1"), *ENGINE
    )
    assert code == 0
    assert seen == ["<s>system:be brief</s><s>user:hello</s><s>assistant:"]


def test_an_interactive_chat_remembers_what_was_said(call, model, monkeypatch):
    seen = watch_prompts(monkeypatch)
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nand you?\n"))
    code, out, err = call("chat", "--model", model, "--max-tokens", "4", "--ignore-eos", *ENGINE)
    assert code == 0
    first = "<s>user:hello</s><s>assistant:"
    assert seen[0] == first
    answer, sep, rest = seen[1].removeprefix(first).partition("</s><s>user:and you?</s>")
    assert sep
    assert rest == "<s>assistant:"
    assert out.startswith(answer + "\n")
    assert err.count(" of 32 KV blocks, ") == 2


def test_an_empty_line_ends_an_interactive_chat(call, model, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("\nhello\n"))
    code, out, _ = call("chat", "--model", model, *ENGINE)
    assert (code, out) == (0, "")


def test_generate_prints_each_prompt_with_its_completion(call, model):
    args = ["generate", "ab", "cd", "--model", model, "--max-tokens", "3", *ENGINE]
    code, out, err = call(*args)
    assert code == 0
    assert out.startswith("ab")
    assert "cd" in out
    assert "2/2" in err


def test_generate_prints_json_lines(call, model):
    args = ["generate", "ab", "cd", "--json", "--model", model, "--max-tokens", "3", *ENGINE]
    code, out, _ = call(*args)
    assert code == 0
    outputs = [json.loads(line) for line in out.splitlines()]
    assert [output["prompt"] for output in outputs] == ["ab", "cd"]
    for output in outputs:
        assert output["finished"]
        assert 1 <= len(output["outputs"][0]["token_ids"]) <= 3


def test_a_prompt_that_is_too_long_is_refused(call, model):
    code, out, err = call("chat", "x" * 300, "--model", model, *ENGINE)
    assert (code, out) == (2, "")
    assert "must be shorter than max_model_len (256)" in err.splitlines()[-1]


def test_an_interrupt_ends_with_130(call, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("paged_jax.cli.info._environment", interrupt)
    assert call("info")[0] == 130


def test_a_bug_keeps_its_trace(call, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("a bug")

    monkeypatch.setattr("paged_jax.cli.info._environment", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        call("info")


def watch_prompts(monkeypatch):
    """Collects the text of every prompt that a chat renders."""
    seen, render = [], LLM.render

    def watched(self, messages):
        prompt = render(self, messages)
        seen.append(prompt["prompt"])
        return prompt

    monkeypatch.setattr(LLM, "render", watched)
    return seen
