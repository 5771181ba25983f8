"""A progress bar over requests."""

from types import TracebackType


class RequestProgress:
    """Requests done, and tokens per second; draws on stderr, or nothing."""

    def __init__(self, total: int, *, is_shown: bool) -> None:
        self._progress = None
        if is_shown and total:
            self._progress, self._task = _bar(total)

    def __enter__(self) -> "RequestProgress":
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def update(self, num_done: int, num_tokens: int) -> None:
        """Tells how many requests are done, and how many tokens they have generated so far."""
        if self._progress is not None:
            elapsed = self._progress.tasks[0].elapsed or 1e-9
            speed = f"{num_tokens / elapsed:.1f} tokens/s"
            self._progress.update(self._task, completed=num_done, speed=speed)


def _bar(total: int):
    try:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )
    except ImportError as error:
        raise ImportError(
            "the progress bar needs an extra: pip install 'paged-jax[llm]', or use_tqdm=False"
        ) from error
    progress = Progress(
        TextColumn("requests"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[speed]}"),
        console=Console(stderr=True),
    )
    return progress, progress.add_task("requests", total=total, speed="")
