"""The HTTP routes."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from importlib import resources
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, Response
from prometheus_client import exposition
from prometheus_client.openmetrics import exposition as openmetrics
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from paged_jax.async_llm import AsyncLLM, EngineDeadError
from paged_jax.server import errors
from paged_jax.server.answers import ChatForm, CompletionForm
from paged_jax.server.errors import ApiError
from paged_jax.server.fields import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    read_body,
)
from paged_jax.server.jobs import chat_job, check_tools, completion_job, rendered
from paged_jax.server.metrics import OPENMETRICS, Metrics
from paged_jax.server.middleware import AccessLog, ApiKey, BodyLimit, Net
from paged_jax.server.monitor import Monitor
from paged_jax.server.options import ServerOptions
from paged_jax.server.run import EventStream, answer, event

_BODIES = (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody)


class ErrorFields(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every failure is answered with this."""

    error: ErrorFields


def make_app(llm: AsyncLLM, options: ServerOptions | None = None) -> FastAPI:
    """An ASGI application that serves a model. Shutting the model down stays the caller's."""
    options = options or ServerOptions()
    app = FastAPI(
        title="paged-jax",
        version=version("paged-jax"),
        redoc_url=None,
        responses={"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}},
    )
    app.state.metrics = Metrics(llm, options.served_model_name)
    _add_generation(app, llm, options)
    _add_models(app, llm, options)
    _add_tokens(app, llm, options)
    _add_operation(app, llm, options)
    _add_dashboard(app, llm)
    errors.install(app)
    app.add_middleware(Net)
    app.add_middleware(BodyLimit, max_bytes=options.max_body_bytes)
    if options.api_key is not None:
        app.add_middleware(ApiKey, key=options.api_key)
    if options.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(AccessLog)
    _describe(app)
    return app


def _add_generation(app: FastAPI, llm: AsyncLLM, options: ServerOptions) -> None:
    @app.post("/v1/completions", openapi_extra=_takes(CompletionBody))
    async def completions(request: Request) -> Response:
        """Continues prompts."""
        body = await read_body(request, CompletionBody)
        model = _check_model(body, options)
        job = await asyncio.to_thread(completion_job, body, llm, model, options.max_prompts)
        return await answer(request, job, CompletionForm(job, llm), llm)

    @app.post("/v1/chat/completions", openapi_extra=_takes(ChatBody))
    async def chat_completions(request: Request) -> Response:
        """Answers a conversation."""
        body = await read_body(request, ChatBody)
        model = _check_model(body, options)
        job = await asyncio.to_thread(chat_job, body, llm, model)
        return await answer(request, job, ChatForm(job, llm), llm)


def _add_models(app: FastAPI, llm: AsyncLLM, options: ServerOptions) -> None:
    name = options.served_model_name
    card = {
        "id": name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "paged-jax",
        "root": name,
        "parent": None,
        "max_model_len": llm.config.max_model_len,
    }

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        """The one model that is served."""
        return JSONResponse({"object": "list", "data": [card]})

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> JSONResponse:
        """The model, if this is its name."""
        if model != name:
            raise _no_model(model, options)
        return JSONResponse(card)


def _add_tokens(app: FastAPI, llm: AsyncLLM, options: ServerOptions) -> None:
    def tokenizer() -> Any:
        found = llm.get_tokenizer()
        if found is None:
            raise ApiError(400, "this model has no tokenizer")
        return found

    @app.post("/tokenize", openapi_extra=_takes(TokenizeBody))
    async def tokenize(request: Request) -> JSONResponse:
        """Token ids of a prompt or a conversation."""
        body = await read_body(request, TokenizeBody)
        _check_model(body, options)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "prompt or messages must be given, and not both", param="prompt")
        if body.messages is None:
            adds = body.add_special_tokens is not False
            ids = await asyncio.to_thread(tokenizer().encode, body.prompt, adds)
        else:
            check_tools(body.tools)
            prompt: Any = await asyncio.to_thread(rendered, body, llm, body.tools)
            ids = prompt["prompt_token_ids"]
        found: dict[str, Any] = {"count": len(ids), "max_model_len": llm.config.max_model_len}
        found |= {"tokens": ids, "token_strs": None}
        if body.return_token_strs:
            found["token_strs"] = await asyncio.to_thread(_pieces, tokenizer(), ids)
        return JSONResponse(found)

    @app.post("/detokenize", openapi_extra=_takes(DetokenizeBody))
    async def detokenize(request: Request) -> JSONResponse:
        """Text of token ids."""
        body = await read_body(request, DetokenizeBody)
        _check_model(body, options)
        size = tokenizer().vocab_size
        for token in body.tokens:
            if not 0 <= token < size:
                message = f"tokens: {token} is outside the vocabulary [0, {size})"
                raise ApiError(400, message, param="tokens")
        text = await asyncio.to_thread(tokenizer().decode, body.tokens, False)
        return JSONResponse({"prompt": text})


def _pieces(tokenizer: Any, ids: list[int]) -> list[str]:
    return [tokenizer.decode_token(token) for token in ids]


def _add_operation(app: FastAPI, llm: AsyncLLM, options: ServerOptions) -> None:
    @app.get("/health")
    async def health() -> JSONResponse:
        """200 while the engine lives and moves, else 503."""
        llm.check_health(options.stalled_after)
        return JSONResponse({"status": "ok"})

    @app.get("/version")
    async def get_version() -> JSONResponse:
        """Version of the package."""
        return JSONResponse({"version": version("paged-jax")})

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Metrics in Prometheus' text format."""
        registry = app.state.metrics.registry
        if "application/openmetrics-text" in request.headers.get("accept", ""):
            return Response(openmetrics.generate_latest(registry), media_type=OPENMETRICS)
        text = exposition.generate_latest(registry)
        return Response(text, media_type=exposition.CONTENT_TYPE_LATEST)


def _add_dashboard(app: FastAPI, llm: AsyncLLM) -> None:
    page = resources.files("paged_jax.server").joinpath("dashboard.html").read_text("utf-8")
    monitor = Monitor()

    @app.get("/", include_in_schema=False)
    async def dashboard() -> HTMLResponse:
        return HTMLResponse(page)

    @app.get("/dashboard/state", include_in_schema=False)
    async def state() -> EventStream:
        async def states() -> AsyncIterator[bytes]:
            with contextlib.suppress(EngineDeadError):
                while True:
                    yield event(await llm.call(monitor.look))
                    await asyncio.sleep(0.5)

        await llm.call(monitor.look)  # a failure has a status then
        return EventStream(states())


def _check_model(body: Body, options: ServerOptions) -> str:
    if body.model not in (None, options.served_model_name):
        raise _no_model(body.model, options)
    return options.served_model_name


def _no_model(model: str, options: ServerOptions) -> ApiError:
    message = f"model {model!r} does not exist; served is {options.served_model_name!r}"
    return ApiError(404, message, param="model", code="model_not_found")


_REFERENCE = "#/components/schemas/{model}"


def _takes(kind: type[Body]) -> dict[str, Any]:
    """OpenAPI's word for what a route reads by itself."""
    schema = {"$ref": _REFERENCE.format(model=kind.__name__)}
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}}


def _describe(app: FastAPI) -> None:
    """Puts the bodies into the OpenAPI document, and takes FastAPI's own error out of it."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = generate()
            pairs = [(kind, "validation") for kind in _BODIES]
            _, found = models_json_schema(pairs, ref_template=_REFERENCE)  # type: ignore[arg-type]
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            schemas.update(found["$defs"])
            for path in document["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
        return app.openapi_schema  # type: ignore[return-value]

    app.openapi = openapi  # type: ignore[method-assign]
