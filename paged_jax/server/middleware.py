"""What every request passes: a name and a log line, the key, the limits on its body, a net."""

import logging
import re
import secrets
import time
import uuid

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paged_jax.server.errors import ApiError, api_error

_logger = logging.getLogger("paged_jax.server")
_access = logging.getLogger("paged_jax.access")

CLIENT_GONE = 499
"""Status in the log of a request whose client did not wait; nginx's."""

# Nothing of the model and nobody's text.
_OPEN_PATHS = frozenset(("/", "/health", "/version", "/metrics", "/docs", "/openapi.json"))


class AccessLog:
    """Names each request, by its own X-Request-Id if that is decent, and logs it when it ends.

    What handlers put into `scope["log"]` is logged too.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = Headers(scope=scope).get("x-request-id", "")
        name = given if re.fullmatch(r"[\w.:/+=-]{1,128}", given, re.ASCII) else uuid.uuid4().hex
        start, status, has_ended = time.monotonic(), 0, False

        async def send_named(message: Message) -> None:
            nonlocal status, has_ended
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", name.encode())]
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                has_ended = True

        fields: dict[str, object] = scope.setdefault("log", {})
        try:
            await self._app(scope, receive, send_named)
        finally:
            client = scope.get("client")
            _access.info(
                "%s %s %d",
                scope["method"],
                scope["path"],
                status,
                extra={
                    "fields": {
                        "request_id": name,
                        "method": scope["method"],
                        "path": scope["path"],
                        "status": status,
                        "duration_s": round(time.monotonic() - start, 6),
                        "client": client[0] if client else None,
                        # A stream that ends in the middle has sent its status long before.
                        "complete": has_ended and status != CLIENT_GONE,
                        **fields,
                    }
                },
            )


class ApiKey:
    """Lets in who knows the key; pages without secrets are open."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app, self._key = app, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS:
            scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
            is_right = secrets.compare_digest(given.strip().encode(), self._key.encode())
            if scheme.lower() != "bearer" or not is_right:
                message = "wrong or missing API key: send Authorization: Bearer <key>"
                return await ApiError(401, message).response()(scope, receive, send)
        return await self._app(scope, receive, send)


class BodyLimit:
    """Refuses bodies above a size, while they are read if they do not say how long they are."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        said = headers.get("content-length", "")
        if said and "transfer-encoding" in headers:
            # Proxies in front may have read another one than we do.
            message = "a body has Content-Length or Transfer-Encoding, and not both"
            return await ApiError(400, message).response()(scope, receive, send)
        if said.isdecimal() and int(said) > self._max_bytes:
            return await self._error().response()(scope, receive, send)
        num_bytes = 0

        async def receive_limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise self._error()
            return message

        return await self._app(scope, receive_limited, send)

    def _error(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._max_bytes} bytes")


class Net:
    """Answers what nobody else has caught, inside of what names, logs and allows requests."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def send_noted(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        except Exception as error:
            if has_begun or scope["type"] != "http":
                raise
            if isinstance(error, ClientDisconnect):
                response: Response = Response(status_code=CLIENT_GONE)
            else:
                _logger.exception("a request failed")
                response = api_error(error).response()
            await response(scope, receive, send)
