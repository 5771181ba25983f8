"""The offline API: text in, text out, in one process."""

import itertools
import numbers
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from paged_jax.beam_search_params import BeamSearchParams
from paged_jax.engine.build import build_engine
from paged_jax.engine.engine import Engine
from paged_jax.engine.lifecycle import Running
from paged_jax.engine.submission import Prompt
from paged_jax.models.protocol import PagedModel
from paged_jax.models.tokenizer import Tokenizer, render_prompt
from paged_jax.outputs import RequestOutput
from paged_jax.progress import RequestProgress
from paged_jax.sampling_params import SamplingParams

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model with its KV pool, ready to generate. Also a context manager.

    `abort` may be called from any thread; everything else belongs to one thread at a time.
    """

    def __init__(
        self,
        model: str | Path | PagedModel = "smollm2-135m-instruct",
        *,
        tokenizer: str | Path | Tokenizer | None = None,
        mesh: Mesh | None = None,
        **options: Any,
    ) -> None:
        """Loads a model and makes its KV pool.

        Args:
          model: A built-in name, a directory with safetensors, a `.gguf` file, or any
            `flax.nnx.Module` on the protocol `model(batch, cache)`, `logits`, `cache_spec`.
          tokenizer: Directory with tokenizer.json, or a `Tokenizer`; None takes the model's own.
          mesh: With an axis "tp", over which the model is divided; None: the first
            `tensor_parallel_size` devices.
          **options: Fields of `EngineConfig`: dtype, max_model_len, block_size, num_blocks,
            max_num_seqs, seed, debug, ...
        Raises: ValueError for an unknown option or model, an unreadable file, or sizes that
          contradict each other; NotImplementedError for an option value that is not built yet.
        """
        self._engine: Engine | None = build_engine(model, tokenizer, options, mesh)
        self._ids = itertools.count()
        self._open: dict[str, _Open] = {}
        """Requests that have not ended."""
        self._lock = threading.RLock()
        """Held while `_open` and the engine's requests are not the same."""

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
        priority: int | Sequence[int] = 0,
        timeout: float | None = None,
        request_ids: Sequence[str] | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts, all of them in one continuously changing batch.

        Args:
          prompts: Text, token ids, `{"prompt_token_ids": [...], "cache_salt": ...}`, or a list of
            these.
          sampling_params: One for all, or one per prompt; None: the defaults.
          use_tqdm: Show a progress bar with tokens/s on stderr.
          priority: One for all, or one per prompt: lower is sooner. Other values than 0 need
            `scheduling_policy="priority"`.
          timeout: Seconds after which what has not ended ends with the reason "timeout".
          request_ids: One per prompt, for `abort`; none of an unfinished request. None: numbers.
        Returns: One output per prompt, in the order of the prompts.
        Raises: ValueError or NotImplementedError for a prompt or field that is refused; then no
          prompt of the call has run. The error of the device, when a request of the call failed
          more than `max_step_retries` times in a row; the call's other requests are aborted then.
        """
        listed = _as_list(prompts)
        given = SamplingParams() if sampling_params is None else sampling_params
        params = _as_params(given, len(listed), SamplingParams)
        opened = self._submit(listed, params, priority, timeout, request_ids)
        return self._finish(opened, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        timeout: float | None = None,
        request_ids: Sequence[str] | None = None,
    ) -> list[RequestOutput]:
        """Answers conversations, rendered through the model's chat template.

        Args:
          messages: `[{"role": ..., "content": ...}, ...]`, or a list of such lists.
          sampling_params: One for all, or one per conversation; None: the defaults.
          tools: As in `render`, for all of them.
          chat_template_kwargs: The `options` of `render`.
          use_tqdm: Show a progress bar with tokens/s on stderr.
          priority: As in `generate`, like `timeout` and `request_ids`.
        Raises: ValueError when the model has no tokenizer or no chat template; and as `generate`.
        """
        if isinstance(messages, Mapping) or not isinstance(messages, Sequence):
            raise ValueError(f"messages ({messages!r}) must be a list")
        is_one = bool(messages) and isinstance(messages[0], Mapping)
        conversations = [messages] if is_one else list(messages)
        options = chat_template_kwargs or {}
        prompts = [self.render(one, tools, **options) for one in conversations]  # type: ignore[arg-type]
        return self.generate(
            prompts,
            sampling_params,
            use_tqdm=use_tqdm,
            priority=priority,
            timeout=timeout,
            request_ids=request_ids,
        )

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams],
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        timeout: float | None = None,
        request_ids: Sequence[str] | None = None,
    ) -> list[RequestOutput]:
        """Searches for the most likely completions of each prompt.

        Args:
          prompts: As in `generate`, like the keywords.
          params: One for all, or one per prompt.
          use_tqdm: Show a progress bar with tokens/s on stderr.
          priority: One for all, or one per prompt.
          timeout: Seconds.
          request_ids: One per prompt.
        Returns: One output per prompt, whose `outputs` are the beams, best first.
        Raises: As `generate`.
        """
        listed = _as_list(prompts)
        each = _as_params(params, len(listed), BeamSearchParams)
        opened = self._submit(listed, each, priority, timeout, request_ids)
        return self._finish(opened, use_tqdm=use_tqdm)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        request_id: str | None = None,
    ) -> Iterator[RequestOutput]:
        """Completes one prompt, yielding the output so far whenever there are new tokens.

        A dispatch that only decodes brings up to `decode_steps` of them. The text of an output is
        a prefix of the text of every later one. Closing the iterator early aborts the request.
        Other calls may run meanwhile; tokens that they bring forward are in the next output.

        Args:
          prompt: Text, token ids, or a mapping.
          sampling_params: None: the defaults.
          priority: As in `generate`, like `timeout`.
          timeout: Seconds.
          request_id: For `abort`; None: a number.
        Raises: As `generate`: what is refused at once, and an error of the device from the
          iterator.
        """
        given = SamplingParams() if sampling_params is None else sampling_params
        params = _as_params(given, 1, SamplingParams)
        names = None if request_id is None else [request_id]
        [opened] = self._submit([prompt], params, priority, timeout, names)
        outputs = self._outputs(opened)
        next(outputs)  # into its `try`, so that closing it before its first output aborts too
        return outputs  # type: ignore[return-value]

    def render(
        self, messages: Messages, tools: Sequence[Any] | None = None, **options: Any
    ) -> dict[str, Any]:
        """The prompt that `chat` makes of a conversation: text and token ids.

        Args: See `Tokenizer.apply_chat_template`; `options` are its other keywords.
        """
        return render_prompt(self.engine.tokenizer, messages, tools, **options)

    def abort(self, request_id: str) -> None:
        """Ends a request, whose last output says so; unknown ids are ignored.

        From any thread. While a dispatch runs it takes effect after it.
        """
        with self._lock:
            output = self.engine.abort(request_id)
            if output is not None:
                self._deliver(output)

    def reset_prefix_cache(self) -> None:
        """Forgets the KV that is kept for later requests; those that run go on."""
        self.engine.reset_prefix_cache()

    def update_weights(self, params: Any, running: Running = "error") -> None:
        """Computes with other parameters from now on; see `Engine.update_weights`."""
        self.engine.update_weights(params, running)

    def sleep(self, level: int = 1) -> None:
        """Frees the KV pool, with level 2 the weights too; see `Engine.sleep`."""
        self.engine.sleep(level)

    def wake_up(self, params: Any = None) -> None:
        """Makes an empty pool after `sleep`; see `Engine.wake_up`."""
        self.engine.wake_up(params)

    def stats(self) -> dict[str, int]:
        """Counts of blocks, requests and tokens; see `Engine.stats`."""
        return self.engine.stats()

    def get_tokenizer(self) -> Tokenizer | None:
        """The tokenizer, or None for a model that serves token ids only."""
        return self.engine.tokenizer

    def close(self) -> None:
        """Drops every request and gives the memory back; the object cannot be used afterwards."""
        engine, self._engine = self._engine, None
        self._open.clear()
        if engine is not None:
            engine.error = None  # its traceback holds the engine

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams | BeamSearchParams],
        priority: int | Sequence[int],
        timeout: float | None,
        request_ids: Sequence[str] | None,
    ) -> list["_Open"]:
        engine = self.engine
        if request_ids is None:
            fresh = (name for name in map(str, self._ids) if not engine.has_unfinished(name))
            names = list(itertools.islice(fresh, len(prompts)))
        elif isinstance(request_ids, str):
            raise ValueError(f"request_ids ({request_ids!r}) must be a list")
        else:
            names = list(request_ids)
        if len(names) != len(prompts):
            raise ValueError(
                f"request_ids ({len(names)}) must be as many as prompts ({len(prompts)})"
            )
        is_ranked = any(priority) if isinstance(priority, Sequence) else priority != 0
        if is_ranked and engine.config.scheduling_policy != "priority":
            raise ValueError(f'priority ({priority!r}) needs scheduling_policy="priority"')
        opened = [_Open(name) for name in names]
        requests = list(zip(names, prompts, params, strict=True))
        with self._lock:
            engine.add_requests(requests, priority=priority, timeout=timeout)
            self._open |= dict(zip(names, opened, strict=True))
        return opened

    def _finish(self, opened: list["_Open"], *, use_tqdm: bool) -> list[RequestOutput]:
        """Steps until all have ended; whatever ends it early aborts them."""
        going = opened
        try:
            with RequestProgress(len(opened), is_shown=use_tqdm) as progress:
                while going:
                    self._step(going[0])
                    for ended in (one for one in going if one.is_ended):
                        if ended.error is not None:
                            raise ended.error
                    going = [one for one in going if not one.is_ended]
                    num_tokens = sum(one.num_tokens for one in opened)
                    progress.update(len(opened) - len(going), num_tokens)
        finally:
            for one in going:
                self._leave(one)
        return [one.output for one in opened if one.output is not None]

    def _outputs(self, opened: "_Open") -> Iterator[RequestOutput | None]:
        """None, then the outputs of one request."""
        output = None
        try:
            yield None
            while output is None or not output.finished:
                while opened.output is output:
                    self._step(opened)
                output = opened.output
                if opened.error is not None:
                    raise opened.error
                yield output
        finally:
            self._leave(opened)

    def _step(self, opened: "_Open") -> None:
        """One dispatch for every open call; `opened` is one that has not ended.

        Raises: RuntimeError if it can never end.
        """
        engine = self.engine
        if engine.has_unfinished():
            for output in engine.step():
                self._deliver(output)
            return
        with self._lock:  # an abort that is under way delivers first
            if not opened.is_ended:
                raise RuntimeError(
                    "the request is gone: somebody reset the engine, or stepped it and took it"
                )

    def _deliver(self, output: RequestOutput) -> None:
        """Hands an output to its call."""
        opened = self._open.get(output.request_id)
        if opened is None:
            return
        if output.finished:
            del self._open[output.request_id]
            opened.error = self.engine.exception_of(output)
        opened.output = output

    def _leave(self, opened: "_Open") -> None:
        """Aborts a request that nobody waits for any more, unless it has ended."""
        with self._lock:
            if self._open.get(opened.name) is opened:
                del self._open[opened.name]
                if self._engine is not None:
                    self._engine.abort(opened.name)


@dataclass(eq=False)
class _Open:
    """A request of a call, and what has come of it."""

    name: str
    output: RequestOutput | None = None
    """The newest."""
    error: Exception | None = None
    """Why it failed, if it did."""

    @property
    def is_ended(self) -> bool:
        """Whether nothing more will come."""
        return self.output is not None and self.output.finished

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far."""
        return sum(len(one.token_ids) for one in self.output.outputs) if self.output else 0


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


def _as_params(params: Any, count: int, kind: type) -> list[Any]:
    """One per prompt."""
    each = list(params) if isinstance(params, Sequence) else [params] * count
    if len(each) != count:
        raise ValueError(f"{kind.__name__} ({len(each)}) must be as many as prompts ({count})")
    for one in each:
        if not isinstance(one, kind):
            raise ValueError(f"params must be {kind.__name__}, not {type(one).__name__}")
    return each
