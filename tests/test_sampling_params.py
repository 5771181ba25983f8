import dataclasses

import pytest

from paged_jax.sampling_params import SamplingParams, StructuredOutputsParams

# A value of each field that is not its default; tests/engine/test_sampling_fields.py shows what
# they do.
LEGAL = {
    "n": 2,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "seed": 3,
    "max_tokens": 5,
    "stop": "x",
    "ignore_eos": True,
    "logprobs": 2,
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
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("min_p", float("nan")),
    ("min_p", None),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("min_tokens", True),
    ("presence_penalty", 2.1),
    ("presence_penalty", float("nan")),
    ("frequency_penalty", -2.1),
    ("frequency_penalty", "1"),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", float("inf")),
    ("prompt_logprobs", 21),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", True),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["1"]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", 5),
    ("stop_token_ids", "5"),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [-1]),
    ("allowed_token_ids", [1.5]),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {"5": 1.0}),
    ("logit_bias", [5]),
    ("bad_words", [""]),
    ("bad_words", "word"),
    ("bad_words", [1]),
    ("ignore_eos", 1),
    ("detokenize", None),
    ("skip_special_tokens", "yes"),
    ("include_stop_str_in_output", 0),
    ("spaces_between_special_tokens", 1),
    ("structured_outputs", "json"),
    ("structured_outputs", 5),
]


def test_every_field_has_a_legal_value():
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    assert sorted(names) == sorted(LEGAL)


@pytest.mark.parametrize("name", LEGAL)
def test_a_legal_value_is_taken(name):
    value = getattr(SamplingParams(**{name: LEGAL[name]}), name)
    if name == "structured_outputs":
        value = {"json": value.json}
    assert value == LEGAL[name]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda value: repr(value))
def test_a_wrong_value_is_refused_with_the_field_and_the_value(name, value):
    with pytest.raises(ValueError, match=rf"^{name} ") as caught:
        SamplingParams(**{name: value})
    assert f"({value!r})" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [0, -1])
def test_top_k_is_off_at_zero_and_minus_one(value):
    assert SamplingParams(top_k=value).top_k == value


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


@pytest.mark.parametrize("value", [float("nan"), "1", None, True])
def test_a_bias_must_be_a_number(value):
    with pytest.raises(ValueError, match=r"^logit_bias of token 5 "):
        SamplingParams(logit_bias={5: value})


def test_biases_have_a_bound():
    SamplingParams(logit_bias=dict.fromkeys(range(1024), 1.0))
    with pytest.raises(ValueError, match=r"^logit_bias \(1025 tokens\)"):
        SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0))


def test_a_stop_string_needs_text():
    with pytest.raises(ValueError, match=r"^stop \('x'\) needs detokenize"):
        SamplingParams(stop="x", detokenize=False)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"json": {}, "regex": "a"},
        {"choice": []},
        {"choice": "ab"},
        {"choice": ["a", ""]},
        {"regex": ""},
        {"grammar": 5},
        {"json": 5},
        {"json_object": False},
        {"json_object": 1},
        {"jsn": {}},
        {"structural_tag": "x"},
    ],
    ids=str,
)
def test_structured_outputs_have_exactly_one_form(fields):
    with pytest.raises(ValueError, match=r"^structured_outputs"):
        SamplingParams(structured_outputs=fields)


def test_structured_outputs_may_be_a_mapping():
    params = SamplingParams(structured_outputs={"regex": "a+"})
    assert params.structured_outputs == StructuredOutputsParams(regex="a+")


def test_an_unknown_field_is_refused():
    with pytest.raises(TypeError, match="temperatur"):
        SamplingParams(temperatur=0.0)
