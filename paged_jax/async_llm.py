"""The API for servers: many requests at once, each an async iterator of its outputs.

event loops                                  engine thread
add_request: check in a worker thread  --->  inbox: add, abort
stream.__anext__                      <---   step, outputs of one dispatch at a time
"""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from paged_jax.beam_search_params import BeamSearchParams
from paged_jax.engine.build import build_engine
from paged_jax.engine.hosts import Group
from paged_jax.engine.request import Request
from paged_jax.engine.submission import Prompt
from paged_jax.engine_thread import EngineDeadError, EngineThread
from paged_jax.models.protocol import PagedModel
from paged_jax.models.tokenizer import Tokenizer, render_prompt
from paged_jax.outputs import RequestOutput
from paged_jax.request_stream import RequestStream, post_to
from paged_jax.sampling_params import SamplingParams

_logger = logging.getLogger("paged_jax")

LAST_DISPATCH_SECONDS = 10.0
"""How long the last dispatch may take to end when the time for a shutdown is up."""


class QueueFullError(RuntimeError):
    """As many requests as may be are waiting already."""


class AsyncLLM(EngineThread):
    """A model with its KV pool and a thread that runs it. Also an async context manager.

    Everything may be called from any thread and event loop.
    """

    def __init__(
        self,
        model: str | Path | PagedModel = "smollm2-135m-instruct",
        *,
        tokenizer: str | Path | Tokenizer | None = None,
        mesh: Mesh | None = None,
        max_waiting: int | None = None,
        **options: Any,
    ) -> None:
        """Loads a model, makes its KV pool and starts the thread.

        Args:
          model: As in `LLM`, like `tokenizer`, `options` and what is raised.
          tokenizer: None takes the model's own.
          mesh: With an axis "tp", over which the model is divided; None: the first
            `tensor_parallel_size` devices.
          max_waiting: Unfinished requests beside the `max_num_seqs` that may run; more are refused.
            None: any number.
          options: Fields of `EngineConfig`.
        """
        if max_waiting is not None and (
            isinstance(max_waiting, bool) or not isinstance(max_waiting, int) or max_waiting < 1
        ):
            raise ValueError(f"max_waiting ({max_waiting!r}) must be an integer of at least 1")
        super().__init__(build_engine(model, tokenizer, options, mesh))
        self._max_waiting = max_waiting
        self._ids = itertools.count()
        self._grammars = ThreadPoolExecutor(4, "paged-jax grammars")
        self._thread.start()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | BeamSearchParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Completes one prompt, yielding the output so far whenever there are new tokens.

        Closing the iterator, or cancelling the task that reads it, aborts the request.

        Args: As `add_request`, which refuses at the first iteration here.
        """
        stream = await self.add_request(
            prompt, sampling_params, request_id, priority=priority, timeout=timeout
        )
        try:
            async for output in stream:
                yield output
        finally:
            self._leave(stream)

    async def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | BeamSearchParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
    ) -> RequestStream:
        """Takes a request in and returns its outputs to come.

        Args:
          prompt: Text, token ids, or a mapping; as in `LLM.generate`.
          sampling_params: None: the defaults.
          request_id: For `abort`; None: a number.
          priority: Lower is sooner, with `scheduling_policy="priority"`.
          timeout: Seconds after which it ends with the reason "timeout".
        Raises: ValueError for what is refused; QueueFullError; EngineDeadError.
        """
        names = None if request_id is None else [request_id]
        [stream] = await self.add_requests(
            [prompt], sampling_params, names, priority=priority, timeout=timeout
        )
        return stream

    async def add_requests(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | BeamSearchParams | None = None,
        request_ids: Sequence[str] | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
    ) -> list[RequestStream]:
        """Takes several prompts in, or none of them when one is refused; see `add_request`."""
        self._check_open()
        if priority and self._engine.config.scheduling_policy != "priority":
            raise ValueError(f'priority ({priority!r}) needs scheduling_policy="priority"')
        if request_ids is None:
            request_ids = [f"async-{next(self._ids)}" for _ in prompts]
        params = SamplingParams() if sampling_params is None else sampling_params

        def check() -> list[Request]:
            return [
                self._engine.check(name, prompt, params, priority=priority, timeout=timeout)
                for name, prompt in zip(request_ids, prompts, strict=True)
            ]

        # Long prompts and grammars take a while, which other requests need not wait for; many
        # grammars at once wait for each other.
        pool = self._grammars if getattr(params, "structured_outputs", None) else None
        requests = await asyncio.get_running_loop().run_in_executor(pool, check)
        streams = {name: RequestStream(name, self._leave) for name in request_ids}
        with self._condition:
            self._check_open()
            self._check_room(len(streams))
            for i, name in enumerate(request_ids):
                if name in self._streams or name in request_ids[:i]:
                    raise ValueError(f"request_id {name!r} is in use by an unfinished request")
            self._streams |= streams
            for request in requests:
                stream = streams[request.request_id]
                self._post(lambda request=request, stream=stream: self._add(request, stream))
        return list(streams.values())

    def _check_room(self, count: int) -> None:
        if self._max_waiting is None:
            return
        room = self._engine.config.max_num_seqs + self._max_waiting
        if count > room:
            raise ValueError(
                f"prompt ({count} prompts) must have {room} at most, max_num_seqs and max_waiting"
            )
        if len(self._streams) + count > room:
            waiting = max(0, len(self._streams) - self._engine.config.max_num_seqs)
            raise QueueFullError(f"{waiting} requests wait; max_waiting is {self._max_waiting}")

    def join(self, group: Group) -> None:
        """Becomes the first of several processes, before any request; see `engine.hosts`.

        When another one is lost, all requests end with EngineDeadError and the engine is dead.
        """
        self._engine.join(group)
        group.on_lost = self._die

    async def abort(self, request_id: str) -> None:
        """Ends a request, whose last output says so; unknown ids are ignored."""
        with self._condition:
            self._post(lambda: self._abort(request_id))

    async def call(self, run: Callable[[Any], Any]) -> Any:
        """Runs `run(engine)` between two dispatches and returns what it returns, or raises that.

        For `update_weights`, `reset_prefix_cache`, `sleep`, `snapshot`, ... Streams of requests
        that it drops, as `reset` does, raise RuntimeError.
        """
        self._check_open()
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()

        def settle(value: Any, error: BaseException | None) -> None:
            if not done.done():
                done.set_exception(error) if error else done.set_result(value)

        def end(value: Any, error: BaseException | None) -> None:
            self._calls.discard(end)
            post_to(loop, settle, value, error)

        def task() -> None:
            try:
                value = run(self._engine)
            except StopIteration as error:  # no future takes it
                end(None, RuntimeError(f"{run!r} raised {error!r}"))
            except Exception as error:
                end(None, error)
            else:
                end(value, None)
            self._end_dropped()

        with self._condition:
            self._check_open()
            self._calls.add(end)
            self._post(task)
        return await done

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """The prompt of a conversation; see `LLM.render`."""
        return render_prompt(self._engine.tokenizer, messages, tools, **options)

    def get_tokenizer(self) -> Tokenizer | None:
        """The tokenizer, or None for a model that serves token ids only."""
        return self._engine.tokenizer

    @property
    def config(self) -> Any:
        """The settled sizes and options, a `ResolvedConfig`."""
        return self._engine.config

    def stats(self) -> dict[str, int]:
        """Counts of blocks, requests and tokens after the last dispatch; see `Engine.stats`."""
        return dict(self._stats)

    def check_health(self, stalled_after: float = 600.0) -> None:
        """Raises EngineDeadError if the engine has stopped, or a dispatch lasts so many seconds.

        A first dispatch of a size compiles its program, which may take minutes.
        """
        self._check_open()
        is_awake = not self._engine.runner.is_asleep
        if self._streams and is_awake and time.monotonic() - self._last_step > stalled_after:
            raise EngineDeadError(f"no dispatch has ended for {stalled_after:g} s")

    async def shutdown(self, timeout: float | None = 0.0) -> None:
        """Refuses new requests, lets those that run end, and stops the thread.

        Args:
          timeout: Seconds after which what has not ended is aborted; None waits for all, but not
            for what waits in an engine that is asleep. A dispatch that does not end within
            `LAST_DISPATCH_SECONDS` then is left behind, and its streams raise EngineDeadError.
        """
        with self._condition:
            self._is_closing = True
            self._condition.notify()
        end = None if timeout is None else time.monotonic() + timeout
        while self._streams and self._thread.is_alive() and not self._engine.runner.is_asleep:
            if end is not None and time.monotonic() >= end:
                break
            await asyncio.sleep(0.01)
        with self._condition:
            for stream in self._streams.values():
                self._inbox.append(lambda stream=stream: self._abort_stream(stream))
            self._is_closed = True
            self._condition.notify()
        # Not by a worker thread that joins it: a loop that ends waits for those.
        late = None
        while self._thread.is_alive():
            if late is None and (end is not None or self._error is not None):
                late = time.monotonic() + LAST_DISPATCH_SECONDS
            if late is not None and time.monotonic() >= late:
                _logger.error("a dispatch does not end after %g s", LAST_DISPATCH_SECONDS)
                self._end_streams()
                break
            await asyncio.sleep(0.01)
        if self._engine.group is not None:
            self._engine.group.close()

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    # In event loops.

    def _leave(self, stream: RequestStream) -> None:
        """Nobody reads a stream any more."""
        with self._condition:
            if self._streams.get(stream.request_id) is stream:
                del self._streams[stream.request_id]
                self._post(lambda: self._abort_stream(stream))
