"""Requests in, tokens out: joins scheduler, ledger and runner, one dispatch per `step`."""

import logging
import random
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Listed
from os import PathLike
from typing import Any

import jax.numpy as jnp

from paged_jax.beam_search_params import BeamSearchParams
from paged_jax.config import EngineConfig, ResolvedConfig
from paged_jax.engine import lifecycle, snapshot
from paged_jax.engine.events import Event
from paged_jax.engine.hosts import Call, Group, Step, told_of
from paged_jax.engine.loop import Loop
from paged_jax.engine.places import Places, probe
from paged_jax.engine.pool import resolve
from paged_jax.engine.request import Request
from paged_jax.engine.runner import Runner
from paged_jax.engine.submission import Prompt, check_beam_request, check_request
from paged_jax.models.protocol import PagedModel
from paged_jax.models.tokenizer import Tokenizer
from paged_jax.outputs import RequestOutput
from paged_jax.sampling_params import SamplingParams

_logger = logging.getLogger("paged_jax")


class Engine(Loop):
    """Continuous batching over one model.

    Requests join and leave at every `step`. A request that does not fit waits; a running one that
    cannot grow goes back to the queue. `abort` may be called from any thread and at any moment;
    everything else belongs to one thread at a time.
    """

    def __init__(
        self,
        model: PagedModel,
        config: EngineConfig,
        *,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Listed[int] = (),
        max_position: int | None = None,
    ) -> None:
        """Sizes the pool and makes it.

        Args:
          model: Any module on the protocol `model(batch, cache)`, `logits`, `cache_spec`.
          config: Options.
          tokenizer: None serves token ids only.
          eos_token_ids: Tokens that end a sequence.
          max_position: Most positions of the model; None: any number.
        Raises: ValueError for options that contradict each other or the model.
        """
        model_dtype, self.vocab_size, step_shape = probe(model)
        kv_dtype = model_dtype if config.kv_dtype is None else jnp.dtype(config.kv_dtype)
        places = Places.of(model)
        self.config: ResolvedConfig = resolve(
            config, model.cache_spec(), kv_dtype, max_position, places.num_ranks, step_shape
        )
        self.eos_token_ids = frozenset(eos_token_ids)
        self.runner = Runner(
            model,
            self.config,
            kv_dtype,
            self.vocab_size,
            places,
            strict_compile=config.strict_compile,
            has_tags=config.debug,
        )
        super().__init__(self.runner, self.config, config, tokenizer, str(kv_dtype).encode())
        self._seeds = random.Random(config.seed)
        self._num_added = 0
        self._leaving: deque[str] = deque()
        """Requests to end in the next step, where there are several processes."""
        if config.warmup == "all":
            self.runner.warm_up()

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams,
        *,
        priority: int = 0,
        timeout: float | None = None,
    ) -> None:
        """Checks a request and puts it into the queue.

        Args:
          request_id: Unique among the unfinished requests.
          prompt: Text, token ids, or `{"prompt_token_ids": [...]}`.
          params: Sampling fields, or those of a beam search.
          priority: Lower is sooner, with `scheduling_policy="priority"`.
          timeout: Seconds after which it ends with the reason "timeout".
        Raises: ValueError that names the field and the rule; ImportError for structured outputs
          without llguidance. Nothing is allocated then.
        """
        self.add_requests([(request_id, prompt, params)], priority=priority, timeout=timeout)

    def add_requests(
        self,
        requests: Listed[tuple[str, Prompt, SamplingParams | BeamSearchParams]],
        *,
        priority: int | Listed[int] = 0,
        timeout: float | None = None,
    ) -> None:
        """Adds all of (request_id, prompt, params), or none when one of them is refused."""
        is_listed = isinstance(priority, Listed)
        priorities = list(priority) if is_listed else [priority] * len(requests)
        if len(priorities) != len(requests):
            raise ValueError(
                f"priority ({len(priorities)}) must be as many as requests ({len(requests)})"
            )
        with self._lock:
            taken = set(self._requests)
            made = []
            for (request_id, prompt, params), rank in zip(requests, priorities, strict=True):
                if request_id in taken:
                    raise ValueError(
                        f"request_id {request_id!r} is in use by an unfinished request"
                    )
                taken.add(request_id)
                made.append(self.check(request_id, prompt, params, priority=rank, timeout=timeout))
            for request in made:
                self._add(request)

    def check(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams,
        *,
        priority: int = 0,
        timeout: float | None = None,
    ) -> Request:
        """A request for `add_checked`. From any thread, also while a step runs: it waits for none.

        Raises: As `add_request`, but for ids in use.
        """
        check = check_beam_request if isinstance(params, BeamSearchParams) else check_request
        return check(
            request_id,
            prompt,
            params,  # type: ignore[arg-type]
            self.config,
            self.vocab_size,
            self.tokenizer,
            self.eos_token_ids,
            priority=priority,
            timeout=timeout,
        )

    def add_checked(self, request: Request) -> None:
        """Adds what `check` has made.

        Raises: ValueError for an id of an unfinished request.
        """
        with self._lock:
            if request.request_id in self._requests:
                raise ValueError(
                    f"request_id {request.request_id!r} is in use by an unfinished request"
                )
            self._add(request)

    def _add(self, request: Request) -> None:
        request.order = self._num_added
        self._num_added += 1
        if request.params.seed in (None, -1):
            request.seed = self._seeds.getrandbits(64)
        self._requests[request.request_id] = request
        self.state.add(request)
        self._counts["prompt_tokens"] += len(request.prompt_token_ids)
        if self.group is not None and self.group.is_first:
            self.group.added.append(told_of(request))
        self.dispatcher.recorder.added(request)

    @property
    def events(self) -> Callable[[Event], None] | None:
        """Called with every `Event`, until it raises, which is logged; None: nobody listens."""
        return self.dispatcher.recorder.sink

    @events.setter
    def events(self, sink: Callable[[Event], None] | None) -> None:
        self.dispatcher.recorder.sink = sink

    def has_unfinished(self, request_id: str | None = None) -> bool:
        """Whether any request, or the one of this id, has outputs to come."""
        if request_id is not None:
            early = (output.request_id for output in self._early)
            return request_id in self._requests or request_id in early
        return bool(self._requests or self._early)

    def step(self) -> list[RequestOutput]:
        """Issues one dispatch, and returns the requests that advanced or ended in the one before.

        Without `overlap` it reads the dispatch that it issues. A dispatch that fails is discarded:
        its requests are computed again with the tokens read so far, and after
        `max_step_retries` failures in a row they end with the reason "error" (see `error`).
        Anything that is no `Exception`, such as Ctrl-C, is raised after the same clean-up.

        Raises: RuntimeError while the engine is asleep.
        """
        if self.runner.is_asleep:
            raise RuntimeError("the engine is asleep: call wake_up() before step()")
        with self._lock:
            if self.group is not None and self.group.is_first:
                self._tell_step(self.group)
            self._is_stepping = True
            outputs, self._early = self._early, []
            try:
                outputs += self._take_aborts()
                self._guarded(self._step, outputs)
                if self.group is None:
                    outputs += self._take_aborts()
                if not self._requests:
                    self._guarded(self._drain, outputs)
            except BaseException:
                self._early = outputs
                raise
            finally:
                self._is_stepping = False
            return outputs

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request; its blocks are free after the next step. Unknown ids are ignored.

        Called while a step runs (from another thread, by a signal handler, or by a stream that the
        garbage collector closes), it takes effect in that step or the next, which returns the
        output.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        if self.group is not None:  # all processes end it in the same step
            self._leaving.append(request_id)
            return None
        if not self._lock.acquire(blocking=False):
            self._aborts.append(request)
            return None
        try:
            if self._is_stepping:
                self._aborts.append(request)
                return None
            if not self._is_held(request):
                return None
            output = self._finish(request, "abort")
            # The end tells all that was read before it.
            self._early = [x for x in self._early if x.finished or x.request_id != request_id]
            if not self._requests:
                self._guarded(self._drain, [])
            return output
        finally:
            self._lock.release()

    def join(self, group: Group) -> None:
        """Becomes one of several processes; nothing has run yet.

        Raises: NotImplementedError for options that other processes would have to know more for;
          PlansDifferError for options or a model that differ from those of process 0.
        """
        if self.config.preemption_mode != "recompute":
            raise NotImplementedError(
                f"preemption_mode={self.config.preemption_mode!r} with several processes; use "
                "'recompute'"
            )
        said = self._options, self.config, self.vocab_size, self.runner.leaf_specs
        group.agree(said, "has another model or other options than")
        self.group = group

    def step_as_told(self, told: Step) -> list[RequestOutput]:
        """The step that the first process does; see `hosts.follow`."""
        for fields in told.added:
            given = dict(fields)
            times = given.pop("arrival_time"), given.pop("deadline")
            request = self.check(**given)
            request.arrival_time, request.deadline = times
            self.add_checked(request)
        self._told = told
        self._aborts.extend(self._requests[x] for x in told.aborted if x in self._requests)
        return self.step()

    def _tell_step(self, group: Group) -> None:
        leaving: list[str] = []
        while self._leaving:
            leaving.append(self._leaving.popleft())
        added, group.added = tuple(group.added), []
        self._told = Step(time.monotonic(), added, tuple(leaving))
        group.tell(self._told)
        self._aborts.extend(self._requests[x] for x in leaving if x in self._requests)

    def _alone(self, what: str) -> None:
        if self.group is not None:
            raise NotImplementedError(f"{what} with several processes")

    def reset(self) -> None:
        """Drops every request and starts over with an empty pool."""
        self._alone("reset")
        with self._lock:
            self._requests.clear()
            self._aborts.clear()
            self._early.clear()
            self.dispatcher.images.clear()
            self._renew()

    def reset_prefix_cache(self) -> None:
        """Forgets what is cached; blocks that no row owns are free afterwards."""
        if self.group is not None and self.group.is_first:
            self.group.tell(Call("reset_prefix_cache"))
        with self._lock:
            self._guarded(self._forget_cached, self._early)

    def snapshot(self, path: str | PathLike[str]) -> None:
        """Writes requests, used blocks and states to a new directory; the engine goes on after it.

        Raises: ValueError when `path` exists; RuntimeError while the engine is asleep.
        """
        self._alone("snapshot")
        with self._between_steps():
            snapshot.save(self, path)

    def restore(self, path: str | PathLike[str]) -> None:
        """Goes on from a snapshot, with the same tokens as the engine that wrote it.

        Requests keep their ids, and deadlines the time that was left. Outputs that had not been
        handed out come with the next step. The weights must be the same; only shapes are compared.

        Raises: ValueError for another model, options or format, with what differs; RuntimeError
          when this engine has unfinished requests or is asleep.
        """
        self._alone("restore")
        with self._between_steps():
            snapshot.restore(self, path)

    def update_weights(self, params: Any, running: lifecycle.Running = "error") -> None:
        """Computes with other parameters from now on; nothing is compiled again.

        Args:
          params: See `weights.fit`: every leaf of the model, of the same shape, dtype and sharding.
          running: For requests that have begun: "error" refuses, "recompute" keeps their tokens and
            computes their KV anew, "abort" ends them.
        Raises: ValueError that names the leaf that does not fit; RuntimeError for "error" when a
          request has begun. Nothing has changed then.
        """
        self._alone("update_weights")
        with self._between_steps():
            lifecycle.update_weights(self, params, running)

    def sleep(self, level: int = 1) -> None:
        """Frees the KV pool, with level 2 the weights too. Requests wait, with their tokens.

        Until `wake_up`, requests can be added and aborted, and `step` raises.
        """
        self._alone("sleep")
        with self._between_steps():
            lifecycle.sleep(self, level)

    def wake_up(self, params: Any = None) -> None:
        """Makes an empty pool; what ran before `sleep` is computed again.

        Args:
          params: The weights, if they were freed and `update_weights` has not given others.
        Raises: RuntimeError when there are no weights; ValueError for some that do not fit.
        """
        self._alone("wake_up")
        with self._between_steps():
            lifecycle.wake_up(self, params)

    def stats(self) -> dict[str, int]:
        """Counts of blocks, requests and tokens."""
        num_free, num_cached = self.state.ledger.num_free, self.state.num_cached
        swapped = sum(sequence.swapped_tokens > 0 for sequence in self.dispatcher.images)
        return {
            "num_blocks": self.config.num_blocks,
            "num_free": num_free,
            "num_used": self.config.num_blocks - num_free - num_cached,
            "num_cached": num_cached,
            "num_running": len(self.state.running),
            "num_waiting": len(self.state.waiting) - swapped,
            "num_swapped": swapped,
            "num_preemptions": self._counts["num_preemptions"],
            "prefix_queries_tokens": self.state.num_queried_tokens,
            "prefix_hits_tokens": self.state.num_hit_tokens,
            "prompt_tokens": self._counts["prompt_tokens"],
            "generation_tokens": self._counts["generation_tokens"],
            "compiles": len(self.runner.compiled),
        }
