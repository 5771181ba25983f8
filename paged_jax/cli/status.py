"""Shows on stderr what a start-up is busy with."""

import contextlib
import logging
from collections.abc import Iterator


class _StatusHandler(logging.Handler):
    """Turns log records into lines and the last of them into a spinner."""

    def __init__(self, console, status) -> None:
        super().__init__(logging.INFO)
        self._console, self._status = console, status

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        self._console.print(message, style="dim", highlight=False, markup=False)
        self._status.update(message)


@contextlib.contextmanager
def startup_status() -> Iterator[None]:
    """Prints what `paged_jax` logs, with a spinner while it works, until the block ends."""
    try:
        from rich.console import Console
    except ImportError as error:
        raise ImportError("the command needs an extra: pip install 'paged-jax[llm]'") from error
    console = Console(stderr=True)
    logger = logging.getLogger("paged_jax")
    level = logger.level
    with console.status("starting") as status:
        handler = _StatusHandler(console, status)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
