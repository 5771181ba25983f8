"""Serves an app until a signal comes, and lets running requests end."""

import asyncio
import logging
import signal
import socket
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from paged_jax.async_llm import LAST_DISPATCH_SECONDS, AsyncLLM

_logger = logging.getLogger("paged_jax.server")

_LAST_BYTES_SECONDS = 5.0
"""How long answers may take on their way when the engine has ended."""


class Server(uvicorn.Server):
    """Refuses new requests once it has been asked to end, and waits for those that run.

    What has not ended `shutdown_timeout` seconds later, or at a second SIGINT, is aborted, and its
    client is told so.
    """

    def __init__(
        self, app: FastAPI, llm: AsyncLLM, *, shutdown_timeout: float = 30.0, **options: Any
    ) -> None:
        grace = shutdown_timeout + LAST_DISPATCH_SECONDS + _LAST_BYTES_SECONDS
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=int(grace) + 1,
                **options,
            )
        )
        self._llm, self._shutdown_timeout = llm, shutdown_timeout
        self._is_hurried = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The second SIGINT aborts requests; the third ends the process without their answers."""
        if self.should_exit and sig == signal.SIGINT and not self._is_hurried:
            self._is_hurried = True
        else:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends connections and engine."""
        _logger.info("shutting down: waiting %g s at most", self._shutdown_timeout)
        closing = asyncio.create_task(super().shutdown(sockets))
        draining = asyncio.create_task(self._llm.shutdown(self._shutdown_timeout))
        while not draining.done() and not self._is_hurried:
            await asyncio.wait((draining,), timeout=0.1)
        if not draining.done():
            draining.cancel()
            await self._llm.shutdown(0.0)
        elif not draining.cancelled():
            draining.result()
        await asyncio.wait((closing,), timeout=_LAST_BYTES_SECONDS)
        if not closing.done():
            # Clients that have not sent all of a body, or do not read.
            for connection in list(self.server_state.connections):
                connection.transport.abort()
        await closing
