"""A model that is divided over several devices: the same tokens as on one."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from paged_jax import LLM, SamplingParams, core
from paged_jax.core import AuditError
from paged_jax.models.decoder import Decoder
from paged_jax.models.parallel import Cut, Share, cuts
from paged_jax.models.shard import make_mesh, shard
from paged_jax.models.spec import uniform_spec
from tests.llm_harness import OPTIONS, PROMPTS, assert_idle, run
from tests.models.tiny import IN_SHORT_SET, LENGTHS, NAMES, TINY, expected, model

PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=8, logprobs=3),
    SamplingParams(temperature=1.0, seed=3, max_tokens=8, n=3, top_p=0.9, top_k=50),
    SamplingParams(temperature=1.0, max_tokens=8, min_p=0.01, repetition_penalty=1.2),
    SamplingParams(
        temperature=0.7,
        seed=1,
        max_tokens=8,
        frequency_penalty=0.5,
        logit_bias={5: 3.0, 250: 1.0},
        allowed_token_ids=list(range(100, 250)),
        prompt_logprobs=2,
    ),
]


def random_model(vocab_size: int = 257, num_heads: int = 8, num_kv_heads: int = 2) -> Decoder:
    """Peaked enough that no order of a sum decides a token."""
    spec = uniform_spec(
        vocab_size=vocab_size,
        hidden_size=32,
        num_layers=2,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=8,
        mlp_size=50,
        max_position_embeddings=512,
    )
    model = Decoder(spec, rngs=nnx.Rngs(3))
    model.head.weight[...] = 8.0 * model.head.weight[...]
    return model


def outputs_of(model, **options) -> list:
    """Of all prompts with all of PARAMS, the tokens and what is told of them."""
    with LLM(model, **{**OPTIONS, "debug": True, **options}) as llm:
        found = [output for params in PARAMS for output in run(llm, PROMPTS, params)]
        assert llm.stats()["num_preemptions"] > 0
        assert_idle(llm)
    return [
        (
            [choice.token_ids for choice in output.outputs],
            [choice.logprobs for choice in output.outputs],
            output.prompt_logprobs,
        )
        for output in found
    ]


def assert_same(found: list, wanted: list) -> None:
    """The same tokens, and log-probabilities within 1e-4."""
    for (tokens, *told), (tokens_alone, *told_alone) in zip(found, wanted, strict=True):
        assert tokens == tokens_alone
        for got, want in zip(logprobs(*told), logprobs(*told_alone), strict=True):
            np.testing.assert_allclose(got, want, atol=1e-4)


def logprobs(of_choices: list, of_prompt: list | None) -> list[np.ndarray]:
    """Of every position, those that are told."""
    return [
        np.array([x.logprob for x in entry.values()])
        for listed in (*of_choices, of_prompt)
        for entry in listed or ()
        if entry
    ]


# Query heads, KV heads, ranks: even, replicated, padded, replicated with queries to spare.
HEADS = [(8, 2, 2), (8, 2, 4), (8, 2, 8), (6, 3, 2), (6, 1, 4), (9, 3, 8)]


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "num_ranks"),
    [
        heads if heads in ((6, 3, 2), (8, 2, 4)) else pytest.param(*heads, marks=pytest.mark.slow)
        for heads in HEADS
    ],
)
def test_tokens_are_those_of_one_device(num_heads, num_kv_heads, num_ranks):
    """With preemption, the prefix cache, choices, seeds and a vocabulary that does not divide."""
    model = random_model(num_heads=num_heads, num_kv_heads=num_kv_heads)
    found = outputs_of(model, tensor_parallel_size=num_ranks)
    assert_same(found, outputs_of(model))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"preemption_mode": "swap"},
        {"kv_cache_dtype": "int8"},
        {"overlap": False, "decode_steps": 1},
        {"enable_prefix_caching": False, "block_size": 1, "num_blocks": 40},
    ],
    ids=lambda options: next(iter(options)),
)
def test_tokens_are_the_same_under_other_options(options):
    model = random_model()
    assert_same(outputs_of(model, tensor_parallel_size=4, **options), outputs_of(model, **options))


def cases():
    for name in NAMES:
        for num_ranks in (2, 4, 8):
            is_short = (name, num_ranks) in (("llama", 2), ("gpt_oss", 4), ("deepseek_v3", 8))
            marks = [] if is_short else [pytest.mark.exhaustive]
            if name not in IN_SHORT_SET and num_ranks != 4:
                marks.append(pytest.mark.by_hand)
            yield pytest.param(name, num_ranks, marks=marks)


@pytest.mark.parametrize(("name", "num_ranks"), list(cases()))
def test_every_architecture_gives_its_reference_tokens(name, num_ranks):
    wanted = [expected(name)[f"greedy_{length}"].tolist() for length in LENGTHS]
    prompts = [expected(name)[f"prompt_{length}"].tolist() for length in LENGTHS]
    params = [SamplingParams(temperature=0.0, max_tokens=len(x), ignore_eos=True) for x in wanted]
    options = {"num_blocks": 40, "block_size": 4, "max_model_len": 64, "max_num_seqs": 4}
    options |= {"max_num_batched_tokens": 16, "dtype": "float32"}
    with LLM(TINY / name, tensor_parallel_size=num_ranks, **options) as llm:
        found = llm.generate(prompts, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in found] == wanted


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "gpt_oss", "olmo2"])
def test_no_device_gets_more_than_its_part(name):
    mesh = make_mesh(4)
    with LLM(TINY / name, mesh=mesh, num_blocks=8, max_model_len=32) as llm:
        names, params = llm.engine.runner.leaf_specs, llm.engine.runner._params
        divided = cuts(model(name).spec, Share(axis="tp", num_ranks=4))
        for leaf, array in zip(names, params, strict=True):
            [shape] = {shard.data.shape for shard in array.addressable_shards}
            assert len(array.addressable_shards) == 4
            if leaf in divided:
                axis = divided[leaf].axis
                assert shape[axis] * 4 == array.shape[axis], leaf
            else:
                assert array.sharding.is_fully_replicated, leaf
        kv = llm.engine.runner.kv.kv
        assert {shard.data.shape[2] * 4 for shard in kv.addressable_shards} == {kv.shape[2]}


def test_a_mesh_of_ones_own_works():
    devices = np.array(jax.devices()[:8]).reshape(2, 2, 2)[:, ::-1]
    mesh = Mesh(devices[0], ("data", "tp"))
    model = random_model()
    assert_same(outputs_of(model, mesh=mesh), outputs_of(model))


def test_what_cannot_be_divided_is_refused(toy):
    with pytest.raises(ValueError, match=r"tensor_parallel_size \(16\) needs as many devices"):
        LLM(toy, tensor_parallel_size=16, **OPTIONS)
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    with pytest.raises(ValueError, match=r"^mesh has the axes"):
        LLM(toy, mesh=mesh, **OPTIONS)
    with pytest.raises(ValueError, match=r"^tensor_parallel_size \(4\)"):
        LLM(toy, mesh=make_mesh(2), tensor_parallel_size=4, **OPTIONS)
    with pytest.raises(ValueError, match=r"num_heads \(8\) must be a multiple of num_kv_heads"):
        random_model(num_heads=8, num_kv_heads=3)


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_a_layer_has_two_sums_over_the_ranks(num_ranks):
    """And the embedding one; nothing else of a forward pass goes over the links."""
    model = shard(random_model(), make_mesh(num_ranks))
    graphdef, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    blocks = core.create_block_state(8, 4, 4, 8)
    kv = core.create_kv_cache(model.cache_spec(), 8, 4, jnp.float32)

    def forward(leaves, kv, tokens, row_ids, query_lens, num_decode):
        batch = core.make_batch(
            blocks,
            tokens=tokens,
            row_ids=row_ids,
            query_lens=query_lens,
            num_decode=num_decode,
        )
        one = nnx.merge(graphdef, treedef.unflatten(leaves))
        hidden, cache = one(batch, core.PagedCache(blocks=blocks, kv=kv))
        return one.logits(hidden), cache.kv

    mapped = jax.shard_map(
        forward,
        mesh=make_mesh(num_ranks),
        in_specs=([leaf.sharding.spec for leaf in leaves], *[PartitionSpec()] * 5),
        out_specs=(PartitionSpec(None, "tp"), PartitionSpec()),
        check_vma=False,
    )
    i32 = jax.ShapeDtypeStruct((4,), jnp.int32)
    given = jax.ShapeDtypeStruct((8,), jnp.int32), i32, i32, jax.ShapeDtypeStruct((), jnp.int32)
    hlo = jax.jit(mapped).lower(leaves, kv, *given).compile().as_text()
    assert len(re.findall(r" all-reduce(?:-start)?\(", hlo)) == 2 * 2 + 1
    assert not re.search(r"all-gather|all-to-all|collective-permute|reduce-scatter", hlo)


def test_a_divided_engine_sleeps_swaps_weights_and_is_restored(tmp_path):
    model, other = random_model(), random_model()
    other.head.weight[...] = -other.head.weight[...]
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    with LLM(model, **OPTIONS) as llm:
        first = [o.outputs[0].token_ids for o in run(llm, PROMPTS, greedy)]
    with LLM(other, **OPTIONS) as llm:
        second = [o.outputs[0].token_ids for o in run(llm, PROMPTS, greedy)]
    with LLM(model, tensor_parallel_size=2, **OPTIONS) as llm:
        engine = llm.engine
        for i, prompt in enumerate(PROMPTS):
            engine.add_request(str(i), prompt, greedy)
        for _ in range(3):
            engine.step()
        engine.snapshot(tmp_path / "snapshot")
        with LLM(model, tensor_parallel_size=2, **OPTIONS) as again:
            again.engine.restore(tmp_path / "snapshot")
            ended = {}
            while again.engine.has_unfinished():
                for output in again.engine.step():
                    ended[int(output.request_id)] = output.outputs[0].token_ids
            # Those that had ended before were told by the first engine.
            assert all(first[i] == tokens for i, tokens in ended.items())
            assert len(ended) >= 4
        engine.reset()
        llm.sleep(1)
        llm.wake_up()
        assert [o.outputs[0].token_ids for o in run(llm, PROMPTS, greedy)] == first
        llm.update_weights(other)
        assert [o.outputs[0].token_ids for o in run(llm, PROMPTS, greedy)] == second


def corrupted(array: jax.Array, rank: int) -> jax.Array:
    """An array that every rank has, with one number more on one of them."""
    parts = [shard.data for shard in array.addressable_shards]
    changed = np.array(parts[rank])
    changed.flat[-1] += 1
    parts[rank] = jax.device_put(changed, parts[rank].sharding)
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


@pytest.mark.parametrize("leaf", ["block_tables", "refcounts", "free_blocks", "lengths"])
def test_debug_mode_names_the_rank_whose_blocks_differ(leaf, divided_engine):
    engine = divided_engine
    engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=20))
    engine.step()
    blocks = engine.runner.blocks
    changed = corrupted(getattr(blocks, leaf), 2)
    engine.runner.blocks = dataclasses.replace(blocks, **{leaf: changed})
    with pytest.raises(AuditError, match="BlockState of rank 2 differs"):  # noqa: PT012
        while engine.has_unfinished():
            engine.step()
    engine.reset()


@pytest.fixture(scope="module")
def divided_engine():
    with LLM(random_model(), tensor_parallel_size=4, debug=True, **OPTIONS) as llm:
        yield llm.engine


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5, 8])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (6, 3), (12, 1), (9, 3), (10, 5), (8, 8)])
def test_each_head_is_somewhere_and_with_its_key(num_ranks, heads, kv_heads):
    share = Share(axis="tp", num_ranks=num_ranks)
    query, kept = share.query_heads(heads, kv_heads), share.kv_heads(kv_heads)
    own, own_kv = share.heads(heads, kv_heads)
    assert query.shape == (num_ranks, own)
    assert kept.shape == (num_ranks, own_kv)
    assert sorted(query[query >= 0]) == list(range(heads))
    assert set(kept[kept >= 0]) == set(range(kv_heads))
    group = own // own_kv
    for rank in range(num_ranks):
        for place, head in enumerate(query[rank]):
            if head >= 0:
                assert kept[rank, place // group] == head // (heads // kv_heads)
    padded = own_kv * num_ranks // share.kv_copies(kv_heads)
    assert padded >= kv_heads
    assert padded % num_ranks == 0 or num_ranks % padded == 0


def joined(cut: Cut, parts: np.ndarray) -> np.ndarray:
    """The whole from the parts of all ranks, side by side."""
    flat = cut.index.reshape(-1)
    order = np.zeros(flat.max() + 1, np.int64)
    order[flat[flat >= 0]] = np.flatnonzero(flat >= 0)
    return np.take(parts, order, axis=cut.axis)


def test_parts_of_a_parameter_join_to_the_whole():
    share = Share(axis="tp", num_ranks=8)
    model = random_model(num_heads=9, num_kv_heads=3)
    whole = {
        ".".join(map(str, p)): np.asarray(v[...]) for p, v in nnx.to_flat_state(nnx.state(model))
    }
    for name, cut in cuts(model.spec, share).items():
        parts = np.concatenate([cut.part(whole[name], r) for r in range(8)], axis=cut.axis)
        np.testing.assert_array_equal(joined(cut, parts), whole[name])


def test_a_model_that_is_divided_already_is_served_as_it_is(toy):
    divided = shard(toy, make_mesh(2))
    placed = divided.embed.weight[...]
    with LLM(divided, tensor_parallel_size=2, **OPTIONS) as llm:
        found = run(llm, PROMPTS)
        assert any(leaf is placed for leaf in llm.engine.runner._params)
    with LLM(toy, **OPTIONS) as llm:
        assert [x.outputs[0].token_ids for x in found] == [
            x.outputs[0].token_ids for x in run(llm, PROMPTS)
        ]
