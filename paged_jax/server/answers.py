"""From the outputs of the engine to the two forms in which clients get them.

An answer without streaming is a stream of one delta per choice: its last output.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from paged_jax.async_llm import AsyncLLM
from paged_jax.outputs import CompletionOutput, RequestOutput
from paged_jax.server import logprobs
from paged_jax.server.jobs import Job


@dataclass(frozen=True, kw_only=True)
class Delta:
    """What is new of one choice."""

    index: int
    """Of the choice in the answer: n times the prompt, and the choice."""
    text: str
    token_ids: Sequence[int]
    entries: Sequence[logprobs.Entries]
    """Log-probabilities of the tokens; empty when nobody asked."""
    finish_reason: str | None
    stop_reason: str | int | None
    is_first: bool
    output: RequestOutput


class Choices:
    """What has been sent of each choice of a job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._sent: dict[int, tuple[int, int]] = {}  # choice -> characters, tokens
        self._ended: set[int] = set()

    def deltas(self, place: int, output: RequestOutput) -> Iterator[Delta]:
        """What an output of the prompt at `place` brings that has not been sent.

        Tokens whose text is held back come alone only where somebody asked for tokens.
        """
        params = self._job.params
        tells_tokens = params.logprobs is not None or self._job.has_token_ids
        for completion in output.outputs:
            index = place * params.n + completion.index
            if index in self._ended:
                continue
            is_first = index not in self._sent
            num_chars, num_tokens = self._sent.get(index, (0, 0))
            delta = self._delta(index, completion, num_chars, num_tokens, is_first, output)
            if delta.finish_reason is not None:
                self._ended.add(index)
            elif not (delta.text or (tells_tokens and delta.token_ids)):
                continue
            self._sent[index] = len(completion.text), len(completion.token_ids)
            yield delta

    def _delta(
        self,
        index: int,
        completion: CompletionOutput,
        num_chars: int,
        num_tokens: int,
        is_first: bool,
        output: RequestOutput,
    ) -> Delta:
        is_scoring = self._job.is_scoring
        entries = [] if is_scoring else (completion.logprobs or [])[num_tokens:]
        reason = completion.finish_reason
        return Delta(
            index=index,
            text="" if is_scoring else completion.text[num_chars:],
            token_ids=[] if is_scoring else completion.token_ids[num_tokens:],
            entries=entries,
            finish_reason="length" if is_scoring and reason == "stop" else reason,
            stop_reason=None if is_scoring else completion.stop_reason,
            is_first=is_first,
            output=output,
        )


class Form(Protocol):
    """How an answer looks."""

    def whole(self, deltas: Sequence[Delta], outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer without streaming."""
        ...

    def chunks(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """The events of a stream for one delta."""
        ...

    def last(self) -> dict[str, Any]:
        """The event that carries the usage, without it."""
        ...


class CompletionForm:
    """Of /v1/completions."""

    def __init__(self, job: Job, llm: AsyncLLM) -> None:
        self._job, self._llm = job, llm
        self._names = _names(job, llm)
        self._offsets: dict[int, int] = {}

    def whole(self, deltas: Sequence[Delta], outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        choices = [self._choice(delta, is_chunk=False) for delta in deltas]
        return _head(self._job, "text_completion") | {"choices": choices}

    def chunks(self, delta: Delta) -> Iterator[dict[str, Any]]:
        choices = [self._choice(delta, is_chunk=True)]
        yield _head(self._job, "text_completion") | {"choices": choices}

    def last(self) -> dict[str, Any]:
        return _head(self._job, "text_completion") | {"choices": []}

    def _choice(self, delta: Delta, *, is_chunk: bool) -> dict[str, Any]:
        job, output = self._job, delta.output
        text, tokens, entries = delta.text, list(delta.token_ids), list(delta.entries)
        if job.is_echo and delta.is_first:
            text = self._prompt_text(output) + text
            if job.params.logprobs is not None:
                tokens = output.prompt_token_ids + tokens
                # A prompt that was aborted on its way has no more.
                known = list(output.prompt_logprobs or [])
                known += [None] * (len(output.prompt_token_ids) - len(known))
                entries = known + entries
        found = None
        if job.params.logprobs is not None:
            offset = self._offsets.get(delta.index, 0)
            count = job.params.logprobs
            found, self._offsets[delta.index] = logprobs.completion_logprobs(
                tokens, entries, count, self._names, offset
            )
        choice = {
            "index": delta.index,
            "text": text,
            "logprobs": found,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if job.num_prompt_logprobs is not None and not is_chunk:
            choice["prompt_logprobs"] = _of_prompt(job.num_prompt_logprobs, output)
        if job.has_token_ids:
            choice["token_ids"] = list(delta.token_ids)
            if delta.is_first:
                choice["prompt_token_ids"] = output.prompt_token_ids
        return choice

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        tokenizer = self._llm.get_tokenizer()
        return tokenizer.decode(output.prompt_token_ids, False) if tokenizer else ""


class ChatForm:
    """Of /v1/chat/completions."""

    def __init__(self, job: Job, llm: AsyncLLM) -> None:
        self._job, self._names = job, _names(job, llm)

    def whole(self, deltas: Sequence[Delta], outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        choices = []
        for delta in deltas:
            message = {"role": "assistant", "content": delta.text, "refusal": None}
            choices.append(self._choice(delta, "message", message))
        answer = _head(self._job, "chat.completion") | {"choices": choices}
        if self._job.num_prompt_logprobs is not None:
            answer["prompt_logprobs"] = _of_prompt(self._job.num_prompt_logprobs, outputs[0])
        if self._job.has_token_ids:
            answer["prompt_token_ids"] = outputs[0].prompt_token_ids
        return answer

    def chunks(self, delta: Delta) -> Iterator[dict[str, Any]]:
        head = _head(self._job, "chat.completion.chunk")
        if delta.is_first:
            role = {"role": "assistant", "content": ""}
            more = (
                {"prompt_token_ids": delta.output.prompt_token_ids}
                if self._job.has_token_ids
                else {}
            )
            opening = {"index": delta.index, "delta": role, "logprobs": None, "finish_reason": None}
            yield head | {"choices": [opening]} | more
        content = {"content": delta.text} if delta.text else {}
        yield head | {"choices": [self._choice(delta, "delta", content)]}

    def last(self) -> dict[str, Any]:
        return _head(self._job, "chat.completion.chunk") | {"choices": []}

    def _choice(self, delta: Delta, key: str, content: dict[str, Any]) -> dict[str, Any]:
        found = None
        if self._job.params.logprobs is not None:
            count = self._job.params.logprobs
            found = logprobs.chat_logprobs(delta.token_ids, delta.entries, count, self._names)
        choice = {
            "index": delta.index,
            key: content,
            "logprobs": found,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._job.has_token_ids:
            choice["token_ids"] = list(delta.token_ids)
        return choice


def _of_prompt(count: int, output: RequestOutput) -> list[dict[str, Any] | None]:
    return logprobs.prompt_logprobs(output.prompt_logprobs or [], count)


def usage(job: Job, outputs: Sequence[RequestOutput | None]) -> dict[str, Any]:
    """Tokens of the answer so far."""
    known = [output for output in outputs if output is not None]
    prompt = sum(len(output.prompt_token_ids) for output in known)
    completion = 0
    if not job.is_scoring:
        completion = sum(len(choice.token_ids) for output in known for choice in output.outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(output.num_cached_tokens for output in known)
        },
    }


def _head(job: Job, kind: str) -> dict[str, Any]:
    return {"id": job.id, "object": kind, "created": job.created, "model": job.model}


def _names(job: Job, llm: AsyncLLM) -> logprobs.Names:
    tokenizer = llm.get_tokenizer()
    token_bytes = None if tokenizer is None else tokenizer.token_bytes
    return logprobs.Names(token_bytes, as_ids=job.names_ids)
