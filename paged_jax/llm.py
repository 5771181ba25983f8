"""The offline API: text in, text out, in one process."""

import itertools
import logging
import numbers
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paged_jax.config import EngineConfig
from paged_jax.engine.compile_cache import use_compilation_cache
from paged_jax.engine.engine import Engine
from paged_jax.engine.submission import Prompt
from paged_jax.models.checkpoint import Checkpoint
from paged_jax.models.hub import cache_dir, resolve_model
from paged_jax.models.load import load_model, open_checkpoint
from paged_jax.models.protocol import PagedModel
from paged_jax.models.tokenizer import Tokenizer, load_tokenizer
from paged_jax.outputs import RequestOutput
from paged_jax.progress import RequestProgress
from paged_jax.sampling_params import SamplingParams

_logger = logging.getLogger("paged_jax")

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model with its KV pool, ready to generate. Also a context manager."""

    def __init__(
        self,
        model: str | Path | PagedModel = "smollm2-135m-instruct",
        *,
        tokenizer: str | Path | Tokenizer | None = None,
        **options: Any,
    ) -> None:
        """Loads a model and makes its KV pool.

        Args:
          model: A built-in name, a directory with safetensors, a `.gguf` file, or any
            `flax.nnx.Module` on the protocol `model(batch, cache)`, `logits`, `cache_spec`.
          tokenizer: Directory with tokenizer.json, or a `Tokenizer`; None takes the model's own.
          **options: Fields of `EngineConfig`: dtype, max_model_len, block_size, num_blocks,
            max_num_seqs, seed, debug, ...
        Raises: ValueError for an unknown option or model, an unreadable file, or sizes that
          contradict each other; NotImplementedError for an option value that is not built yet.
        """
        config = EngineConfig.from_options(options)
        eos_token_ids: Sequence[int] = ()
        max_position = None
        own_tokenizer = None
        if isinstance(model, (str, Path)):
            start = time.monotonic()
            path = resolve_model(str(model), progress=_logger.info)
            checkpoint = open_checkpoint(path)
            _logger.info("loading %s", path.name)
            module = load_model(checkpoint, config.dtype)
            own_tokenizer = checkpoint.tokenizer()
            eos_token_ids = _eos_token_ids(checkpoint, own_tokenizer)
            max_position = module.spec.max_position_embeddings
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
        # JAX's cache of compiled programs is one setting of the process: it is set where the user
        # has not, and not before the arguments are known to be good.
        use_compilation_cache(cache_dir())
        self._engine: Engine | None = Engine(
            module,
            config,
            tokenizer=own_tokenizer,
            eos_token_ids=eos_token_ids,
            max_position=max_position,
        )
        self._ids = itertools.count()
        self._aborted: list[RequestOutput] = []
        """Last outputs of aborted requests, which the next step reports."""
        self._unread: dict[str, RequestOutput | None] = {}
        """Newest output of each open stream, until the stream has yielded it."""

    @property
    def engine(self) -> Engine:
        """The engine below: add requests and step it yourself.

        Raises: RuntimeError after `close`.
        """
        if self._engine is None:
            raise RuntimeError("this LLM is closed")
        return self._engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes prompts, all of them in one continuously changing batch.

        Args:
          prompts: Text, token ids, `{"prompt_token_ids": [...]}`, or a list of these.
          sampling_params: One for all, or one per prompt; None: the defaults.
          use_tqdm: Show a progress bar with tokens/s on stderr.
        Returns: One output per prompt, in the order of the prompts.
        Raises: ValueError or NotImplementedError for a prompt or field that is refused; then no
          prompt of the call has run.
        """
        listed = _as_list(prompts)
        if isinstance(sampling_params, Sequence):
            params = list(sampling_params)
            if len(params) != len(listed):
                raise ValueError(
                    f"sampling_params ({len(params)}) must be as many as prompts ({len(listed)})"
                )
        else:
            params = [SamplingParams() if sampling_params is None else sampling_params]
            params *= len(listed)
        names = [str(next(self._ids)) for _ in listed]
        self.engine.add_requests(list(zip(names, listed, params, strict=True)))
        finished: dict[str, RequestOutput] = {}
        mine = set(names)
        try:
            with RequestProgress(len(listed), is_shown=use_tqdm) as progress:
                while len(finished) < len(listed):
                    outputs = [out for out in self._step() if out.request_id in mine]
                    finished |= {out.request_id: out for out in outputs if out.finished}
                    progress.update(len(finished), outputs)
        finally:
            for name in names:
                self.engine.abort(name)
        return [finished[name] for name in names]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers conversations, rendered through the model's chat template.

        Args:
          messages: `[{"role": ..., "content": ...}, ...]`, or a list of such lists.
          sampling_params: One for all, or one per conversation; None: the defaults.
          use_tqdm: Show a progress bar with tokens/s on stderr.
        Raises: ValueError when the model has no tokenizer or no chat template.
        """
        if isinstance(messages, Mapping) or not isinstance(messages, Sequence):
            raise ValueError(f"messages ({messages!r}) must be a list")
        is_one = bool(messages) and isinstance(messages[0], Mapping)
        conversations = [messages] if is_one else list(messages)
        prompts = [self.render(conversation) for conversation in conversations]  # type: ignore[arg-type]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Completes one prompt, yielding the output so far after each token.

        The text of an output is a prefix of the text of every later one. Closing the iterator
        early aborts the request. Other calls may run meanwhile; tokens that they bring forward
        are in the next output.
        """
        name = str(next(self._ids))
        params = SamplingParams() if sampling_params is None else sampling_params
        self.engine.add_request(name, prompt, params)
        outputs = self._outputs(name)
        next(outputs)  # into its `try`, so that closing it before its first output aborts too
        return outputs  # type: ignore[return-value]

    def render(self, messages: Messages) -> dict[str, Any]:
        """The prompt that `chat` makes of a conversation: text and token ids."""
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise ValueError("this model has no tokenizer: chat needs one with a chat template")
        text = tokenizer.apply_chat_template(messages)
        # The template has written BOS where it belongs.
        ids = tokenizer.encode(text, add_special_tokens=False)
        return {"prompt": text, "prompt_token_ids": ids}

    def abort(self, request_id: str) -> None:
        """Ends a request, whose last output says so; unknown ids are ignored."""
        output = self.engine.abort(request_id)
        if output is not None:
            self._aborted.append(output)

    def stats(self) -> dict[str, int]:
        """Counts of blocks, requests and tokens; see `Engine.stats`."""
        return self.engine.stats()

    def get_tokenizer(self) -> Tokenizer | None:
        """The tokenizer, or None for a model that serves token ids only."""
        return self.engine.tokenizer

    def close(self) -> None:
        """Ends every request and gives the memory back; the object cannot be used afterwards."""
        self._engine = None

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _step(self) -> list[RequestOutput]:
        """One dispatch for every open call; keeps what belongs to streams."""
        outputs, self._aborted = self._aborted, []
        if not outputs:
            if not self.engine.has_unfinished():
                raise RuntimeError(
                    "the request is gone: a failed call reset the engine, or another step took it"
                )
            outputs = self.engine.step()
        for output in outputs:
            if output.request_id in self._unread:
                self._unread[output.request_id] = output
        return outputs

    def _outputs(self, name: str) -> Iterator[RequestOutput | None]:
        """None, then the outputs of one request."""
        self._unread[name] = None
        try:
            yield None
            while True:
                while (output := self._unread[name]) is None:
                    self._step()
                self._unread[name] = None
                yield output
                if output.finished:
                    return
        finally:
            del self._unread[name]
            if self._engine is not None:
                self._engine.abort(name)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (text, mapping, or token ids) as a list of one."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Sequence | np.ndarray) or isinstance(prompts, bytes | bytearray):
        raise ValueError(f"prompts ({prompts!r}) must be a prompt or a list of prompts")
    listed = list(prompts)
    if listed and all(isinstance(item, numbers.Integral) for item in listed):
        return [listed]  # type: ignore[list-item]
    return listed  # type: ignore[return-value]


def _eos_token_ids(checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """End-of-sequence ids: generation_config, else config, else the tokenizer's."""
    for source in (checkpoint.generation_config, checkpoint.config):
        value = source.get("eos_token_id")
        if value is not None:
            ids = tuple(value) if isinstance(value, (list, tuple)) else (value,)
            if not all(isinstance(token, int) for token in ids):
                raise ValueError(f"config eos_token_id ({value!r}) must be an id or a list of ids")
            return ids
    return tokenizer.eos_token_ids if tokenizer else ()
