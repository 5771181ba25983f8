"""The `paged-jax` command. Nothing heavy is imported before a command runs."""

import argparse
import sys
from typing import NoReturn

from paged_jax.cli import bench, chat, convert, download, generate, info, plan, serve, sweep

_COMMANDS = {
    "chat": chat,
    "generate": generate,
    "serve": serve,
    "bench": bench,
    "download": download,
    "convert": convert,
    "info": info,
    "plan": plan,
    "sweep": sweep,
}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line and exits with 2."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the exit code: 0, 2 for a usage error, 130 when interrupted."""
    parser = _Parser(prog="paged-jax", description="Run language models through paged KV blocks.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in _COMMANDS.items():
        summary = (module.__doc__ or "").splitlines()[0]
        command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        module.add_arguments(command)
    arguments = parser.parse_args(argv)
    try:
        return _COMMANDS[arguments.command].run(arguments)
    except KeyboardInterrupt:
        return 130
    except (ValueError, NotImplementedError, ImportError, OSError) as error:
        return _refuse(arguments.command, error)
    except RuntimeError as error:
        from paged_jax.models.hub import DownloadError

        # Any other RuntimeError is a bug and keeps its trace.
        if not isinstance(error, DownloadError):
            raise
        return _refuse(arguments.command, error)


def _refuse(command: str, error: Exception) -> int:
    print(f"paged-jax {command}: error: {' '.join(str(error).split())}", file=sys.stderr)
    return 2
