"""The outputs of one request on their way from the engine thread to an event loop."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from paged_jax.outputs import RequestOutput

_logger = logging.getLogger("paged_jax")


class RequestStream(AsyncIterator[RequestOutput]):
    """The outputs of one request, for one task of the loop that asked for them.

    Each holds all that the request has produced so far. Who reads slowly skips some, never the
    last, so that nothing piles up. `aclose`, which `async with contextlib.aclosing(stream)` calls,
    aborts a request that has not ended.
    """

    def __init__(self, request_id: str, leave: "Callable[[RequestStream], None]") -> None:
        """In the event loop that will read it; `leave` is told when nobody reads it any more."""
        self.request_id = request_id
        self._leave = leave
        self._loop = asyncio.get_running_loop()
        self._newest: RequestOutput | None = None
        self._error: BaseException | None = None
        self._has_news = asyncio.Event()
        self._is_over = False

    async def __anext__(self) -> RequestOutput:
        """The newest output, once it is another than before.

        Raises: The error of the device, when the request failed more than `max_step_retries` times
          in a row; EngineDeadError when the engine stopped.
        """
        if self._is_over:
            raise StopAsyncIteration
        await self._has_news.wait()
        self._has_news.clear()
        output, error = self._newest, self._error
        if error is not None:
            self._is_over = True
            raise error
        assert output is not None
        self._is_over = output.finished
        return output

    async def aclose(self) -> None:
        """Aborts the request, unless it has ended."""
        self._is_over = True
        self._leave(self)

    def tell(self, output: RequestOutput | None, error: BaseException | None) -> None:
        """Hands over the newest output, or what went wrong; from any thread."""
        post_to(self._loop, self._tell, output, error)

    def _tell(self, output: RequestOutput | None, error: BaseException | None) -> None:
        """In the loop of the stream."""
        if output is not None:
            self._newest = output
        self._error = self._error or error
        self._has_news.set()


def post_to(loop: asyncio.AbstractEventLoop, run: Callable[..., None], *arguments: Any) -> None:
    """Runs something in a loop, if it still runs."""
    try:
        loop.call_soon_threadsafe(run, *arguments)
    except RuntimeError:
        _logger.debug("an event loop ended before its requests")
