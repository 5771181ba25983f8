"""The embedded model predicts a text as well from a KV cache of 8 bits as from one of 32."""

import pytest

from benchmarks.kv_quality import PROSE, Quality, measure
from paged_jax.models.load import load_model, open_checkpoint

NUM_TOKENS = 512
"""Of 1784: four chunks, the last of which reads the quantised KV of the others."""


@pytest.fixture(scope="module")
def text(smollm2_path):
    """The model and the first tokens of the text."""
    checkpoint = open_checkpoint(smollm2_path)
    tokenizer = checkpoint.tokenizer()
    assert tokenizer is not None
    return load_model(checkpoint, "float32"), tokenizer.encode(PROSE.read_text("utf-8"))


@pytest.fixture(scope="module")
def in_float32(text) -> Quality:
    model, tokens = text
    return measure(model, tokens[:NUM_TOKENS], "float32")


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3"])
def test_perplexity_is_within_1_percent_of_float32(text, in_float32, dtype):
    model, tokens = text
    quality = measure(model, tokens[:NUM_TOKENS], dtype)
    assert quality.losses.shape == (NUM_TOKENS - 1,)
    assert (quality.losses != in_float32.losses).any(), "the pool is not quantised"
    assert quality.perplexity / in_float32.perplexity == pytest.approx(1.0, abs=0.01)
    assert quality.token_bytes == 30 * 2 * 3 * (64 + 4)
    assert in_float32.token_bytes == 30 * 2 * 3 * 64 * 4
