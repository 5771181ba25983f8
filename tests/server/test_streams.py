"""Streams: deltas add up to the answer without streaming, and every choice ends exactly once."""

import random

import pytest

from tests.server.harness import Script, serving, toy_llm

CHAT = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}


def text_of(events: list, index: int = 0) -> str:
    """Of one choice, from either kind of chunk."""
    choices = [c for event in events if event != "[DONE]" for c in event["choices"]]
    mine = [c for c in choices if c["index"] == index]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in mine)


def assert_ends_once(events: list, num_choices: int, *, is_chat: bool) -> None:
    """Each choice has one role chunk (chat), then deltas, then one end, and nothing after it."""
    assert events[-1] == "[DONE]"
    assert "[DONE]" not in events[:-1]
    begun, ended = set(), set()
    for event in events[:-1]:
        for choice in event["choices"]:
            index = choice["index"]
            assert index not in ended
            if is_chat:
                assert ("role" in choice["delta"]) == (index not in begun)
            begun.add(index)
            if choice["finish_reason"] is not None:
                ended.add(index)
    assert begun == ended == set(range(num_choices))
    assert len({event["id"] for event in events[:-1]}) == 1


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("more", [{}, {"logprobs": True}, {"stop": ["a", "xy"], "seed": 4}])
def test_deltas_add_up(server, n, is_chat, more):
    body = {"n": n, "max_tokens": 9, "temperature": 1, "seed": 2, **more}
    if is_chat:
        path, body = "/v1/chat/completions", {**CHAT, **body}
        whole = server.chat(**body)["choices"]
        texts = [choice["message"]["content"] for choice in whole]
    else:
        path, body = "/v1/completions", {"prompt": "hi", **body}
        if "logprobs" in body:
            body["logprobs"] = 0
        whole = server.complete(**body)["choices"]
        texts = [choice["text"] for choice in whole]
    events = server.events(path, body)
    assert_ends_once(events, n, is_chat=is_chat)
    assert [text_of(events, i) for i in range(n)] == texts
    if "logprobs" in body:
        chunks = [c for event in events[:-1] for c in event["choices"] if c["logprobs"]]
        for index, choice in enumerate(whole):
            key = "content" if is_chat else "tokens"
            mine = [c["logprobs"][key] for c in chunks if c["index"] == index]
            names = [x["token"] if is_chat else x for listed in mine for x in listed]
            expected = choice["logprobs"][key]
            assert names == [x["token"] if is_chat else x for x in expected]


def test_choices_of_different_lengths_end_once_each():
    # Of one prompt the choices are equal, so several prompts: 1, 4 and 9 tokens and a common end.
    script = Script([[b"x", b"."], [b"abc", b"d", b"e", b"f", b"."], [b"y"] * 8 + [b"."], [b"."]])
    with serving(script.llm(num_blocks=20)) as server:
        for logprobs in (None, 0):
            body = {"prompt": script.prompts, "stop": ["."], "logprobs": logprobs}
            body |= {"temperature": 0, "max_tokens": 20}
            events = server.events("/v1/completions", body)
            assert_ends_once(events, 4, is_chat=False)
            assert [text_of(events, i) for i in range(4)] == ["x", "abcdef", "y" * 8, ""]
            whole = server.complete(**body)["choices"]
            assert [(c["text"], c["finish_reason"], c["stop_reason"]) for c in whole] == [
                ("x", "stop", "."),
                ("abcdef", "stop", "."),
                ("y" * 8, "stop", "."),
                ("", "stop", "."),
            ]


@pytest.mark.parametrize("usage", [None, False, True])
@pytest.mark.parametrize("is_chat", [False, True])
def test_usage_comes_last_and_only_when_asked_for(server, usage, is_chat):
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    body = {**CHAT, "max_tokens": 4} if is_chat else {"prompt": "hi", "max_tokens": 4}
    if usage is not None:
        body["stream_options"] = {"include_usage": usage}
    events = server.events(path, body)
    if not usage:
        assert all(event["choices"] for event in events[:-1])
        assert all("usage" not in event for event in events[:-1])
        return
    *chunks, last = events[:-1]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4
    assert all(chunk["choices"] and chunk["usage"] is None for chunk in chunks)
    body["stream_options"]["continuous_usage_stats"] = True
    counts = [event["usage"]["completion_tokens"] for event in server.events(path, body)[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == 4


def test_stream_options_need_a_stream(server):
    body = {"prompt": "a", "stream_options": {"include_usage": True}}
    response = server.post("/v1/completions", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "stream_options"


# (pieces, stop strings, text without and with include_stop_str_in_output, stop reason)
STOPS = [
    ([b" red", b" green", b"!", b"\n", b"more"], ["\n"], " red green!", "\n"),
    ([b" x", b" y", b" z", b" w"], ["x y z"], " ", "x y z"),
    ([b" Bob", b"?", b" Bo"], ["Bob:"], " Bob? Bo", None),
    ([b"and Bo"], ["Bob:"], "and Bo", None),
    ([b"Done\n\n", b"x"], ["\n"], "Done", "\n"),
    ([b"ab@@@cd", b"x"], ["@@"], "ab", "@@"),
    ([b"one two three", b"x"], ["two", "one two three"], "", "one two three"),
    # The first that is complete ends the text: nobody knows what would have come.
    ([b"one", b" tw", b"o th", b"ree"], ["two", "one two three"], "one ", "two"),
    ([b"a", b"b", b"c"], ["bc", "abd"], "a", "bc"),
]


def test_text_is_cut_at_the_leftmost_stop_and_nothing_held_is_lost():
    script = Script([pieces for pieces, *_ in STOPS])
    with serving(script.llm()) as server:
        for prompt, (pieces, stop, text, reason) in zip(script.prompts, STOPS, strict=True):
            for includes in (False, True):
                body = {"prompt": prompt, "stop": stop, "max_tokens": len(pieces)}
                body |= {"temperature": 0, "include_stop_str_in_output": includes}
                [choice] = server.complete(**body)["choices"]
                wanted = text + (reason or "") if includes else text
                assert choice["text"] == wanted, (pieces, stop)
                assert choice["stop_reason"] == reason
                assert choice["finish_reason"] == ("stop" if reason else "length")
                assert text_of(server.events("/v1/completions", body)) == wanted


def test_characters_split_over_tokens_come_whole():
    rng = random.Random(3)
    texts = [
        "Q 山b川 👨\u200d👩\u200d👦 ü".encode(),
        b"\xffok",
        bytes([0xE2, 0x28, 0xA1, 0xF0, 0x9F, 0x98]) + b"a",
        "cut in the middle 山".encode()[:-1],
        bytes(rng.randrange(256) for _ in range(50)),
    ]
    script = Script([[bytes([byte]) for byte in text] for text in texts])
    with serving(script.llm(num_blocks=40)) as server:
        for prompt, text in zip(script.prompts, texts, strict=True):
            body = {"prompt": prompt, "max_tokens": len(text), "temperature": 0}
            expected = text.decode("utf-8", "replace")
            assert server.complete(**body)["choices"][0]["text"] == expected
            events = server.events("/v1/completions", body)
            assert text_of(events) == expected
            for event in events[:-1]:
                for char in event["choices"][0]["text"]:
                    assert char != "\ufffd" or "\ufffd" in expected


def test_what_fails_later_is_told_by_one_event(toy, monkeypatch):
    llm = toy_llm(toy, max_step_retries=0, overlap=False, decode_steps=1)
    with serving(llm) as server:
        expected = server.complete(prompt="hi", temperature=0, max_tokens=8)
        calls = 0
        issue = llm._engine.dispatcher.issue

        def fail_once(*arguments, **options):
            nonlocal calls
            calls += 1
            if calls == 4:
                raise RuntimeError("the device is on fire, secret path /x")
            return issue(*arguments, **options)

        monkeypatch.setattr(llm._engine.dispatcher, "issue", fail_once)
        events = server.events("/v1/completions", {"prompt": "hi", "temperature": 0})
        assert "error" in events[-1]
        assert set(events[-1]["error"]) == {"message", "type", "param", "code"}
        assert "secret" not in events[-1]["error"]["message"]
        assert all("error" not in event for event in events[:-1])
        assert events.count("[DONE]") == 0
        # The same without a stream is 500, and the next request runs.
        calls = 0
        response = server.post("/v1/completions", {"prompt": "hi", "temperature": 0})
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
        again = server.complete(prompt="hi", temperature=0, max_tokens=8)
        assert again["choices"] == expected["choices"]
        server.settle()


def test_what_is_wrong_is_refused_before_the_first_byte(server):
    for body in ({"prompt": [1] * 64}, {"prompt": "a", "temperature": 99e9}, {"prompt": [999]}):
        response = server.post("/v1/completions", {**body, "stream": True})
        assert response.status_code == 400
        assert response.json()["error"]["message"]
