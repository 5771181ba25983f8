"""Every field of SamplingParams changes something, and what it changes is what numpy computes.

Greedy rows are compared with a loop over the dense model whose logits numpy adjusts; all rows with
themselves alone, whoever runs beside them.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.config import EngineConfig
from paged_jax.engine import Engine
from paged_jax.models.tokenizer import Tokenizer
from paged_jax.sampling_params import SamplingParams
from tests.byte_tokenizer import byte_backend
from tests.engine.harness import PLAIN, ROOMY, assert_idle, run_all
from tests.engine.workloads import limit

V, EOS = 258, 1
PROMPT = [40, 41, 42, 43, 40]
BASE = {"temperature": 0.0, "max_tokens": 10}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Ids 0 and 1 are special, the others bytes."""
    backend = byte_backend(["<s>", "</s>"], V)
    return Tokenizer(backend, special_tokens={"eos_token": "</s>"}, eos_token_ids=(EOS,))


@pytest.fixture(scope="module")
def engine(toy, tokenizer):
    return make(toy, tokenizer)


def make(toy, tokenizer, **options) -> Engine:
    config = EngineConfig(debug=True, **{**ROOMY, **options})
    return Engine(toy, config, tokenizer=tokenizer, eos_token_ids=(EOS,))


@pytest.fixture(scope="module")
def dense(toy):
    """Callable tokens -> f32[V], logits of the next one."""
    compiled = jax.jit(lambda tokens, last: jnp.take(toy(tokens), last, axis=1)[0])

    def logits_of(tokens: list[int]) -> np.ndarray:
        padded = np.zeros((1, 64), np.int32)
        padded[0, : len(tokens)] = tokens
        return np.asarray(compiled(padded, len(tokens) - 1))

    return logits_of


def greedy(dense, tokenizer, params: SamplingParams, prompt=PROMPT) -> list[int]:
    """Token after token, as the fields say."""
    output: list[int] = []
    ends = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else {EOS})
    words = [tokenizer.encode(word, False) for word in params.bad_words or ()]
    while len(output) < params.max_tokens:
        logits = dense([*prompt, *output]).astype(np.float32)
        if params.allowed_token_ids is not None:
            banned = np.ones(V, bool)
            banned[list(params.allowed_token_ids)] = False
            logits[banned] = -np.inf
        for *start, last in words:
            if not start or output[-len(start) :] == start:
                logits[last] = -np.inf
        if len(output) < params.min_tokens:
            logits[list(ends)] = -np.inf
        for token, bias in (params.logit_bias or {}).items():
            logits[token] += np.float32(np.clip(bias, -100, 100))
        seen = list({*prompt, *output})
        factor = np.float32(params.repetition_penalty)
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / factor, logits[seen] * factor)
        counts = np.bincount(output, minlength=V).astype(np.float32)
        logits -= np.float32(params.frequency_penalty) * counts
        logits -= np.float32(params.presence_penalty) * (counts > 0)
        output.append(int(np.argmax(logits)))
        if output[-1] in ends:
            break
    return output


def completion(engine, prompt=PROMPT, **fields):
    params = SamplingParams(**{**BASE, **fields})
    return run_all(engine, [("a", prompt, params)]).finished["a"].outputs[0]


@pytest.fixture(scope="module")
def free(engine) -> list[int]:
    """What is said when nothing is asked for."""
    return completion(engine).token_ids


def on_logits(free: list[int]) -> dict[str, dict]:
    """Fields that choose other tokens, with values that do so here."""
    text = Tokenizer(byte_backend(["<s>", "</s>"], V), special_tokens={})
    first, second = free[0], next(x for x in free if x != free[0])
    return {
        "presence_penalty": {"presence_penalty": 2.0},
        "frequency_penalty": {"frequency_penalty": 1.5},
        "negative penalties": {"frequency_penalty": -1.0, "presence_penalty": -1.0},
        "repetition_penalty": {"repetition_penalty": 1.8},
        "repetition_penalty below 1": {"repetition_penalty": 0.5},
        "logit_bias": {"logit_bias": {first: -3.0, 77: 1.0}},
        "logit_bias beyond its bound": {"logit_bias": {77: 1e30, first: -1e30}},
        "allowed_token_ids": {"allowed_token_ids": [5, 31, 32, 33, 257]},
        "stop_token_ids": {"stop_token_ids": [second]},
        "min_tokens": {"stop_token_ids": [first, second], "min_tokens": 4},
        "min_tokens with more ends than a row has": {
            "stop_token_ids": sorted({*free, *range(20, 60)}),
            "min_tokens": 6,
        },
        "ignore_eos": {"logit_bias": {EOS: 100.0}, "ignore_eos": True},
        "end of sequence": {"logit_bias": {EOS: 100.0}},
        "end of sequence later": {"logit_bias": {EOS: 100.0}, "min_tokens": 3},
        "bad_words of one token": {"bad_words": [text.decode([first])]},
        "bad_words of several": {"bad_words": [text.decode(free[:2])]},
        "all at once": {
            "presence_penalty": 0.3,
            "frequency_penalty": 0.2,
            "repetition_penalty": 1.1,
            "logit_bias": {9: 3.0, 10: 2.0},
            "min_tokens": 2,
            "stop_token_ids": [9],
        },
    }


NAMES = list(on_logits(list(range(70, 80))))


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_those_of_adjusted_logits(engine, dense, tokenizer, free, name):
    fields = on_logits(free)[name]
    output = completion(engine, **fields)
    params = SamplingParams(**{**BASE, **fields})
    assert output.token_ids == greedy(dense, tokenizer, params)
    assert output.token_ids != free
    assert_idle(engine)


@pytest.mark.parametrize(
    "options",
    [
        {"decode_steps": 8, "overlap": True},
        {"decode_steps": 8, "overlap": False},
        {"num_blocks": 10, "preemption_mode": "recompute"},
        {"num_blocks": 10, "preemption_mode": "swap"},
    ],
    ids=str,
)
def test_rows_do_not_notice_each_other(toy, tokenizer, engine, dense, free, options):
    """Each beside all others, some of them random, as alone; in small pools they are preempted."""
    asked = {name: SamplingParams(**{**BASE, **f}) for name, f in on_logits(free).items()}
    asked["plain"] = SamplingParams(**BASE)
    asked["random"] = SamplingParams(temperature=1.0, seed=5, max_tokens=10)
    asked["choices"] = SamplingParams(
        n=3, temperature=0.9, seed=6, max_tokens=8, frequency_penalty=1.0, min_p=0.05
    )
    asked["told"] = SamplingParams(**BASE, prompt_logprobs=2, logprobs=1)
    crowd = make(toy, tokenizer, **options)
    run = run_all(crowd, [(name, PROMPT, params) for name, params in asked.items()])
    if "num_blocks" in options:
        assert crowd.stats()["num_preemptions"] > 0
    for name, params in asked.items():
        alone = run_all(engine, [("alone", PROMPT, params)]).finished["alone"]
        found = run.finished[name]
        assert [x.token_ids for x in found.outputs] == [x.token_ids for x in alone.outputs], name
        assert [x.text for x in found.outputs] == [x.text for x in alone.outputs], name
        assert rounded(found.prompt_logprobs) == rounded(alone.prompt_logprobs)
    assert_idle(crowd)


def rounded(entries) -> list | None:
    return entries and [
        entry and {token: (round(x.logprob, 4), x.rank) for token, x in entry.items()}
        for entry in entries
    ]


# Every field by itself. What acts on logits is above.


DRAW = {"temperature": 1.5, "seed": 3}
CHANGES = {
    "temperature": (0.9, {"seed": 3}),
    "top_p": (0.1, DRAW),
    "top_k": (2, DRAW),
    "min_p": (0.9, DRAW),
    "seed": (4, {"temperature": 1.5, "seed": None}),
    "max_tokens": (3, {}),
    "min_tokens": (3, {"logit_bias": {EOS: 100.0}}),
    "stop_token_ids": ([90], {"logit_bias": {90: 100.0}}),
    "ignore_eos": (True, {"logit_bias": {EOS: 100.0}}),
    "presence_penalty": (2.0, {}),
    "frequency_penalty": (2.0, {}),
    "repetition_penalty": (2.0, {}),
    "logit_bias": ({9: 100.0}, {}),
    "allowed_token_ids": ([9, 10], {}),
    "logprobs": (2, {}),
    "skip_special_tokens": (False, {"logit_bias": {0: 100.0}}),
    "detokenize": (False, {"logit_bias": {90: 100.0}}),
    "structured_outputs": ({"choice": ["yes", "no"]}, {}),
}
"""Field -> (value, the other fields); those that are not here have tests of their own below."""

ELSEWHERE = {
    "n",
    "stop",
    "bad_words",
    "prompt_logprobs",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
}


def test_every_field_is_shown_to_act():
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert names == CHANGES.keys() | ELSEWHERE


@pytest.mark.parametrize("field", CHANGES)
def test_a_field_changes_the_outcome(engine, field):
    """Of a request that is the same but for it."""
    value, more = CHANGES[field]
    assert completion(engine, **more) != completion(engine, **{**more, field: value})


def test_n_gives_as_many_choices(engine):
    params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=6)
    outputs = run_all(engine, [("a", PROMPT, params)]).finished["a"].outputs
    assert len({tuple(output.token_ids) for output in outputs}) == 3


def spell(text: str, tokenizer) -> dict[int, float]:
    """Biases that allow no other characters than these."""
    return {"allowed_token_ids": tokenizer.encode(text, False)}


def test_a_stop_string_cuts_the_text_or_stays(engine, tokenizer):
    whole = completion(engine, **spell("abc", tokenizer), ignore_eos=True)
    stop = whole.text[3:5]
    place = whole.text.index(stop)
    for included in (False, True):
        cut = completion(
            engine,
            **spell("abc", tokenizer),
            ignore_eos=True,
            stop=stop,
            include_stop_str_in_output=included,
        )
        assert cut.text == whole.text[: place + len(stop) * included]
        assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)


def test_a_stop_string_waits_for_min_tokens(engine, tokenizer):
    fields = {**spell("a", tokenizer), "ignore_eos": True, "stop": "aa"}
    assert completion(engine, **fields).text == ""
    later = completion(engine, **fields, min_tokens=4)
    assert len(later.token_ids) == 5
    assert later.text == "aaa"


def test_a_stop_token_is_told_and_an_end_is_not(engine):
    at_end = completion(engine, logit_bias={EOS: 100.0})
    assert (at_end.token_ids, at_end.stop_reason, at_end.text) == ([EOS], None, "")
    named = completion(engine, logit_bias={90: 100.0}, stop_token_ids=[90])
    assert (named.token_ids, named.stop_reason, named.text) == ([90], 90, "")
    shown = completion(
        engine, logit_bias={90: 100.0}, stop_token_ids=[90], include_stop_str_in_output=True
    )
    assert shown.text == engine.tokenizer.decode([90])


def test_user_stops_act_where_ends_are_ignored(engine):
    """Two ends of the model, neither of which counts; a stop of the request does."""
    assert len(completion(engine, logit_bias={EOS: 100.0}, ignore_eos=True).token_ids) == 10
    stopped = completion(engine, logit_bias={65: 100.0}, ignore_eos=True, stop_token_ids=[65])
    assert (stopped.token_ids, stopped.stop_reason) == ([65], 65)


def test_a_bad_word_is_never_said(engine, tokenizer):
    fields = {**spell("abc", tokenizer), "max_tokens": 40}
    said = completion(engine, **fields).text
    word = said[5:8]
    other = completion(engine, **fields, bad_words=[word])
    assert word not in other.text
    assert len(other.token_ids) == 40


@pytest.mark.parametrize("overlap", [False, True])
def test_prompt_logprobs_are_those_of_the_dense_model(toy, tokenizer, dense, overlap):
    """A prompt of nine tokens twice, and after another: the cache is not read for it."""
    engine = make(toy, tokenizer, overlap=overlap, max_num_batched_tokens=64)
    prompt = list(range(30, 39))
    params = SamplingParams(**BASE, prompt_logprobs=2)
    found = []
    for name, ids in (("a", prompt), ("b", prompt), ("c", [7, 8, 9]), ("d", prompt)):
        run = run_all(engine, [(name, ids, params)])
        found.append(run.finished[name].prompt_logprobs)
    assert found[0] == found[1] == found[3]
    assert len(found[0]) == 9
    assert found[0][0] is None
    for position in range(1, 9):
        logits = dense(prompt[:position]).astype(np.float64)
        logprobs = logits - np.log(np.exp(logits).sum())
        entry = found[0][position]
        best = np.argsort(-logprobs, kind="stable")[:2]
        assert entry.keys() == {prompt[position], *best.tolist()}
        for token, value in entry.items():
            assert value.logprob == pytest.approx(logprobs[token], abs=1e-4)
            assert value.rank == 1 + int(np.sum(logprobs > logprobs[token]))
            assert value.decoded_token == tokenizer.decode_token(token)


@pytest.mark.parametrize("chunk", [1, 3])
def test_prompt_logprobs_do_not_depend_on_chunks(engine, toy, tokenizer, chunk):
    prompt = list(range(30, 41))
    params = SamplingParams(**BASE, prompt_logprobs=1)
    whole = run_all(engine, [("a", prompt, params)]).finished["a"].prompt_logprobs
    small = make(toy, tokenizer)
    limit(small, chunk=chunk, decode_steps=1)
    beside = SamplingParams(**BASE)
    run = run_all(small, [("b", [9, 8, 7], beside), ("a", prompt, params)])
    assert rounded(run.finished["a"].prompt_logprobs) == rounded(whole)


def test_logprobs_are_the_model_s_own(engine, free):
    """Whatever is banned, biased, penalised or filtered away."""
    plain = completion(engine, logprobs=3).logprobs[0]
    for fields in (
        {"allowed_token_ids": [9]},
        {"logit_bias": {9: 100.0}},
        {"temperature": 1.0, "top_k": 1, "seed": 1},
        {"temperature": 1.0, "top_p": 0.01, "seed": 1},
        {"repetition_penalty": 2.0},
    ):
        entry = completion(engine, logprobs=3, **fields).logprobs[0]
        assert all(np.isfinite(x.logprob) and x.logprob <= 0 for x in entry.values())
        for token in plain.keys() & entry.keys():
            assert entry[token] == plain[token]
        assert plain.keys() - {free[0]} <= entry.keys() | {free[0]}


def test_random_draws_keep_to_what_is_allowed(engine):
    allowed = [9, 40, 200]
    seen = set()
    for seed in range(12):
        output = completion(
            engine, temperature=1e6, seed=seed, allowed_token_ids=allowed, ignore_eos=True
        )
        seen |= set(output.token_ids)
    assert seen == set(allowed)


def test_numbers_without_bounds_are_taken_for_the_largest(engine, free):
    huge = 10**400
    fields = {"min_tokens": huge, "max_tokens": None, "top_k": huge}
    params = SamplingParams(**{**BASE, **fields})
    engine.add_request("huge", PROMPT, params, timeout=huge, priority=huge)
    engine.add_request("other", PROMPT, SamplingParams(**BASE))
    ended = {}
    while engine.has_unfinished():
        ended |= {output.request_id: output for output in engine.step() if output.finished}
    assert ended["other"].outputs[0].token_ids == free
    assert len(PROMPT) + len(ended["huge"].outputs[0].token_ids) == engine.config.max_model_len


WRONG = [
    ({"stop_token_ids": [10**6], "min_tokens": 2}, r"stop_token_ids: token id 1000000 "),
    ({"logit_bias": {70000: 3.0}}, r"logit_bias: token id 70000 "),
    ({"allowed_token_ids": [V]}, r"allowed_token_ids: token id 258 "),
    ({"allowed_token_ids": [EOS], "min_tokens": 1}, r"leave no token"),
    ({"structured_outputs": {"regex": "[a"}}, r"^structured_outputs cannot be used: "),
    ({"structured_outputs": {"json": "{"}}, r"^structured_outputs cannot be used: "),
    ({"structured_outputs": {"grammar": "start: x"}}, r"^structured_outputs cannot be used: "),
    ({"structured_outputs": {"regex": "a"}, "bad_words": ["a"]}, r"^bad_words cannot be combined"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG, ids=lambda x: str(x))
def test_what_cannot_be_is_refused_and_nobody_notices(engine, free, fields, message):
    with pytest.raises(ValueError, match=message) as caught:
        engine.add_request("a", PROMPT, SamplingParams(**{**BASE, **fields}))
    assert "\n" not in str(caught.value)
    assert not engine.has_unfinished()
    assert completion(engine).token_ids == free


@pytest.mark.parametrize("fields", [{"bad_words": ["a"]}, {"structured_outputs": {"regex": "a"}}])
def test_what_is_text_needs_a_tokenizer(toy, fields):
    engine = Engine(toy, EngineConfig(**{**ROOMY, **PLAIN}), eos_token_ids=(EOS,))
    with pytest.raises(ValueError, match="needs a tokenizer, and this model has none"):
        engine.add_request("a", PROMPT, SamplingParams(**{**BASE, **fields}))
