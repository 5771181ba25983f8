"""Errors as clients get them: always the same JSON object, with OpenAI's names."""

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from paged_jax.async_llm import EngineDeadError, QueueFullError

_logger = logging.getLogger("paged_jax.server")

RETRY_AFTER = "1"
"""Seconds after which a client may try again, when the queue is full."""

# Status -> type, and code where OpenAI names one.
_KINDS: dict[int, tuple[str, str | None]] = {
    401: ("authentication_error", "invalid_api_key"),
    404: ("not_found_error", None),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    501: ("not_implemented_error", None),
}


class ApiError(Exception):
    """Ends a request with a status and an error body."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        """The JSON object."""
        kind, code = _KINDS.get(
            self.status, ("server_error" if self.status >= 500 else "invalid_request_error", None)
        )
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code or code,
            }
        }

    def response(self) -> JSONResponse:
        """The body with its status."""
        headers = {
            401: {"WWW-Authenticate": "Bearer"},
            429: {"Retry-After": RETRY_AFTER},
        }.get(self.status)
        return JSONResponse(self.body(), status_code=self.status, headers=headers)


def api_error(error: BaseException) -> ApiError:
    """What a client is told of any exception."""
    match error:
        case ApiError():
            return error
        case QueueFullError():
            return ApiError(429, f"the server is busy: {error}")
        case EngineDeadError():
            return ApiError(503, str(error))
        case NotImplementedError():
            return ApiError(501, str(error))
        case ValueError():
            return refusal(str(error))
        case HTTPException():
            return ApiError(error.status_code, str(error.detail))
    # Causes stay in the log: they may hold what is nobody's business.
    return ApiError(500, f"internal error: {type(error).__name__}")


def refusal(message: str, names: Mapping[str, str] | None = None) -> ApiError:
    """400 for a message that begins, as ours do, with the name of a field.

    Args:
      names: What the body calls a field, where that is another name.
    """
    words = message.split(None, 1)
    field = words[0].rstrip(":,").split("[")[0].split(".")[0] if words else ""
    if names and field in names:
        message = names[field] + message.removeprefix(field)
        field = names[field]
    code = "context_length_exceeded" if "max_model_len" in message else None
    is_field = field.isidentifier() and field not in ("the", "this", "cannot")
    return ApiError(400, message, param=field if is_field else None, code=code)


def install(app: FastAPI) -> None:
    """Makes an app answer every failure with an error body."""

    async def handle(request: Request, error: Exception) -> JSONResponse:
        found = api_error(error)
        if isinstance(error, HTTPException) and error.status_code == 404:
            found = ApiError(404, f"no such path: {request.method} {request.url.path}")
        elif isinstance(error, HTTPException) and error.status_code == 405:
            found = ApiError(405, f"{request.url.path} does not take {request.method}")
        if found.status == 500:
            _logger.error("a request failed", exc_info=error)
        response = found.response()
        if isinstance(error, HTTPException) and error.headers:
            response.headers.update(error.headers)
        return response

    async def handle_field(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:])
        return ApiError(400, f"{where}: {first['msg']}", param=where or None).response()

    for kind in (ApiError, ValueError, NotImplementedError, RuntimeError, HTTPException):
        app.add_exception_handler(kind, handle)
    app.add_exception_handler(RequestValidationError, handle_field)  # type: ignore[arg-type]
