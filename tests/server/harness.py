"""Live servers on a free port of this machine, and a model whose output a test can write down."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import httpx
import jax
import jax.numpy as jnp
from flax import nnx

from paged_jax import AsyncLLM
from paged_jax.core import CacheSpec
from paged_jax.models.tokenizer import Tokenizer
from paged_jax.server.app import make_app
from paged_jax.server.options import ServerOptions
from paged_jax.server.serve import Server
from tests.byte_tokenizer import TEMPLATE, byte_backend
from tests.llm_harness import OPTIONS


def byte_tokenizer(template: str | None = TEMPLATE) -> Tokenizer:
    """Of the toy model."""
    return Tokenizer(byte_backend(["<s>", "</s>"], 258), special_tokens={}, chat_template=template)


class Running:
    """A server that runs: its client, its engine, its app."""

    def __init__(self, llm: AsyncLLM, server: Server, url: str) -> None:
        self.llm, self.server, self.url = llm, server, url
        self.app = server.config.app
        self.client = httpx.Client(base_url=url, timeout=120)

    def post(self, path: str, body, **options) -> httpx.Response:
        return self.client.post(path, json=body, **options)

    def complete(self, **body) -> dict:
        return self._good("/v1/completions", body)

    def chat(self, **body) -> dict:
        return self._good("/v1/chat/completions", body)

    def _good(self, path: str, body: dict) -> dict:
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        return response.json()

    def events(self, path: str, body: dict, **options) -> list:
        """The events of a stream, the last of them "[DONE]" if it ended well."""
        response = self.post(path, {**body, "stream": True}, **options)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return list(parse_events(response.text))

    def settle(self) -> dict:
        """Waits until nothing runs or waits; returns the engine's counts."""
        for _ in range(1000):
            stats = self.llm.stats()
            busy = ("num_used", "num_running", "num_waiting", "num_swapped")
            if not any(stats[name] for name in busy) and not self.llm._streams:
                return stats
            time.sleep(0.01)
        raise AssertionError(f"requests or blocks are left: {stats}")


def parse_events(text: str) -> Iterator:
    """JSON of the events of a stream; every event has one line."""
    assert text.endswith("\n\n")
    for part in text.removesuffix("\n\n").split("\n\n"):
        assert part.startswith("data: ")
        assert "\n" not in part
        data = part.removeprefix("data: ")
        yield data if data == "[DONE]" else json.loads(data)


@contextlib.contextmanager
def serving(
    llm: AsyncLLM, *, shutdown_timeout: float = 5.0, port: int = 0, **options
) -> Iterator[Running]:
    """Serves until the block ends, and ends the engine."""
    app = make_app(llm, ServerOptions(**{"served_model_name": "toy", **options}))
    server = Server(app, llm, host="127.0.0.1", port=port, shutdown_timeout=shutdown_timeout)
    thread = threading.Thread(target=server.run, name="server")
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        running = Running(llm, server, f"http://127.0.0.1:{port}")
        with running.client:
            yield running
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Raises: AssertionError if it does not come true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def toy_llm(toy, *, template: str | None = TEMPLATE, **options) -> AsyncLLM:
    """The toy model with a tokenizer of bytes."""
    return AsyncLLM(toy, tokenizer=byte_tokenizer(template), **{**OPTIONS, **options})


class Successor(nnx.Module):
    """After token t comes t + 1, whatever stood before; the last token goes on for ever."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, batch, cache):
        return batch.tokens.astype(jnp.float32)[:, None], cache

    def logits(self, hidden):
        following = jnp.minimum(hidden[:, 0].astype(jnp.int32) + 1, self.size - 1)
        return 20.0 * jax.nn.one_hot(following, self.size, dtype=jnp.float32)

    def cache_spec(self):
        return CacheSpec(num_layers=1, num_kv_heads=1, head_dim=8)


class _Pieces:
    """Stands for a backend of `tokenizers`: token i has the bytes of piece i."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces

    def decode(self, ids, skip_special_tokens=True):
        return b"".join(self._pieces[i] for i in ids).decode("utf-8", "replace")

    def encode(self, text, add_special_tokens=True):
        raise ValueError("only token ids, please")

    def token_to_id(self, text):
        return None

    def id_to_token(self, token):
        return self._pieces[token].decode("latin-1")

    def get_added_tokens_decoder(self):
        return {}

    def get_vocab(self, with_added_tokens=True):
        return {str(i): i for i in range(len(self._pieces))}

    def to_str(self):
        return "{}"


class Script:
    """Scripts after each other in one vocabulary; a prompt is the token before a script's first."""

    def __init__(self, scripts: Sequence[Sequence[bytes]]) -> None:
        self.pieces: list[bytes] = []
        self.prompts: list[list[int]] = []
        for script in scripts:
            self.prompts.append([len(self.pieces)])
            self.pieces += [b"", *script]
        self.pieces.append(b"")

    def llm(self, **options) -> AsyncLLM:
        """Which plays the scripts."""
        tokenizer = Tokenizer(_Pieces(self.pieces), special_tokens={})  # type: ignore[arg-type]
        return AsyncLLM(Successor(len(self.pieces)), tokenizer=tokenizer, **{**OPTIONS, **options})
