"""One engine in several processes: the first decides, and all apply the same plans.

Every process has the same requests, ledger and scheduler. What could differ comes from the first:
which requests came and went, and what time it is. So all make the same plan, which they compare
before they run it, because a rank that ran another program would wait for the others for ever.

first process                                  others
step: time, requests, aborts        ------->   step with the same
make the plan                                  make the plan
compare digests                     <------->  compare digests
run the step                                   run the step
"""

import contextlib
import hashlib
import os
import pickle
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paged_jax.engine.engine import Engine
    from paged_jax.engine.request import Request

KEY_VARIABLE = "PAGED_JAX_HOSTS_KEY"
"""The same secret in every process: who has it can run code in all of them."""

PATIENCE = 60.0
"""Seconds after which a process that says nothing is taken for lost."""

_PING = 1.0

_KNOCK_SECONDS = 5
"""Who connects and says nothing so long is a stranger."""

_HUNG_UP = getattr(select, "POLLRDHUP", select.POLLHUP)
"""That the other side has closed, also while there is something to read."""


class HostLostError(RuntimeError):
    """Another process has ended or does not answer; this one cannot go on."""


class PlansDifferError(RuntimeError):
    """The processes have made different plans, and none was run."""


@dataclass(frozen=True)
class Step:
    """What the first process says of a step."""

    now: float
    added: tuple[dict[str, Any], ...] = ()
    """Arguments of `Engine.add_request`, with what its time was."""
    aborted: tuple[str, ...] = ()


@dataclass(frozen=True)
class Call:
    """A method of the engine that is called between steps."""

    name: str
    arguments: tuple[Any, ...] = ()


@dataclass(eq=False)
class Group:
    """The other processes, as one of them sees them.

    Args:
      process_id: Of this process; 0 is the first.
      others: Connections by process: to all others in the first, to the first in the others.
    """

    process_id: int
    others: dict[int, Connection]
    patience: float = PATIENCE
    on_lost: Callable[[HostLostError], None] | None = None
    """Called once, in a thread of its own, when another process is lost."""
    added: list[dict[str, Any]] = field(default_factory=list)
    """Requests since the last step, in the first process."""
    lost: HostLostError | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_closed: bool = False

    def __post_init__(self) -> None:
        # Descriptors of its own, because others close the connections.
        watched = {os.dup(each.fileno()): process for process, each in self.others.items()}
        threading.Thread(
            target=self._watch, args=(watched,), name="paged-jax hosts", daemon=True
        ).start()

    @property
    def is_first(self) -> bool:
        """Whether this process decides."""
        return self.process_id == 0

    def tell(self, message: Any) -> None:
        """Sends to all others. Raises: HostLostError."""
        with self._lock:
            for process, connection in self.others.items():
                try:
                    connection.send(message)
                except OSError as error:
                    raise self._lose(process) from error

    def hear(self, process: int = 0) -> Any:
        """The next message of a process that is no ping. Raises: HostLostError."""
        connection = self.others[process]
        while True:
            try:
                if not connection.poll(self.patience):
                    raise self._lose(process, f"said nothing for {self.patience:g} s")
                message = connection.recv()
            except (OSError, EOFError) as error:
                raise self._lose(process) from error
            if message is not None:
                return message

    def agree(self, said: Any, what: str = "has made another plan than") -> None:
        """Goes on when all say the same, of which the `repr` is compared.

        Raises: PlansDifferError, in every process; HostLostError.
        """
        digest = hashlib.sha256(repr(said).encode()).digest()
        if not self.is_first:
            self.tell(digest)
            verdict = self.hear()
        else:
            found = {process: self.hear(process) for process in self.others}
            wrong = [str(process) for process, other in found.items() if other != digest]
            verdict = ", ".join(wrong)
            self.tell(verdict)
        if verdict:
            raise PlansDifferError(f"process {verdict} {what} process 0")

    def cause_of(self, error: Exception) -> Exception:
        """The loss of another process, if that is why something failed here; else `error`."""
        end = time.monotonic() + 1.0  # the device may see it first
        while self.lost is None and time.monotonic() < end:
            time.sleep(0.05)
        return self.lost or error

    def close(self) -> None:
        """Lets the others end, from the first process; ends the connections."""
        if self._is_closed:
            return
        self._is_closed = True
        if self.is_first and self.lost is None:
            with contextlib.suppress(HostLostError):
                self.tell(Call("close"))
                for connection in self.others.values():
                    _wait_for_end(connection)
        for connection in self.others.values():
            connection.close()

    def _watch(self, processes: dict[int, int]) -> None:
        """Sees when a process ends, also while this one waits for the device."""
        poller = select.poll()
        for descriptor in processes:
            poller.register(descriptor, _HUNG_UP)
        last = 0.0
        try:
            while not self._is_closed and self.lost is None:
                if self.is_first and time.monotonic() - last > _PING:
                    last = time.monotonic()
                    with contextlib.suppress(HostLostError):
                        self.tell(None)
                for descriptor, _ in poller.poll(200):
                    if not self._is_closed:
                        self._lose(processes[descriptor])
        finally:
            for descriptor in processes:
                os.close(descriptor)
        if self.lost is not None and not self._is_closed and self.on_lost is not None:
            self.on_lost(self.lost)

    def _lose(self, process: int, why: str = "has ended") -> HostLostError:
        if self.lost is None:
            self.lost = HostLostError(f"process {process} {why}; the model is not whole any more")
        return self.lost


def connect(
    address: tuple[str, int],
    process_id: int,
    num_processes: int,
    *,
    key: str | None = None,
    timeout: float = 300.0,
) -> Group:
    """Waits until all processes are there.

    Args:
      address: Host and port at which the first process listens.
      key: The secret of all; None takes $PAGED_JAX_HOSTS_KEY.
      timeout: Seconds to wait for the others.
    Raises: ValueError without a key, or for a number that is taken or too large; HostLostError
      when somebody is missing.
    """
    key = key or os.environ.get(KEY_VARIABLE)
    if not key:
        raise ValueError(f"several processes need a common secret: set ${KEY_VARIABLE}")
    secret, end = key.encode(), time.monotonic() + timeout
    if process_id:
        connection = _knock(address, end)
        connection.send_bytes(process_id.to_bytes(4, "big"))
        try:
            answer_challenge(connection, secret)
            deliver_challenge(connection, secret)
        except BlockingIOError as error:
            raise HostLostError(f"process 0 does not answer at {address}") from error
        _set_patience(connection, 0)
        return Group(process_id, {0: connection})
    others: dict[int, Connection] = {}
    with socket.create_server(address) as server:
        while len(others) < num_processes - 1:
            server.settimeout(max(0.01, end - time.monotonic()))
            try:
                accepted, _ = server.accept()
            except TimeoutError as error:
                missing = sorted(set(range(1, num_processes)) - set(others))
                raise HostLostError(f"process {missing} did not come in {timeout:g} s") from error
            accepted.setblocking(True)
            connection = Connection(accepted.detach())
            _set_patience(connection, _KNOCK_SECONDS)
            try:
                number = int.from_bytes(connection.recv_bytes(16), "big")
                deliver_challenge(connection, secret)
                answer_challenge(connection, secret)
            except (AuthenticationError, EOFError, OSError):
                connection.close()  # a stranger
                continue
            if number in others or not 0 < number < num_processes:
                raise ValueError(
                    f"process_id ({number}) must be below {num_processes} and of one process"
                )
            _set_patience(connection, 0)
            others[number] = connection
    return Group(0, dict(sorted(others.items())))


def follow(engine: "Engine") -> None:
    """Does what the first process says until it ends.

    Raises: HostLostError, PlansDifferError, or the error of the device.
    """
    group = engine.group
    assert group is not None
    while True:
        match group.hear():
            case Step() as told:
                engine.step_as_told(told)
            case Call(name="close"):
                group.close()
                return
            case Call(name=name, arguments=arguments):
                getattr(engine, name)(*arguments)


def told_of(request: "Request") -> dict[str, Any]:
    """A request for the other processes."""
    prompt: dict[str, Any] = {"prompt_token_ids": request.prompt_token_ids}
    prompt |= {"prompt": request.prompt, "cache_salt": request.cache_salt}
    found = {
        "request_id": request.request_id,
        "prompt": prompt,
        "params": request.beam.params if request.beam is not None else request.params,
        "priority": request.priority,
        "arrival_time": request.arrival_time,
        "deadline": request.deadline,
    }
    pickle.dumps(found)  # what cannot be sent is refused here
    return found


def _knock(address: tuple[str, int], end: float) -> Connection:
    """Connects to the first process, which may not be there yet."""
    while True:
        try:
            made = socket.create_connection(address, timeout=5)
        except OSError as error:
            if time.monotonic() > end:
                raise HostLostError(f"process 0 does not listen at {address}") from error
            time.sleep(0.1)
        else:
            made.setblocking(True)
            connection = Connection(made.detach())
            _set_patience(connection, max(1, int(end - time.monotonic())))
            return connection


def _set_patience(connection: Connection, seconds: int) -> None:
    """How long a read may take, though the socket blocks; 0: for ever."""
    with socket.socket(fileno=os.dup(connection.fileno())) as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


def _wait_for_end(connection: Connection) -> None:
    """Until the other side has closed a connection, or says nothing for some seconds."""
    with contextlib.suppress(OSError, EOFError):
        while connection.poll(5.0):
            connection.recv()
