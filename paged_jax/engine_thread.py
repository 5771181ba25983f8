"""The thread that runs an engine: it takes in what event loops post, and tells streams."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from paged_jax.engine.answer import output_of
from paged_jax.engine.engine import Engine
from paged_jax.engine.request import Request
from paged_jax.outputs import RequestOutput
from paged_jax.request_stream import RequestStream

_logger = logging.getLogger("paged_jax")


class EngineDeadError(RuntimeError):
    """The engine has stopped, by an error or because it was closed."""


class EngineThread:
    """The private half of `AsyncLLM`. Its methods run in the thread unless they say otherwise."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.observer: Callable[[Sequence[RequestOutput]], None] | None = None
        """Called in the engine thread with what a dispatch has brought, until it raises."""
        self._live: dict[str, tuple[RequestStream, Request]] = {}
        """What the engine holds by now; in `_streams` an id may be taken again before that."""
        self._condition = threading.Condition()
        """Guards what follows."""
        self._streams: dict[str, RequestStream] = {}
        self._inbox: deque[Callable[[], None]] = deque()
        self._calls: set[Callable[[Any, BaseException | None], None]] = set()
        self._is_closing = self._is_closed = False
        self._error: BaseException | None = None
        self._stats = engine.stats()
        self._last_step = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="paged-jax engine", daemon=True)

    def _check_open(self) -> None:
        """In any thread. Raises: EngineDeadError when nothing is taken in any more."""
        if self._error is not None:
            raise EngineDeadError(f"the engine has stopped: {self._error!r}") from self._error
        if self._is_closing:
            raise EngineDeadError("the engine is shutting down")

    def _post(self, task: Callable[[], None]) -> None:
        """In any thread that holds the condition: hands something to the engine thread."""
        self._inbox.append(task)
        self._condition.notify()

    def _run(self) -> None:
        try:
            while self._take_inbox():
                if self._engine.has_unfinished() and not self._engine.runner.is_asleep:
                    self._deliver(self._engine.step())
                self._stats = self._engine.stats()
                self._last_step = time.monotonic()
        except BaseException as error:
            _logger.exception("the engine has stopped")
            self._error = error
        finally:
            self._end_streams()

    def _take_inbox(self) -> bool:
        """Runs what has come in, waiting for something if there is nothing to do; False at the end.

        What is left when the end has been asked for runs before it.
        """
        with self._condition:
            while not self._inbox and not self._is_closed and not self._has_work():
                self._condition.wait()
                self._last_step = time.monotonic()
            tasks = list(self._inbox)
            self._inbox.clear()
        for task in tasks:
            task()
        return not self._is_closed or bool(tasks)

    def _has_work(self) -> bool:
        return self._engine.has_unfinished() and not self._engine.runner.is_asleep

    def _add(self, request: Request, stream: RequestStream) -> None:
        if request.request_id in self._live:  # with several processes aborts wait for a step
            self._deliver(self._engine.step())
        try:
            self._engine.add_checked(request)
        except ValueError as error:  # the id of a request that no stream is of, as after a restore
            self._forget(stream)
            stream.tell(None, error)
        else:
            self._live[request.request_id] = stream, request

    def _abort_stream(self, stream: RequestStream) -> None:
        """Aborts its request, and none that has the id after it."""
        live = self._live.get(stream.request_id)
        if live is not None and live[0] is stream:
            self._abort(stream.request_id)

    def _abort(self, request_id: str) -> None:
        output = self._engine.abort(request_id)
        if output is not None:
            self._deliver([output])

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        if self.observer is not None:
            try:
                self.observer(outputs)
            except Exception:
                _logger.exception("the observer of outputs has failed and is not called again")
                self.observer = None
        for output in outputs:
            self._tell(output.request_id, output, self._engine.exception_of(output))

    def _tell(
        self, request_id: str, output: RequestOutput | None, error: BaseException | None
    ) -> None:
        if request_id not in self._live:
            return
        stream, _ = self._live[request_id]
        if output is None or output.finished:
            del self._live[request_id]
            self._forget(stream)
        stream.tell(output, error)

    def _forget(self, stream: RequestStream) -> None:
        with self._condition:
            if self._streams.get(stream.request_id) is stream:
                del self._streams[stream.request_id]

    def _end_dropped(self) -> None:
        """Ends the streams of requests that the engine has given to somebody else, or up."""
        for name, (_, request) in list(self._live.items()):
            if self._engine.has_unfinished(name):
                continue
            if request.is_finished:
                self._tell(name, output_of(request, 0), None)
            else:
                self._tell(name, None, RuntimeError(f"the engine has dropped request {name!r}"))

    def _end_streams(self) -> None:
        with self._condition:
            self._is_closing = self._is_closed = True
            streams, calls = list(self._streams.values()), list(self._calls)
            self._streams.clear()
        for stream in streams:
            stream.tell(None, self._death())
        for end in calls:
            end(None, self._death())

    def _die(self, error: Exception) -> None:
        """In any thread: the engine thread may wait for ever for a process that is lost."""
        _logger.error("the engine has stopped: %s", error)
        self._error = error
        self._end_streams()

    def _death(self) -> EngineDeadError:
        error = EngineDeadError("the engine has stopped")
        error.__cause__ = self._error
        return error
