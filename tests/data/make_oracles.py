"""Writes rope.json, gradients.npz and biases.npz with transformers; tests only read them.

Environment: torch 2.x and transformers 5.19 (any Python that has both; not this project's).
Command: python tests/data/make_oracles.py
"""

import json
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM

DATA = Path(__file__).parent
HEAD_DIM = 32

BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
SHORT = [1.0 + 0.05 * i for i in range(HEAD_DIM // 2)]
LONG = [1.0 + 0.5 * i for i in range(HEAD_DIM // 2)]
NARROW = {"partial_rotary_factor": 0.5}

# Name: parameters, and the longest position of the config.
ROPES = {
    "default": ({"rope_theta": 10000.0}, 4096),
    "default_base_500000": ({"rope_theta": 500000.0}, 4096),
    "default_part_of_a_head": ({"rope_theta": 10000.0} | NARROW, 4096),
    "linear": ({"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}, 4096),
    "linear_part_of_a_head": (
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5} | NARROW,
        4096,
    ),
    "dynamic": ({"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}, 2048),
    "dynamic_part_of_a_head": (
        {"rope_type": "dynamic", "rope_theta": 500000.0, "factor": 4.0} | NARROW,
        1024,
    ),
    **{
        f"llama3_factor_{factor}": (
            {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": float(factor),
                "original_max_position_embeddings": 8192,
            }
            | BANDS,
            131072,
        )
        for factor in (8, 32)
    },
    "llama3_without_original": (
        {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0} | BANDS,
        2048,
    ),
    **{
        name: (
            {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 2048,
            }
            | more,
            8192,
        )
        for name, more in {
            "yarn": {},
            "yarn_attention_factor": {"attention_factor": 1.25},
            "yarn_mscale": {"mscale": 1.0, "mscale_all_dim": 0.707},
            "yarn_mscale_alone": {"mscale": 0.5},
            "yarn_betas": {"beta_fast": 16.0, "beta_slow": 2.0},
            "yarn_not_truncated": {"truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
            "yarn_part_of_a_head": NARROW,
            "yarn_factor_from_lengths": {"factor": None},
        }.items()
    },
    "yarn_without_original": ({"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}, 2048),
    "longrope": (
        {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 2048,
            "short_factor": SHORT,
            "long_factor": LONG,
        },
        16384,
    ),
    "longrope_attention_factor": (
        {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 2048,
            "short_factor": SHORT[:8],
            "long_factor": LONG[:8],
            "attention_factor": 1.2,
        }
        | NARROW,
        16384,
    ),
}


def rope_case(parameters: dict, max_position: int) -> dict:
    """Frequencies and tables; LongRoPE has a second set for long contexts."""
    config = LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=max_position,
        rope_parameters=dict(parameters),
    )
    original = parameters.get("original_max_position_embeddings", max_position)
    kind = parameters.get("rope_type", "default")
    positions = [0, 1, 100, original - 1, original, 4 * original]
    case = {"parameters": parameters, "max_position_embeddings": max_position}
    case["positions"] = positions
    if kind == "dynamic":
        # Each token as the last one of its sequence.
        rows = [tables(config, [position]) for position in positions]
        case |= {key: [row[key][0] for row in rows] for key in ("cos", "sin")}
        case["inv_freq"] = [
            numbers(ROPE_INIT_FUNCTIONS[kind](config, seq_len=position + 1)[0])
            for position in positions
        ]
        case["attention_factor"] = 1.0
        return case
    if kind == "longrope":
        case["short"] = tables(config, positions[:4]) | {"positions": positions[:4]}
        case["long"] = tables(config, positions)
        return case
    return case | tables(config, positions)


def tables(config, positions: list[int]) -> dict:
    rotary = Phi3RotaryEmbedding(config)  # the plainest that rotates a part of a head
    cos, sin = rotary(torch.zeros(1), torch.tensor([positions]))
    half = cos.shape[-1] // 2
    return {
        "inv_freq": numbers(rotary.inv_freq),
        "attention_factor": float(rotary.attention_scaling),
        "cos": [numbers(row) for row in cos[0, :, :half]],
        "sin": [numbers(row) for row in sin[0, :, :half]],
    }


def numbers(tensor) -> list[float]:
    """Nine digits give a float32 back exactly."""
    return [float(f"{value:.9g}") for value in tensor.to(torch.float32).tolist()]


def gradients(name: str) -> dict[str, np.ndarray]:
    """Of the mean cross entropy of the next token, by the tensor's name in the checkpoint.

    Small tensors are whole; of large ones there are products with random vectors.
    """
    path = DATA / "tiny" / name
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    prompt = torch.tensor(np.load(path / "expected.npz")["prompt_40"]).long()[None]
    loss = model(prompt, labels=prompt).loss
    loss.backward()
    found = {"loss": np.float32(loss.item())}
    for key, parameter in model.named_parameters():
        for stored, gradient in in_checkpoint(name, key, parameter.grad.numpy()):
            found[stored] = shortened(gradient)
    return found


def in_checkpoint(name: str, key: str, gradient: np.ndarray):
    """Experts that are joined in memory and apart in the file."""
    if name != "qwen3_moe" or ".experts." not in key:
        yield key, gradient
        return
    for index, own in enumerate(gradient):
        module = key[: key.index(".experts.")] + f".experts.{index}."
        if key.endswith("gate_up_proj"):
            gate, up = np.split(own, 2)
            yield module + "gate_proj.weight", gate
            yield module + "up_proj.weight", up
        else:
            yield module + "down_proj.weight", own


def shortened(gradient: np.ndarray) -> np.ndarray:
    """As `shortened` in tests/models/test_training.py."""
    if gradient.size <= 512:
        return gradient
    vectors = np.random.default_rng(gradient.size).standard_normal((8, gradient.size))
    return (vectors @ gradient.reshape(-1)).astype(np.float32)


def biased(model_class, config) -> dict[str, np.ndarray]:
    """Weights and logits of a model whose biases are as large as its activations."""
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(".bias"):
                parameter.normal_(std=2.0)
            elif "norm" not in key:
                parameter.normal_(std=0.2)
        tokens = torch.arange(3, 12)[None]
        logits = model(tokens).logits[0].numpy()
    weights = {key: value.numpy() for key, value in model.state_dict().items()}
    return weights | {"tokens": tokens[0].numpy(), "logits": logits}


def main() -> None:
    cases = {name: rope_case(*case) for name, case in ROPES.items()}
    lines = (f" {json.dumps(name)}: {json.dumps(case)}" for name, case in cases.items())
    (DATA / "rope.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")

    found = {
        f"{name}/{key}": value
        for name in ("llama", "gemma3", "gpt_oss", "qwen3_moe")
        for key, value in gradients(name).items()
    }
    np.savez_compressed(DATA / "gradients.npz", **found)

    sizes = {
        "vocab_size": 24,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    llama = LlamaConfig(**sizes, attention_bias=True, mlp_bias=True)
    models = {
        "qwen2": biased(Qwen2ForCausalLM, Qwen2Config(**sizes)),
        "llama": biased(LlamaForCausalLM, llama),
    }
    found = {f"{name}/{key}": value for name, own in models.items() for key, value in own.items()}
    np.savez_compressed(DATA / "biases.npz", **found)


if __name__ == "__main__":
    main()
