"""Fetch a built-in model into the cache and print its path."""

import argparse

from paged_jax.cli import options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the command."""
    parser.add_argument(
        "name",
        nargs="?",
        default=options.DEFAULT_MODEL,
        help=f"built-in name (default: {options.DEFAULT_MODEL})",
    )


def run(arguments: argparse.Namespace) -> int:
    """Downloads where needed."""
    import logging

    from paged_jax.cli.status import startup_status
    from paged_jax.models.hub import download

    with startup_status():
        path = download(arguments.name, progress=logging.getLogger("paged_jax").info)
    print(path)
    return 0
