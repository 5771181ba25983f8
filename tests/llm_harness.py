"""An LLM over the toy model, and what its tests share."""

from paged_jax import LLM, SamplingParams
from paged_jax.models.tokenizer import Tokenizer
from tests.byte_tokenizer import TEMPLATE, byte_backend

# One shape for every LLM: compiled programs are found in the cache.
OPTIONS = {
    "max_num_seqs": 4,
    "block_size": 4,
    "num_blocks": 10,
    "max_model_len": 64,
    "max_num_batched_tokens": 16,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9], [10, 11, 12, 13], [14, 15], [200, 201, 202]]


def open_texting(toy, **options) -> LLM:
    """With a tokenizer of bytes and no end of sequence."""
    backend = byte_backend(["<s>", "</s>"], 258)
    tokenizer = Tokenizer(backend, special_tokens={}, chat_template=TEMPLATE)
    return LLM(toy, tokenizer=tokenizer, **{**OPTIONS, **options})


def assert_idle(llm: LLM) -> None:
    """Nobody waits and every block is free, or cached and then given back."""
    names = ("num_used", "num_running", "num_waiting", "num_swapped")
    assert [llm.stats()[name] for name in names] == [0, 0, 0, 0]
    assert not llm.engine.has_unfinished()
    assert not llm._open
    llm.reset_prefix_cache()
    assert llm.stats()["num_free"] == llm.stats()["num_blocks"]


def run(llm: LLM, prompts, params=GREEDY, **options):
    return llm.generate(prompts, params, use_tqdm=False, **options)


def tokens(outputs) -> list[list[int]]:
    """Of the first choice of each."""
    return [output.outputs[0].token_ids for output in outputs]


def reasons(outputs) -> list[str | None]:
    return [output.outputs[0].finish_reason for output in outputs]
