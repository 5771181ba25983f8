import dataclasses

import pytest

from paged_jax.sampling_params import SamplingParams

# Acting fields are tested where they act: tests/ops, tests/engine and tests/test_llm.py.
ACTING = {
    "n": 2,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "seed": 3,
    "max_tokens": 5,
    "stop": "x",
    "ignore_eos": True,
    "logprobs": 2,
}
# A legal value in vLLM that is not the default.
REFUSED = {
    "min_p": 0.1,
    "min_tokens": 1,
    "stop_token_ids": [3],
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {3: 1.0},
    "allowed_token_ids": [3],
    "bad_words": ["x"],
    "prompt_logprobs": 1,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "include_stop_str_in_output": True,
    "detokenize": False,
    "structured_outputs": {"json": {}},
}
WRONG = [
    ("temperature", float("nan")),
    ("temperature", -0.1),
    ("temperature", "0.5"),
    ("temperature", True),
    ("temperature", None),
    ("top_p", 0.0),
    ("top_p", 1.5),
    ("top_p", -0.1),
    ("top_p", float("nan")),
    ("top_p", "1"),
    ("top_k", -2),
    ("top_k", 2.0),
    ("top_k", True),
    ("top_k", None),
    ("n", 0),
    ("n", 65),
    ("n", True),
    ("n", None),
    ("max_tokens", 0),
    ("max_tokens", -5),
    ("max_tokens", 1.0),
    ("max_tokens", True),
    ("logprobs", 21),
    ("logprobs", -1),
    ("logprobs", True),
    ("stop", ""),
    ("stop", [""]),
    ("stop", ["x", ""]),
    ("stop", [1]),
    ("seed", -(2**63) - 1),
    ("seed", 2**64),
    ("seed", 0.5),
    ("seed", True),
]


def test_every_field_acts_or_is_refused():
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    assert sorted(names) == sorted([*ACTING, *REFUSED])


def test_defaults_are_supported():
    SamplingParams().check_supported()


@pytest.mark.parametrize("name", ACTING)
def test_a_field_that_acts_is_taken(name):
    SamplingParams(**{name: ACTING[name]}).check_supported()


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_does_not_act_is_refused_and_named(name):
    params = SamplingParams(**{name: REFUSED[name]})
    with pytest.raises(NotImplementedError, match=rf"SamplingParams\.{name} "):
        params.check_supported()


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_does_not_act_may_keep_its_default(name):
    default = getattr(SamplingParams(), name)
    SamplingParams(**{name: default}).check_supported()


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda value: repr(value))
def test_a_wrong_value_is_refused_with_the_field_and_the_value(name, value):
    with pytest.raises(ValueError, match=rf"^{name} ") as caught:
        SamplingParams(**{name: value})
    assert f"({value!r})" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [0, -1])
def test_top_k_is_off_at_zero_and_minus_one(value):
    SamplingParams(top_k=value).check_supported()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0),
        ("top_p", 1),
        ("max_tokens", None),
        ("max_tokens", 1),
        ("logprobs", 0),
        ("logprobs", 20),
        ("seed", -(2**63)),
        ("seed", 2**64 - 1),
    ],
)
def test_a_value_at_the_edge_of_its_range_is_taken(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("stop", "strings"), [(None, ()), ("ab", ("ab",)), (["a", "b"], ("a", "b")), ([], ())]
)
def test_stop_strings_are_a_tuple(stop, strings):
    assert SamplingParams(stop=stop).stop_strings == strings


def test_an_unknown_field_is_refused():
    with pytest.raises(TypeError, match="temperatur"):
        SamplingParams(temperatur=0.0)
