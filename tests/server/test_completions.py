"""What /v1/completions and /v1/chat/completions answer, beside an `LLM` asked the same."""

import json
import math

import pytest

from paged_jax import AsyncLLM, SamplingParams
from paged_jax.models.tokenizer import Tokenizer
from tests.byte_tokenizer import TEMPLATE, byte_backend
from tests.llm_harness import OPTIONS, run
from tests.server.harness import serving

GREEDY = {"temperature": 0, "max_tokens": 6}


def test_text_usage_and_head(server, direct):
    answer = server.complete(prompt="hello", **GREEDY)
    [expected] = run(direct, ["hello"], SamplingParams(temperature=0.0, max_tokens=6))
    assert answer["object"] == "text_completion"
    assert answer["model"] == "toy"
    assert answer["id"].startswith("cmpl-")
    [choice] = answer["choices"]
    assert (choice["index"], choice["text"]) == (0, expected.outputs[0].text)
    assert (choice["finish_reason"], choice["logprobs"]) == ("length", None)
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 6, 11)


def test_default_lengths_are_16_and_the_rest_of_the_context(server):
    assert server.complete(prompt="a", temperature=0)["usage"]["completion_tokens"] == 16
    answer = server.chat(messages=[{"role": "user", "content": "a"}], temperature=0)
    # The pool of ten blocks of four holds less than max_model_len.
    assert answer["usage"]["total_tokens"] >= 40
    assert answer["choices"][0]["finish_reason"] == "length"


def test_prompts_come_back_in_order_and_each_with_its_choices(server, direct):
    prompts = ["a", "bc", "def", "ghij", "k"]
    params = SamplingParams(n=3, seed=5, max_tokens=4)
    expected = run(direct, prompts, params)
    for _ in range(3):
        answer = server.complete(prompt=prompts, n=3, seed=5, max_tokens=4)
        choices = answer["choices"]
        assert [choice["index"] for choice in choices] == list(range(15))
        texts = [choice.text for output in expected for choice in output.outputs]
        assert [choice["text"] for choice in choices] == texts
        assert answer["usage"]["prompt_tokens"] == 11
        assert answer["usage"]["completion_tokens"] == 15 * 4


@pytest.mark.parametrize("prompt", [[73, 70], [[73, 70], [77]], "he", ["he", "l"]])
def test_prompts_are_text_or_token_ids(server, direct, prompt):
    is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
    prompts = [prompt] if is_one else prompt
    expected = run(direct, prompts, SamplingParams(temperature=0.0, max_tokens=6))
    choices = server.complete(prompt=prompt, **GREEDY)["choices"]
    assert [c["text"] for c in choices] == [output.outputs[0].text for output in expected]


def test_log_probabilities_are_those_of_the_model(server, direct):
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3)
    [expected] = run(direct, ["hello"], params)
    plain = server.complete(prompt="hello", logprobs=3, **GREEDY)["choices"][0]["logprobs"]
    filtered = server.complete(prompt="hello", logprobs=3, top_p=0.5, **GREEDY)
    found = filtered["choices"][0]["logprobs"]
    assert found["tokens"] == plain["tokens"]
    # The second prompt comes from the prefix cache, so fewer of its tokens are computed at once.
    assert found["token_logprobs"] == pytest.approx(plain["token_logprobs"], abs=1e-5)
    chosen = expected.outputs[0]
    for i, token in enumerate(chosen.token_ids):
        entry = chosen.logprobs[i][token]
        assert plain["token_logprobs"][i] == pytest.approx(entry.logprob, abs=1e-5)
        assert plain["tokens"][i] == entry.decoded_token
        # Tokens that look alike are one key, of the likelier.
        best = max(x.logprob for x in chosen.logprobs[i].values())
        assert max(plain["top_logprobs"][i].values()) == pytest.approx(best, abs=1e-5)
        assert 1 <= len(plain["top_logprobs"][i]) <= 3
    offsets = [0]
    for token in plain["tokens"][:-1]:
        offsets.append(offsets[-1] + len(token))
    assert plain["text_offset"] == offsets


def test_chat_log_probabilities_have_bytes(server, direct):
    messages = [{"role": "user", "content": "hi"}]
    answer = server.chat(messages=messages, logprobs=True, top_logprobs=2, **GREEDY)
    content = answer["choices"][0]["logprobs"]["content"]
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=2)
    [expected] = direct.chat(messages, params, use_tqdm=False)
    chosen = expected.outputs[0]
    assert len(content) == 6
    for entry, token, listed in zip(content, chosen.token_ids, chosen.logprobs, strict=True):
        assert entry["logprob"] == pytest.approx(listed[token].logprob, abs=1e-5)
        ranked = sorted(listed.values(), key=lambda x: x.rank)[:2]
        assert [x["logprob"] for x in entry["top_logprobs"]] == pytest.approx(
            [x.logprob for x in ranked], abs=1e-5
        )
    raw = b"".join(bytes(entry["bytes"]) for entry in content)
    assert raw.decode("utf-8", "replace") == answer["choices"][0]["message"]["content"]
    bare = server.chat(messages=messages, logprobs=True, **GREEDY)["choices"][0]["logprobs"]
    assert [x["top_logprobs"] for x in bare["content"]] == [[]] * 6


def test_echo_puts_the_prompt_in_front(server):
    bare = server.complete(prompt="hello", **GREEDY)["choices"][0]["text"]
    for prompt in ("hello", [73, 70, 77, 77, 80]):
        [choice] = server.complete(prompt=prompt, echo=True, **GREEDY)["choices"]
        assert choice["text"] == "hello" + bare
    body = {"prompt": ["hello", "world"], "echo": True, "logprobs": 2, **GREEDY}
    for choice in server.complete(**body)["choices"]:
        found = choice["logprobs"]
        assert found["tokens"][:5] in (list("hello"), list("world"))
        assert len(found["tokens"]) == 11
        assert found["token_logprobs"][0] is None
        assert found["top_logprobs"][0] is None
        assert all(x <= 0 for x in found["token_logprobs"][1:])


def test_offsets_are_of_the_text_whatever_tokens_are_called(server):
    body = {"prompt": "hello", "echo": True, "logprobs": 1, **GREEDY}
    plain, ids = (
        server.complete(**body, return_tokens_as_token_ids=as_ids)["choices"][0]["logprobs"]
        for as_ids in (False, True)
    )
    assert ids["text_offset"] == plain["text_offset"]
    assert ids["token_logprobs"] == plain["token_logprobs"]
    assert ids["tokens"][0].startswith("token_id:")


@pytest.mark.parametrize(("logprobs", "count"), [(3, 0), (0, 3)])
def test_an_echo_and_the_logprobs_of_a_prompt_each_list_what_was_asked(server, logprobs, count):
    body = {"prompt": "hello", "echo": True, "logprobs": logprobs, "prompt_logprobs": count}
    body["return_tokens_as_token_ids"] = True  # bytes that are no text look alike
    choice = server.complete(**body, **GREEDY)["choices"][0]
    for listed in choice["logprobs"]["top_logprobs"][1:]:
        assert max(1, logprobs) <= len(listed) <= logprobs + 1
    for listed in choice["prompt_logprobs"][1:]:
        assert max(1, count) <= len(listed) <= count + 1


def test_echo_alone_scores_a_prompt(server, direct):
    answer = server.complete(prompt="hello", echo=True, max_tokens=0, logprobs=1)
    [choice] = answer["choices"]
    assert choice["text"] == "hello"
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    [expected] = run(direct, ["hello"], SamplingParams(max_tokens=1, prompt_logprobs=1))
    ids = expected.prompt_token_ids
    scores = [entry[ids[i]].logprob for i, entry in enumerate(expected.prompt_logprobs) if entry]
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(scores, abs=1e-5)
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 0}).status_code == 400


def test_vllms_fields_for_prompts_and_token_ids(server):
    answer = server.complete(prompt="hello", prompt_logprobs=2, return_token_ids=True, **GREEDY)
    [choice] = answer["choices"]
    assert choice["prompt_logprobs"][0] is None
    assert len(choice["prompt_logprobs"]) == 5
    for token, listed in zip(
        choice["prompt_token_ids"][1:], choice["prompt_logprobs"][1:], strict=True
    ):
        assert set(listed[str(token)]) == {"logprob", "rank", "decoded_token"}
    assert choice["prompt_token_ids"] == [73, 70, 77, 77, 80]
    assert len(choice["token_ids"]) == 6
    named = server.complete(prompt="a", logprobs=0, return_tokens_as_token_ids=True, **GREEDY)
    assert all(x.startswith("token_id:") for x in named["choices"][0]["logprobs"]["tokens"])


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 1, "temperature": 1},
        {"temperature": 1e-6},
        {"allowed_token_ids": [70], "temperature": 1},
        {"logit_bias": {"70": 100}, "temperature": 1},
        {"echo": True, "allowed_token_ids": [70]},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_finite_json(server, fields, stream):
    body = {"prompt": "ab", "logprobs": 5, "max_tokens": 4, **fields}
    if stream:
        events = server.events("/v1/completions", body)
        choices = [choice for event in events[:-1] for choice in event["choices"]]
    else:
        choices = server.complete(**body)["choices"]

    def refuse(name):
        raise AssertionError(name)

    json.loads(json.dumps(choices), parse_constant=refuse)
    found = [x for choice in choices for x in choice["logprobs"]["token_logprobs"]]
    assert all(x is None or (math.isfinite(x) and -9999 <= x <= 0) for x in found)


def test_null_is_the_same_as_nothing(server):
    names = [
        *("n", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens"),
        *("stop", "stop_token_ids", "ignore_eos", "presence_penalty", "frequency_penalty"),
        *("repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words", "logprobs"),
        *("prompt_logprobs", "stream", "stream_options", "echo", "suffix", "best_of", "user"),
        *("response_format", "structured_outputs", "priority", "cache_salt", "model"),
        *("skip_special_tokens", "include_stop_str_in_output", "metadata"),
    ]
    greedy = {"temperature": 0, "prompt": "hello"}
    bare = server.complete(**greedy)["choices"]
    for name in names:
        if name != "temperature":
            assert server.complete(**{**greedy, name: None})["choices"] == bare, name
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "temperature": 0}
    expected = server.chat(**chat)["choices"]
    for name in ("tools", "tool_choice", "max_completion_tokens", "top_logprobs", "logprobs"):
        assert server.chat(**{**chat, name: None})["choices"] == expected, name
    assert server.complete(prompt="a", temperature=None, max_tokens=2)["choices"]


def test_a_length_beyond_the_context_is_cut(server):
    answer = server.complete(prompt="ab", max_tokens=10**12, temperature=0)
    assert answer["choices"][0]["finish_reason"] == "length"
    both = {"max_tokens": 9, "max_completion_tokens": 3, "temperature": 0}
    chat = server.chat(messages=[{"role": "user", "content": "a"}], **both)
    assert chat["usage"]["completion_tokens"] == 3


def test_structured_outputs_and_response_format(toy):
    tokenizer = Tokenizer(
        byte_backend(["<s>", "</s>"], 258),
        special_tokens={"eos_token": "</s>"},
        eos_token_ids=[1],
        chat_template=TEMPLATE,
    )
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    with serving(AsyncLLM(toy, tokenizer=tokenizer, **OPTIONS)) as server:
        messages = [{"role": "user", "content": "a"}]
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        answer = server.chat(
            messages=messages,
            response_format=wanted,
            max_tokens=16,
            structured_outputs=None,
            seed=1,
        )
        choice = answer["choices"][0]
        text = choice["message"]["content"]
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(text)["ok"], bool)
        assert text.lstrip().startswith("{")
        picked = server.complete(
            prompt="a", structured_outputs={"choice": ["yes", "no"]}, temperature=1, seed=3
        )
        assert picked["choices"][0]["text"] in ("yes", "no")
        assert picked["choices"][0]["finish_reason"] == "stop"
        for bad in (
            {"response_format": {"type": "json_schema"}},
            {"response_format": {"type": "xml"}},
            {"response_format": wanted, "structured_outputs": {"regex": "a"}},
            {"structured_outputs": {"regex": "("}},
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        ):
            response = server.post("/v1/completions", {"prompt": "a", **bad})
            assert response.status_code == 400, bad
            error = response.json()["error"]
            assert error["param"] in bad, error
        # Refused by the engine, which knows no response_format.
        dangling = {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/nothing"}}}
        response = server.post("/v1/completions", {"prompt": "a", "response_format": dangling})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "response_format"
        rules = "\n".join(f'r{i}: "a" r{i + 1}' for i in range(5000))
        fatal = {"grammar": f'start: r0\n{rules}\nr5000: "b"'}
        response = server.post("/v1/completions", {"prompt": "a", "structured_outputs": fatal})
        assert response.status_code == 400
        assert server.client.get("/health").status_code == 200
