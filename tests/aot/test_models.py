"""Models beyond Llama compile for TPU: two layers, heads and options of the real ones.

The attention of each layer is a kernel with its window, cap and sinks, latent attention excepted,
and nothing copies the pool.
"""

import collections
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from paged_jax import core
from paged_jax.models.decoder import Decoder
from paged_jax.models.registry import read_spec
from tests.aot.targets import compile_for, report

pytestmark = [pytest.mark.aot, pytest.mark.slow, pytest.mark.usefixtures("optimized")]

NUM_LAYERS, NUM_ROWS, NUM_TOKENS, POOL_TOKENS = 2, 16, 128, 2**17
COMMON = {
    "vocab_size": 1024,
    "num_hidden_layers": NUM_LAYERS,
    "max_position_embeddings": 8192,
    "rope_theta": 10000.0,
}
CONFIGS = {
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 8,
        "sliding_window": 128,
    },
    "phi3": {
        "architectures": ["Phi3ForCausalLM"],
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "sliding_window": 2047,
    },
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 4096,
        "moe_intermediate_size": 1024,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "num_attention_heads": 16,
        "q_lora_rank": 512,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_forward_pass_keeps_the_pool_in_place(name):
    spec = read_spec(COMMON | CONFIGS[name])
    model = nnx.eval_shape(lambda: Decoder(spec, dtype="bfloat16", rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(model)
    block_size = 128
    num_blocks = POOL_TOKENS // block_size
    kv = jax.eval_shape(
        lambda: core.create_kv_cache(
            model.cache_spec(), num_blocks, block_size, jnp.bfloat16, platform="tpu"
        )
    )
    blocks = jax.eval_shape(lambda: core.create_block_state(num_blocks, block_size, NUM_ROWS, 64))
    i32 = jax.ShapeDtypeStruct((NUM_ROWS,), jnp.int32)

    def forward(state, kv, blocks, tokens, row_ids, query_lens, num_decode):
        batch = core.make_batch(
            blocks, tokens=tokens, row_ids=row_ids, query_lens=query_lens, num_decode=num_decode
        )
        model = nnx.merge(graphdef, state)
        hidden, cache = model(batch, core.PagedCache(blocks=blocks, kv=kv))
        return model.logits(hidden[:NUM_ROWS]), cache.kv

    tokens = jax.ShapeDtypeStruct((NUM_TOKENS,), jnp.int32)
    args = (state, kv, blocks, tokens, i32, i32, jax.ShapeDtypeStruct((), jnp.int32))
    compiled = compile_for("v6e", forward, args, (1,))
    found = report(compiled, [kv.kv.shape])
    pool_bytes = kv.kv.size * kv.kv.dtype.itemsize
    assert found.faults == ()
    assert found.alias_bytes >= pool_bytes
    assert found.temp_bytes < 128 << 20  # no copy of the experts' weights either
    hlo = compiled.as_text()
    assert hlo is not None
    lines = [line for line in hlo.splitlines() if 'custom_call_target="tpu_custom_call"' in line]
    found = collections.Counter(re.findall(r"/(paged_\w+)/pallas_call", "\n".join(lines)))
    ours = ("paged_write", "paged_decode", "paged_prefill")
    # XLA's own product of groups is a kernel too.
    assert found == ({} if name == "deepseek_v3" else dict.fromkeys(ours, NUM_LAYERS))
