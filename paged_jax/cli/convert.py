"""Write any model as a directory with an Orbax checkpoint."""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the command."""
    parser.add_argument(
        "source",
        metavar="SRC",
        help="built-in name, model directory, .gguf file or hub id, as for --model",
    )
    parser.add_argument("destination", metavar="DST", help="a new or empty directory")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="cast tensors (default: as they are stored; quantised ones are dequantised)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Converts and prints the destination."""
    import logging

    from paged_jax.cli.status import startup_status

    with startup_status():
        from paged_jax.models.hub import resolve_model

        logger = logging.getLogger("paged_jax")
        source = resolve_model(arguments.source, progress=logger.info)
        logger.info(f"converting {source}")
        from paged_jax.models.convert import convert

        convert(source, Path(arguments.destination), arguments.dtype)
    print(arguments.destination)
    return 0
