"""Runs vLLM's CPU build on the workload, its engine core in this process."""

import argparse
import os

# Read by vLLM at import. One process: its peak memory is then this process's, and on two cores the
# three of vLLM's default compete with its own threads. `nobind` keeps every core: vLLM's automatic
# binding takes one logical CPU per physical core. 1 GiB of KV cache holds 23 thousand tokens.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}

from vllm import LLM, SamplingParams

from benchmarks.runners.measure import Answer, Generate, measure
from benchmarks.workload import MAX_MODEL_LEN, Request


def build(options: argparse.Namespace) -> Generate:
    """Loads and compiles the model; returns a function that answers all requests in one call."""
    llm = LLM(
        options.model,
        dtype="float32",
        max_num_seqs=options.batch_size,
        max_model_len=MAX_MODEL_LEN,
        disable_log_stats=False,  # otherwise outputs carry no times
    )

    def generate(requests: list[Request]) -> list[Answer]:
        outputs = llm.generate(
            [{"prompt_token_ids": request.prompt_token_ids} for request in requests],
            [
                SamplingParams(
                    temperature=0.0,
                    max_tokens=request.output_len,
                    ignore_eos=True,
                    detokenize=False,
                )
                for request in requests
            ],
            use_tqdm=False,
        )
        return [
            Answer(list(out.outputs[0].token_ids), out.metrics.first_token_latency)
            for out in outputs
        ]

    return generate


if __name__ == "__main__":
    measure(build, packages=["vllm-cpu", "torch"])
