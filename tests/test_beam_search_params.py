"""Fields of a beam search are checked, by name and rule."""

import pytest

from paged_jax.beam_search_params import BeamSearchParams


def test_defaults_are_those_of_vllm_and_hugging_face():
    params = BeamSearchParams(beam_width=4)
    assert (params.max_tokens, params.temperature, params.length_penalty) == (16, 0.0, 1.0)
    assert params.early_stopping is False
    assert params.skip_special_tokens is True
    assert params.include_stop_str_in_output is False
    assert params.ignore_eos is False


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("beam_width", 0, r"beam_width \(0\) must be an integer in \[1, 10\]"),
        ("beam_width", 11, r"beam_width \(11\) must be an integer in \[1, 10\]"),
        ("beam_width", True, "beam_width"),
        ("beam_width", 2.0, "beam_width"),
        ("max_tokens", 0, r"max_tokens \(0\) must be an integer at least 1"),
        ("max_tokens", None, "max_tokens"),
        ("temperature", 0.7, r"temperature \(0\.7\) must be 0; beam search draws nothing"),
        ("length_penalty", float("nan"), r"length_penalty \(nan\) must be a number in \[-5, 5\]"),
        ("length_penalty", 6, "length_penalty"),
        ("length_penalty", "1", "length_penalty"),
        ("early_stopping", "always", r"early_stopping \('always'\) must be True, False or"),
        ("early_stopping", 1, "early_stopping"),
        ("ignore_eos", 1, r"ignore_eos \(1\) must be True or False"),
        ("skip_special_tokens", None, "skip_special_tokens"),
        ("include_stop_str_in_output", "", "include_stop_str_in_output"),
    ],
)
def test_a_wrong_value_names_field_and_rule(name, value, rule):
    with pytest.raises(ValueError, match=rule):
        BeamSearchParams(**({"beam_width": 2} | {name: value}))


@pytest.mark.parametrize("stopping", [True, False, "never"])
@pytest.mark.parametrize("penalty", [-5, 0, 1.5])
def test_legal_values_are_kept(stopping, penalty):
    params = BeamSearchParams(beam_width=10, early_stopping=stopping, length_penalty=penalty)
    assert params.early_stopping == stopping
    assert params.length_penalty == penalty
