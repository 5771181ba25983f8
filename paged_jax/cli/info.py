"""Show versions, devices, and what a model is made of."""

import argparse
import dataclasses
import json
import platform
from importlib.metadata import version
from typing import Any

from paged_jax.cli import options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the command."""
    parser.add_argument(
        "model",
        nargs="?",
        help=f"built-in name, model directory or .gguf file, such as {options.DEFAULT_MODEL}",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Prints a line per fact; reads a model's config but not its weights."""
    facts = _environment()
    if arguments.model is not None:
        facts |= _model(arguments.model)
    if arguments.json:
        print(json.dumps(facts, indent=2))
    else:
        for name, value in facts.items():
            print(f"{name}: {value}")
    return 0


def _environment() -> dict[str, Any]:
    import flax
    import jax

    from paged_jax import __version__

    return {
        "paged-jax": __version__,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "flax": flax.__version__,
        "devices": [str(device) for device in jax.devices()],
    }


def _model(name: str) -> dict[str, Any]:
    import math

    from paged_jax.models.decoder import cache_spec
    from paged_jax.models.hub import resolve_model
    from paged_jax.models.load import open_checkpoint
    from paged_jax.models.registry import read_spec

    path = resolve_model(name)
    checkpoint = open_checkpoint(path)
    spec = read_spec(checkpoint.config)
    kept = cache_spec(spec)
    heads = (1 if kept.latent_dim else 2) * kept.num_kv_heads
    parts = {name: value for name, value in vars(spec).items() if name not in ("layers", "norm")}
    return {
        "model": str(path),
        "architecture": ", ".join(checkpoint.config["architectures"]),
        "parameters": sum(math.prod(shape) for shape in checkpoint.shapes().values()),
        "num_layers": spec.num_layers,
        "num_kv_heads": kept.num_kv_heads,
        "head_dim": kept.head_dim,
        "kv_bytes_per_token_float32": spec.num_layers * heads * kept.head_dim * 4,
        **parts,
        # Layers of a kind are told once.
        "layers": [dataclasses.asdict(layer) for layer in dict.fromkeys(spec.layers)],
    }
