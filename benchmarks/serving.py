"""A server in this process, for benchmarks that ask it over HTTP."""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

from paged_jax import AsyncLLM
from paged_jax.server.app import make_app
from paged_jax.server.options import ServerOptions
from paged_jax.server.serve import Server


@contextlib.contextmanager
def serving(model: str, **options: Any) -> Iterator[tuple[AsyncLLM, str]]:
    """The engine of a model and the address of its server, which lives as long as the block.

    Args:
      options: Of `AsyncLLM`.
    """
    llm = AsyncLLM(model, **options)
    app = make_app(llm, ServerOptions(served_model_name=model))
    server = Server(app, llm, host="127.0.0.1", port=0, shutdown_timeout=0)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield llm, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
