"""Writes a GGUF model as a Hugging Face directory, so that every engine loads the same weights.

    python -m benchmarks.runners.export_hf SmolLM2-135M-Instruct.Q4_1.gguf OUT \\
        [--check REFERENCE.json]

Needs torch, transformers and gguf. Weights are dequantised to float32. `--check` compares greedy
tokens of the written model with the rows (`prompt_token_ids`, `token_ids`) of a reference file.
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig


def export(gguf: Path, out: Path) -> None:
    """Dequantises `gguf` into `out`: config.json, model.safetensors, tokenizer files."""
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)
    loaded = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    # The weights are dense now, but a model that came from GGUF refuses to be saved: move them to
    # one that did not. Saved last, because model.safetensors marks a finished export.
    dense = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.float32)
    dense.load_state_dict(loaded.state_dict())
    dense.save_pretrained(out)


def check(out: Path, reference: Path) -> None:
    """Raises ValueError where greedy decoding of `out` leaves the reference tokens."""
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    model.generation_config = GenerationConfig(pad_token_id=0, do_sample=False)  # no EOS
    rows = json.loads(reference.read_text())["rows"]
    for index, row in enumerate(rows):
        prompt = torch.tensor([row["prompt_token_ids"]])
        expected = row["token_ids"]
        output = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=len(expected)
        )
        token_ids = output[0, prompt.shape[1] :].tolist()
        if token_ids != expected:
            raise ValueError(f"row {index} generates {token_ids}, the reference has {expected}")
    print(f"{len(rows)} of {len(rows)} reference rows reproduced")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("gguf", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--check", type=Path, metavar="REFERENCE.json")
    args = parser.parse_args()
    export(args.gguf.resolve(), args.out)
    if args.check:
        check(args.out, args.check)


if __name__ == "__main__":
    main()
