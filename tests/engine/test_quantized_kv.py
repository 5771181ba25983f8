"""B18: engines whose pool has 8 bits give the tokens that they give to each request alone.

After every step the blocks that are free hold NaN, in their scales too: whoever read a scale that
did not move with its block, or one of the block's last owner, would get other tokens.
"""

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged_jax import LLM, core
from paged_jax.beam_search_params import BeamSearchParams
from paged_jax.core import CacheSpec
from paged_jax.engine import Engine
from paged_jax.models.decoder import Decoder
from paged_jax.models.spec import LatentAttentionSpec, RopeSpec, uniform_spec
from paged_jax.sampling_params import SamplingParams
from tests.engine.workloads import (
    Alone,
    Ask,
    Run,
    assert_empty,
    differences,
    limit,
    make_engine,
    preempted,
    run_asks,
)

DTYPES = {"int8": "int8", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
NUM_BLOCKS = {1: 96, 2: 48, 16: 8}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
SHORT_SET = {("int8", 2), ("fp8_e4m3", 16)}


def sizes(dtype: str, block_size: int) -> dict:
    """Options of all engines of a dtype and block size: they share two compiled steps."""
    return {
        "kv_cache_dtype": dtype,
        "block_size": block_size,
        "num_blocks": NUM_BLOCKS[block_size],
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "max_model_len": 48,
        "preemption_mode": "swap",
    }


class Case:
    """Engines of one dtype and block size, and requests run alone in the like of them."""

    def __init__(self, model, dtype: str, block_size: int) -> None:
        self.model, self.dtype, self.block_size = model, dtype, block_size
        self.alone = Alone(model, **sizes(dtype, block_size))
        self.copies: Counter[str] = Counter()
        """Events of each kind so far."""

    def engine(self, **options) -> Engine:
        engine = make_engine(self.model, **sizes(self.dtype, self.block_size), **options)
        engine.events = lambda event: self.copies.update([event.kind])
        poison(engine)
        return engine

    def run(self, engine: Engine, *asks: Ask, preempts: bool = False) -> Run:
        """Runs requests, each of which must get the tokens that it gets alone.

        Args:
          preempts: After every token; beams excepted, which are never swapped.
        """
        for one in asks:
            self.alone(one)
        with preempted(lambda sequence: preempts and sequence.request.beam is None):
            run = run_asks(engine, asks, after_step=poison)
        assert differences(asks, run, self.alone) == []
        assert_empty(engine)
        return run


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            (dtype, size),
            marks=[] if (dtype, size) in SHORT_SET else [pytest.mark.exhaustive],
            id=f"{dtype}-{size}",
        )
        for dtype in DTYPES
        for size in NUM_BLOCKS
    ],
)
def case(request, toy) -> Case:
    return Case(toy, *request.param)


def poison(engine: Engine) -> None:
    """Fills what nobody owns, the null block too, with NaN; of int8, which has none, the scales."""
    kv = engine.runner.kv
    assert kv is not None
    assert kv.is_quantized
    free = [0, *engine.state.ledger.free_blocks]
    numbers, scales = np.array(kv.kv), np.array(kv.scales)
    numbers[:, free] = np.asarray(-128 if kv.kv.dtype == jnp.int8 else np.nan, kv.kv.dtype)
    scales[:, free] = np.nan
    engine.runner.kv = dataclasses.replace(
        kv,
        kv=jax.device_put(numbers, kv.kv.sharding),
        scales=jax.device_put(scales, kv.scales.sharding),
    )


def ask(name: str, rng, length: int, params=GREEDY) -> Ask:
    return Ask(name=name, prompt=tuple(rng.integers(0, 258, length).tolist()), params=params)


def test_the_pool_has_the_dtype_and_a_scale_per_token_and_head(case):
    engine = case.engine()
    kv, size = engine.runner.kv, case.block_size
    assert kv.kv.dtype.name == DTYPES[case.dtype]
    assert kv.kv.shape == (2, NUM_BLOCKS[size] + 1, 4, size, 8)
    assert kv.scales.shape == (2, NUM_BLOCKS[size] + 1, 4, size)
    assert kv.token_bytes == 2 * 4 * (8 + 4)
    stats = engine.stats()
    assert stats["num_blocks"] == stats["num_free"] == NUM_BLOCKS[size]
    assert engine.config.swap_blocks == 4 * 2**30 // kv.block_bytes


def test_the_same_prompt_three_times_has_the_same_tokens(case, rng):
    """Cold, then warm: the rest of the prompt is computed on blocks that another has written."""
    engine = case.engine()
    first = ask("0", rng, 19)
    hits = []
    for name in "012":
        before = engine.stats()["prefix_hits_tokens"]
        case.run(engine, dataclasses.replace(first, name=name))
        hits.append(engine.stats()["prefix_hits_tokens"] - before)
    warm = 18 // case.block_size * case.block_size
    assert hits == [0, warm, warm], "one token of the prompt is always computed"


def test_prompts_in_chunks_of_three(case, rng):
    engine = case.engine()
    limit(engine, chunk=3, decode_steps=4)
    asks = [ask("a", rng, 17), ask("b", rng, 4), ask("c", rng, 9)]
    run = case.run(engine, *asks)
    assert run.prefills["a", 0] >= 6
    case.run(engine, *asks)
    assert engine.stats()["prefix_hits_tokens"] > 0


@pytest.mark.parametrize("is_cached", [False, True])
def test_requests_swapped_out_and_in_after_every_token(case, rng, is_cached):
    engine = case.engine(enable_prefix_caching=is_cached)
    seeded = SamplingParams(temperature=0.9, max_tokens=8, seed=4)
    before = case.copies["swap_in"]
    limit(engine, chunk=32, decode_steps=1)
    case.run(engine, ask("a", rng, 7), ask("b", rng, 18, seeded), preempts=True)
    assert engine.stats()["num_preemptions"] > 4
    assert is_cached or case.copies["swap_in"] - before > 4


def test_choices_share_a_prompt_and_copy_the_block_they_write_into(case, rng):
    engine = case.engine()
    params = SamplingParams(n=2, seed=3, max_tokens=8, ignore_eos=True)
    before = case.copies["copy"]
    run = case.run(engine, ask("a", rng, 13, params), ask("b", rng, 5))
    first, second = run.ends["a"].outputs
    assert first.token_ids != second.token_ids
    assert case.copies["copy"] > before or case.block_size == 1


def test_beams_change_places(case, rng):
    engine = case.engine()
    params = BeamSearchParams(beam_width=2, max_tokens=6)
    case.run(engine, ask("a", rng, 9, params), ask("b", rng, 6))


def test_a_snapshot_holds_the_scales_of_blocks_and_of_images(case, rng, tmp_path):
    engine, other = case.engine(), case.engine()
    asks = [ask(name, rng, length) for name, length in (("a", 13), ("b", 6), ("c", 9))]
    limit(engine, chunk=32, decode_steps=1)
    limit(other, chunk=32, decode_steps=1)
    for one in asks:
        engine.add_request(one.name, one.prompt, one.params)
    with preempted(lambda sequence: sequence.request.request_id == "b"):
        while not engine.dispatcher.images:
            assert not any(output.finished for output in engine.step())
            poison(engine)
    engine.snapshot(tmp_path / "saved")
    other.restore(tmp_path / "saved")
    assert other.dispatcher.images
    assert other.runner.kv.kv.dtype == engine.runner.kv.kv.dtype
    run = Run()
    while other.has_unfinished():
        poison(other)
        run.see(other.step(), {})
        assert other.error is None
    assert differences(asks, run, case.alone) == []


def test_values_far_outside_the_range_of_8_bits_change_nothing(case, rng):
    """Values 2 ** 60 times as large, and an output projection that takes it back: both exact."""
    asks = [ask("a", rng, 9), ask("b", rng, 3)]
    expected = [case.alone(one) for one in asks]
    graphdef, state = nnx.split(case.model)
    model = nnx.merge(graphdef, jax.tree.map(jnp.copy, state))
    for block in model.blocks:
        qkv, out = block.attention.qkv.weight, block.attention.out.weight
        qkv[...] = qkv[...].at[-16:].multiply(2.0**60)
        out[...] = out[...] * 2.0**-60
    case = Case(model, case.dtype, case.block_size)
    engine = case.engine()
    case.run(engine, *asks)
    assert [case.alone(one) for one in asks] == expected


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_infinities_saturate(dtype, rng):
    spec = CacheSpec(num_layers=1, num_kv_heads=2, head_dim=8)
    cache = core.create_kv_cache(spec, 3, 4, dtype)
    keys, values = rng.standard_normal((2, 5, 2, 8), dtype=np.float32)
    keys[1] *= 1e30
    values[2, 0, 3], values[2, 1, 0] = np.inf, -np.inf
    slots = jnp.asarray([4, 5, 6, 7, 8], jnp.int32)
    cache = core.write(cache, jnp.int32(0), keys, values, slots)
    read = core.gather(cache, 0, np.array([1, 2], np.int32), 5)
    assert np.isfinite(read).all()
    assert read[1][2, 0, 3] > 1e38
    assert read[1][2, 1, 0] < -1e38


def test_prefixes_are_not_shared_between_dtypes(toy):
    roots = {
        make_engine(toy, **(sizes("auto", 2) | {"kv_cache_dtype": name})).state.cache._root
        for name in ("auto", "int8", "fp8", "fp8_e4m3")
    }
    assert roots == {b"float32", b"int8", b"float8_e4m3fn"}


def test_a_snapshot_of_another_kv_dtype_is_refused(toy, tmp_path):
    make_engine(toy, **sizes("int8", 2)).snapshot(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"kv_dtype of this engine \(float8_e5m2\) must be"):
        make_engine(toy, **sizes("fp8_e5m2", 2)).restore(tmp_path / "saved")


def test_an_llm_takes_the_option(toy):
    with LLM(toy, **sizes("fp8", 16)) as llm:
        assert llm.engine.runner.kv.kv.dtype == jnp.float8_e4m3fn
    with pytest.raises(ValueError, match=r"kv_cache_dtype \('fp4'\) must be one of auto, float32"):
        LLM(toy, kv_cache_dtype="fp4")


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_pool_may_have_another_float_than_the_model(toy, rng, dtype):
    alone = Alone(toy, **sizes(dtype, 2))
    engine = make_engine(toy, **sizes(dtype, 2))
    assert engine.runner.kv.kv.dtype.name == dtype
    assert engine.runner.kv.token_bytes == 2 * 4 * 8 * 2
    asks = [ask("a", rng, 17), ask("b", rng, 6)]
    for _ in range(2):
        assert differences(asks, run_asks(engine, asks), alone) == []
    assert engine.stats()["prefix_hits_tokens"] > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", DTYPES)
def test_latent_pools_move_their_scales_too(dtype, rng):
    """Cold and warm, in chunks, swapped, choices and beams."""
    case = Case(make_latent(), dtype, 2)
    params = SamplingParams(n=2, seed=3, max_tokens=8)
    asks = [
        ask("a", rng, 17),
        ask("b", rng, 7, params),
        ask("c", rng, 9, BeamSearchParams(beam_width=2, max_tokens=6)),
    ]
    for options in ({}, {"enable_prefix_caching": False}):
        engine = case.engine(**options)
        assert engine.runner.kv.layout == "latent"
        case.run(engine, *asks)
        case.run(engine, *asks)
        limit(engine, chunk=3, decode_steps=1)
        case.run(engine, *asks, preempts=True)
    assert case.copies["copy"] > 0
    assert case.copies["swap_in"] > 0


def make_latent() -> Decoder:
    """A model as `toy` is, with multi-head latent attention."""
    spec = uniform_spec(
        vocab_size=258,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        mlp_size=48,
        max_position_embeddings=512,
    )
    attention = LatentAttentionSpec(
        num_heads=4,
        q_rank=None,
        kv_rank=8,
        nope_dim=8,
        rope_dim=4,
        v_dim=8,
        rope=RopeSpec(),
        sm_scale=12**-0.5,
    )
    layers = tuple(dataclasses.replace(layer, attention=attention) for layer in spec.layers)
    return Decoder(dataclasses.replace(spec, layers=layers), rngs=nnx.Rngs(7))
