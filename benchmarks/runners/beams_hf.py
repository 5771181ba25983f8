"""Writes what transformers' beam search finds: the rows of tests/data/beams_smollm2.json.

    python -m benchmarks.runners.beams_hf MODEL_DIRECTORY OUT.json

MODEL_DIRECTORY is what `export_hf` writes. Needs torch and transformers. Float32 on the CPU, every
width, length penalty and early stopping below for each prompt.
"""

import argparse
import itertools
import json
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

CHATS = ["What is the capital of France?", "Say yes or no."]
TEXTS = ["The quick brown fox"]
WIDTHS = [2, 4]
LENGTH_PENALTIES = [0.0, 1.0, 2.0]
EARLY_STOPPING = [True, False]
MAX_TOKENS = 10


def tokenise(directory: Path) -> list[dict]:
    """The prompts, chats in the model's template, with their token ids."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    prompts = []
    for text in CHATS:
        message = [{"role": "user", "content": text}]
        rendered = tokenizer.apply_chat_template(
            message, tokenize=False, add_generation_prompt=True
        )
        prompts.append((rendered, tokenizer(rendered, add_special_tokens=False).input_ids))
    prompts += [(text, tokenizer(text, add_special_tokens=False).input_ids) for text in TEXTS]
    return [{"text": text, "token_ids": ids} for text, ids in prompts]


def search(model, token_ids: list[int], config: GenerationConfig) -> tuple[list, list[float]]:
    """All beams, best first, each up to its end-of-sequence token; and their scores."""
    prompt = torch.tensor([token_ids])
    output = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), generation_config=config
    )
    sequences = []
    for padded in output.sequences[:, prompt.shape[1] :].tolist():
        eos = config.eos_token_id
        end = padded.index(eos) + 1 if eos in padded else len(padded)
        sequences.append(padded[:end])
    return sequences, [round(score, 5) for score in output.sequences_scores.tolist()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)  # threads that wait for each other crawl on a busy machine
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.float32, attn_implementation="eager"
    )
    eos = model.generation_config.eos_token_id
    prompts = tokenise(args.model)
    rows = []
    for width, penalty, early, index in itertools.product(
        WIDTHS, LENGTH_PENALTIES, EARLY_STOPPING, range(len(prompts))
    ):
        config = GenerationConfig(
            num_beams=width,
            num_return_sequences=width,
            length_penalty=penalty,
            early_stopping=early,
            max_new_tokens=MAX_TOKENS,
            eos_token_id=eos,
            pad_token_id=eos,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
        sequences, scores = search(model, prompts[index]["token_ids"], config)
        rows.append(
            {
                "prompt": index,
                "width": width,
                "length_penalty": penalty,
                "early_stopping": early,
                "eos": eos,
                "max_tokens": MAX_TOKENS,
                "sequences": sequences,
                "scores": scores,
            }
        )
    engine = f"transformers {transformers.__version__}, torch {torch.__version__}, eager float32"
    lines = [
        f' "engine": {json.dumps(engine)}',
        ' "prompts": [\n  ' + ",\n  ".join(map(json.dumps, prompts)) + "\n ]",
        ' "rows": [\n  ' + ",\n  ".join(map(json.dumps, rows)) + "\n ]",
    ]
    args.out.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
