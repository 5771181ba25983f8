"""Flags that several commands share; engine flags are made from the fields of `EngineConfig`."""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from paged_jax.config import EngineConfig
from paged_jax.sampling_params import SamplingParams

DEFAULT_MODEL = "smollm2-135m-instruct"

_TYPES = {"int": int, "float": float, "str": str, "int | None": int}


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds --model."""
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help=f"built-in name, model directory or .gguf file (default: {DEFAULT_MODEL})",
    )


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Adds a flag per field of `EngineConfig`."""
    group = parser.add_argument_group("engine options")
    for field in dataclasses.fields(EngineConfig):
        flag = "--" + field.name.replace("_", "-")
        if field.type is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None)
        else:
            kind = _TYPES.get(getattr(field.type, "__name__", str(field.type)))
            kind = kind or _TYPES.get(str(field.type), str)
            group.add_argument(flag, type=kind, default=None, metavar="X")


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The engine flags that were given, as keyword options of `LLM`."""
    given = {
        field.name: getattr(arguments, field.name) for field in dataclasses.fields(EngineConfig)
    }
    return {name: value for name, value in given.items() if value is not None}


def add_sampling(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    """Adds the sampling flags; greedy by default."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    group.add_argument("--top-k", type=int, default=0, help="0 (default) is off")
    group.add_argument("--top-p", type=float, default=1.0, help="1 (default) is off")
    # The engine has a --seed of its own, for requests without one.
    group.add_argument("--max-tokens", type=int, default=max_tokens, help=f"default {max_tokens}")
    group.add_argument("--stop", action="append", help="stop string; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", help="go on to --max-tokens")


def sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    """Builds the sampling fields that the flags describe."""
    return SamplingParams(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        max_tokens=arguments.max_tokens,
        stop=arguments.stop,
        ignore_eos=arguments.ignore_eos,
    )


def integers(text: str) -> list[int]:
    """The value of a flag: "1,2,4". Raises: ArgumentTypeError."""
    if not all(part.isdecimal() and int(part) for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} must be integers of at least 1 and commas")
    return [int(part) for part in text.split(",")]


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[tuple[str, str, str]]) -> str:
    """Lines under titles; a column is its title, the name of its figure, and its format."""
    lines = [[title for title, _, _ in columns]]
    lines += [[form.format(row[name]) for _, name, form in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)
