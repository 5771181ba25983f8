"""The real embedded model against tokens and logprobs that transformers computed in float32.

The longest file of the suite: it stands first, so that no worker waits for it at the end.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from paged_jax import LLM, SamplingParams
from paged_jax.models.load import load_model, open_checkpoint
from paged_jax.models.registry import architecture
from paged_jax.models.weights import sources
from tests.beam_rows import smollm2_rows

ROWS = json.loads((Path(__file__).parents[1] / "data" / "smollm2.json").read_text())["rows"]
LONGEST = max(len(row["prompt_token_ids"]) + len(row["token_ids"]) for row in ROWS)


def small_pool(block_size: int) -> int:
    """Blocks for the longest row and a little more: a batch of all rows must preempt."""
    return -(-LONGEST * 5 // 4 // block_size)


@pytest.mark.slow
@pytest.mark.parametrize(
    "block_size", [16, pytest.param(1, marks=[pytest.mark.exhaustive, pytest.mark.by_hand])]
)
def test_greedy_tokens_and_logprobs_equal_the_reference(smollm2_path, block_size):
    """One by one and all in one batch, in a pool so small that the batch preempts."""
    llm = LLM(
        smollm2_path,
        dtype="float32",
        block_size=block_size,
        num_blocks=small_pool(block_size),
        max_num_seqs=len(ROWS),
        max_num_batched_tokens=64,
        max_model_len=LONGEST + 1,
        debug=True,
    )
    prompts = [{"prompt_token_ids": row["prompt_token_ids"]} for row in ROWS]
    params = [
        SamplingParams(temperature=0.0, max_tokens=len(row["token_ids"]), logprobs=1)
        for row in ROWS
    ]
    single = [llm.generate(*pair, use_tqdm=False)[0] for pair in zip(prompts, params, strict=True)]
    assert llm.stats()["num_preemptions"] == 0
    together = llm.generate(prompts, params, use_tqdm=False)
    assert llm.stats()["num_preemptions"] > 0
    assert llm.stats()["num_used"] == 0
    for outputs in (single, together):
        for output, row in zip(outputs, ROWS, strict=True):
            completion = output.outputs[0]
            assert completion.token_ids == row["token_ids"]
            assert completion.logprobs is not None
            pairs = zip(completion.logprobs, completion.token_ids, strict=True)
            logprobs = [entry[token].logprob for entry, token in pairs]
            np.testing.assert_allclose(logprobs, row["logprobs"], atol=2e-3, rtol=0)
            assert completion.text == row["text"]
    rows = smollm2_rows()[::9]
    beams = llm.beam_search(
        [{"prompt_token_ids": row.prompt_token_ids} for row in rows],
        [row.params for row in rows],
        use_tqdm=False,
    )
    for row, output in zip(rows, beams, strict=True):
        power = row.params.length_penalty
        row.check(
            (beam.token_ids, (beam.cumulative_logprob or 0.0) / len(beam.token_ids) ** power)
            for beam in output.outputs
        )


@pytest.mark.slow
def test_prompts_render_and_encode_as_the_reference(smollm2_path):
    from paged_jax.models.gguf import open_gguf

    tokenizer = open_gguf(smollm2_path).tokenizer()
    assert tokenizer is not None
    for row in ROWS:
        if row["kind"] == "chat":
            message = {"role": "user", "content": row["prompt"]}
            assert tokenizer.apply_chat_template([message]) == row["rendered"]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_safetensors_export_gives_the_same_model(smollm2_path, tmp_path):
    """Same spec and parameters as through GGUF, so same tokens; in two shards."""
    checkpoint = open_checkpoint(smollm2_path)
    model = load_model(checkpoint, "float32")
    by_parameter = sources(model.spec, architecture(checkpoint.config).names)
    shards: tuple[dict, dict] = ({}, {})
    parameters = nnx.to_flat_state(nnx.state(model))
    for i, (path, variable) in enumerate(parameters):
        source = by_parameter[".".join(map(str, path))]
        arrays = source.split(np.asarray(variable[...]))
        shards[i % 2].update(
            (tensor.name, np.ascontiguousarray(array))
            for tensor, array in zip(source.tensors, arrays, strict=True)
        )
    weight_map = {}
    for i, shard in enumerate(shards):
        save_file(shard, tmp_path / f"{i}.safetensors")
        weight_map |= dict.fromkeys(shard, f"{i}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text(json.dumps(checkpoint.config))
    exported = load_model(open_checkpoint(tmp_path), "float32")
    assert exported.spec == model.spec
    for (path, ours), (_, theirs) in zip(
        nnx.to_flat_state(nnx.state(exported)), parameters, strict=True
    ):
        np.testing.assert_array_equal(ours[...], theirs[...], err_msg=str(path))
