"""A whole engine in a directory, and a new engine that goes on from it with the same tokens.

engine.json      options and model it needs, requests, queues, prefix cache, counters
cache/           block state and used blocks, as `core.save_cache` writes them
arrays/          row state, and the host images of swapped sequences

The ledger is the block state again, and text and hashes follow from tokens: none is written. The
directory is written under another name and renamed, so that it is there as a whole or not at all.
"""

import dataclasses
import heapq
import json
import os
import shutil
import time
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax import core
from paged_jax.core import BlockState, KVCache, PagedCache
from paged_jax.decode import RowState
from paged_jax.engine.records import output_of, record_output, record_request, request_of
from paged_jax.engine.request import Request, Sequence
from paged_jax.engine.scheduler_state import Fork, SchedulerState
from paged_jax.ledger import Ledger
from paged_jax.shapes import ceil_div

if TYPE_CHECKING:
    from paged_jax.engine.engine import Engine

FORMAT = 1
"""Version of the directories that `save` writes."""

_STATE_FIELDS = ("free_rows", "num_queried_tokens", "num_hit_tokens")


def save(engine: "Engine", path: str | PathLike[str]) -> None:
    """Writes an engine between two steps, when nothing that was issued is unread."""
    path = Path(path).absolute()
    if path.exists():
        raise ValueError(f"path ({path}) must not exist yet")
    runner = engine.runner
    if runner.is_asleep:
        raise RuntimeError("the engine is asleep: call wake_up() before snapshot()")
    assert runner.kv is not None
    record = {
        "format": FORMAT,
        **_needs(engine),
        **_record_engine(engine, time.monotonic()),
    }
    arrays: dict[str, Any] = {"rows": _fields(jax.device_get(runner.rows))}
    images = [_pools(image) for image, _ in engine.dispatcher.images.values()]
    if images:
        arrays["images"] = {str(number): pools for number, pools in enumerate(images)}
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.mkdir()
        text = json.dumps(record, default=_plain_number)
        (unfinished / "engine.json").write_text(text, encoding="utf-8")
        core.save_cache(unfinished / "cache", PagedCache(blocks=runner.blocks, kv=runner.kv))
        _save_arrays(unfinished / "arrays", arrays)
        unfinished.rename(path)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def restore(engine: "Engine", path: str | PathLike[str]) -> None:
    """Makes an engine without requests the one that was saved."""
    path = Path(path).absolute()
    if not (path / "engine.json").is_file():
        raise ValueError(f"path ({path}) must be a directory that Engine.snapshot wrote")
    record = json.loads((path / "engine.json").read_text(encoding="utf-8"))
    if record.get("format") != FORMAT:
        raise ValueError(
            f"path ({path}) has format {record.get('format')}; this version reads {FORMAT}"
        )
    _check_needs(record, engine)
    if engine.has_unfinished():
        raise RuntimeError("the engine has unfinished requests: restore needs one without")
    if engine.runner.is_asleep:
        raise RuntimeError("the engine is asleep: call wake_up() before restore()")
    now = time.monotonic()
    requests = {
        part["request_id"]: request_of(
            part, now, engine.tokenizer, engine.vocab_size, engine.eos_token_ids
        )
        for part in record["requests"]
    }
    arrays = _restore_arrays(path / "arrays")
    try:
        engine.runner.kv = None  # memory may not hold two pools
        cache = core.restore_cache(path / "cache")
        rows = RowState(**{name: jnp.asarray(x) for name, x in arrays["rows"].items()})
        images = _images_of(record["images"], arrays.get("images", {}), requests)
        state = _state_of(record["state"], engine.state, cache.blocks, requests)
        engine.runner.adopt(cache, rows, state.running)
        engine.dispatcher.adopt(images, state.ledger)
    except BaseException:
        engine._renew()
        raise
    engine.state, engine._requests = state, requests
    engine._early = [output_of(part, now) for part in record["outputs"]]
    engine._num_added = record["num_added"]
    engine._counts = dict(record["counts"])
    version, words, gauss = record["seeds"]
    engine._seeds.setstate((version, tuple(words), gauss))


def _needs(engine: "Engine") -> dict[str, dict[str, Any]]:
    """What an engine must be to go on."""
    runner = engine.runner
    leaves = {name: f"{spec.dtype}{list(spec.shape)}" for name, spec in runner.leaf_specs.items()}
    has_tokenizer = engine.tokenizer is not None
    return {
        "options": dataclasses.asdict(engine.config) | {"has_tokenizer": has_tokenizer},
        "model": {"vocab_size": engine.vocab_size, "kv_dtype": engine._root.decode(), **leaves},
    }


def _check_needs(record: dict[str, Any], engine: "Engine") -> None:
    needs = json.loads(json.dumps(_needs(engine)))
    for part in ("options", "model"):
        ours, theirs = needs[part], record[part]
        for name in [*theirs, *(ours.keys() - theirs.keys())]:
            if ours.get(name) != theirs.get(name):
                raise ValueError(
                    f"{name} of this engine ({ours.get(name)}) must be that of the snapshot "
                    f"({theirs.get(name)})"
                )


def _record_engine(engine: "Engine", now: float) -> dict[str, Any]:
    state = engine.state
    return {
        "requests": [record_request(request, now) for request in engine._requests.values()],
        "outputs": [record_output(output, now) for output in engine._early],
        "images": [
            {
                "key": sequence.key,
                "num_blocks": num_blocks,
                "layout": image.layout,
                "num_kv_heads": image.num_kv_heads,
                "head_dim": image.head_dim,
            }
            for sequence, (image, num_blocks) in engine.dispatcher.images.items()
        ],
        "state": {name: getattr(state, name) for name in _STATE_FIELDS}
        | {
            "waiting": [sequence.key for sequence in state.waiting],
            "running": [sequence.key for sequence in state.running],
            "released": list(state.released),
            "forks": [[fork.parent, fork.child.key, fork.num_tokens] for fork in state.forks],
            "reindexed": list(state.reindexed.items()),
            "costs": dataclasses.asdict(state.costs),
            "cache": None if state.cache is None else state.cache.record(),
        },
        "counts": engine._counts,
        "num_added": engine._num_added,
        "seeds": engine._seeds.getstate(),
    }


def _state_of(
    record: dict[str, Any], old: SchedulerState, blocks: BlockState, requests: dict[str, Request]
) -> SchedulerState:
    """A scheduler state from a record; `old` gives what follows from the options."""

    def find(key: list[Any]) -> Sequence:
        return requests[key[0]].sequences[key[1]]

    state = SchedulerState(
        ledger=_ledger_of(blocks),
        cache=old.cache,
        is_by_priority=old.is_by_priority,
        running=[find(key) for key in record["running"]],
        released=dict.fromkeys(record["released"]),
        forks=[
            Fork(parent=parent, child=find(key), num_tokens=num_tokens)
            for parent, key, num_tokens in record["forks"]
        ],
        reindexed=dict(record["reindexed"]),
        costs=dataclasses.replace(old.costs, **record["costs"]),
        **{name: record[name] for name in _STATE_FIELDS},
    )
    for key in record["waiting"]:
        state.waiting.push(find(key))
    for request in requests.values():
        if request.deadline is not None:
            heapq.heappush(state.deadlines, (request.deadline, request.order, request))
        for sequence in request.sequences:
            state.num_swapped_blocks += ceil_div(sequence.swapped_tokens, blocks.block_size)
    if state.cache is not None:
        state.cache.load(record["cache"])
    return state


def _ledger_of(blocks: BlockState) -> Ledger:
    """The same state on the host."""
    ledger = Ledger(
        blocks.num_blocks, blocks.block_size, blocks.max_seqs, blocks.max_blocks_per_seq
    )
    host = jax.device_get(blocks)
    ledger.free_blocks = host.free_blocks[: int(host.num_free)].tolist()
    ledger.refcounts, ledger.lengths = host.refcounts.tolist(), host.lengths.tolist()
    ledger.tables = [
        table[: ceil_div(length, blocks.block_size)].tolist()
        for table, length in zip(host.block_tables, ledger.lengths, strict=True)
    ]
    return ledger


def _images_of(
    records: list[dict[str, Any]], arrays: dict[str, Any], requests: dict[str, Request]
) -> dict[Sequence, tuple[KVCache, int]]:
    images = {}
    for number, record in enumerate(records):
        name, index = record["key"]
        pools = {key: np.asarray(x) for key, x in arrays[str(number)].items()}
        static = {key: record[key] for key in ("layout", "num_kv_heads", "head_dim")}
        image = KVCache(**{"scales": np.zeros(0, np.float32), **pools}, **static)
        images[requests[name].sequences[index]] = image, record["num_blocks"]
    return images


def _pools(image: KVCache) -> dict[str, Any]:
    """The arrays of an image: Orbax stores no empty ones, and tags are made anew."""
    return {"kv": image.kv, **({"scales": image.scales} if image.is_quantized else {})}


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _save_arrays(path: Path, arrays: dict[str, Any]) -> None:
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        checkpointer.save(path, args=ocp.args.StandardSave(arrays))


def _restore_arrays(path: Path) -> dict[str, Any]:
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        return checkpointer.restore(path, args=ocp.args.StandardRestore())


def _plain_number(value: Any) -> Any:
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no JSON")
