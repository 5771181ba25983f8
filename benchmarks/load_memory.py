"""How much memory does loading a model take beyond its arrays?

    python benchmarks/load_memory.py
    python benchmarks/load_memory.py --format gguf --dtype bfloat16

Writes a random Llama of somewhat more than 1 GB to a temporary directory, then loads it in a new
process, which watches its own anonymous memory (pages of files do not count: the system takes them
back when it needs memory). Peak minus what was there after `import jax`, over the bytes of the
loaded arrays: 1 would be none beyond them. Linux only.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

FORMATS = ("safetensors", "sharded", "gguf", "orbax")
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 64,
    "vocab_size": 32_000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "tie_word_embeddings": False,
    "dtype": "float32",
}


def tensors_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor by its Hugging Face name."""
    hidden, mlp = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config["vocab_size"], hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj"):
            shapes[f"{prefix}.self_attn.{name}.weight"] = (heads, hidden)
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (hidden, heads)
        shapes[f"{prefix}.mlp.gate_proj.weight"] = (mlp, hidden)
        shapes[f"{prefix}.mlp.up_proj.weight"] = (mlp, hidden)
        shapes[f"{prefix}.mlp.down_proj.weight"] = (hidden, mlp)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}.{name}.weight"] = (hidden,)
    return shapes


def random_array(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """float32, small; the same million numbers over and over, which is fast."""
    block = 0.02 * np.random.default_rng(seed).standard_normal(1_000_003, np.float32)
    return np.resize(block, shape)


def write_safetensors(path: Path, num_files: int) -> None:
    """Writes one file, or several with an index."""
    from safetensors.numpy import save_file

    shapes = tensors_of(CONFIG)
    names = list(shapes)
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    weight_map: dict[str, str] = {}
    for number in range(num_files):
        file = f"model-{number}.safetensors" if num_files > 1 else "model.safetensors"
        own = names[number::num_files]
        save_file({name: random_array(shapes[name], len(name)) for name in own}, path / file)
        weight_map |= dict.fromkeys(own, file)
    if num_files > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))


def write_gguf(path: Path) -> None:
    """Writes Q8_0; q and k are random, so that their order does not matter."""
    import gguf
    from gguf.quants import quantize

    modules = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
        "self_attn.o_proj": "attn_output",
        **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
    }
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONFIG["max_position_embeddings"])
    writer.add_embedding_length(CONFIG["hidden_size"])
    writer.add_block_count(CONFIG["num_hidden_layers"])
    writer.add_feed_forward_length(CONFIG["intermediate_size"])
    writer.add_head_count(CONFIG["num_attention_heads"])
    writer.add_head_count_kv(CONFIG["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(CONFIG["rms_norm_eps"])
    for name, shape in tensors_of(CONFIG).items():
        prefix, module = "", name.removesuffix(".weight")
        if module.startswith("model.layers."):
            _, _, layer, module = module.split(".", 3)
            prefix = f"blk.{layer}."
        kind = gguf.GGMLQuantizationType.Q8_0 if len(shape) > 1 else gguf.GGMLQuantizationType.F32
        data = quantize(random_array(shape, len(name)), kind)
        writer.add_tensor(f"{prefix}{modules[module]}.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write(format: str, directory: Path) -> Path:
    """Path of a model in one of `FORMATS`."""
    path = directory / ("model.gguf" if format == "gguf" else "model")
    if format == "gguf":
        write_gguf(path)
    elif format == "orbax":
        from paged_jax.models.convert import convert

        write_safetensors(directory / "source", 1)
        convert(directory / "source", path)
    else:
        write_safetensors(path, 4 if format == "sharded" else 1)
    return path


def anonymous_bytes() -> int:
    """Resident memory of this process that belongs to no file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError("/proc/self/status has no RssAnon")


def measure(path: Path, dtype: str) -> dict[str, Any]:
    """Loads a model in this process, which has done nothing else."""
    import jax

    jax.devices()
    before = anonymous_bytes()
    peak, has_ended = before, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not has_ended.wait(0.002):
            peak = max(peak, anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    from flax import nnx

    from paged_jax.models.load import load_model, open_checkpoint

    model = load_model(open_checkpoint(path), dtype)
    arrays = jax.tree.leaves(nnx.state(model))
    jax.block_until_ready(arrays)
    seconds = time.perf_counter() - start
    has_ended.set()
    watcher.join()
    num_bytes = sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)
    return {
        "array_bytes": num_bytes,
        "peak_bytes": peak - before,
        "ratio": round((peak - before) / num_bytes, 3),
        "after_bytes": anonymous_bytes() - before,
        "seconds": round(seconds, 2),
    }


def main() -> None:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--format", choices=FORMATS, default="safetensors")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--layers", type=int, help="fewer make a smaller model, for a trial")
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)  # of the new process
    arguments = parser.parse_args()
    if arguments.path:
        print(json.dumps(measure(arguments.path, arguments.dtype)))
        return
    if arguments.layers:
        CONFIG["num_hidden_layers"] = arguments.layers
    with tempfile.TemporaryDirectory() as directory:
        path = write(arguments.format, Path(directory))
        command = [sys.executable, __file__, "--path", str(path), "--dtype", arguments.dtype]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    print(
        json.dumps(
            {"format": arguments.format, "dtype": arguments.dtype, **json.loads(done.stdout)}
        )
    )


if __name__ == "__main__":
    main()
