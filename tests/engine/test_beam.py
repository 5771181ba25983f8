"""Beam search against transformers, through the dense model; and its rules on scripted logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.beam_search_params import BeamSearchParams
from paged_jax.engine.beam import BeamSearch
from paged_jax.models.load import load_model, open_checkpoint
from tests.beam_rows import DATA, llama_rows, smollm2_rows

EOS = 0


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def run(search: BeamSearch, logprobs_of, seen: list | None = None) -> BeamSearch:
    """Drives `search` to its end; `logprobs_of`: generated tokens of all beams -> f32[B, V]."""
    beams = [()]
    while not search.is_done:
        logprobs = logprobs_of(beams)
        top_ids = np.argsort(-logprobs, axis=1, kind="stable")[:, : search.num_candidates]
        top = np.take_along_axis(logprobs, top_ids, axis=1)
        moves = search.advance(top_ids.astype(np.int32), top)
        beams = [(*beams[source], token) for source, token in moves]
        if seen is not None:
            seen.append(beams)
    return search


def dense_logprobs(model, prompt: list[int], rows: int, length: int):
    """A function for `run` that computes everything anew, padded to one shape."""

    def logprobs_of(beams):
        tokens = np.zeros((rows, length), np.int32)
        for row, beam in enumerate(beams):
            tokens[row, : len(prompt) + len(beam)] = [*prompt, *beam]
        last = len(prompt) + len(beams[0]) - 1
        logits = np.asarray(model(jnp.asarray(tokens), last))
        return log_softmax(logits)[: len(beams)]

    return logprobs_of


def jitted(model):
    return jax.jit(lambda tokens, last: jnp.take(model(tokens), last, axis=1))


@pytest.fixture(scope="module")
def llama():
    return jitted(load_model(open_checkpoint(DATA / "tiny" / "llama")))


@pytest.mark.parametrize("row", llama_rows())
def test_beams_of_the_tiny_llama_equal_the_reference(llama, row):
    prompt = row.prompt_token_ids
    search = BeamSearch(len(prompt), row.params, frozenset({row.eos_token_id}), 512)
    beams = run(search, dense_logprobs(llama, prompt, rows=4, length=32)).results()
    row.check((beam.token_ids, beam.score) for beam in beams)
    assert {beam.finish_reason for beam in beams} == {"length"}


def scripted(table: dict[tuple[int, ...], list[float]], default: list[float]):
    """A function for `run`: probabilities of each token after the tokens generated so far."""

    def logprobs_of(beams):
        with np.errstate(divide="ignore"):
            return np.log(np.asarray([table.get(beam, default) for beam in beams], np.float32))

    return logprobs_of


def start(
    *, prompt_len: int = 3, eos: frozenset = frozenset({EOS}), max_total_tokens: int = 100, **params
) -> BeamSearch:
    return BeamSearch(prompt_len, BeamSearchParams(**params), eos, max_total_tokens)


def test_a_beam_that_ends_leaves_its_place_to_a_live_one():
    """EOS is second at the first step: it ends, and the two others go on.

    step 1  1: .5             EOS: .3             2: .15
    step 2  1 1: .5 * .7      2 1: .15 * .4       1 2: .5 * .1
    """
    table = {(): [0.3, 0.5, 0.15, 0.05], (1,): [0.1, 0.7, 0.1, 0.1]}
    seen = []
    search = start(beam_width=2, max_tokens=2, length_penalty=0.0)
    found = run(search, scripted(table, [0.1, 0.4, 0.3, 0.2]), seen).results()
    assert seen == [[(1,), (2,)], []]
    assert [beam.token_ids for beam in found] == [(1, 1), (EOS,)]
    assert [beam.finish_reason for beam in found] == ["length", "stop"]
    np.testing.assert_allclose([beam.score for beam in found], np.log([0.35, 0.3]), rtol=1e-6)


def test_an_end_that_ranks_below_the_width_is_dropped():
    search = start(beam_width=2, max_tokens=2, length_penalty=-5.0)
    table = {(): [0.1, 0.5, 0.4, 0.0001]}
    found = run(search, scripted(table, [0.0001, 0.5, 0.3, 0.2])).results()
    # Length 2 costs a factor of 32: EOS alone, at .1, would have been the best.
    assert [beam.token_ids for beam in found] == [(1, 1), (2, 1)]


@pytest.mark.parametrize("stopping", [True, False])
def test_all_beams_may_end_in_one_step(stopping):
    seen = []
    search = start(beam_width=2, max_tokens=50, early_stopping=stopping)
    table = {(): [0.001, 0.5, 0.4, 0.099]}
    found = run(search, scripted(table, [0.97, 0.01, 0.01, 0.01]), seen).results()
    assert seen == [[(1,), (2,)], []]
    assert [beam.token_ids for beam in found] == [(1, EOS), (2, EOS)]
    assert {beam.finish_reason for beam in found} == {"stop"}


# After two steps EOS (.3) and 1 EOS (.18) have ended and 1 1 (.36) leads; then 1 1 1 (.144).
SLOW = {(): [0.3, 0.6, 0.05, 0.05], (1,): [0.3, 0.6, 0.05, 0.05], (1, 1): [0.1, 0.4, 0.4, 0.1]}
# After two steps EOS (.9) and 1 EOS (.0898) have ended and 1 1 (.00996) leads. It goes on surely.
QUICK = {(): [0.9, 0.0998, 0.0001, 0.0001], (1,): [0.9, 0.0998, 0.0001, 0.0001]}


@pytest.mark.parametrize(
    ("table", "stopping", "penalty", "num_steps"),
    [
        (SLOW, True, 0.0, 2),
        (SLOW, False, 0.0, 3),
        (SLOW, "never", 0.0, 3),
        (QUICK, True, 1.0, 2),
        (QUICK, False, 1.0, 2),  # log .00996 / 2 is below log .0898 / 2 ..
        (QUICK, "never", 1.0, 8),  # .. and log .00996 / 8 is not
        (QUICK, "never", 0.0, 2),
        (QUICK, "never", -1.0, 2),
    ],
)
def test_early_stopping_decides_when_a_search_ends(table, stopping, penalty, num_steps):
    seen = []
    search = start(beam_width=2, max_tokens=8, length_penalty=penalty, early_stopping=stopping)
    found = run(search, scripted(table, [0.001, 0.997, 0.001, 0.001]), seen).results()
    assert len(seen) == num_steps
    second = (1,) * 8 if num_steps == 8 else (1, EOS)
    assert {beam.token_ids for beam in found} == {(EOS,), second}


@pytest.mark.parametrize(
    ("penalty", "best"), [(-1.0, (EOS,)), (0.0, (EOS,)), (1.0, (1, EOS)), (2.0, (1, EOS))]
)
def test_a_penalty_above_0_favours_long_beams_and_below_0_short_ones(penalty, best):
    table = {(): [0.4, 0.59, 0.005, 0.005]}
    search = start(beam_width=2, max_tokens=9, length_penalty=penalty, early_stopping=True)
    found = run(search, scripted(table, [0.6, 0.3, 0.05, 0.05])).results()
    assert found[0].token_ids == best
    scores = {
        (EOS,): np.log(0.4),
        (1, EOS): np.log(0.59 * 0.6) / 2**penalty,
    }
    assert {beam.token_ids for beam in found} == set(scores)
    for beam in found:
        np.testing.assert_allclose(beam.score, scores[beam.token_ids], rtol=1e-6)
        length = np.float32(len(beam.token_ids) ** penalty)
        assert beam.score == np.float32(beam.cumulative_logprob) / length


@pytest.mark.parametrize(
    "limits", [{"max_tokens": 2}, {"max_tokens": 9, "max_total_tokens": 5}], ids=["own", "model"]
)
def test_beams_at_a_length_limit_are_returned(limits):
    search = start(beam_width=2, **limits)
    found = run(search, scripted({}, [0.01, 0.5, 0.3, 0.19])).results()
    assert [beam.token_ids for beam in found] == [(1, 1), (1, 2)]
    assert {beam.finish_reason for beam in found} == {"length"}


def test_an_end_at_the_length_limit_is_a_stop():
    found = run(start(beam_width=2, max_tokens=1), scripted({}, [0.6, 0.4])).results()
    assert [(b.token_ids, b.finish_reason) for b in found] == [((0,), "stop"), ((1,), "length")]


def test_ignored_ends_are_tokens_like_others():
    search = start(beam_width=2, max_tokens=3, ignore_eos=True)
    found = run(search, scripted({}, [0.9, 0.05, 0.03, 0.02])).results()
    assert [beam.token_ids for beam in found] == [(0, 0, 0), (0, 0, 1)]
    assert {beam.finish_reason for beam in found} == {"length"}


def test_width_1_is_greedy():
    table = {(): [0.1, 0.2, 0.4, 0.3], (2,): [0.2, 0.1, 0.1, 0.6]}
    seen = []
    search = start(beam_width=1, max_tokens=9)
    found = run(search, scripted(table, [0.7, 0.1, 0.1, 0.1]), seen).results()
    assert seen == [[(2,)], [(2, 3)], []]
    assert [beam.token_ids for beam in found] == [(2, 3, EOS)]


def test_more_ends_than_beams_need_more_candidates():
    """The one beam ends with token 0 or goes on with 3, its fourth most likely token."""
    search = start(beam_width=1, max_tokens=8, eos=frozenset({0, 1, 2}), early_stopping="never")
    assert search.num_candidates == 4
    assert start(beam_width=3).num_candidates == 6
    assert start(beam_width=3, eos=frozenset()).num_candidates == 6
    seen = []
    run(search, scripted({(): [0.4, 0.3, 0.2, 0.1, 0.0]}, [0.0, 0.0, 0.0, 0.999, 0.001]), seen)
    assert seen[0] == [(3,)]


def test_equal_scores_go_by_beam_then_by_token():
    seen = []
    search = start(beam_width=3, max_tokens=3, eos=frozenset())
    run(search, scripted({}, [0.25, 0.25, 0.25, 0.25]), seen)
    assert seen[:2] == [[(0,), (1,), (2,)], [(0, 0), (0, 1), (0, 2)]]


def test_among_equal_scores_the_beam_that_ended_first_is_first():
    table = {(): [0.5, 0.5], (1,): [1.0, 0.0]}
    search = start(beam_width=2, max_tokens=4, length_penalty=0.0)
    found = run(search, scripted(table, [0.5, 0.5])).results()
    assert [beam.token_ids for beam in found] == [(0,), (1, 0)]
    assert found[0].score == found[1].score


def test_candidates_may_come_in_any_order():
    beams = []
    for order in ([0, 1, 2, 3], [2, 0, 3, 1]):
        search = start(beam_width=2, max_tokens=2)
        top = np.log(np.asarray([[0.1, 0.4, 0.3, 0.2]], np.float32))
        moves = search.advance(np.asarray([order], np.int32), top[:, order])
        beams.append(moves)
    assert beams == [((0, 1), (0, 2))] * 2


def test_a_vocabulary_smaller_than_the_width_fills_rows_that_have_no_chance():
    """Two tokens and no end: after two steps all four sequences, by their probability.

    1 0 and 0 1 are equally likely; 1 leads after the first step, so its continuation comes first.
    """
    seen = []
    search = start(beam_width=4, max_tokens=2, eos=frozenset())
    found = run(search, scripted({}, [0.4, 0.6]), seen).results()
    assert [len(beams) for beams in seen] == [4, 0]
    assert [beam.token_ids for beam in found] == [(1, 1), (1, 0), (0, 1), (0, 0)]


def test_a_tiny_vocabulary_with_an_end_returns_no_beam_twice():
    seen = []
    search = start(beam_width=4, max_tokens=3)
    found = run(search, scripted({}, [0.4, 0.6]), seen).results()
    assert [len(beams) for beams in seen] == [4, 4, 0]
    ends = {(0,), (1, 0), (1, 1, 0), (1, 1, 1)}
    assert {beam.token_ids for beam in found} == ends
    assert len(found) == 4


def test_impossible_tokens_are_never_chosen():
    found = run(start(beam_width=2, max_tokens=9), scripted({}, [1.0, 0.0, 0.0])).results()
    assert [(beam.token_ids, beam.score) for beam in found] == [((EOS,), 0.0)]


def test_a_search_that_is_cut_short_has_its_live_beams():
    search = start(beam_width=3, max_tokens=9)
    assert search.results() == []
    top_ids = np.asarray([[1, EOS, 2, 3]], np.int32)
    moves = search.advance(top_ids, np.log(np.asarray([[0.5, 0.3, 0.15, 0.05]], np.float32)))
    assert moves == ((0, 1), (0, 2), (0, 3))
    assert not search.is_done
    found = [(beam.token_ids, beam.finish_reason) for beam in search.results()]
    assert found == [((EOS,), "stop"), ((1,), "abort"), ((2,), "abort")]


def test_a_prompt_without_room_is_refused():
    with pytest.raises(ValueError, match=r"prompt_len \(100\) must be below max_total_tokens"):
        start(beam_width=2, prompt_len=100)


def test_rows_of_the_real_model_cover_what_they_are_for():
    rows = smollm2_rows()
    cases = {
        (row.params.beam_width, row.params.length_penalty, row.params.early_stopping)
        for row in rows
    }
    assert len(cases) == 2 * 3 * 2
    for row in rows:
        assert len(row.sequences) == len(row.scores) == row.params.beam_width
        assert row.scores == sorted(row.scores, reverse=True)
    ends = [[ids[-1] == row.eos_token_id for ids in row.sequences] for row in rows]
    assert any(all(flags) for flags in ends)
    assert any(any(flags) and not all(flags) for flags in ends)
    assert any(not any(flags) for flags in ends)
