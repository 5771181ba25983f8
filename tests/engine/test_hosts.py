"""Two processes with one model between them, over gloo on this machine."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from paged_jax import LLM, SamplingParams
from paged_jax.config import EngineConfig
from paged_jax.engine import Engine, hosts
from paged_jax.engine.hosts import Call, HostLostError, PlansDifferError, connect
from paged_jax.plan import Plan
from tests.llm_harness import OPTIONS, PROMPTS, run

ROOT = Path(__file__).resolve().parents[2]
NUM = 2


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Workers:
    """The processes, with what they have said."""

    def __init__(self, mode: str) -> None:
        coordinator, port = f"127.0.0.1:{free_port()}", str(free_port())
        env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        env.pop("XLA_FLAGS", None)
        self.processes = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.engine.hosts_worker"),
                    *(str(i), str(NUM), coordinator, port, mode),
                ],
                cwd=ROOT,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for i in range(NUM)
        ]
        self.said: list[list[str]] = [[] for _ in range(NUM)]
        self._readers = [threading.Thread(target=self._read, args=(i,)) for i in range(NUM)]
        for reader in self._readers:
            reader.start()

    def _read(self, i: int) -> None:
        for line in self.processes[i].stdout:
            self.said[i].append(line.strip())

    def wait_for(self, i: int, start: str, seconds: float = 120.0) -> None:
        end = time.monotonic() + seconds
        while not any(line.startswith(start) for line in self.said[i]):
            assert time.monotonic() < end, self.said
            assert self.processes[i].poll() is None, self.said
            time.sleep(0.05)

    def end(self, seconds: float = 120.0) -> list[int]:
        """Exit codes; none may take longer."""
        codes = [process.wait(seconds) for process in self.processes]
        for reader in self._readers:
            reader.join(10)
        return codes

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for process, reader in zip(self.processes, self._readers, strict=True):
            reader.join(10)
            process.stdout.close()


def ended(lines: list[str]) -> dict[str, tuple]:
    found = [json.loads(line) for line in lines if line.startswith('["')]
    return {name: (tokens, reason) for name, tokens, reason in found}


@pytest.mark.parametrize(
    "mode", ["debug", pytest.param("abort", marks=pytest.mark.exhaustive), "async"]
)
def test_two_processes_give_the_tokens_of_one(toy, mode):
    with Workers(mode) as workers:
        assert workers.end() == [0, 0], workers.said
        found = ended(workers.said[0])
    assert len(found) == (2 if mode == "async" else 3) * len(PROMPTS)
    params = [
        SamplingParams(temperature=0.0, max_tokens=8),
        SamplingParams(temperature=1.0, seed=3, max_tokens=8, n=2),
    ]
    with LLM(toy, **OPTIONS) as llm:
        for j, given in enumerate(params):
            for i, output in enumerate(run(llm, PROMPTS, given)):
                tokens, reason = found[f"{j}-{i}"]
                whole = [choice.token_ids for choice in output.outputs]
                if reason == "abort":
                    assert (mode, i, j) == ("abort", 1, 0)
                    assert tokens[0] == whole[0][: len(tokens[0])]
                else:
                    assert tokens == whole
    assert (mode == "abort") == ("abort" in {reason for _, reason in found.values()})


def test_processes_that_plan_differently_are_stopped_before_they_run():
    with Workers("differ") as workers:
        assert workers.end() == [3, 3], workers.said
        for lines in workers.said:
            assert lines[-1].startswith("PlansDifferError: process 1 has made another plan")
        assert ended(workers.said[0]) == {}


def test_processes_with_other_options_are_stopped_before_they_begin():
    with Workers("options") as workers:
        assert workers.end() == [3, 3], workers.said
        for lines in workers.said:
            assert lines[-1] == (
                "PlansDifferError: process 1 has another model or other options than process 0"
            )


@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_process_that_is_killed_ends_the_others_with_an_error(killed):
    with Workers("long") as workers:
        for i in range(NUM):
            workers.wait_for(i, "READY")
        time.sleep(3.0)
        workers.processes[killed].send_signal(signal.SIGKILL)
        start = time.monotonic()
        other = 1 - killed
        assert workers.processes[other].wait(60) != 0, workers.said
        assert time.monotonic() - start < 60
        workers.end()


def test_a_stranger_without_the_key_is_not_let_in():
    port = free_port()
    made = []
    first = threading.Thread(
        target=lambda: made.append(connect(("127.0.0.1", port), 0, 2, key="right", timeout=30))
    )
    first.start()
    with pytest.raises((HostLostError, Exception)):
        connect(("127.0.0.1", port), 1, 2, key="wrong", timeout=10)
    second = connect(("127.0.0.1", port), 1, 2, key="right", timeout=10)
    first.join(30)
    [group] = made
    plan = Plan(free_rows=(1,))
    errors = []

    def agree(other: Plan) -> None:
        try:
            second.agree(other)
        except PlansDifferError as error:
            errors.append(error)

    for other, is_same in ((plan, True), (Plan(free_rows=(2,)), False)):
        thread = threading.Thread(target=agree, args=(other,))
        thread.start()
        if is_same:
            group.agree(plan)
        else:
            with pytest.raises(PlansDifferError, match="process 1"):
                group.agree(plan)
        thread.join(10)
    assert len(errors) == 1
    lost = threading.Event()
    second.on_lost = lambda error: lost.set()
    for connection in group.others.values():
        connection.close()
    assert lost.wait(10)
    with pytest.raises(HostLostError, match="process 0 has ended"):
        second.hear()
    for each in (group, second):
        each.close()


def test_strangers_who_say_nothing_or_garbage_do_not_hold_the_start(monkeypatch):
    monkeypatch.setattr(hosts, "_KNOCK_SECONDS", 1)
    port, made = free_port(), []
    first = threading.Thread(
        target=lambda: made.append(connect(("127.0.0.1", port), 0, 2, key="k", timeout=30))
    )
    first.start()
    while True:
        try:
            silent = socket.create_connection(("127.0.0.1", port))
            break
        except OSError:
            time.sleep(0.01)
    garbage = socket.create_connection(("127.0.0.1", port))
    garbage.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
    second = connect(("127.0.0.1", port), 1, 2, key="k", timeout=30)
    first.join(30)
    time.sleep(1.5)  # who is let in may say nothing for longer
    second.tell("hi")
    assert made[0].hear(1) == "hi"
    for each in (silent, garbage, made[0], second):
        each.close()


@pytest.mark.parametrize("number", [1, 5])
def test_a_number_belongs_to_one_process(number):
    port, raised = free_port(), []

    def meet() -> None:
        try:
            connect(("127.0.0.1", port), 0, 3, key="k", timeout=30)
        except ValueError as error:
            raised.append(str(error))

    first = threading.Thread(target=meet)
    first.start()
    others = []
    for each in (1, number):
        try:
            others.append(connect(("127.0.0.1", port), each, 3, key="k", timeout=10))
        except (EOFError, OSError):
            break
    first.join(30)
    assert raised == [f"process_id ({number}) must be below 3 and of one process"]
    for other in others:
        other.close()


def test_an_end_is_seen_behind_what_has_not_been_read():
    port, made = free_port(), []
    first = threading.Thread(
        target=lambda: made.append(connect(("127.0.0.1", port), 0, 2, key="k"))
    )
    first.start()
    second = connect(("127.0.0.1", port), 1, 2, key="k", timeout=10)
    first.join(30)
    lost = threading.Event()
    second.on_lost = lambda error: lost.set()
    made[0].tell("never read")
    made[0]._is_closed = True
    made[0].others[1].close()
    assert lost.wait(10)
    second.close()


def test_an_end_that_is_told_is_no_loss():
    for _ in range(5):
        port, made = free_port(), []
        first = threading.Thread(
            target=lambda port=port, made=made: made.append(
                connect(("127.0.0.1", port), 0, 2, key="k")
            )
        )
        first.start()
        second = connect(("127.0.0.1", port), 1, 2, key="k", timeout=10)
        first.join(30)
        end = threading.Thread(target=made[0].close)
        end.start()
        time.sleep(0.3)  # busy
        assert second.hear() == Call("close")
        second.close()
        end.join(10)
        assert not end.is_alive()
        assert made[0].lost is second.lost is None


def test_who_does_not_come_is_named():
    with (
        socket.create_server(("127.0.0.1", 0)) as mute,
        pytest.raises(HostLostError, match="answer"),
    ):
        connect(mute.getsockname(), 1, 2, key="k", timeout=1)
    with pytest.raises(HostLostError, match=r"process \[1, 2\] did not come"):
        connect(("127.0.0.1", free_port()), 0, 3, key="k", timeout=0.3)
    with pytest.raises(HostLostError, match="process 0 does not listen"):
        connect(("127.0.0.1", free_port()), 1, 2, key="k", timeout=0.3)
    with pytest.raises(ValueError, match="PAGED_JAX_HOSTS_KEY"):
        connect(("127.0.0.1", free_port()), 0, 2, timeout=0.3)


@pytest.mark.parametrize(
    "call",
    [
        lambda engine: engine.reset(),
        lambda engine: engine.sleep(),
        lambda engine: engine.wake_up(),
        lambda engine: engine.update_weights({}),
        lambda engine: engine.snapshot("x"),
        lambda engine: engine.restore("x"),
    ],
)
def test_what_other_processes_would_not_do_is_refused(toy, call):
    engine = Engine(toy, EngineConfig(**OPTIONS))
    engine.join(SimpleNamespace(agree=lambda *_: None))
    with pytest.raises(NotImplementedError, match="with several processes"):
        call(engine)


def test_images_of_blocks_stay_with_one_process(toy):
    engine = Engine(toy, EngineConfig(**OPTIONS, preemption_mode="swap"))
    with pytest.raises(NotImplementedError, match="preemption_mode='swap'"):
        engine.join(SimpleNamespace())
