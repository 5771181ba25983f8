"""Serve a model over HTTP: an OpenAI-compatible API, metrics, and a dashboard at /."""

import argparse
import logging
import os
import signal

from paged_jax.cli import options

_logger = logging.getLogger("paged_jax.server")

KEY_VARIABLE = "PAGED_JAX_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the command."""
    options.add_model(parser)
    group = parser.add_argument_group("server options")
    group.add_argument("--host", default="127.0.0.1", help="address (default: 127.0.0.1)")
    group.add_argument("--port", type=int, default=8000, help="default 8000; 0 takes a free one")
    group.add_argument("--tokenizer", help="directory with tokenizer.json (default: the model's)")
    group.add_argument("--served-model-name", metavar="NAME", help="default: that of --model")
    group.add_argument("--api-key", help=f"what clients must send (default: ${KEY_VARIABLE})")
    group.add_argument(
        "--allowed-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="origin whose pages may call the server (CORS); may be repeated; '*' is any",
    )
    for flag, default, what in (
        ("--max-waiting", 1024, "requests beside --max-num-seqs; more get 429"),
        ("--max-prompts", 128, "prompts of one completion"),
        ("--max-body-bytes", 8 * 2**20, "bytes of a body"),
    ):
        group.add_argument(
            flag, type=int, default=default, metavar="N", help=f"most {what} (default {default})"
        )
    for flag, default, what in (
        ("--shutdown-timeout", 30.0, "after a signal, after which requests are aborted"),
        ("--stalled-after", 600.0, "without the end of a dispatch, after which /health is 503"),
    ):
        group.add_argument(
            flag, type=float, default=default, metavar="S", help=f"seconds {what} ({default:g})"
        )
    group.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    several = parser.add_argument_group("several processes, with the same options otherwise")
    several.add_argument(
        "--coordinator-address",
        metavar="HOST:PORT",
        help="where process 0 meets the others; it takes the next port too",
    )
    several.add_argument("--num-processes", type=int, default=1, metavar="N", help="default 1")
    several.add_argument(
        "--process-id", type=int, default=0, metavar="I", help="0 (default) is the server"
    )
    options.add_engine(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serves until SIGINT or SIGTERM."""
    try:
        from paged_jax.server.app import make_app
        from paged_jax.server.logs import configure_logs
        from paged_jax.server.options import ServerOptions
        from paged_jax.server.serve import Server
    except ImportError as error:
        raise ImportError(
            f"serve needs an extra: pip install 'paged-jax[llm,serve]' ({error})"
        ) from error
    if not arguments.shutdown_timeout >= 0:
        raise ValueError(f"shutdown-timeout ({arguments.shutdown_timeout}) must be at least 0")
    if not 0 <= arguments.port < 2**16:
        raise ValueError(f"port ({arguments.port}) must be in [0, 65535]")
    settled = ServerOptions(
        served_model_name=arguments.served_model_name or arguments.model,
        api_key=arguments.api_key or os.environ.get(KEY_VARIABLE) or None,
        allowed_origins=tuple(arguments.allowed_origin),
        max_body_bytes=arguments.max_body_bytes,
        max_prompts=arguments.max_prompts,
        stalled_after=arguments.stalled_after,
    )
    configure_logs(arguments.log_level)
    from paged_jax.async_llm import AsyncLLM

    engine = {"warmup": "all", **options.engine_options(arguments)}
    address = _meet(arguments)
    if address is not None:
        import jax

        engine = {"tensor_parallel_size": jax.device_count(), **engine}
    if arguments.process_id:
        return _follow(arguments, engine, address)
    llm = AsyncLLM(
        arguments.model,
        tokenizer=arguments.tokenizer,
        max_waiting=arguments.max_waiting,
        **engine,
    )
    group = None
    if address is not None:
        from paged_jax.engine.hosts import connect

        group = connect(address, 0, arguments.num_processes)
        llm.join(group)
    app = make_app(llm, settled)
    timeout = arguments.shutdown_timeout
    server = Server(app, llm, shutdown_timeout=timeout, host=arguments.host, port=arguments.port)
    # uvicorn raises the signal once more when all is done, which would end this as a crash.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server.run()
    if group is not None and group.lost is not None:
        _leave(group.lost)
    return 0


def _meet(arguments: argparse.Namespace) -> tuple[str, int] | None:
    """Lets JAX know of the other processes. Returns: Where process 0 listens; None if alone."""
    number, count = arguments.process_id, arguments.num_processes
    if count == 1 and number == 0 and arguments.coordinator_address is None:
        return None
    if not 0 <= number < count:
        raise ValueError(f"--process-id ({number}) must be below --num-processes ({count})")
    host, _, port = (arguments.coordinator_address or "").rpartition(":")
    if not host or not port.isdecimal():
        given = arguments.coordinator_address
        raise ValueError(f"--coordinator-address ({given}) must be HOST:PORT")
    import jax

    jax.distributed.initialize(
        arguments.coordinator_address, num_processes=count, process_id=number
    )
    return host, int(port) + 1


def _follow(arguments: argparse.Namespace, engine: dict, address: tuple[str, int] | None) -> int:
    """Computes what process 0 decides, until it ends."""
    from paged_jax.engine.build import build_engine
    from paged_jax.engine.hosts import connect, follow

    assert address is not None
    made = build_engine(arguments.model, arguments.tokenizer, engine)
    group = connect(address, arguments.process_id, arguments.num_processes)
    group.on_lost = _leave
    made.join(group)
    try:
        follow(made)
    except Exception as error:
        _leave(error)
    return 0


def _leave(error: Exception) -> None:
    """Ends a process that may wait for ever for another one, as the end of JAX would."""
    _logger.error("%s: %s", type(error).__name__, error)
    os._exit(1)
