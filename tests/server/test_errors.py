"""Whatever is sent: an error of one form, or an answer; never a hang, and others do not notice."""

import json
import logging
import random
import threading

import pytest

from paged_jax import AsyncLLM, SamplingParams
from paged_jax.server.fields import ChatBody, CompletionBody
from tests.llm_harness import OPTIONS, run
from tests.server.harness import serving, toy_llm, wait_for

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def assert_error(response, status: int | None = None, param: str | None = None) -> dict:
    """An error body of the fixed form, and nothing of the framework's own."""
    if status is not None:
        assert response.status_code == status, response.text
    assert 400 <= response.status_code < 600
    assert response.status_code not in (422, 500), response.text
    body = response.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"]
    if param is not None:
        assert error["param"] == param, error
    return error


# (path, body, param that is named)
REFUSED = [
    (CHAT, {"messages": {"role": "user"}}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": [{"content": "hi"}]}, "messages"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages"),
    (CHAT, {"messages": ["hi"]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    (CHAT, {}, "messages"),
    (CHAT, {"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"messages": MESSAGES, "max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"messages": MESSAGES, "tools": [{}]}, "tools"),
    (CHAT, {"messages": MESSAGES, "tool_choice": "perhaps"}, "tool_choice"),
    *(
        (CHAT, {"messages": MESSAGES, "chat_template_kwargs": {name: 1}}, "chat_template_kwargs")
        for name in (
            "messages",
            "tokenizer",
            "self",
            "tools",
            "chat_template",
            "add_generation_prompt",
        )
    ),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 80}]}, "prompt"),
    (COMPLETIONS, {}, "prompt"),
    (COMPLETIONS, {"prompt": None}, "prompt"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": [""]}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt"),
    (COMPLETIONS, {"prompt": ["a"] * 200}, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt"),
    (COMPLETIONS, {"prompt": [258]}, "prompt"),
    (COMPLETIONS, {"prompt": [10**30]}, "prompt"),
    (COMPLETIONS, {"prompt": [1.5]}, "prompt"),
    (COMPLETIONS, {"prompt": [True]}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", 1]}, "prompt"),
    (COMPLETIONS, {"prompt": [5] * 64}, "prompt"),
    (COMPLETIONS, {"prompt": "x" * 65}, "prompt"),
    (COMPLETIONS, {"prompt": "a", "temperature": "hot"}, "temperature"),
    (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": -5}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "n": 0}, "n"),
    (COMPLETIONS, {"prompt": "a", "n": 65}, "n"),
    (COMPLETIONS, {"prompt": "a", "n": True}, "n"),
    (COMPLETIONS, {"prompt": "a", "top_p": 0}, "top_p"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"70000": 3}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"-1": 5}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 5}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": [1]}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "stop_token_ids": [10**6], "min_tokens": 2}, "stop_token_ids"),
    (COMPLETIONS, {"prompt": "a", "allowed_token_ids": [258]}, "allowed_token_ids"),
    (COMPLETIONS, {"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids"),
    (COMPLETIONS, {"prompt": "a", "stop": ""}, "stop"),
    (COMPLETIONS, {"prompt": "a", "priority": -10}, "priority"),
    (COMPLETIONS, {"prompt": "a", "stream": "yes"}, "stream"),
    (COMPLETIONS, {"prompt": "a", "stream": True, "stream_options": {"x": 1}}, "stream_options"),
    (COMPLETIONS, {"prompt": "a", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    (
        COMPLETIONS,
        {"prompt": "a", "stream": True, "stream_options": {"continuous_usage_stats": True}},
        "stream_options",
    ),
    (COMPLETIONS, {"prompt": "a", "stop": ["x"] * 257}, "stop"),
    (COMPLETIONS, {"prompt": "a", "bad_words": ["x" * 5000]}, "bad_words"),
    (COMPLETIONS, {"prompt": "a", "response_format": {"type": "json_object"}}, "response_format"),
    (
        COMPLETIONS,
        {"prompt": "a", "response_format": {"type": "text", "json_schema": {}}},
        "response_format",
    ),
    (
        COMPLETIONS,
        {
            "prompt": "a",
            "response_format": {"type": "json_schema", "json_schema": {"schema": {}, "x": 1}},
        },
        "response_format",
    ),
    *(
        (COMPLETIONS, {"prompt": "a", "structured_outputs": {"json": value}}, "structured_outputs")
        for value in ("[1]", "null", "5", "true", 5, [1])
    ),
    (
        COMPLETIONS,
        {"prompt": "a", "structured_outputs": {"regex": "a", "disable_any_whitespace": "yes"}},
        "structured_outputs",
    ),
    (
        COMPLETIONS,
        {"prompt": "a", "allowed_token_ids": [73], "bad_words": ["h"]},
        "allowed_token_ids",
    ),
    (COMPLETIONS, {"prompt": "a", "frobnicate": 1}, "frobnicate"),
    (COMPLETIONS, {"prompt": "a", "model": 7}, "model"),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
    ("/tokenize", {"messages": MESSAGES, "tools": [{}]}, "tools"),
    ("/detokenize", {"tokens": [258]}, "tokens"),
    ("/detokenize", {"tokens": [-1]}, "tokens"),
]


@pytest.mark.parametrize(("path", "body", "param"), REFUSED)
def test_a_refusal_names_the_field(server, path, body, param):
    assert_error(server.post(path, body), 400, param)


def test_the_message_of_a_long_prompt_speaks_of_the_prompt(server):
    for length in (64, 65, 1000):
        error = assert_error(server.post(COMPLETIONS, {"prompt": [5] * length}), 400, "prompt")
        assert f"prompt ({length} tokens)" in error["message"]
        assert error["code"] == "context_length_exceeded"
    # The longest that runs: the pool of forty slots is smaller than the context of 64.
    assert server.complete(prompt=[5] * 39, max_tokens=1)["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix"),
        (COMPLETIONS, {"prompt": "a", "best_of": 3}, "best_of"),
        (CHAT, {"messages": MESSAGES, "tool_choice": "required"}, "tool_choice"),
        (CHAT, {"messages": MESSAGES, "functions": []}, "functions"),
        (CHAT, {"messages": MESSAGES, "modalities": ["audio"]}, "modalities"),
    ],
)
def test_what_openai_has_and_we_have_not_is_501(server, path, body, param):
    assert_error(server.post(path, body), 501, param)


def test_what_nobody_expected_is_a_500_with_name_origin_and_log(toy, monkeypatch, caplog):
    llm = toy_llm(toy)
    with serving(llm, allowed_origins=("https://a.example",)) as server:

        def fail(*_, **__):
            raise ZeroDivisionError("secret")

        monkeypatch.setattr(llm._engine, "check", fail)
        headers = {"Origin": "https://a.example", "X-Request-Id": "mine"}
        with caplog.at_level(logging.INFO, "paged_jax.access"):
            for _ in range(2):  # on one connection
                response = server.post(COMPLETIONS, {"prompt": "a"}, headers=headers)
                assert response.status_code == 500
                assert response.json()["error"]["message"] == "internal error: ZeroDivisionError"
                assert response.headers["X-Request-Id"] == "mine"
                assert response.headers["Access-Control-Allow-Origin"] == "https://a.example"
            # A line is written after the answer.
            wait_for(lambda: caplog.messages.count(f"POST {COMPLETIONS} 500") == 2)
        assert "secret" in caplog.text


def test_paths_methods_and_models_that_do_not_exist(server):
    assert_error(server.client.get("/v1/nothing"), 404)
    assert_error(server.client.get(COMPLETIONS), 405)
    assert_error(server.client.delete("/v1/models"), 405)
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": MESSAGES})):
        error = assert_error(server.post(path, {**body, "model": "gpt-4"}), 404, "model")
        assert error["code"] == "model_not_found"
    assert_error(server.client.get("/v1/models/a/b"), 404, "model")
    assert server.client.get("/v1/models/toy").json()["id"] == "toy"


RAW = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"text"',
    b"\xff\xfe",
    b'{"prompt": "\xff"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "temperature": Infinity}',
    b'{"prompt": "a", "temperature": 1e999}',
    b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
    b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"messages": ' + b'[{"a":' * 3000 + b"1" + b"}]" * 3000 + b"}",
    b'{"prompt": "a", "prompt": ["b"], "n": 0}',
    b'{"prompt": "\\u0000", "stop": "\\u0000", "n": 0}',
]


@pytest.mark.parametrize("raw", RAW, ids=range(len(RAW)))
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_bodies_that_are_no_request(server, path, raw):
    headers = {"Content-Type": "application/json"}
    assert_error(server.client.post(path, content=raw, headers=headers), 400)


def test_a_body_may_be_large_but_not_too_large(server, toy):
    large = json.dumps({"prompt": "x" * 10_000_000}).encode()
    headers = {"Content-Type": "application/json"}
    assert_error(server.client.post(COMPLETIONS, content=large, headers=headers), 413)

    def chunks():
        for _ in range(100):
            yield b" " * 100_000

    assert_error(server.client.post(COMPLETIONS, content=chunks(), headers=headers), 413)
    assert_error(server.post(COMPLETIONS, {"prompt": "x" * 2_000_000}), 400, "prompt")


def random_value(rng: random.Random, depth: int = 0):
    """Any JSON, small."""
    kinds = [
        lambda: None,
        lambda: rng.random() < 0.5,
        lambda: rng.choice([0, 1, -1, 2**31, 2**63, -(2**70), 7]),
        lambda: rng.choice([0.5, -1e300, 1e-300, 2.0]),
        lambda: rng.choice(["", "a", "\x00", "\u202e", "json_object", "required", "🦙" * 9]),
    ]
    if depth < 3:
        kinds += [
            lambda: [random_value(rng, depth + 1) for _ in range(rng.randrange(3))],
            lambda: {
                rng.choice(["a", "type", "role", "content", "1", ""]): random_value(rng, depth + 1)
                for _ in range(rng.randrange(3))
            },
        ]
    return rng.choice(kinds)()


@pytest.mark.parametrize("seed", range(4))
def test_random_fields_are_answered_or_refused(server, seed):
    rng = random.Random(seed)
    before = server.complete(prompt="hello", temperature=0, max_tokens=4)["choices"]
    for _ in range(75):
        kind, path = rng.choice([(CompletionBody, COMPLETIONS), (ChatBody, CHAT)])
        body = {"prompt": "hi"} if kind is CompletionBody else {"messages": MESSAGES}
        body["max_tokens"] = 3
        for name in rng.sample(sorted(kind.model_fields), rng.randrange(1, 4)):
            body[name] = random_value(rng)
        response = server.post(path, body)
        if response.status_code != 200:
            assert_error(response)
    assert server.complete(prompt="hello", temperature=0, max_tokens=4)["choices"] == before
    server.settle()


def test_neighbours_of_refused_requests_notice_nothing(server, direct):
    [expected] = run(direct, ["abc"], SamplingParams(temperature=0.0, max_tokens=30))
    found = []
    body = {"prompt": "abc", "temperature": 0, "max_tokens": 30}
    thread = threading.Thread(target=lambda: found.append(server.complete(**body)))
    thread.start()
    for path, bad, _ in REFUSED[::3]:
        assert_error(server.post(path, bad), 400)
    thread.join()
    assert found[0]["choices"][0]["text"] == expected.outputs[0].text


def test_chats_without_a_template_or_with_a_broken_one(toy):
    raising = "{% if messages[0].role != 'user' %}{{ raise_exception('roles!') }}{% endif %}hi"
    for template, words in (
        (None, "no chat template"),
        ("{% if %}", "template"),
        (raising, "roles!"),
    ):
        with serving(toy_llm(toy, template=template)) as server:
            chat = {"messages": [{"role": "system", "content": "a"}]}
            error = assert_error(server.post(CHAT, chat), 400, "messages")
            assert words in error["message"]
            assert_error(server.post(CHAT, {**chat, "stream": True}), 400)
            assert server.complete(prompt="a", max_tokens=2)["choices"]


def test_a_model_without_a_tokenizer_takes_token_ids(toy):
    with serving(AsyncLLM(toy, **OPTIONS)) as server:
        answer = server.complete(prompt=[5, 6], max_tokens=3, logprobs=1, return_token_ids=True)
        [choice] = answer["choices"]
        assert choice["text"] == ""
        assert choice["logprobs"]["tokens"] == [f"token_id:{x}" for x in choice["token_ids"]]
        for path, body in (
            (COMPLETIONS, {"prompt": "a"}),
            (COMPLETIONS, {"prompt": [1], "stop": "a"}),
            (CHAT, {"messages": MESSAGES}),
            ("/tokenize", {"prompt": "a"}),
            ("/detokenize", {"tokens": [1]}),
        ):
            error = assert_error(server.post(path, body), 400)
            assert "tokenizer" in error["message"]


def test_tool_turns_reach_the_template(toy):
    template = (
        "{% for m in messages %}[{{ m.role }}|{{ m.content }}|"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments.x }}{% endfor %}]{% endfor %}"
        "{% if tools %}{{ tools[0].function.name }}{% endif %}{{ mood }}"
    )
    with serving(toy_llm(toy, template=template)) as server:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 7}'}}
        messages = [
            {"role": "user", "content": [{"type": "text", "text": "a"}], "extra": 1},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "42"},
        ]
        tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        body = {"messages": messages, "tools": tools, "chat_template_kwargs": {"mood": "!"}}
        ids = server.post("/tokenize", body).json()["tokens"]
        text = server.post("/detokenize", {"tokens": ids}).json()["prompt"]
        assert text == "[user|a|][assistant||7][tool|42|]f!"
        chat = server.chat(**body, max_tokens=1, return_token_ids=True, tool_choice="auto")
        assert chat["prompt_token_ids"] == ids
        silent = server.chat(**body, max_tokens=1, return_token_ids=True, tool_choice="none")
        assert len(silent["prompt_token_ids"]) == len(ids) - 1
