"""Runs transformers' static batching on the workload.

A batch is padded on the left to its longest prompt and generates until its longest output; the
tokens beyond a request's own length are thrown away, as static batching must.
"""

import argparse
import time

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from benchmarks.runners.measure import Answer, Generate, measure
from benchmarks.workload import Request

PAD_ID = 0


def build(options: argparse.Namespace) -> Generate:
    """Loads the model; returns a function that answers the requests batch after batch."""
    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    model.generation_config = GenerationConfig(pad_token_id=PAD_ID, do_sample=False)  # no EOS

    def generate(requests: list[Request]) -> list[Answer]:
        start = time.perf_counter()
        answers = []
        for first in range(0, len(requests), options.batch_size):
            batch = requests[first : first + options.batch_size]
            answers += _generate_batch(model, batch, start)
        return answers

    return generate


def _generate_batch(model, batch: list[Request], start: float) -> list[Answer]:
    prompt_len = max(len(request.prompt_token_ids) for request in batch)
    input_ids = torch.full((len(batch), prompt_len), PAD_ID)
    attention_mask = torch.zeros_like(input_ids)
    for row, (prompt_token_ids, _) in enumerate(batch):
        input_ids[row, prompt_len - len(prompt_token_ids) :] = torch.tensor(prompt_token_ids)
        attention_mask[row, prompt_len - len(prompt_token_ids) :] = 1
    clock = _FirstTokenClock()
    output_ids = model.generate(
        input_ids=input_ids,
        attention_mask=attention_mask,
        max_new_tokens=max(request.output_len for request in batch),
        streamer=clock,
    )
    generated = output_ids[:, prompt_len:].tolist()
    return [
        Answer(token_ids[: request.output_len], clock.times[1] - start)
        for request, token_ids in zip(batch, generated, strict=True)
    ]


class _FirstTokenClock(BaseStreamer):
    """Notes when `generate` hands over the prompt (time 0) and each step's tokens (from time 1)."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


if __name__ == "__main__":
    measure(build, packages=["transformers", "torch"])
