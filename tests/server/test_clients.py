"""Clients that go away, that are too many, and that are there when the server ends."""

import contextlib
import json
import logging
import signal
import socket
import threading
import time

import pytest

from paged_jax.server import serve
from tests.llm_harness import OPTIONS
from tests.server.harness import serving, toy_llm, wait_for

LONG = {"prompt": "hi", "temperature": 0, "max_tokens": 500, "ignore_eos": True}


@contextlib.contextmanager
def slow(llm, seconds: float):
    """Makes every dispatch last longer."""
    issue = llm._engine.dispatcher.issue

    def issue_slowly(*arguments, **options):
        time.sleep(seconds)
        return issue(*arguments, **options)

    llm._engine.dispatcher.issue = issue_slowly
    yield
    llm._engine.dispatcher.issue = issue


def connect(server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), 30)


def send(server, body: dict, path: str = "/v1/completions") -> socket.socket:
    """A raw connection that has sent a request."""
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection = connect(server)
    connection.sendall(head.encode() + f"Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
    return connection


@pytest.fixture(scope="module")
def small(toy):
    """Two requests run, four wait."""
    # Steps one by one, so that a long request lasts.
    llm = toy_llm(toy, max_num_seqs=2, decode_steps=1, num_blocks=40, max_model_len=160)
    with serving(llm) as running:
        yield running
        running.settle()


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"n": 2}, {"prompt": ["a", "b", "c"]}])
@pytest.mark.parametrize("when", ["at once", "running", "queued"])
def test_a_client_that_goes_away_aborts_its_request(small, more, when):
    llm = small.llm
    with slow(llm, 0.01):
        before = small.settle()["generation_tokens"]
        others = [send(small, LONG) for _ in range(2)] if when == "queued" else []
        if others:
            wait_for(lambda: llm.stats()["num_running"] == 2)
        connection = send(small, {**LONG, **more})
        if when == "running":
            wait_for(lambda: llm.stats()["generation_tokens"] > before + 1)
        elif when == "queued":
            wait_for(lambda: llm.stats()["num_waiting"] > 0)
        connection.close()
        for other in others:
            other.close()
        stats = small.settle()
    assert stats["generation_tokens"] - before < 150
    assert small.app.state.metrics.num_tracked == 0
    assert small.complete(prompt="hi", max_tokens=2)["choices"]


def test_nothing_is_kept_of_requests_that_ended(server):
    metrics = server.app.state.metrics

    def sizes() -> list[int]:
        engine = server.llm._engine
        return [
            len(server.llm._streams),
            len(server.llm._inbox),
            len(engine._requests),
            len(engine.state.waiting._heap),
            len(engine.state.deadlines),
            len(engine.dispatcher.images),
            metrics.num_tracked,
        ]

    before = sizes()
    for i in range(100):
        server.complete(prompt=f"{i}", max_tokens=1, n=1 + i % 2)
    server.settle()
    assert sizes() == before == [0] * 7


def test_too_many_are_told_to_come_again(toy):
    llm = toy_llm(toy, max_waiting=2, decode_steps=1)
    with serving(llm) as server, slow(llm, 0.02):
        body = {**LONG, "prompt": ["a"] * (OPTIONS["max_num_seqs"] + 2), "max_tokens": 30}
        connection = send(server, body)
        wait_for(lambda: llm.stats()["num_running"] > 0)
        response = server.post("/v1/completions", {"prompt": "a"})
        assert response.status_code == 429
        assert int(response.headers["Retry-After"]) > 0
        assert response.json()["error"]["code"] == "rate_limit_exceeded"
        assert server.client.get("/health").status_code == 200
        connection.close()
        server.settle()
        assert server.complete(prompt="a", max_tokens=1)["choices"]
        # More prompts than ever fit are refused as a whole.
        response = server.post("/v1/completions", {"prompt": ["a"] * 7, "max_tokens": 1})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "prompt"
        server.settle()


def test_priority_decides_who_runs_first(toy):
    llm = toy_llm(toy, max_num_seqs=1, scheduling_policy="priority", decode_steps=1)
    with serving(llm) as server, slow(llm, 0.01):
        first = send(server, LONG)
        wait_for(lambda: llm.stats()["num_running"] == 1)
        ended = []

        def ask(name: str, priority: int) -> None:
            server.complete(prompt=name, max_tokens=2, priority=priority)
            ended.append(name)

        threads = []
        for count, (name, priority) in enumerate([("late", 5), ("soon", -10), ("next", 0)]):
            threads.append(threading.Thread(target=ask, args=(name, priority)))
            threads[-1].start()
            wait_for(lambda count=count: llm.stats()["num_waiting"] > count)
        first.close()
        for thread in threads:
            thread.join()
        assert ended == ["soon", "next", "late"]


@pytest.mark.parametrize("timeout", [0.0, 30.0])
def test_an_end_lets_requests_end_or_aborts_them_at_its_deadline(toy, timeout):
    llm = toy_llm(toy, decode_steps=1)
    found = {}
    with serving(llm, shutdown_timeout=timeout) as server, slow(llm, 0.05):
        body = {"prompt": "hi", "temperature": 0, "max_tokens": 20}

        def ask(stream: bool) -> None:
            path = "/v1/completions"
            found[stream] = server.events(path, body) if stream else server.complete(**body)

        threads = [threading.Thread(target=ask, args=(stream,)) for stream in (True, False)]
        for thread in threads:
            thread.start()
        wait_for(lambda: llm.stats()["num_running"] == 2)
        server.server.should_exit = True
        for thread in threads:
            thread.join()
    reason = "abort" if timeout == 0 else "length"
    assert found[False]["choices"][0]["finish_reason"] == reason
    *_, last, done = found[True]
    assert done == "[DONE]"
    assert last["choices"][0]["finish_reason"] == reason
    if timeout:
        assert found[False]["usage"]["completion_tokens"] == 20


def test_clients_that_go_away_in_the_middle_of_a_body_are_a_line_in_the_log(server, caplog):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
    with caplog.at_level(logging.INFO):
        with connect(server) as connection:
            connection.sendall(head)
            time.sleep(0.05)
        wait_for(lambda: "POST /v1/completions 499" in caplog.messages)
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def test_a_body_has_one_length(server):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n"
    with connect(server) as connection:
        connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400 ")


def test_half_a_body_does_not_hold_the_end(toy, monkeypatch):
    monkeypatch.setattr(serve, "_LAST_BYTES_SECONDS", 0.2)
    with serving(toy_llm(toy), shutdown_timeout=60.0) as server:
        connection = connect(server)
        connection.sendall(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        server.complete(prompt="a", max_tokens=1)
        start = time.monotonic()
    assert time.monotonic() - start < 20
    connection.close()


def test_a_second_signal_does_not_wait(toy):
    llm = toy_llm(toy, decode_steps=1, num_blocks=40, max_model_len=160)
    found = []
    with serving(llm, shutdown_timeout=600.0) as server, slow(llm, 0.05):
        thread = threading.Thread(target=lambda: found.append(server.complete(**LONG)))
        thread.start()
        wait_for(lambda: llm.stats()["num_running"] == 1)
        for _ in range(2):
            server.server.handle_exit(signal.SIGINT, None)
            time.sleep(0.2)
        thread.join(20)
        # In this thread the signals are not raised again, as those of a real server are.
    assert found[0]["choices"][0]["finish_reason"] == "abort"


def test_an_aborted_echo_tells_what_is_known_of_the_prompt(toy):
    llm = toy_llm(toy, decode_steps=1, max_num_batched_tokens=4)
    found = []
    with serving(llm, shutdown_timeout=0.0) as server, slow(llm, 0.3):
        body = {"prompt": "x" * 30, "echo": True, "logprobs": 1, "max_tokens": 2}
        thread = threading.Thread(target=lambda: found.append(server.complete(**body)))
        thread.start()
        wait_for(lambda: llm.stats()["num_running"] == 1)
        server.server.should_exit = True
        thread.join(20)
    choice = found[0]["choices"][0]
    assert choice["finish_reason"] == "abort"
    assert choice["text"] == "x" * 30
    assert choice["logprobs"]["tokens"] == ["x"] * 30
    assert choice["logprobs"]["token_logprobs"][-1] is None


def test_a_dead_engine_is_unhealthy_and_answers_503(toy, monkeypatch):
    llm = toy_llm(toy)
    with serving(llm) as server:
        assert server.client.get("/health").json() == {"status": "ok"}

        def die():
            raise SystemError("gone")

        monkeypatch.setattr(llm._engine, "step", die)
        response = server.post("/v1/completions", {"prompt": "a"})
        assert response.status_code == 503
        for path in ("/health", "/v1/completions"):
            response = (
                server.client.get(path)
                if path == "/health"
                else server.post(path, {"prompt": "a", "stream": True})
            )
            assert response.status_code == 503
            assert response.json()["error"]["type"] == "server_error"
        assert server.client.get("/metrics").status_code == 200


def test_a_stalled_engine_is_unhealthy(toy):
    llm = toy_llm(toy, decode_steps=1)
    with serving(llm, stalled_after=0.2) as server:
        server.complete(prompt="a", max_tokens=3)
        with slow(llm, 1.0):
            connection = send(server, LONG)
            wait_for(lambda: server.client.get("/health").status_code == 503)
            connection.close()
        server.settle()
        assert server.client.get("/health").status_code == 200
