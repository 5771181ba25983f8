"""SmolLM2 served by two processes, one of which is killed."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.engine.test_hosts import free_port
from tests.server.harness import wait_for

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
OPTIONS = {
    "max-model-len": 256,
    "num-blocks": 64,
    "max-num-seqs": 4,
    "max-num-batched-tokens": 32,
    "warmup": "lazy",
}


def two_free_ports() -> int:
    """The first of two neighbours: JAX takes one, and we the next."""
    while True:
        first = free_port()
        with contextlib.suppress(OSError), socket.socket() as second:
            second.bind(("127.0.0.1", first + 1))
            return first


def start(process: int, port: int, coordinator: int, smollm2_path, log: Path) -> subprocess.Popen:
    flags = {
        **OPTIONS,
        "model": smollm2_path,
        "port": port,
        "served-model-name": "smollm2",
        "coordinator-address": f"127.0.0.1:{coordinator}",
        "num-processes": 2,
        "process-id": process,
    }
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PAGED_JAX_HOSTS_KEY": "secret"}
    env.pop("XLA_FLAGS", None)
    command = [
        *(sys.executable, "-c", "import sys; from paged_jax.cli import main; sys.exit(main())"),
        "serve",
        *(f"--{name}={value}" for name, value in flags.items()),
    ]
    with log.open("w") as stream:
        return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=stream)


@pytest.mark.exhaustive
@pytest.mark.parametrize("killed", [0, 1])
def test_the_loss_of_a_process_is_told_and_nothing_hangs(smollm2_path, tmp_path, killed):
    port, coordinator = free_port(), two_free_ports()
    logs = [tmp_path / f"{i}.log" for i in range(2)]
    processes = [start(i, port, coordinator, smollm2_path, logs[i]) for i in range(2)]
    events: list[str] = []
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as client:

            def is_up() -> bool:
                assert all(process.poll() is None for process in processes), logs[0].read_text()
                try:
                    return client.get("/health").status_code == 200
                except httpx.TransportError:
                    return False

            wait_for(is_up, 120)
            body = {"messages": QUESTION, "temperature": 0}
            answer = client.post("/v1/chat/completions", json=body).json()
            assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."

            def listen() -> None:
                body = {"prompt": "Once", "stream": True, "max_tokens": 240, "ignore_eos": True}
                try:
                    with client.stream("POST", "/v1/completions", json=body) as response:
                        events.extend(response.iter_lines())
                except httpx.TransportError:
                    events.append("cut")

            listener = threading.Thread(target=listen)
            listener.start()
            time.sleep(3)
            assert listener.is_alive()
            processes[killed].send_signal(signal.SIGKILL)
            listener.join(60)
            assert not listener.is_alive()
            if killed == 1:
                last = [line for line in events if line][-1]
                message = json.loads(last.removeprefix("data: "))["error"]["message"]
                assert message.startswith("the engine has stopped")
                assert client.get("/health").status_code == 503
                refused = client.post("/v1/completions", json={"prompt": "a"})
                assert refused.status_code == 503
                assert "process 1 has ended" in refused.json()["error"]["message"]
                processes[0].send_signal(signal.SIGTERM)
            else:
                assert events[-1] == "cut"
        # JAX's own service may see the end before we do, and then aborts in its way.
        assert processes[1 - killed].wait(60) in (1, -signal.SIGABRT)
        log = logs[1 - killed].read_text()
        assert f"process {killed} has ended" in log or "another task died" in log
    finally:
        for process in processes:
            process.kill()
            process.wait()
