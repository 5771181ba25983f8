"""The openai client, unchanged, and curl, on `paged-jax serve` with the real model."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import openai
import pytest

ROWS = json.loads((Path(__file__).parents[1] / "data" / "smollm2.json").read_text())["rows"]
CHATS = [row for row in ROWS if row["kind"] == "chat"]
OTHERS = [row for row in ROWS if row["kind"] != "chat"]
MODEL = "smollm2-135m-instruct"
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
KEY = "a-key"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """Of a server in a process of its own, as users start it."""
    log = tmp_path_factory.mktemp("server") / "log"
    command = [sys.executable, "-m", "paged_jax.cli", "serve", "--port", "0", "--api-key", KEY]
    command += ["--max-num-seqs", "4", "--max-model-len", "512", "--num-blocks", "128"]
    command += ["--max-num-batched-tokens", "64", "--dtype", "float32", "--warmup", "lazy"]
    # This test is not about speed, and compiling is most of its time.
    env = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "true"}
    with log.open("w") as file:
        process = subprocess.Popen(command, stderr=file, env=env)
    try:
        yield wait_for_address(process, log)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    access = [line for line in lines if line["logger"] == "paged_jax.access"]
    assert {"request_id", "status", "duration_s", "path"} <= set(access[-1])
    assert not [line for line in lines if "trace" in line]


def wait_for_address(process, log: Path) -> str:
    end = time.monotonic() + 240
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()
        if found := re.search(r"running on (http://127\.0\.0\.1:\d+)", log.read_text()):
            return found[1]
        time.sleep(0.1)
    raise AssertionError(log.read_text())


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=300) as found:
        yield found


def test_models(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_chats_equal_the_reference(client):
    for row in CHATS[:3]:
        messages = [{"role": "user", "content": row["prompt"]}]
        answer = client.chat.completions.create(
            model=MODEL, messages=messages, temperature=0, max_tokens=len(row["token_ids"])
        )
        [choice] = answer.choices
        assert choice.message.content == row["text"].removesuffix("<|im_end|>")
        assert answer.usage.prompt_tokens == len(row["prompt_token_ids"])
        ends = row["token_ids"][-1] == 2
        assert choice.finish_reason == ("stop" if ends else "length")


def test_completions_equal_the_reference(client):
    for row in OTHERS[:2] or CHATS[:2]:
        answer = client.completions.create(
            model=MODEL,
            prompt=row["prompt_token_ids"],
            temperature=0,
            max_tokens=len(row["token_ids"]),
            logprobs=1,
        )
        [choice] = answer.choices
        assert choice.logprobs.token_logprobs == pytest.approx(row["logprobs"], abs=5e-3)


def test_streams_and_their_usage(client):
    stream = client.chat.completions.create(
        model=MODEL,
        messages=CAPITAL,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "The capital of France is Paris."
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage.completion_tokens == 8
    stream = client.completions.create(
        model=MODEL, prompt="Water boils at", temperature=0, max_tokens=8, stream=True
    )
    text = "".join(chunk.choices[0].text for chunk in stream)
    whole = client.completions.create(
        model=MODEL, prompt="Water boils at", temperature=0, max_tokens=8
    )
    assert text == whole.choices[0].text


def test_the_helper_for_streams_reads_them(client):
    with client.chat.completions.stream(model=MODEL, messages=CAPITAL, temperature=0) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == "The capital of France is Paris."


def test_several_choices_seeds_and_stops(client):
    def ask(**options):
        return client.chat.completions.create(
            model=MODEL, messages=CAPITAL, max_tokens=12, **options
        ).choices

    first, again = (ask(n=3, seed=7, temperature=1.5) for _ in range(2))
    assert [choice.index for choice in first] == [0, 1, 2]
    texts = [choice.message.content for choice in first]
    assert texts == [choice.message.content for choice in again]
    assert len(set(texts)) == 3
    [stopped] = ask(temperature=0, stop=["France"])
    assert stopped.message.content == "The capital of "
    assert stopped.finish_reason == "stop"


def test_log_probabilities(client):
    answer = client.chat.completions.create(
        model=MODEL, messages=CAPITAL, temperature=0, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    row = next(row for row in CHATS if row["prompt"] == CAPITAL[0]["content"])
    assert [entry.logprob for entry in content] == pytest.approx(row["logprobs"], abs=5e-3)
    assert all(len(entry.top_logprobs) == 3 for entry in content)
    text = b"".join(bytes(entry.bytes) for entry in content[:-1]).decode()
    assert text == answer.choices[0].message.content


def test_tools_and_response_formats(client):
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
    }
    answer = client.chat.completions.create(
        model=MODEL, messages=CAPITAL, tools=[tool], max_tokens=4, temperature=0
    )
    assert answer.choices[0].message.content
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "big": {"type": "boolean"}},
        "required": ["city", "big"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    answer = client.chat.completions.create(
        model=MODEL, messages=CAPITAL, response_format=wanted, max_tokens=60, temperature=0
    )
    found = json.loads(answer.choices[0].message.content)
    assert isinstance(found["city"], str)
    assert isinstance(found["big"], bool)
    answer = client.chat.completions.create(
        model=MODEL,
        messages=CAPITAL,
        max_tokens=60,
        temperature=0,
        extra_body={"structured_outputs": {"choice": ["Paris", "Berlin"]}},
    )
    assert answer.choices[0].message.content in ("Paris", "Berlin")


@pytest.mark.parametrize(
    ("options", "error", "param"),
    [
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
        ({"model": "gpt-4"}, openai.NotFoundError, "model"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"extra_body": {"frobnicate": 1}}, openai.BadRequestError, "frobnicate"),
        ({"tool_choice": "required", "stream": True}, openai.InternalServerError, "tool_choice"),
    ],
)
def test_errors_are_of_the_right_class(client, options, error, param):
    body = {"model": MODEL, "messages": CAPITAL, **options}
    with pytest.raises(error) as caught:
        client.chat.completions.create(**body)
    assert caught.value.param == param
    assert param in caught.value.body["message"]


def test_a_wrong_key_is_an_authentication_error(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="other", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            client.models.list()
        assert caught.value.code == "invalid_api_key"


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_curl(url):
    body = json.dumps({"messages": CAPITAL, "temperature": 0, "stream": True})
    command = ["curl", "-sN", f"{url}/v1/chat/completions", "-H", f"Authorization: Bearer {KEY}"]
    command += ["-H", "Content-Type: application/json", "-d", body]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    events = [line.removeprefix("data: ") for line in shown.splitlines() if line]
    assert events[-1] == "[DONE]"
    parts = [json.loads(event)["choices"][0]["delta"] for event in events[:-1]]
    assert "".join(part.get("content", "") for part in parts) == "The capital of France is Paris."


def test_an_async_client_that_stops_reading_frees_its_blocks(url):
    import asyncio

    async def main():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY) as client:
            stream = await client.completions.create(
                model=MODEL,
                prompt="Once",
                max_tokens=400,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            async for _ in stream:
                break
            await stream.close()

    asyncio.run(main())
    for _ in range(200):
        shown = httpx.get(f"{url}/metrics").text
        running = re.search(r"vllm:num_requests_running\{.*\} (\S+)", shown)
        with contextlib.suppress(TypeError):
            if float(running[1]) == 0:
                return
        time.sleep(0.05)
    raise AssertionError("it still runs")
