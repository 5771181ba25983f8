"""How many tokens per second does the engine make on this GPU, and are they the right ones?

smollm2    SmolLM2 135M: greedy tokens in float32 must be those of tests/data/smollm2.json; then the
           workload of offline_throughput.py in bfloat16
llama3-8b  random weights in the shapes of Llama 3 8B, bfloat16: decode at 64 rows. Two passes with
           the same prompts' lengths differ in output tokens alone, and so in time for decode alone

    python benchmarks/gpu_end_to_end.py smollm2
    python benchmarks/gpu_end_to_end.py llama3-8b --json FILE
    python benchmarks/gpu_end_to_end.py smollm2 --toy          # a tiny model, anywhere, no times
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np
from flax import nnx
from workload import MAX_MODEL_LEN, make_workload

from paged_jax import LLM, SamplingParams
from paged_jax.models.decoder import Decoder
from paged_jax.models.spec import DecoderSpec, RopeSpec, uniform_spec

REFERENCE = Path(__file__).resolve().parents[1] / "tests" / "data" / "smollm2.json"
LLAMA3_8B = uniform_spec(
    vocab_size=128256,
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    mlp_size=14336,
    norm_eps=1e-5,
    rope=RopeSpec(theta=500000.0),
    max_position_embeddings=8192,
)
TINY = uniform_spec(
    vocab_size=258,
    hidden_size=32,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    mlp_size=48,
    max_position_embeddings=8192,
)
NUM_ROWS = 64
MEAN_LEN = 2048
OUTPUT_LENS = (16, 144)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", choices=("smollm2", "llama3-8b"))
    parser.add_argument("--toy", action="store_true", help="a tiny model, no times")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    if options.toy:
        jax.config.update("jax_disable_most_optimizations", True)
    elif jax.default_backend() != "gpu":
        print(f"this runs on a GPU, and JAX found {jax.default_backend()}", file=sys.stderr)
        return 2
    run = run_smollm2 if options.run == "smollm2" else run_llama
    found = run(options.toy)
    print("\n".join(found["lines"]))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(not found["is_right"])


def run_smollm2(is_toy: bool) -> dict:
    """Compares greedy tokens with the reference, and times the workload."""
    if is_toy:
        llm = LLM(_model(TINY, "float32"), max_num_seqs=2, max_model_len=32, num_blocks=8)
        prompts = [[1, 2, 3], [4, 5, 6, 7, 8]]
        want = [_generate(llm, [prompt], [4])[0] for prompt in prompts]
        same = sum(a == b for a, b in zip(_generate(llm, prompts, [4, 4]), want, strict=True))
        lines = [f"A tiny model: {same} of {len(want)} outputs of a batch are those alone."]
        return {"lines": lines, "is_right": same == len(want)}
    rows = json.loads(REFERENCE.read_text())["rows"]
    # Otherwise products of float32 are rounded to tf32.
    with jax.default_matmul_precision("highest"), LLM(dtype="float32", max_num_seqs=8) as llm:
        prompts = [row["prompt_token_ids"] for row in rows]
        got = _generate(llm, prompts, [len(row["token_ids"]) for row in rows])
    same = sum(a == row["token_ids"] for a, row in zip(got, rows, strict=True))
    with LLM(dtype="bfloat16", max_num_seqs=32, max_model_len=MAX_MODEL_LEN) as llm:
        for index in (0, 1):  # the first pass compiles
            requests = make_workload(32, seed=0, pass_index=index)
            begin = time.perf_counter()
            lens = [request.output_len for request in requests]
            _generate(llm, [request.prompt_token_ids for request in requests], lens)
            seconds = time.perf_counter() - begin
    rate = sum(lens) / seconds
    lines = [
        f"SmolLM2 135M, float32: greedy tokens of {same} of {len(rows)} prompts are those of "
        "transformers.",
        f"SmolLM2 135M, bfloat16, 32 requests at once: {rate:.0f} output tokens/s, prefill "
        "included.",
    ]
    return {"lines": lines, "is_right": same == len(rows), "output_tokens_per_s": rate}


def run_llama(is_toy: bool) -> dict:
    """Times decode as the difference of two passes."""
    num_rows, output_lens = (2, (2, 4)) if is_toy else (NUM_ROWS, OUTPUT_LENS)
    prompt_len = 5 if is_toy else MEAN_LEN - sum(output_lens) // 2
    spec = TINY if is_toy else LLAMA3_8B
    max_len = prompt_len + max(output_lens)
    limit = {"num_blocks": 8} if is_toy else {}  # beside that, what memory holds
    model = _model(spec, "float32" if is_toy else "bfloat16")
    llm = LLM(model, max_num_seqs=num_rows, max_model_len=max_len, **limit)
    rng, seconds = np.random.default_rng(0), []
    # The first pass compiles.
    for output_len in (max(output_lens), *output_lens):
        prompts = rng.integers(0, spec.vocab_size, (num_rows, prompt_len)).tolist()
        begin = time.perf_counter()
        _generate(llm, prompts, [output_len] * num_rows)
        seconds.append(time.perf_counter() - begin)
    if is_toy:
        lines = ["A tiny model: passes of two lengths run; nothing is timed."]
        return {"lines": lines, "is_right": True}
    if not seconds[2] > seconds[1]:
        raise RuntimeError(f"{output_lens} tokens a row took {seconds[1:]} s: cannot be compared")
    rate = num_rows * (output_lens[1] - output_lens[0]) / (seconds[2] - seconds[1])
    lines = [
        f"Llama 3 8B's shapes, random weights, bfloat16, {num_rows} rows of {MEAN_LEN} tokens on "
        f"average: {rate:.0f} tokens/s in decode, {1e3 * num_rows / rate:.2f} ms a step."
    ]
    return {"lines": lines, "is_right": True, "decode_tokens_per_s": rate, "seconds": seconds}


def _model(spec: DecoderSpec, dtype: str) -> Decoder:
    return Decoder(spec, dtype=dtype, rngs=nnx.Rngs(0))


def _generate(llm: LLM, prompts: list[list[int]], lens: list[int]) -> list[list[int]]:
    """Greedy tokens; as many as asked for, whatever they are."""
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lens]
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(inputs, params, use_tqdm=False)
    found = [list(output.outputs[0].token_ids) for output in outputs]
    if list(map(len, found)) != lens:
        raise RuntimeError(f"{list(map(len, found))} tokens are not the {lens} asked for")
    return found


if __name__ == "__main__":
    raise SystemExit(main())
