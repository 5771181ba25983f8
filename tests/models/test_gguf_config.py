import numpy as np
import pytest

from paged_jax.models.gguf import open_gguf
from tests.conftest import DATA
from tests.models.gguf_files import metadata_of, read_model, tensors_of, write_file, write_gguf

TINY = DATA / "tiny"


@pytest.fixture
def config_of(tmp_path):
    """A function that writes a tiny model with other metadata and returns the config read."""

    def write(name="llama", without=(), tensors=None, **changes):
        config, hf_tensors = read_model(TINY / name)
        metadata = metadata_of(config) | {
            key.replace("__", "."): value for key, value in changes.items()
        }
        family = next(iter(metadata)).partition(".")[0]
        for key in without:
            del metadata[f"{family}.{key}"]
        stored = tensors_of(config, hf_tensors) | (tensors or {})
        path = write_file(tmp_path / "model.gguf", family, metadata, stored)
        return open_gguf(path).config

    return write


def test_linear_scaling_may_be_named_by_its_older_key_or_not_at_all(config_of):
    scaled = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    factor = ("add_float32", 4.0)
    assert config_of(llama__rope__scaling__factor=factor)["rope_parameters"] == scaled
    assert config_of(llama__rope__scale_linear=factor)["rope_parameters"] == scaled


@pytest.mark.parametrize("kind", ["none", "linear"])
def test_a_factor_of_zero_scales_nothing(config_of, kind):
    config = config_of(
        llama__rope__scaling__type=("add_string", kind),
        llama__rope__scaling__factor=("add_float32", 0.0),
    )
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}


def test_yarn_factors_multiply_the_usual_attention_factor(config_of):
    config = config_of(
        "llama_rope_yarn",
        llama__rope__scaling__attn_factor=("add_float32", 1.5),
        llama__rope__scaling__yarn_beta_fast=("add_float32", 16.0),
        llama__rope__scaling__yarn_beta_slow=("add_float32", 2.0),
    )
    assert config["rope_parameters"] == {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": pytest.approx(1.5 * (0.1 * np.log(4.0) + 1)),
    }


def test_precomputed_rope_factors_are_in_the_config(tmp_path):
    factors = np.array([1, 1, 1.5, 2, 3, 5, 8, 8], np.float32)
    path = tmp_path / "model.gguf"
    # As the converter writes the "llama3" kind: no key says so.
    config, hf_tensors = read_model(TINY / "llama_rope_llama3")
    tensors = tensors_of(config, hf_tensors) | {"rope_freqs.weight": factors}
    checkpoint = open_gguf(write_file(path, "llama", metadata_of(config), tensors))
    assert checkpoint.config["rope_freq_factors"] == factors.tolist()
    assert checkpoint.config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert "rope_freqs.weight" not in checkpoint.shapes()


def test_phi3_factors_are_longrope(tmp_path):
    path = tmp_path / "model.gguf"
    config, hf_tensors = read_model(TINY / "phi3")
    long, short = [1.0, 1.5, 2.0, 4.0], [1.0, 1.0, 1.25, 1.5]
    rope = config["rope_parameters"] | {"long_factor": long, "short_factor": short}
    tensors = tensors_of(config | {"rope_parameters": rope}, hf_tensors)
    extra = {"phi3.rope.scaling.attn_factor": ("add_float32", 1.25)}
    write_file(path, "phi3", metadata_of(config) | extra, tensors)
    checkpoint = open_gguf(path)
    assert checkpoint.config["rope_parameters"] == {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 1.0,
        "long_factor": long,
        "short_factor": short,
        "original_max_position_embeddings": 4096,
        "attention_factor": 1.25,
    }
    assert checkpoint.shapes().keys() == hf_tensors.keys()
    del tensors["rope_factors_long.weight"]
    write_file(path, "phi3", metadata_of(config), tensors)
    with pytest.raises(ValueError, match="one is missing"):
        open_gguf(path)


def test_phi3_may_rotate_a_part_of_each_head_and_slide(config_of):
    config = config_of(
        "phi3",
        phi3__rope__dimension_count=("add_uint32", 12),
        phi3__attention__sliding_window=("add_uint32", 100),
    )
    assert config["rope_parameters"]["partial_rotary_factor"] == 0.75
    assert config["sliding_window"] == 100


def test_head_dim_comes_from_the_key_length_then_rope_then_the_width(config_of):
    lengths = ("attention.key_length", "attention.value_length")
    assert config_of()["head_dim"] == 16
    assert config_of("llama_mqa_hd")["head_dim"] == 40
    assert config_of("llama_mqa_hd", without=lengths)["head_dim"] == 16
    rope_dim = ("add_uint32", 32)
    assert config_of(without=lengths, llama__rope__dimension_count=rope_dim)["head_dim"] == 32


def test_qwen2_has_a_head_dim_only_if_it_is_unusual(config_of):
    assert "head_dim" not in config_of("qwen2")
    length = ("add_uint32", 32)
    changes = {"qwen2__attention__key_length": length, "qwen2__attention__value_length": length}
    assert config_of("qwen2", **changes)["head_dim"] == 32


def test_early_gemma2_files_lack_what_all_have_in_common(config_of):
    keys = ("attn_logit_softcapping", "final_logit_softcapping", "attention.sliding_window")
    config = config_of("gemma2", without=keys)
    assert config["attn_logit_softcapping"] == 50.0
    assert config["final_logit_softcapping"] == 30.0
    assert config["sliding_window"] == 4096


def test_gemma_queries_are_scaled_by_the_head_but_in_the_largest_models(config_of):
    scale = ("attention.scale",)
    assert config_of("gemma2")["query_pre_attn_scalar"] == 24
    assert config_of("gemma2", without=scale)["query_pre_attn_scalar"] == 32
    # Hidden size over heads: 64 / 4.
    for name, num_layers in (("gemma2", 46), ("gemma3", 62)):
        layers = {f"{name}__block_count": ("add_uint32", num_layers)}
        padding = {f"blk.{i}.x": np.ones(1, np.float32) for i in range(num_layers)}
        config = config_of(name, without=scale, tensors=padding, **layers)
        assert config["query_pre_attn_scalar"] == 16


def test_gemma3_slides_by_a_period_or_a_list_or_nowhere(config_of):
    key = "gemma3__attention__sliding_window_pattern"
    sliding, full = "sliding_attention", "full_attention"
    types = config_of("gemma3", **{key: ("add_uint32", 3)})["layer_types"]
    assert types == [sliding, sliding, full] * 2
    flags = [True, False, False, True, True, False]
    types = config_of("gemma3", **{key: ("add_array", flags)})["layer_types"]
    assert types == [sliding if flag else full for flag in flags]
    config = config_of("gemma3", without=["attention.sliding_window"])
    assert config["layer_types"] == [full] * 6
    assert config["sliding_window"] is None


def test_gemma3_scales_the_rotation_of_full_attention_only(config_of):
    config = config_of(
        "gemma3",
        gemma3__rope__scaling__type=("add_string", "linear"),
        gemma3__rope__scaling__factor=("add_float32", 8.0),
        gemma3__rope__freq_base_swa=("add_float32", 5000.0),
    )
    assert config["rope_parameters"] == {
        "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
    }


def test_a_value_by_layer_may_be_the_same_for_all(config_of):
    key = "llama__attention__head_count_kv"
    assert config_of(**{key: ("add_array", [2, 2])})["num_key_value_heads"] == 2


@pytest.mark.parametrize(
    ("name", "metadata", "reason"),
    [
        ("llama", {"llama.expert_count": ("add_uint32", 8)}, "8 experts"),
        ("llama", {"llama.rope.dimension_count": ("add_uint32", 8)}, "rotating 8 of 16"),
        ("llama", {"llama.attention.value_length": ("add_uint32", 8)}, "values of 8"),
        ("llama", {"llama.attention.head_count_kv": ("add_array", [2, 4])}, "varies by layer"),
        ("llama", {"llama.attention.scale": ("add_float32", 0.5)}, r"scale \(0.5\)"),
        ("llama", {"llama.rope.scaling.type": ("add_string", "spiral")}, "'spiral' is not"),
        ("llama", {"llama.rope.scaling.type": ("add_string", "yarn")}, "must be at least 1"),
        ("llama", {"llama.rope.freq_base": ("add_float32", -1.0)}, r"\(-1.0\) must be above 0"),
        ("llama", {"llama.rope.freq_base": ("add_float32", float("nan"))}, "must be a number"),
        ("llama_rope_yarn", {"llama.rope.scaling.yarn_ext_factor": ("add_float32", 0.5)}, "ext"),
        ("llama", {"split.count": ("add_uint16", 3)}, "several files"),
        ("llama", {"llama.embedding_length": ("add_string", "wide")}, r"'wide'\) must be an int"),
        ("llama", {"llama.embedding_length": ("add_uint32", 0)}, "at least 1"),
        ("llama", {"llama.embedding_length": ("add_bool", True)}, "must be an integer"),
        ("llama", {"llama.block_count": ("add_uint32", 2**32 - 1)}, "4294967295 blocks cannot"),
        ("llama", {"tokenizer.ggml.eos_token_id": ("add_string", "x")}, "must be a token id"),
        ("qwen2", {"qwen2.attention.sliding_window": ("add_uint32", 8)}, r"window \(8\)"),
        (
            "gemma3",
            {"gemma3.attention.sliding_window_pattern": ("add_array", [True])},
            "6 booleans",
        ),
        ("phi3", {"phi3.rope.dimension_count": ("add_uint32", 64)}, "rotating 64 of 16"),
    ],
)
def test_what_the_config_cannot_express_is_refused(tmp_path, name, metadata, reason):
    path = tmp_path / "model.gguf"
    write_gguf(path, TINY / name, metadata=metadata)
    with pytest.raises(ValueError, match=rf"^cannot load GGUF file {path}: .*{reason}"):
        open_gguf(path)
