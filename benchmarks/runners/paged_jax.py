"""Runs paged-jax on the workload, through its public API."""

import argparse

from benchmarks.runners.measure import Answer, Generate, measure
from benchmarks.workload import MAX_MODEL_LEN, Request
from paged_jax import LLM, SamplingParams


def build(options: argparse.Namespace) -> Generate:
    """Loads the model and returns a function that answers all requests in one call."""
    llm = LLM(
        options.model,
        dtype="float32",
        max_num_seqs=options.batch_size,
        max_model_len=MAX_MODEL_LEN,
    )

    def generate(requests: list[Request]) -> list[Answer]:
        outputs = llm.generate(
            [{"prompt_token_ids": request.prompt_token_ids} for request in requests],
            [
                SamplingParams(temperature=0.0, max_tokens=request.output_len, ignore_eos=True)
                for request in requests
            ],
            use_tqdm=False,
        )
        return [
            Answer(
                list(out.outputs[0].token_ids),
                out.metrics.first_token_time - out.metrics.arrival_time,
            )
            for out in outputs
        ]

    return generate


if __name__ == "__main__":
    measure(build, packages=["jax", "jaxlib", "flax"])
