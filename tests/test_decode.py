"""The decode loop against the same rows run one token at a time by plain Python.

The scripted model of most tests keeps a diary in the KV pool: the key of a token is (token,
position), and the next token is a function of all tokens that the row can read. A wrong slot, a
stale block or a neighbour's token changes what is said next.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged_jax import core
from paged_jax.core import CacheSpec, PagedCache
from paged_jax.decode import (
    MAX_STOP_IDS,
    NO_STOP_ID,
    create_row_state,
    decode_loop,
    finish_rows,
    fork_rows,
    greedy,
    sample,
    seed_words,
    start_rows,
)
from tests.hlo import pool_copies

N, P, S, M, V = 18, 2, 4, 12, 31
STEPS = 6
SPEC = CacheSpec(num_layers=1, num_kv_heads=1, head_dim=2)


def next_token(history: list[int]) -> int:
    """What a row says after `history`, by hand: tokens weighted by their places, modulo V."""
    return sum(token * (position + 1) for position, token in enumerate(history)) % V


def scripted_step(params, batch, cache):
    """Writes (token, position) and answers with what the row's table holds."""
    pair = jnp.stack([batch.tokens, batch.positions], axis=-1).astype(jnp.float32)[:, None, :]
    kv = core.write(cache.kv, 0, pair, -pair, batch.slots)

    def read(row, length):
        table = cache.blocks.block_tables[jnp.where(row < S, row, 0)]
        keys, values = core.gather(kv, 0, table, length)
        total = jnp.sum(keys[:, 0, 0] * (keys[:, 0, 1] + 1.0))
        return jnp.where(jnp.all(keys == -values), total, jnp.nan)

    total = jax.vmap(read)(batch.row_ids, batch.context_lens)
    wanted = jnp.where(jnp.isnan(total), 0, total).astype(jnp.int32) % V
    logits = jax.nn.one_hot(wanted, V) + params
    return logits, PagedCache(blocks=cache.blocks, kv=kv)


def poisoned_cache(block_size: int = P, *, num_hogged: int = 0) -> PagedCache:
    """N blocks full of NaN, of which row 1 holds some that nobody else can have."""
    kv = core.create_kv_cache(SPEC, N, block_size, "float32")
    kv = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), kv)
    blocks = core.create_block_state(N, block_size, S, M)
    blocks, allocation = allocate(blocks, np.array([0, num_hogged * block_size, 0, 0], np.int32))
    assert allocation.ok
    return PagedCache(blocks=blocks, kv=kv)


allocate = jax.jit(core.allocate)
start = jax.jit(start_rows)


@functools.cache
def compiled(sample_fn=greedy):
    def run(cache, rows, *, num_steps, reserved):
        zero = jnp.float32(0)
        return decode_loop(
            scripted_step,
            zero,
            cache,
            rows,
            num_steps=num_steps,
            reserved=reserved,
            sample_fn=sample_fn,
        )

    return jax.jit(run, static_argnames=("num_steps", "reserved"))


def loop(cache, rows, *, num_steps=STEPS, reserved=False, sample_fn=greedy):
    return compiled(sample_fn)(cache, rows, num_steps=num_steps, reserved=reserved)


@jax.jit
def write_tokens(cache, rows, positions, tokens):
    slots = core.slot_mapping(cache.blocks, rows, positions)
    pair = jnp.stack([tokens, positions], axis=-1).astype(jnp.float32)[:, None, :]
    return PagedCache(blocks=cache.blocks, kv=core.write(cache.kv, 0, pair, -pair, slots))


def prefill(cache, prompts: dict[int, list[int]]):
    """Prompts into rows, as prefill would leave them; the cache and the rows' first tokens."""
    counts = np.zeros(S, np.int32)
    placed = [(row, i, token) for row in prompts for i, token in enumerate(prompts[row])]
    for row, prompt in prompts.items():
        counts[row] = len(prompt)
    blocks, allocation = allocate(cache.blocks, counts)
    assert allocation.ok
    padded = np.array(placed + [(S, 0, 0)] * (32 - len(placed)), np.int32)
    cache = write_tokens(PagedCache(blocks=blocks, kv=cache.kv), *padded.T)
    first = {row: next_token(prompt) for row, prompt in prompts.items()}
    return cache, first


def started(prompts, first, *, steps=STEPS, **fields):
    """Rows after their prompts; fields are one for all or one per prompt."""
    ids = list(prompts)
    padding = [0] * (S - len(ids))
    steps = steps if isinstance(steps, list) else [steps] * len(ids)
    for name, value in fields.items():
        if isinstance(value, list):
            fields[name] = np.array([*value, *[value[0]] * len(padding)])
    return start(
        create_row_state(S),
        np.array([*ids, *[S] * len(padding)]),
        token=np.array([*[first[row] for row in ids], *padding]),
        position=np.array([*[len(prompts[row]) for row in ids], *padding]),
        steps_left=np.array([*steps, *padding]),
        **fields,
    )


def alone(prompt: list[int], count: int) -> list[int]:
    """The next `count` tokens after the first, by plain Python."""
    history = [*prompt, next_token(prompt)]
    for _ in range(count):
        history.append(next_token(history))
    return history[len(prompt) + 1 :]


PROMPTS = {0: [3, 1, 4], 2: [1, 5, 9, 2, 6, 5], 3: [8]}


def said(rows, tokens, prompts) -> dict[int, list[int]]:
    """The tokens of each row, by how far its position moved; zeros must follow."""
    counts = {row: int(rows.position[row]) - len(prompts[row]) for row in prompts}
    for row, count in counts.items():
        assert not tokens[count:, row].any()
    return {row: tokens[:count, row].tolist() for row, count in counts.items()}


@pytest.mark.parametrize("reserved", [False, True])
@pytest.mark.parametrize("block_size", [1, 2])
def test_rows_say_what_each_says_alone(block_size, reserved):
    cache, first = prefill(poisoned_cache(block_size), PROMPTS)
    steps = {0: 3, 2: 2, 3: 1} if block_size == 1 else {0: STEPS, 2: STEPS, 3: 3}
    rows = started(PROMPTS, first, steps=list(steps.values()))
    cache, rows, tokens = loop(cache, rows, reserved=reserved)
    assert said(rows, tokens, PROMPTS) == {
        row: alone(prompt, steps[row]) for row, prompt in PROMPTS.items()
    }
    assert rows.finished.all()
    assert not rows.stalled.any()
    assert rows.token.tolist()[3] == alone(PROMPTS[3], steps[3])[-1]
    # The last token is not written yet, and nothing is reserved beyond it.
    assert cache.blocks.lengths.tolist() == rows.position.tolist()
    core.audit(cache.blocks)


@pytest.mark.parametrize("reserved", [False, True])
def test_loops_continue_each_other(reserved):
    cache, first = prefill(poisoned_cache(), PROMPTS)
    rows = started(PROMPTS, first)
    parts = []
    for count in (3, 3):
        cache, rows, tokens = loop(cache, rows, num_steps=count, reserved=reserved)
        parts.append(tokens)
    whole = np.concatenate(parts)
    assert said(rows, whole, PROMPTS) == {row: alone(p, STEPS) for row, p in PROMPTS.items()}


def test_a_stop_id_ends_its_row_only():
    cache, first = prefill(poisoned_cache(), PROMPTS)
    expected = {row: alone(prompt, STEPS) for row, prompt in PROMPTS.items()}
    stop = [[expected[0][1]], [NO_STOP_ID], [expected[3][0]]]
    rows = started(PROMPTS, first, stop_ids=stop)
    cache, rows, tokens = loop(cache, rows)
    ends = {0: expected[0].index(stop[0][0]) + 1, 2: STEPS, 3: 1}
    assert said(rows, tokens, PROMPTS) == {row: expected[row][: ends[row]] for row in PROMPTS}
    assert rows.steps_left.tolist() == [STEPS - ends[0], 0, 0, STEPS - 1]
    core.audit(cache.blocks)


def test_a_row_may_be_finished_at_its_start():
    _, first = prefill(poisoned_cache(), PROMPTS)
    rows = started(PROMPTS, first, stop_ids=[first[0]], steps=[STEPS, STEPS, 0])
    is_stop = [first[row] == first[0] for row in (0, 2)]
    assert rows.finished.tolist() == [True, True, is_stop[1], True]


def test_finished_rows_change_nothing():
    cache, _ = prefill(poisoned_cache(), PROMPTS)
    rows = create_row_state(S)
    after, rows, tokens = loop(cache, rows)
    assert not tokens.any()
    jax.tree.map(np.testing.assert_array_equal, after.blocks, cache.blocks)
    np.testing.assert_array_equal(after.kv.kv[:, 1:], cache.kv.kv[:, 1:])


@pytest.mark.parametrize("reserved", [False, True])
def test_rows_without_a_block_stall_and_go_on_later(reserved):
    # Prompts take 2 + 3 + 1 blocks, two are left.
    cache, first = prefill(poisoned_cache(num_hogged=N - 8), PROMPTS)
    rows = started(PROMPTS, first)
    cache, rows, tokens = loop(cache, rows, reserved=reserved)
    before = said(rows, tokens, PROMPTS)
    assert rows.stalled.any()
    assert not (rows.stalled & rows.finished).any(), "such as row 1, which never started"
    expected = {row: alone(prompt, STEPS) for row, prompt in PROMPTS.items()}
    for row in PROMPTS:
        assert before[row] == expected[row][: len(before[row])]
        assert (len(before[row]) < STEPS) == bool(rows.stalled[row])
    core.audit(cache.blocks)
    lengths = cache.blocks.lengths.tolist()
    assert [lengths[row] for row in PROMPTS] == [int(rows.position[row]) for row in PROMPTS]
    # Rows 1 and 2 go; the others find their blocks.
    blocks = jax.jit(core.free)(cache.blocks, np.array([False, True, True, False]))
    rows = finish_rows(rows, jnp.arange(S) == 2)
    cache, rows, tokens = loop(PagedCache(blocks=blocks, kv=cache.kv), rows, reserved=reserved)
    for row in (0, 3):
        count = STEPS - len(before[row])
        assert before[row] + tokens[:count, row].tolist() == expected[row]
    assert rows.finished.all()


def test_blocks_go_to_the_lowest_rows_first():
    prompts = {0: [3, 1], 2: [5, 9], 3: [2, 6, 5, 3]}
    cache, first = prefill(poisoned_cache(num_hogged=N - 6), prompts)
    _, rows, tokens = loop(cache, started(prompts, first))
    # Two blocks for the next token of three rows; rows 0 and 2 then fill the second slot.
    assert rows.stalled.tolist() == [True, False, True, True]
    assert rows.position.tolist() == [4, 0, 4, 4]
    assert said(rows, tokens, prompts) == {0: alone([3, 1], 2), 2: alone([5, 9], 2), 3: []}


@pytest.mark.parametrize("reserved", [False, True])
def test_a_row_stalls_when_its_table_is_full(reserved):
    prompts = {0: list(range(M * P - 2))}
    cache, first = prefill(poisoned_cache(), prompts)
    cache, rows, tokens = loop(cache, started(prompts, first, steps=100), reserved=reserved)
    assert rows.position.tolist() == [M * P, 0, 0, 0]
    assert rows.stalled.tolist() == [True, False, False, False]
    assert said(rows, tokens, prompts)[0] == alone(prompts[0], 2)


@pytest.mark.parametrize("reserved", [False, True])
def test_a_row_that_was_freed_and_not_finished_stalls_alone(reserved):
    prompts = {**PROMPTS, 2: list(range(20))}
    cache, first = prefill(poisoned_cache(), prompts)
    rows = started(prompts, first)
    blocks = jax.jit(core.free)(cache.blocks, np.arange(S) == 2)
    _, rows, tokens = loop(PagedCache(blocks=blocks, kv=cache.kv), rows, reserved=reserved)
    assert rows.stalled.tolist() == [False, False, True, False]
    assert said(rows, tokens, prompts) == {0: alone(prompts[0], STEPS), 2: [], 3: alone([8], STEPS)}


def test_no_steps_change_nothing_and_fewer_are_refused():
    cache, first = prefill(poisoned_cache(), PROMPTS)
    rows = started(PROMPTS, first)
    run = {"step_fn": scripted_step, "params": None, "cache": cache, "rows": rows}
    after, same_rows, tokens = decode_loop(**run, num_steps=0)
    assert tokens.shape == (0, S)
    assert after is cache
    assert same_rows is rows
    with pytest.raises(ValueError, match=r"num_steps \(-1\) must be at least 0"):
        decode_loop(**run, num_steps=-1)
    run["rows"] = create_row_state(S + 2)
    with pytest.raises(ValueError, match=r"rows \(6\) must be as many as the cache has \(4\)"):
        decode_loop(**run, num_steps=1)


def test_row_ids_out_of_range_start_nothing():
    rows = start_rows(create_row_state(S), [-1, S, 9], token=3, position=1, steps_left=1)
    assert rows.finished.all()
    rows = start_rows(create_row_state(S), 2, token=3, position=1, steps_left=1, stop_ids=5)
    assert rows.finished.tolist() == [True, True, False, True]


@pytest.mark.parametrize("reserved", [False, True])
def test_forked_rows_copy_before_they_write(reserved):
    prompt = PROMPTS[2][:5]  # two full blocks and half of a third
    cache, first = prefill(poisoned_cache(), {0: prompt})
    rows = started({0: prompt}, first, steps=3)
    pairs = np.array([0, 0, 1], np.int32), np.array([1, 2, 3], np.int32)
    blocks = jax.jit(core.fork)(cache.blocks, *pairs)
    assert len({tuple(table) for table in blocks.block_tables.tolist()}) == 1
    rows = jax.jit(fork_rows)(rows, *pairs)
    # Rows 1 and 2 say another first token, so that what follows differs.
    rows = dataclasses.replace(rows, token=rows.token.at[1:3].set(jnp.array([7, 11])))
    cache, rows, tokens = loop(PagedCache(blocks=blocks, kv=cache.kv), rows, reserved=reserved)
    for row, token in ((0, first[0]), (1, 7), (2, 11), (3, first[0])):
        history = [*prompt, token]
        for _ in range(3):
            history.append(next_token(history))
        assert tokens[:3, row].tolist() == history[6:]
    tables = cache.blocks.block_tables
    assert len(set(map(tuple, tables[:, :2].tolist()))) == 1, "full blocks stay shared"
    assert len(set(tables[:, 2].tolist())) == 4, "the partial one does not"
    core.audit(cache.blocks)


def test_draws_depend_on_the_row_alone():
    fields = {"temperature": 1.5, "top_k": 9}
    cache, first = prefill(poisoned_cache(), PROMPTS)
    seeds = [seed_words(5), seed_words(2**40 + 1), seed_words(5, choice=1)]
    rows = started(PROMPTS, first, seeds=seeds, **fields)
    _, rows, tokens = loop(cache, rows, sample_fn=sample)
    together = said(rows, tokens, PROMPTS)
    for i, row in enumerate(PROMPTS):
        other = (row + 1) % S
        prompts = {other: PROMPTS[row]}
        cache, first = prefill(poisoned_cache(), prompts)
        rows = started(prompts, first, seeds=seeds[i], **fields)
        _, rows, tokens = loop(cache, rows, sample_fn=sample)
        assert said(rows, tokens, prompts)[other] == together[row]
    assert together[0] != alone(PROMPTS[0], STEPS), "nothing was drawn"


def test_choices_of_a_fork_draw_apart():
    rows = start_rows(
        create_row_state(S), [0], token=1, position=4, steps_left=3, seeds=seed_words(7)
    )
    forked = fork_rows(rows, [0, 1, S], [1, 2, 3], choices=[1, 2, 3])
    assert forked.seeds[:, 2].tolist() == [0, 1, 2, 0]
    assert forked.position.tolist() == [4, 4, 4, 0]
    assert forked.finished.tolist() == [False, False, False, True]
    assert fork_rows(rows, [0, -1], [1, 2]).position.tolist() == [4, 4, 0, 0]


def test_the_users_sampler_sees_the_position_of_its_token():
    def place(logits, rows):
        return rows.position

    cache, first = prefill(poisoned_cache(), PROMPTS)
    _, rows, tokens = loop(cache, started(PROMPTS, first), sample_fn=place)
    assert said(rows, tokens, PROMPTS) == {
        row: list(range(len(p) + 1, len(p) + 1 + STEPS)) for row, p in PROMPTS.items()
    }


def test_more_stop_ids_than_fit_are_refused():
    with pytest.raises(ValueError, match=f"stop_ids \\(9\\) must be at most {MAX_STOP_IDS}"):
        start_rows(
            create_row_state(S), [0], token=0, position=0, steps_left=1, stop_ids=list(range(9))
        )


@pytest.mark.parametrize("reserved", [False, True])
def test_the_pool_is_updated_in_place(reserved):
    cache = poisoned_cache()

    def run(cache, rows):
        zero = jnp.float32(0)
        return decode_loop(scripted_step, zero, cache, rows, num_steps=STEPS, reserved=reserved)

    step = jax.jit(run, donate_argnums=0).lower(cache, create_row_state(S)).compile()
    assert pool_copies(step.as_text(), cache.kv.kv.shape) == []
    assert step.memory_analysis().alias_size_in_bytes >= cache.kv.kv.nbytes


@pytest.mark.parametrize("reserved", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_a_real_model_says_what_its_dense_form_says(toy, rng, reserved):
    graphdef, params = nnx.split(toy)
    prompts = [rng.integers(0, 258, length).astype(np.int32) for length in (5, 2, 8, 1)]
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)

    def step_fn(params, batch, cache):
        model = nnx.merge(graphdef, params)
        hidden, cache = model(batch, cache)
        return model.logits(hidden), cache

    @jax.jit
    def generate(params, cache, tokens):
        model = nnx.merge(graphdef, params)
        blocks, _ = core.allocate(cache.blocks, lengths)
        batch = core.make_batch(
            blocks, tokens=tokens, row_ids=jnp.arange(4), query_lens=lengths, num_decode=0
        )
        hidden, cache = model(batch, PagedCache(blocks=blocks, kv=cache.kv))
        first = greedy(model.logits(hidden[batch.last_tokens]), create_row_state(4))
        rows = start_rows(
            create_row_state(4),
            jnp.arange(4),
            token=first,
            position=lengths,
            steps_left=jnp.array([STEPS, 3, STEPS, STEPS]),
        )
        cache, rows, more = decode_loop(
            step_fn, params, cache, rows, num_steps=STEPS, reserved=reserved
        )
        return cache, rows, jnp.concatenate([first[None], more])

    cache = PagedCache(
        blocks=core.create_block_state(20, 4, 4, 5),
        kv=core.create_kv_cache(toy.cache_spec(), 20, 4, "float32"),
    )
    cache, rows, tokens = generate(params, cache, np.concatenate(prompts))
    core.audit(cache.blocks)
    dense = nnx.jit(lambda model, tokens: model(tokens[None])[0])
    for row, prompt in enumerate(prompts):
        history = prompt.tolist()
        for _ in range(int(rows.position[row]) - len(prompt) + 1):
            padded = np.pad(np.array(history, np.int32), (0, 16 - len(history)))
            history.append(int(dense(toy, padded)[len(history) - 1].argmax()))
        assert tokens[: len(history) - len(prompt), row].tolist() == history[len(prompt) :]
    assert (np.asarray(rows.position) - lengths).tolist() == [STEPS, 3, STEPS, STEPS]
