"""Runs a job for a client: waits for it or streams it, and ends it when the client goes away."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pydantic_core
from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from paged_jax.async_llm import AsyncLLM
from paged_jax.outputs import RequestOutput
from paged_jax.request_stream import RequestStream
from paged_jax.server.answers import Choices, Form, usage
from paged_jax.server.errors import api_error, refusal
from paged_jax.server.jobs import Job
from paged_jax.server.middleware import CLIENT_GONE

_logger = logging.getLogger("paged_jax.server")


async def answer(request: Request, job: Job, form: Form, llm: AsyncLLM) -> Response:
    """Submits a job and answers it.

    Raises: What `AsyncLLM.add_requests` raises, before the first byte; what ends a request.
    """
    try:
        streams = await llm.add_requests(
            job.prompts, job.params, job.request_ids, priority=job.priority
        )
    except ValueError as error:
        raise refusal(str(error), job.names) from None
    log = request.scope.setdefault("log", {})
    if job.is_stream:
        return EventStream(_events(job, form, streams, log), streams)
    outputs = await _collect(request, streams)
    if outputs is None:
        return Response(status_code=CLIENT_GONE)
    choices = Choices(job)
    deltas = [delta for i, output in enumerate(outputs) for delta in choices.deltas(i, output)]
    tokens = usage(job, outputs)
    _note(log, tokens, outputs)
    return JSONResponse(form.whole(deltas, outputs) | {"usage": tokens})


class EventStream(StreamingResponse):
    """Server-sent events; requests that they are of end with the connection, also before the
    first event."""

    def __init__(self, events: AsyncIterator[bytes], streams: Sequence[RequestStream] = ()) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await _leave(self._streams)


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + pydantic_core.to_json(data) + b"\n\n"


async def _events(
    job: Job, form: Form, streams: Sequence[RequestStream], log: dict[str, Any]
) -> AsyncIterator[bytes]:
    outputs: list[RequestOutput | None] = [None] * len(streams)
    choices = Choices(job)
    try:
        async for place, output in _merged(streams):
            outputs[place] = output
            for delta in choices.deltas(place, output):
                for chunk in form.chunks(delta):
                    if job.has_usage:
                        chunk["usage"] = usage(job, outputs) if job.has_running_usage else None
                    yield event(chunk)
    except Exception as error:
        # The status has been sent: what can still be said is said as an event, the last one.
        _logger.exception("a stream failed")
        log["error"] = repr(error)
        yield event(api_error(error).body())
        return
    tokens = usage(job, outputs)
    _note(log, tokens, outputs)
    if job.has_usage:
        yield event(form.last() | {"usage": tokens})
    yield b"data: [DONE]\n\n"


async def _merged(
    streams: Sequence[RequestStream],
) -> AsyncIterator[tuple[int, RequestOutput]]:
    """Outputs of all streams as they come, each with the place of its stream."""
    pending = {asyncio.ensure_future(anext(stream)): i for i, stream in enumerate(streams)}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                place = pending.pop(task)
                output = task.result()
                if not output.finished:
                    pending[asyncio.ensure_future(anext(streams[place]))] = place
                yield place, output
    finally:
        for task in pending:
            task.cancel()


async def _collect(
    request: Request, streams: Sequence[RequestStream]
) -> list[RequestOutput] | None:
    """The last output of each stream; None when the client has gone away."""
    work = asyncio.ensure_future(_last_of(streams))
    gone = asyncio.ensure_future(_wait_until_gone(request))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        gone.cancel()
        work.cancel()
        await _leave(streams)


async def _last_of(streams: Sequence[RequestStream]) -> list[RequestOutput]:
    outputs: list[RequestOutput | None] = [None] * len(streams)
    async for place, output in _merged(streams):
        outputs[place] = output
    return [output for output in outputs if output is not None]


async def _wait_until_gone(request: Request) -> None:
    """The body has been read: what comes next is the end of the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _leave(streams: Sequence[RequestStream]) -> None:
    for stream in streams:
        await stream.aclose()


def _note(
    log: dict[str, Any], tokens: dict[str, Any], outputs: Sequence[RequestOutput | None]
) -> None:
    """What the access log says of a request."""
    reasons = [choice.finish_reason for output in outputs if output for choice in output.outputs]
    log |= {
        "prompt_tokens": tokens["prompt_tokens"],
        "completion_tokens": tokens["completion_tokens"],
        "finish_reasons": reasons,
    }
