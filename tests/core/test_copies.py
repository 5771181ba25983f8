"""What XLA makes of the transitions: a donated state is changed where it lies."""

import re

import jax
import jax.numpy as jnp
import pytest

from paged_jax import core

N, P, S, M = 1000, 4, 24, 40

ONES, IDS = jnp.ones(S, jnp.int32), jnp.ones(4, jnp.int32)


@pytest.mark.parametrize(
    ("transition", "argument"),
    [
        (lambda s, x: core.allocate(s, x, max_new_blocks=2 * S), ONES),
        (core.free, ONES > 0),
        (core.truncate, ONES),
        (lambda s, x: core.fork(s, x, x), IDS),
        (lambda s, x: core.share(s, x, jnp.zeros((4, M), jnp.int32), x), IDS),
        (lambda s, x: core.reindex(s, x, x + 1), IDS),
        (core.retain, IDS),
        (core.release, IDS),
    ],
    ids=["allocate", "free", "truncate", "fork", "share", "reindex", "retain", "release"],
)
def test_no_transition_copies_tables_or_stack(transition, argument):
    state = core.create_block_state(N, P, S, M)
    text = jax.jit(transition, donate_argnums=0).lower(state, argument).compile().as_text()
    assert re.findall(rf"= s32\[(?:{N + 1}|{S},{M})\]\S* (?:copy|copy-start)\(", text) == []


def test_the_search_for_copies_finds_those_of_a_state_that_is_not_donated():
    state = core.create_block_state(N, P, S, M)
    text = jax.jit(core.retain).lower(state, IDS).compile().as_text()
    assert re.findall(rf"= s32\[(?:{N + 1}|{S},{M})\]\S* (?:copy|copy-start)\(", text)
