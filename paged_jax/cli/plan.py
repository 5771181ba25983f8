"""Say what fits on a device, or how many devices a model needs, from its config alone."""

import argparse
import dataclasses
import json
import re
from typing import Any

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the command."""
    parser.add_argument(
        "model",
        help="built-in name, model directory (config.json is enough), config.json or .gguf file",
    )
    memory = parser.add_mutually_exclusive_group()
    memory.add_argument("--hbm", type=bytes_of, metavar="SIZE", help="memory of a device: 80GiB")
    memory.add_argument("--device", metavar="NAME", help="a known one: h100, v5e, ...")
    parser.add_argument("--platform", choices=("cpu", "gpu", "tpu"), help="with --hbm; default gpu")
    parser.add_argument("--tp", type=int, metavar="N", help="devices; default: the least that do")
    parser.add_argument("--concurrency", type=int, default=1, metavar="N", help="default 1")
    parser.add_argument("--max-model-len", type=int, metavar="N")
    parser.add_argument("--dtype", default="auto", help="of the weights; default: the config's")
    parser.add_argument("--kv-dtype", default="auto", help="of keys and values, such as int8")
    parser.add_argument("--block-size", type=int, metavar="N")
    parser.add_argument("--max-num-seqs", type=int, default=256, metavar="N", help="default 256")
    parser.add_argument("--max-num-batched-tokens", type=int, metavar="N")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9, metavar="X")
    parser.add_argument(
        "--kv-cache-memory",
        type=bytes_of,
        metavar="SIZE",
        help="of the pool; default: what is left",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")


def bytes_of(text: str) -> int:
    """80GiB, 16G, 1048576. Raises: ValueError."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([kmgt]?i?)b?", text.strip().lower())
    unit = found and {**_UNITS, **_BINARY}.get(found[2])
    if not found or not unit:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 80GiB")
    return int(float(found[1]) * unit)


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan; exits with 2 and the arithmetic where it does not fit."""
    from paged_jax import planner

    request = _request(arguments)
    config = planner.read_config(arguments.model)
    found: dict[str, Any] = {"model": arguments.model}
    if arguments.tp is None:
        found["least_devices"] = {
            name: made.tp if (made := planner.least_devices(config, request, name)) else None
            for name in planner.DEVICES
        }
    hbm = arguments.hbm
    if arguments.device is not None:
        platform, hbm = planner.DEVICES[arguments.device]
        request = dataclasses.replace(request, platform=platform)
    made = None
    if hbm is not None:
        made = _made(config, request, hbm, arguments.tp)
        found |= _facts(made)
        found |= planner.model_kv(config, request)
    elif arguments.tp is not None:
        raise ValueError("--tp needs --hbm or --device")
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        _print(found, request, made)
    return 0


def _request(arguments: argparse.Namespace) -> Any:
    from paged_jax import planner

    for name in (
        "tp",
        "concurrency",
        "max_model_len",
        "block_size",
        "max_num_seqs",
        "max_num_batched_tokens",
        "kv_cache_memory",
    ):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} ({value}) must be at least 1")
    if not 0.0 < arguments.gpu_memory_utilization <= 1.0:
        given = arguments.gpu_memory_utilization
        raise ValueError(f"--gpu-memory-utilization ({given}) must be in (0, 1]")
    if arguments.device is not None and arguments.device not in planner.DEVICES:
        known = ", ".join(planner.DEVICES)
        raise ValueError(f"--device ({arguments.device}) must be one of {known}")
    if arguments.platform is not None and arguments.hbm is None:
        raise ValueError("--platform needs --hbm; a device has its own")
    return planner.Request(
        platform=arguments.platform or "gpu",
        concurrency=arguments.concurrency,
        dtype=arguments.dtype,
        kv_dtype=arguments.kv_dtype,
        max_model_len=arguments.max_model_len,
        block_size=arguments.block_size,
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        kv_cache_memory_bytes=arguments.kv_cache_memory,
    )


def _made(config: dict[str, Any], request: Any, hbm: int, tp: int | None) -> Any:
    from paged_jax import planner

    if tp is not None:
        return planner.plan(config, request, hbm, tp)
    for ranks in planner.RANKS[:-1]:
        try:
            return planner.plan(config, request, hbm, ranks)
        except planner.DoesNotFitError:
            continue
    return planner.plan(config, request, hbm, planner.RANKS[-1])


def _facts(made: Any) -> dict[str, Any]:
    facts = dataclasses.asdict(made)
    budget = facts.pop("budget")
    names = ("num_blocks", "pool", "tokens", "contiguous")
    return {
        **facts,
        "hbm": budget["limit"],
        "gpu_memory_utilization": budget["utilization"],
        "step": budget["step"],
        "states": budget["states"],
        **{name: getattr(made, name) for name in names},
        "concurrency": {str(length): made.concurrency(length) for length in _lengths(made)},
    }


def _lengths(made: Any) -> list[int]:
    lengths, length = [], 256
    while length < made.max_model_len:
        lengths.append(length)
        length *= 2
    return [*lengths, made.max_model_len]


def _print(found: dict[str, Any], request: Any, made: Any) -> None:
    from paged_jax.engine.memory import size

    if "least_devices" in found:
        length = request.max_model_len or "the usual"
        print(f"least devices for {request.concurrency} x {length} tokens:")
        for name, count in found["least_devices"].items():
            print(f"  {name:8} {count or 'more than 64'}")
    if made is None:
        return
    in_all = found["model_kv_bytes_per_token"] * made.max_model_len
    whole = found["every_head_kv_bytes_per_token"] * made.max_model_len
    rows = [
        ("devices", f"{made.tp} ({made.platform})"),
        (
            "memory of a device",
            f"{size(found['hbm'])}, of which {request.gpu_memory_utilization:g} is used",
        ),
        ("weights", f"{size(made.weights)} ({made.dtype})"),
        ("step, at most", f"{size(found['step'])}, of which logits {size(made.logits)}"),
        ("states", f"{size(found['states'])}, of which block tables {size(made.block_tables)}"),
        ("KV heads", f"{made.num_kv_heads}, {made.kv_heads_per_device} on each device"),
        (
            "KV of a token",
            f"{size(made.kv_bytes_per_token)} ({made.kv_dtype}) = {made.kv_bytes_per_token} bytes",
        ),
        ("block", f"{made.block_size} tokens, {size(made.block_bytes)}"),
        (
            "pool",
            f"{made.pool_blocks} blocks with the null block, {size(made.pool)}; "
            f"{made.tokens} tokens",
        ),
        ("KV of a request", f"{size(in_all)} for {made.max_model_len} tokens"),
        (f"KV of {request.concurrency}", size(in_all * request.concurrency)),
        ("with a KV head for each query head", size(whole * request.concurrency)),
    ]
    for name, value in rows:
        print(f"{name:34} {value}")
    print(f"{'requests at once':34} paged, and contiguous ({made.max_model_len} reserved for each)")
    for length in _lengths(made):
        paged, contiguous = made.concurrency(length), made.contiguous
        print(f"  of {length:8} tokens                {paged:7} {contiguous:7}")
