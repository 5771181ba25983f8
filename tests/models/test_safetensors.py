import json
import os
import pickle
import shutil
import struct

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from paged_jax.models.safetensors import open_directory
from tests.conftest import DATA

TINY = DATA / "tiny"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def model(tmp_path):
    """A directory with a config and no weights yet."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path


def write_index(path, weight_map):
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_shards(path):
    """Two files and their index; returns the tensors of both."""
    tensors = {name: np.full((2, 3), i, np.float32) for i, name in enumerate("abcd")}
    files = {"a": "1.safetensors", "b": "2.safetensors", "c": "1.safetensors", "d": "2.safetensors"}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in files if files[name] == file}, path / file)
    write_index(path, files)
    return tensors


def write_raw(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "deepseek_v3"])
def test_a_directory_reads_as_the_safetensors_package_has_it(name):
    checkpoint = open_directory(TINY / name)
    tensors = load_file(TINY / name / "model.safetensors")
    assert checkpoint.shapes() == {key: values.shape for key, values in tensors.items()}
    for key, values in tensors.items():
        np.testing.assert_array_equal(checkpoint.read(key), values)
    assert checkpoint.config == json.loads((TINY / name / "config.json").read_text())
    assert checkpoint.generation_config["eos_token_id"] == 2
    assert checkpoint.tokenizer() is None


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_floats_keep_their_type(model, dtype):
    values = np.linspace(-2, 2, 15).reshape(3, 5).astype(jnp.dtype(dtype))
    empty, scalar = np.zeros((0, 4), values.dtype), np.full((), 3, values.dtype)
    save_file({"x": values, "empty": empty, "scalar": scalar}, model / "model.safetensors")
    checkpoint = open_directory(model)
    for name, expected in (("x", values), ("empty", empty), ("scalar", scalar)):
        read = checkpoint.read(name)
        assert read.dtype == expected.dtype
        np.testing.assert_array_equal(read, expected)
        assert checkpoint.shapes()[name] == expected.shape


def test_tensors_are_cast_while_they_are_read(model):
    values = np.linspace(-2, 2, 15).reshape(3, 5).astype(np.float32)
    save_file({"x": values}, model / "model.safetensors")
    for dtype in (np.dtype(jnp.bfloat16), np.dtype(np.float16), np.dtype(np.float64)):
        read = open_directory(model).read("x", dtype)
        assert read.dtype == dtype
        np.testing.assert_array_equal(read, values.astype(dtype))


@pytest.mark.parametrize("dtype", [np.int32, np.int8, np.uint8, np.bool_])
def test_other_types_are_listed_but_not_read(model, dtype):
    save_file({"x": np.ones(3, dtype)}, model / "model.safetensors")
    checkpoint = open_directory(model)
    assert checkpoint.shapes() == {"x": (3,)}
    with pytest.raises(ValueError, match=r"tensor x of .*: its dtype is (I32|I8|U8|BOOL), not"):
        checkpoint.read("x")


def test_float8_is_not_taken_for_a_number(model):
    write_raw(
        model / "model.safetensors",
        {"x": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}},
        bytes(4),
    )
    with pytest.raises(ValueError, match=r"tensor x of .*: its dtype is F8_E4M3"):
        open_directory(model).read("x")


def test_a_later_change_of_the_file_does_not_reach_what_was_read(model):
    path = model / "model.safetensors"
    save_file({"x": np.ones(1000, np.float32)}, path)
    read = open_directory(model).read("x")
    with path.open("r+b") as file:
        file.seek(-2000, os.SEEK_END)
        file.write(bytes(2000))
    assert np.all(read == 1)


def test_shards_are_joined(model):
    tensors = write_shards(model)
    checkpoint = open_directory(model)
    assert checkpoint.shapes().keys() == tensors.keys()
    for name, values in tensors.items():
        np.testing.assert_array_equal(checkpoint.read(name), values)


def test_shards_without_an_index_are_joined_unless_they_contradict(model):
    tensors = write_shards(model)
    (model / INDEX).unlink()
    assert open_directory(model).shapes().keys() == tensors.keys()
    shutil.copy(model / "1.safetensors", model / "3.safetensors")
    with pytest.raises(ValueError, match=r"1\.safetensors and .*3\.safetensors both have tensor a"):
        open_directory(model)


def test_the_index_decides_which_file_has_a_tensor(model):
    tensors = write_shards(model)
    wrong = {name: values + 100 for name, values in tensors.items()}
    save_file({name: wrong[name] for name in "ab"} | {"d": tensors["d"]}, model / "2.safetensors")
    write_index(model, {name: f"{1 if name in 'ac' else 2}.safetensors" for name in "abcd"})
    checkpoint = open_directory(model)
    np.testing.assert_array_equal(checkpoint.read("a"), tensors["a"])
    np.testing.assert_array_equal(checkpoint.read("b"), wrong["b"])


def test_one_file_of_the_usual_name_goes_before_others(model):
    save_file({"x": np.ones(1, np.float32)}, model / "model.safetensors")
    save_file({"y": np.ones(1, np.float32)}, model / "consolidated.safetensors")
    assert open_directory(model).shapes().keys() == {"x"}


def test_a_missing_shard_is_named(model):
    write_shards(model)
    (model / "2.safetensors").unlink()
    with pytest.raises(ValueError, match=r"names 2\.safetensors, which is missing"):
        open_directory(model)


def test_a_tensor_that_its_shard_lacks_is_named(model):
    write_shards(model)
    write_index(model, {"a": "1.safetensors", "b": "1.safetensors"})
    with pytest.raises(ValueError, match=r"1\.safetensors lacks tensor b, see .*index\.json"):
        open_directory(model)


@pytest.mark.parametrize(
    "name",
    [
        *("../secret.safetensors", "/etc/secret.safetensors", "sub/x.safetensors", ".."),
        *("..\\secret.safetensors", "C:x.safetensors", "x\0.safetensors", "", 3, None, ["x"]),
        *("pytorch_model.bin", "model.pth"),
    ],
)
def test_an_index_names_nothing_but_safetensors_beside_it(model, tmp_path, name):
    save_file({"a": np.ones(1, np.float32)}, tmp_path / "secret.safetensors")
    write_index(model, {"a": name})
    with pytest.raises(ValueError, match=r"not a file beside it|which is not safetensors"):
        open_directory(model)


@pytest.mark.parametrize("text", ["", "[]", "{", "{}", '{"weight_map": []}', "[" * 100_000])
def test_a_malformed_index_is_refused(model, text):
    (model / INDEX).write_text(text)
    with pytest.raises(ValueError, match=rf"cannot read {model / INDEX}"):
        open_directory(model)


def test_overlong_names_are_missing_files(model):
    write_index(model, {"a": "x" * 5000 + ".safetensors"})
    with pytest.raises(ValueError, match="which is missing"):
        open_directory(model)


def test_links_may_not_leave_the_directory(model, tmp_path):
    save_file({"a": np.ones(1, np.float32)}, tmp_path / "elsewhere.safetensors")
    (model / "model.safetensors").symlink_to("../elsewhere.safetensors")
    with pytest.raises(ValueError, match=r"a link to .*, outside of its directory"):
        open_directory(model)
    write_index(model, {"a": "model.safetensors"})
    with pytest.raises(ValueError, match="outside of its directory"):
        open_directory(model)


def test_links_within_the_directory_and_to_it_are_followed(model, tmp_path):
    save_file({"a": np.ones(1, np.float32)}, model / "weights.data")
    (model / "model.safetensors").symlink_to("weights.data")
    (tmp_path / "link").symlink_to(model)
    for path in (model, tmp_path / "link"):
        assert open_directory(path).shapes() == {"a": (1,)}


def test_links_in_a_circle_are_refused(model):
    (model / "a.safetensors").symlink_to("b.safetensors")
    (model / "b.safetensors").symlink_to("a.safetensors")
    with pytest.raises(ValueError, match=r"cannot read safetensors file .*a\.safetensors"):
        open_directory(model)


def test_the_layout_of_hugging_faces_cache_is_followed(tmp_path):
    root = tmp_path / "models--org--name"
    snapshot, blobs = root / "snapshots" / "0123", root / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name, blob in (("config.json", "c0"), ("model.safetensors", "w0")):
        shutil.copy(TINY / "llama" / name, blobs / blob)
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    checkpoint = open_directory(snapshot)
    assert "lm_head.weight" in checkpoint.shapes()
    assert checkpoint.config["model_type"] == "llama"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_refused_and_never_opened(model, name):
    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(model / "executed"),))

    (model / name).write_bytes(pickle.dumps(Trap()))
    (model / name).chmod(0)
    expected = rf"has pickled weights \({name}\).* are not opened: save the model as safetensors"
    with pytest.raises(ValueError, match=expected):
        open_directory(model)
    assert not (model / "executed").exists()


def test_a_pickle_under_another_name_is_no_header(model):
    (model / "model.safetensors").write_bytes(pickle.dumps({"a": 1}) * 50)
    with pytest.raises(ValueError, match=r"cannot read safetensors file .*model\.safetensors"):
        open_directory(model)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
OTHER = {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}


@pytest.mark.parametrize(
    ("header", "length"),
    [
        ({"a": ENTRY}, 2**64 - 1),
        ({"a": ENTRY}, 10**8 + 1),
        ({"a": ENTRY}, 5),
        (b"\xff\xfe{}", None),
        (b"[" * 100_000, None),
        ([], None),
        ({"a": []}, None),
        ({"a": ENTRY | {"dtype": "F99"}}, None),
        ({"a": ENTRY | {"shape": [-2]}}, None),
        ({"a": ENTRY | {"shape": [2.0]}}, None),
        ({"a": ENTRY | {"shape": [2**62, 2**62]}}, None),
        ({"a": ENTRY | {"data_offsets": [0]}}, None),
        ({"a": ENTRY | {"data_offsets": [0, 2**70]}}, None),
        ({"a": ENTRY | {"data_offsets": [4, 12]}}, None),
        ({"a": ENTRY | {"data_offsets": [8, 0]}}, None),
        ({"a": ENTRY, "b": OTHER}, None),
    ],
)
def test_malformed_headers_are_refused(model, header, length):
    path = model / "model.safetensors"
    write_raw(path, header, bytes(8), length)
    with pytest.raises(ValueError, match=rf"^cannot read safetensors file {path}: .+"):
        open_directory(model)


def test_files_cut_anywhere_are_refused(model):
    path = model / "model.safetensors"
    whole = (TINY / "llama" / "model.safetensors").read_bytes()
    for num_bytes in [*range(0, 3000, 61), len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:num_bytes])
        with pytest.raises(ValueError, match=rf"^cannot read safetensors file {path}: [^\n]+$"):
            open_directory(model)


VALUES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def mxfp4_by_hand(blocks, scales):
    """Value by value, from the definition: sign, two bits of exponent, one of mantissa."""
    experts, rows, groups, _ = blocks.shape
    values = np.zeros((experts, groups * 32, rows), np.float64)
    for e, r, g, i in np.ndindex(experts, rows, groups, 32):
        byte = int(blocks[e, r, g, i // 2])
        nibble = byte & 15 if i % 2 == 0 else byte >> 4
        sign = -1 if nibble & 8 else 1
        values[e, g * 32 + i, r] = sign * VALUES[nibble & 7] * 2.0 ** (int(scales[e, r, g]) - 127)
    return values


def test_mxfp4_experts_are_matrices_of_floats(model):
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (2, 6, 3, 16), np.uint8)
    scales = rng.integers(100, 150, (2, 6, 3), np.uint8)
    scales[0, 0] = 0, 1, 252  # the smallest there are, and the largest with 6 times it below inf
    name = "model.layers.0.mlp.experts.gate_up_proj"
    parts = {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(parts | {f"{name}_bias": np.ones(3, np.float32)}, model / "model.safetensors")
    (model / "config.json").write_text('{"quantization_config": {"quant_method": "mxfp4"}}')
    checkpoint = open_directory(model)

    assert checkpoint.shapes() == {name: (2, 96, 6), f"{name}_bias": (3,)}
    read = checkpoint.read(name)
    assert read.dtype == jnp.bfloat16
    assert read.shape == (2, 96, 6)
    np.testing.assert_array_equal(read.astype(np.float64), mxfp4_by_hand(blocks, scales))
    wide = checkpoint.read(name, np.dtype(np.float32))
    assert wide.dtype == np.float32
    np.testing.assert_array_equal(wide, read.astype(np.float32))
    assert checkpoint.config == {}


def test_an_mxfp4_scale_of_255_is_not_a_number(model):
    blocks, scales = np.ones((1, 1, 1, 16), np.uint8), np.full((1, 1, 1), 255, np.uint8)
    save_file({"x_blocks": blocks, "x_scales": scales}, model / "model.safetensors")
    assert np.isnan(open_directory(model).read("x").astype(np.float32)).all()


def test_mxfp4_parts_must_fit_together(model):
    blocks, scales = np.ones((1, 2, 1, 16), np.uint8), np.ones((1, 1, 1), np.uint8)
    save_file({"x_blocks": blocks, "x_scales": scales}, model / "model.safetensors")
    with pytest.raises(ValueError, match=r"tensor x has blocks \(1, 2, 1, 16\) and scales"):
        open_directory(model)


def test_other_quantisation_is_refused(model):
    save_file({"x": np.ones(1, np.float32)}, model / "model.safetensors")
    (model / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}')
    with pytest.raises(ValueError, match="is quantised with 'gptq'; supported: 'mxfp4'"):
        open_directory(model)
