"""Any checkpoint as a directory that holds an Orbax tree."""

import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from paged_jax.models.checkpoint import Checkpoint
from paged_jax.models.load import open_checkpoint
from paged_jax.models.orbax import TREE, save_tree
from paged_jax.models.tokenizer import Tokenizer

DTYPES = ("float32", "bfloat16", "float16")
_TOKENIZER_FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("chat_template.*", "additional_chat_templates/*.jinja"),
)


def convert(source: Path, destination: Path, dtype: str | None = None) -> None:
    """Writes config, tokenizer and tensors of a model; one tensor at a time is in memory.

    The destination is there as a whole or not at all.

    Args:
      source: What `open_checkpoint` takes.
      destination: A directory that is empty or does not exist.
      dtype: What to cast tensors to; None: as they are, or dequantised.
    Raises: ValueError if the destination holds something, for an unknown dtype, and what reading
      the source raises.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype ({dtype!r}) must be one of {', '.join(DTYPES)}")
    destination = destination.absolute()
    if destination.exists() and not (destination.is_dir() and not any(destination.iterdir())):
        raise ValueError(f"destination {destination} must be empty or not exist")
    checkpoint = open_checkpoint(source)
    tokenizer = None if source.is_dir() else checkpoint.tokenizer()
    destination.parent.mkdir(parents=True, exist_ok=True)
    unfinished = destination.with_name(f".{destination.name}.{os.getpid()}")
    try:
        unfinished.mkdir()
        if source.is_dir():
            _copy_tokenizer(source, unfinished)
        elif tokenizer is not None:
            _save_tokenizer(tokenizer, unfinished)
        written = _save_tensors(checkpoint, unfinished / TREE, dtype)
        _write_json(unfinished / "config.json", _config(checkpoint.config, written, dtype))
        if checkpoint.generation_config:
            _write_json(unfinished / "generation_config.json", checkpoint.generation_config)
        unfinished.rename(destination)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _save_tensors(checkpoint: Checkpoint, path: Path, dtype: str | None) -> Counter[str]:
    """Returns how many bytes were written in each dtype."""
    written: Counter[str] = Counter()

    def read(name: str) -> np.ndarray:
        array = checkpoint.read(name, None if dtype is None else jnp.dtype(dtype))
        written[array.dtype.name] += array.nbytes
        return np.ascontiguousarray(array)

    save_tree(path, checkpoint.shapes(), read)
    return written


def _config(config: dict[str, Any], written: Counter[str], dtype: str | None) -> dict[str, Any]:
    """The config of what was written: a dtype that it names is kept, unless tensors were cast."""
    if dtype is None and (config.get("dtype") or config.get("torch_dtype") or not written):
        return config
    kept = {key: value for key, value in config.items() if key != "torch_dtype"}
    return kept | {"dtype": dtype or written.most_common(1)[0][0]}


def _copy_tokenizer(source: Path, destination: Path) -> None:
    for pattern in _TOKENIZER_FILES:
        for file in source.glob(pattern):
            if file.is_file():
                target = destination / file.relative_to(source)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, target)


def _save_tokenizer(tokenizer: Tokenizer, destination: Path) -> None:
    """As `Tokenizer.from_directory` reads it; further end tokens are in the generation config."""
    tokenizer._backend.save(str(destination / "tokenizer.json"))
    settings: dict[str, Any] = dict(tokenizer._special_tokens)
    template = tokenizer.chat_template
    if template is not None:
        by_name = [] if isinstance(template, str) else template.items()
        named = [{"name": name, "template": text} for name, text in by_name]
        settings["chat_template"] = named or template
    _write_json(destination / "tokenizer_config.json", settings)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
