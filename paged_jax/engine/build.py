"""From what a user names to an engine: a checkpoint or a module, its tokenizer, and options."""

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from paged_jax.config import EngineConfig
from paged_jax.engine.compile_cache import use_compilation_cache
from paged_jax.engine.engine import Engine
from paged_jax.engine.pool import served_length
from paged_jax.models.checkpoint import Checkpoint
from paged_jax.models.decoder import Decoder
from paged_jax.models.hub import cache_dir, resolve_model
from paged_jax.models.load import load_model, open_checkpoint
from paged_jax.models.protocol import PagedModel
from paged_jax.models.registry import read_spec
from paged_jax.models.shard import check_mesh, make_mesh, shard
from paged_jax.models.tokenizer import Tokenizer, load_tokenizer

_logger = logging.getLogger("paged_jax")


def build_engine(
    model: str | Path | PagedModel,
    tokenizer: str | Path | Tokenizer | None,
    options: dict[str, Any],
    mesh: Mesh | None = None,
) -> Engine:
    """Loads a model and makes its KV pool.

    Args:
      model: A built-in name, a directory with safetensors, a `.gguf` file, or a module.
      tokenizer: Directory with tokenizer.json, or a `Tokenizer`; None takes the model's own.
      options: Fields of `EngineConfig`.
      mesh: With an axis "tp", over which the model is divided. None: the first
        `tensor_parallel_size` devices.
    Raises: ValueError for an unknown option or model, an unreadable file, or sizes that contradict
      each other; NotImplementedError for an option value that is not built yet.
    """
    ranks = None if mesh is None else check_mesh(mesh).num_ranks
    if ranks is not None:
        options = {"tensor_parallel_size": ranks, **options}
    config = EngineConfig.from_options(options)
    size = config.tensor_parallel_size
    if ranks is not None and size != ranks:
        raise ValueError(
            f"tensor_parallel_size ({size}) must be the size of the axis 'tp' of mesh ({ranks})"
        )
    if mesh is None and size > 1:
        mesh = make_mesh(size)
    eos_token_ids: Sequence[int] = ()
    max_position = None
    own_tokenizer = None
    if isinstance(model, (str, Path)):
        start = time.monotonic()
        path = resolve_model(str(model), progress=_logger.info)
        checkpoint = open_checkpoint(path)
        _logger.info("loading %s", path.name)
        max_position = read_spec(checkpoint.config).max_position_embeddings
        length = served_length(config.max_model_len, max_position)
        module = load_model(checkpoint, config.dtype, max_model_len=length, mesh=mesh)
        if tokenizer is None:
            own_tokenizer = checkpoint.tokenizer()
        eos_token_ids = _eos_token_ids(checkpoint)
        if path.suffix == ".gguf" and own_tokenizer is not None:
            # Older files name one end of sequence and leave the end of a turn to be found.
            ends = dict.fromkeys((*eos_token_ids, *own_tokenizer.eos_token_ids))
            eos_token_ids = tuple(ends)
        _logger.info("loaded in %.1f s", time.monotonic() - start)
    else:
        if isinstance(model, type):
            raise ValueError(f"model must be an instance, not the class {model.__name__}")
        for method in ("logits", "cache_spec"):
            if not callable(getattr(model, method, None)):
                raise ValueError(f"model {type(model).__name__} must have a method {method}")
        if config.dtype != "auto":
            raise ValueError(f"dtype ({config.dtype!r}) applies to checkpoints, not to modules")
        module = model
        if mesh is not None:
            if not isinstance(model, Decoder):
                raise NotImplementedError(
                    f"a model of another kind than Decoder ({type(model).__name__}) is not divided"
                )
            module = model if model.share is not None else shard(model, mesh)
    if isinstance(tokenizer, (str, Path)):
        own_tokenizer = load_tokenizer(Path(tokenizer))
        if own_tokenizer is None:
            raise ValueError(f"tokenizer {tokenizer} has no tokenizer.json")
    elif isinstance(tokenizer, Tokenizer):
        own_tokenizer = tokenizer
    elif tokenizer is not None:
        raise ValueError(f"tokenizer ({tokenizer!r}) must be a path or a Tokenizer")
    if not eos_token_ids and own_tokenizer is not None:
        eos_token_ids = own_tokenizer.eos_token_ids
    # JAX's cache of compiled programs is one setting of the process: it is set where the user has
    # not, and not before the arguments are known to be good.
    use_compilation_cache(cache_dir())
    return Engine(
        module,
        config,
        tokenizer=own_tokenizer,
        eos_token_ids=eos_token_ids,
        max_position=max_position,
    )


def _eos_token_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    """End-of-sequence ids: generation_config, else config; none: the tokenizer's are taken."""
    for source in (checkpoint.generation_config, checkpoint.config):
        value = source.get("eos_token_id")
        if value is not None:
            ids = tuple(value) if isinstance(value, (list, tuple)) else (value,)
            if not all(isinstance(token, int) for token in ids):
                raise ValueError(f"config eos_token_id ({value!r}) must be an id or a list of ids")
            return ids
    return ()
