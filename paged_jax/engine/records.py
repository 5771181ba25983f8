"""Requests and outputs as JSON, and back; times are told from now, for another process's clock."""

import dataclasses
import numbers
from collections.abc import Mapping
from typing import Any

import numpy as np

from paged_jax.engine.answer import text_stream
from paged_jax.engine.beam import BeamSearch
from paged_jax.engine.request import Request, Sequence
from paged_jax.engine.rules import check_rules
from paged_jax.models.tokenizer import Tokenizer
from paged_jax.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from paged_jax.sampling_params import SamplingParams

_REQUEST_TIMES = ("arrival_time", "deadline", "first_scheduled_time", "first_token_time")
_METRIC_TIMES = ("arrival_time", "first_scheduled_time", "first_token_time", "finished_time")
# What has a form of its own below, or is computed anew. Every other field is JSON as it is.
_REQUEST_FIELDS = (
    "params",
    "stop_ids",
    "named_stop_ids",
    "banned",
    "guide",
    "prompt_logprobs",
    "sequences",
    "unforked",
    "live_beams",
    "beam",
)
_SEQUENCE_FIELDS = (
    "request",
    "text",
    "guide",
    "hashes",
    "logprobs",
    "listed",
    "rank",
    "num_unread",
)


def record_request(request: Request, now: float) -> dict[str, Any]:
    """An unfinished request, all of whose tokens have been read."""
    record = _plain(request, _REQUEST_FIELDS)
    return record | {
        **_shifted(record, _REQUEST_TIMES, -now),
        "params": _json_of(request.params),
        "stop_ids": sorted(request.stop_ids),
        "named_stop_ids": sorted(request.named_stop_ids),
        "prompt_logprobs": _record_prompt_logprobs(request.prompt_logprobs),
        "sequences": [_record_sequence(sequence) for sequence in request.sequences],
        "unforked": [sequence.index for sequence in request.unforked],
        "live_beams": [sequence.index for sequence in request.live_beams],
        "beam": None if request.beam is None else request.beam.record(),
    }


def _json_of(value: Any) -> Any:
    """Sampling fields as JSON: users may give any numbers, sequences and mappings."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if dataclasses.is_dataclass(value):
        return {
            field.name: _json_of(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, Mapping):
        return {str(key): _json_of(item) for key, item in value.items()}
    return [_json_of(item) for item in value]


def request_of(
    record: dict[str, Any],
    now: float,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    eos_token_ids: frozenset[int],
) -> Request:
    """The request that a record was made of; its text is decoded again from its tokens."""
    params = dict(record["params"])
    if params["logit_bias"] is not None:  # JSON has text for keys
        params["logit_bias"] = {int(key): value for key, value in params["logit_bias"].items()}
    plain = {name: record[name] for name in record if name not in _REQUEST_FIELDS}
    request = Request(
        **plain | _shifted(record, _REQUEST_TIMES, now),
        params=SamplingParams(**params),
        stop_ids=frozenset(record["stop_ids"]),
        named_stop_ids=frozenset(record["named_stop_ids"]),
        prompt_logprobs=_prompt_logprobs_of(record["prompt_logprobs"]),
    )
    rules = check_rules(request.params, tokenizer, vocab_size, eos_token_ids)
    request.banned, request.guide = rules.banned, rules.guide
    if record["beam"] is not None:
        prompt_len = len(request.prompt_token_ids)
        request.beam = BeamSearch.of_record(record["beam"], prompt_len, request.max_total_tokens)
    for part in record["sequences"]:
        request.sequences.append(_sequence_of(part, request, tokenizer))
    request.unforked = [request.sequences[index] for index in record["unforked"]]
    request.live_beams = [request.sequences[index] for index in record["live_beams"]]
    return request


def _record_sequence(sequence: Sequence) -> dict[str, Any]:
    assert not sequence.num_unread
    listed = sequence.listed
    return _plain(sequence, _SEQUENCE_FIELDS) | {
        "logprobs": [_record_logprobs(entry) for entry in sequence.logprobs],
        "listed": None if listed is None else [array.tolist() for array in listed],
        "rank": sequence.rank,
    }


def _sequence_of(record: dict[str, Any], request: Request, tokenizer: Tokenizer | None) -> Sequence:
    plain = {name: record[name] for name in record if name not in _SEQUENCE_FIELDS}
    sequence = Sequence(
        request=request,
        logprobs=[_logprobs_of(entry) for entry in record["logprobs"]],
        rank=tuple(record["rank"]),
        **plain,
    )
    if record["listed"] is not None:
        ids, logprobs = record["listed"]
        sequence.listed = np.array(ids, np.int32), np.array(logprobs, np.float32)
    if not request.is_beam:
        _replay(sequence, tokenizer)
    return sequence


def _replay(sequence: Sequence, tokenizer: Tokenizer | None) -> None:
    """Text, and what the guide has seen, from the tokens again."""
    request, params = sequence.request, sequence.request.params
    sequence.text = text = text_stream(request, tokenizer)
    if request.guide is not None:
        sequence.guide = request.guide.copy()
    for i, token in enumerate(sequence.output_ids):
        if sequence.guide is not None:
            sequence.guide.accept(token)
        # A token that ends the sequence is no text, unless somebody wants it.
        is_end = token in request.stop_ids
        if text is not None and (not is_end or params.include_stop_str_in_output):
            text.append(token, may_stop=i >= params.min_tokens and not is_end)
    if text is not None and sequence.finish_reason is not None:
        text.finish()


def record_output(output: RequestOutput, now: float) -> dict[str, Any]:
    """An output that has not been handed out."""
    metrics = dataclasses.asdict(output.metrics)
    return _plain(output, ("outputs", "metrics", "prompt_logprobs")) | {
        "metrics": metrics | _shifted(metrics, _METRIC_TIMES, -now),
        "prompt_logprobs": _record_prompt_logprobs(output.prompt_logprobs),
        "outputs": [
            _plain(part, ("logprobs",))
            | {"logprobs": part.logprobs and [_record_logprobs(x) for x in part.logprobs]}
            for part in output.outputs
        ],
    }


def output_of(record: dict[str, Any], now: float) -> RequestOutput:
    """The output that a record was made of."""
    metrics = record["metrics"]
    parts = [
        CompletionOutput(
            **part | {"logprobs": part["logprobs"] and [_logprobs_of(x) for x in part["logprobs"]]}
        )
        for part in record["outputs"]
    ]
    made = {
        "metrics": RequestMetrics(**metrics | _shifted(metrics, _METRIC_TIMES, now)),
        "prompt_logprobs": _prompt_logprobs_of(record["prompt_logprobs"]),
        "outputs": parts,
    }
    return RequestOutput(**record | made)


def _record_prompt_logprobs(entries: list[dict[int, Logprob] | None] | None) -> Any:
    return entries and [x and _record_logprobs(x) for x in entries]


def _prompt_logprobs_of(entries: Any) -> list[dict[int, Logprob] | None] | None:
    return entries and [x and _logprobs_of(x) for x in entries]


def _record_logprobs(entries: dict[int, Logprob]) -> list[list[Any]]:
    return [[token, x.logprob, x.rank, x.decoded_token] for token, x in entries.items()]


def _logprobs_of(entries: list[list[Any]]) -> dict[int, Logprob]:
    return {
        token: Logprob(logprob=logprob, rank=rank, decoded_token=text)
        for token, logprob, rank, text in entries
    }


def _plain(value: Any, without: tuple[str, ...]) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(value) if field.name not in without]
    return {name: getattr(value, name) for name in names}


def _shifted(record: dict[str, Any], names: tuple[str, ...], by: float) -> dict[str, Any]:
    return {name: None if record[name] is None else record[name] + by for name in names}
