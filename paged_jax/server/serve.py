"""Serves an app until a signal comes, and lets running requests end."""

import asyncio
import logging
import socket
from typing import Any

import uvicorn
from fastapi import FastAPI

from paged_jax.async_llm import AsyncLLM

_logger = logging.getLogger("paged_jax.server")


class Server(uvicorn.Server):
    """Refuses new requests once it has been asked to end, and waits for those that run.

    What has not ended `shutdown_timeout` seconds later is aborted, and its client is told so.
    """

    def __init__(
        self, app: FastAPI, llm: AsyncLLM, *, shutdown_timeout: float = 30.0, **options: Any
    ) -> None:
        # Connections get a moment more, to send what an abort brings.
        grace = int(shutdown_timeout) + 5
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=grace,
                **options,
            )
        )
        self._llm, self._shutdown_timeout = llm, shutdown_timeout

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends connections and engine."""
        _logger.info("shutting down: waiting %g s at most", self._shutdown_timeout)
        draining = asyncio.create_task(self._llm.shutdown(self._shutdown_timeout))
        await super().shutdown(sockets)
        await draining
