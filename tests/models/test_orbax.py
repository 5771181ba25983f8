import json
import shutil
import weakref

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import load_file, save_file

from paged_jax.cli import main
from paged_jax.models.convert import convert
from paged_jax.models.gguf import open_gguf
from paged_jax.models.orbax import is_orbax, nested, open_orbax, save_tree
from paged_jax.models.safetensors import open_directory
from paged_jax.models.tokenizer import Tokenizer
from tests.byte_tokenizer import SPECIAL, TEMPLATE, byte_backend
from tests.conftest import DATA
from tests.models.gguf_files import write_gguf

TINY = DATA / "tiny"


def assert_same(converted, original):
    assert converted.shapes() == original.shapes()
    for name in original.shapes():
        expected, read = original.read(name), converted.read(name)
        assert read.dtype == expected.dtype
        np.testing.assert_array_equal(read, expected, err_msg=name)


@pytest.fixture
def source(tmp_path):
    """A small directory with tensors of two types and a tokenizer."""
    path = tmp_path / "source"
    path.mkdir()
    tensors = load_file(TINY / "llama" / "model.safetensors")
    few = {name: tensors[name] for name in list(tensors)[:3]}
    few["model.norm.weight"] = tensors["model.norm.weight"].astype(jnp.bfloat16)
    save_file(few, path / "model.safetensors")
    shutil.copy(TINY / "llama" / "config.json", path)
    shutil.copy(TINY / "llama" / "generation_config.json", path)
    byte_backend(SPECIAL, 320).save(str(path / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "special_tokens_map.json").write_text("{}")
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tools.jinja").write_text("tools")
    (path / "pytorch_model.bin").write_bytes(b"pickle")
    return path


@pytest.mark.parametrize("options", [{"use_zarr3": True}, {"use_ocdbt": False}, {}], ids=str)
def test_trees_of_every_kind_of_storage_are_read(source, tmp_path, options):
    original = open_directory(source)
    tree = nested({name: original.read(name) for name in original.shapes()})
    path = tmp_path / "a tree, 100%"
    path.mkdir()
    shutil.copy(source / "config.json", path)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(path.absolute() / "orbax", args=ocp.args.PyTreeSave(tree))
    converted = open_orbax(path)
    assert_same(converted, original)
    for name in original.shapes():
        half = converted.read(name, np.dtype(np.float16))
        np.testing.assert_array_equal(half, original.read(name).astype(np.float16))


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_every_tensor_and_config_survives(tmp_path, name):
    convert(TINY / name, tmp_path / "new")
    original, converted = open_directory(TINY / name), open_orbax(tmp_path / "new")
    assert_same(converted, original)
    assert converted.config == original.config
    assert converted.generation_config == original.generation_config
    assert converted.tokenizer() is None


def test_types_and_tokenizer_files_survive(tmp_path, source):
    convert(source, tmp_path / "new")
    converted = open_orbax(tmp_path / "new")
    assert_same(converted, open_directory(source))
    assert converted.read("model.norm.weight").dtype == jnp.bfloat16
    assert converted.read("model.norm.weight", np.dtype(np.float32)).dtype == np.float32
    for name in (
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
        "additional_chat_templates/tools.jinja",
    ):
        assert (tmp_path / "new" / name).read_bytes() == (source / name).read_bytes()
    assert not (tmp_path / "new" / "pytorch_model.bin").exists()
    tokenizer = converted.tokenizer()
    assert tokenizer is not None
    assert tokenizer.encode("ab") == Tokenizer.from_directory(source).encode("ab")


def test_tensors_are_read_in_any_order_and_again(tmp_path):
    convert(TINY / "llama", tmp_path / "new")
    original, converted = open_directory(TINY / "llama"), open_orbax(tmp_path / "new")
    names = [*sorted(original.shapes(), reverse=True)[:4], "model.norm.weight"]
    for name in (*names, *names, names[0], names[0]):
        for dtype in (None, np.dtype(np.float16)):
            expected, read = original.read(name, dtype), converted.read(name, dtype)
            assert read.dtype == expected.dtype
            np.testing.assert_array_equal(read, expected)


def test_the_tree_is_keyed_by_the_parts_of_names(tmp_path, source):
    convert(source, tmp_path / "new")
    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.restore(tmp_path / "new" / "orbax")
    original = open_directory(source).read("model.norm.weight")
    np.testing.assert_array_equal(tree["model"]["norm"]["weight"], original)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_tensors_are_cast_on_request(tmp_path, source, dtype):
    config = json.loads((source / "config.json").read_text()) | {"torch_dtype": "float64"}
    (source / "config.json").write_text(json.dumps(config))
    convert(source, tmp_path / "new", dtype)
    original, converted = open_directory(source), open_orbax(tmp_path / "new")
    for name in original.shapes():
        read = converted.read(name)
        assert read.dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(read, original.read(name).astype(dtype))
        halved = converted.read(name, np.dtype(np.float16))
        assert halved.dtype == np.float16
        np.testing.assert_array_equal(halved, read.astype(np.float16))
    assert converted.config["dtype"] == dtype
    assert "torch_dtype" not in converted.config


def test_a_gguf_file_becomes_a_directory_with_its_tokenizer(tmp_path):
    path = tmp_path / "model.gguf"
    texts = [*SPECIAL, *sorted(byte_backend([], 256).get_vocab()), "ab"]
    metadata = {
        "tokenizer.ggml.model": ("add_string", "gpt2"),
        "tokenizer.ggml.pre": ("add_string", "gpt-2"),
        "tokenizer.ggml.tokens": ("add_array", texts),
        "tokenizer.ggml.token_type": ("add_array", [3] * 3 + [1] * (len(texts) - 3)),
        "tokenizer.ggml.merges": ("add_array", ["a b"]),
        "tokenizer.ggml.add_bos_token": ("add_bool", True),
        "tokenizer.ggml.eot_token_id": ("add_uint32", 0),
        "tokenizer.chat_template": ("add_string", TEMPLATE),
    }
    write_gguf(path, TINY / "llama", kind="Q8_0", metadata=metadata)
    convert(path, tmp_path / "new")
    original, converted = open_gguf(path), open_orbax(tmp_path / "new")
    assert_same(converted, original)
    assert converted.config == original.config | {"dtype": "float32"}
    assert converted.generation_config == {"eos_token_id": [2, 0]}
    before, after = original.tokenizer(), converted.tokenizer()
    assert before is not None
    assert after is not None
    ids = after.encode("cabs</s> ü")
    assert ids == before.encode("cabs</s> ü")
    assert ids[0] == 1
    assert after.decode(ids) == before.decode(ids)
    assert after.bos_token_id == before.bos_token_id == 1
    assert after.eos_token_ids == (2,)
    messages = [{"role": "user", "content": "hi"}]
    assert after.apply_chat_template(messages) == before.apply_chat_template(messages)


def test_several_chat_templates_survive(tmp_path):
    path = tmp_path / "model.gguf"
    texts = [*SPECIAL, *sorted(byte_backend([], 256).get_vocab()), "ab"]
    metadata = {
        "tokenizer.ggml.model": ("add_string", "gpt2"),
        "tokenizer.ggml.pre": ("add_string", "gpt-2"),
        "tokenizer.ggml.tokens": ("add_array", texts),
        "tokenizer.ggml.merges": ("add_array", ["a b"]),
        "tokenizer.chat_template": ("add_string", "a"),
        "tokenizer.chat_template.tool_use": ("add_string", "b"),
        "tokenizer.chat_templates": ("add_array", ["tool_use"]),
    }
    write_gguf(path, TINY / "llama", metadata=metadata)
    convert(path, tmp_path / "new")
    before, after = open_gguf(path).tokenizer(), open_orbax(tmp_path / "new").tokenizer()
    assert before is not None
    assert after is not None
    assert after.chat_template == before.chat_template == {"default": "a", "tool_use": "b"}


def test_half_precision_of_a_gguf_file_is_kept(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, TINY / "qwen2", kind="BF16")
    convert(path, tmp_path / "new")
    converted = open_orbax(tmp_path / "new")
    assert_same(converted, open_gguf(path))
    assert converted.config["dtype"] == "bfloat16"


def test_one_tensor_at_a_time_is_in_memory(tmp_path):
    alive, most = set(), 0

    def read(name):
        nonlocal most
        array = np.full((64, 64), int(name), np.float32)
        alive.add(name)
        weakref.finalize(array, alive.discard, name)
        most = max(most, len(alive))
        return array

    save_tree(tmp_path / "tree", map(str, range(20)), read)
    assert most <= 2  # the last one may not be collected yet


def test_large_tensors_are_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr("paged_jax.models.orbax._CHUNK_BYTES", 1000)
    (tmp_path / "config.json").write_text("{}")
    values = np.arange(6000, dtype=np.float32).reshape(60, 100)
    save_tree(tmp_path / "orbax", ["x"], lambda name: values)
    checkpoint = open_orbax(tmp_path)
    np.testing.assert_array_equal(checkpoint.read("x"), values)
    assert checkpoint._arrays["x"].storage.chunk_shape != values.shape


def test_a_directory_with_something_in_it_is_not_overwritten(tmp_path, source):
    new = tmp_path / "new"
    new.mkdir()
    (new / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=f"destination {new} must be empty"):
        convert(source, new)
    assert [path.name for path in new.iterdir()] == ["notes.txt"]
    with pytest.raises(ValueError, match="must be empty"):
        convert(source, new / "notes.txt")
    (new / "notes.txt").unlink()
    convert(source, new)
    assert is_orbax(new)


def test_a_failure_leaves_nothing(tmp_path, source):
    tensors = load_file(source / "model.safetensors")
    save_file(tensors | {"z": np.ones(3, np.int32)}, source / "model.safetensors")
    with pytest.raises(ValueError, match=r"tensor z of .*: its dtype is I32"):
        convert(source, tmp_path / "deep" / "new")
    assert list((tmp_path / "deep").iterdir()) == []
    with pytest.raises(ValueError, match=r"dtype \('int8'\) must be one of"):
        convert(source, tmp_path / "new", "int8")
    with pytest.raises(ValueError, match="does not exist"):
        convert(tmp_path / "nowhere", tmp_path / "new")


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["a.b", "a"], "a cannot be above"),
        (["a", "a.b"], "a.b cannot be below"),
        (["a..b"], "must be printable words"),
        ([""], "must be printable words"),
        (["../x"], "must be printable words"),
        (["a.b/c"], "must be printable words"),
        (["a.\0"], "must be printable words"),
    ],
)
def test_names_must_be_paths_in_a_tree(names, reason):
    with pytest.raises(ValueError, match=reason):
        nested(dict.fromkeys(names, 0))


def test_a_tree_may_lie_in_the_directory_itself(tmp_path):
    weights = {"model": {"norm": {"weight": np.arange(4, dtype=np.float32)}}}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", weights)
    shutil.copy(TINY / "llama" / "config.json", tmp_path / "model")
    checkpoint = open_orbax(tmp_path / "model")
    assert checkpoint.shapes() == {"model.norm.weight": (4,)}
    np.testing.assert_array_equal(checkpoint.read("model.norm.weight"), np.arange(4))


def test_directories_of_other_kinds_are_told_apart(tmp_path, source):
    assert not is_orbax(source)
    assert not is_orbax(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="has no Orbax checkpoint"):
        open_orbax(source)
    (source / "config.json").unlink()
    with pytest.raises(ValueError, match=r"has no config\.json"):
        open_orbax(source)


def test_trees_of_other_things_are_refused(tmp_path):
    shutil.copytree(TINY / "llama", tmp_path / "model", ignore=lambda *_: ["model.safetensors"])
    save_tree(tmp_path / "model" / "orbax", ["x"], lambda name: np.ones(3, np.int32))
    with pytest.raises(ValueError, match=r"tensor x of .* has dtype int32, which is no float"):
        open_orbax(tmp_path / "model").read("x")
    shutil.rmtree(tmp_path / "model" / "orbax")
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model" / "orbax", {"x": [np.ones(3), np.ones(4)]})
    with pytest.raises(ValueError, match="x is neither"):
        open_orbax(tmp_path / "model")


def test_damaged_trees_are_refused_by_name(tmp_path, source):
    new = tmp_path / "new"
    convert(source, new)
    checkpoint = open_orbax(new)
    shutil.rmtree(new / "orbax" / "d")
    with pytest.raises(ValueError, match=rf"tensor lm_head\.weight of {new}"):
        checkpoint.read("lm_head.weight")
    (new / "orbax" / "_METADATA").write_text("{")
    with pytest.raises(ValueError, match=f"cannot read Orbax checkpoint {new}"):
        open_orbax(new)


def test_the_command_converts_and_refuses_in_one_line(tmp_path, source, capsys):
    new = str(tmp_path / "new")
    assert main(["convert", str(source), new, "--dtype", "bfloat16"]) == 0
    assert capsys.readouterr().out == f"{new}\n"
    assert open_orbax(tmp_path / "new").read("lm_head.weight").dtype == jnp.bfloat16
    assert main(["convert", str(source), new]) == 2
    error = capsys.readouterr().err
    assert f"paged-jax convert: error: destination {new} must be empty or not exist" in error
