"""Requests and outputs as JSON, and back; times are told from now, for another process's clock."""

import dataclasses
from typing import Any

import numpy as np

from paged_jax.engine.beam import BeamSearch
from paged_jax.engine.detokenize import TextStream
from paged_jax.engine.request import Request, Sequence
from paged_jax.models.tokenizer import Tokenizer
from paged_jax.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from paged_jax.sampling_params import SamplingParams

_REQUEST_TIMES = ("arrival_time", "deadline", "first_scheduled_time", "first_token_time")
_METRIC_TIMES = ("arrival_time", "first_scheduled_time", "first_token_time", "finished_time")
# What has a form of its own below, or is computed anew. Every other field is JSON as it is.
_REQUEST_FIELDS = ("params", "stop_ids", "sequences", "unforked", "live_beams", "beam")
_SEQUENCE_FIELDS = ("request", "text", "hashes", "logprobs", "listed", "rank", "num_unread")


def record_request(request: Request, now: float) -> dict[str, Any]:
    """An unfinished request, all of whose tokens have been read."""
    record = _plain(request, _REQUEST_FIELDS)
    return record | {
        **_shifted(record, _REQUEST_TIMES, -now),
        "params": dataclasses.asdict(request.params),
        "stop_ids": sorted(request.stop_ids),
        "sequences": [_record_sequence(sequence) for sequence in request.sequences],
        "unforked": [sequence.index for sequence in request.unforked],
        "live_beams": [sequence.index for sequence in request.live_beams],
        "beam": None if request.beam is None else request.beam.record(),
    }


def request_of(record: dict[str, Any], now: float, tokenizer: Tokenizer | None) -> Request:
    """The request that a record was made of; its text is decoded again from its tokens."""
    params = dict(record["params"])
    if params["logit_bias"] is not None:  # JSON has text for keys
        params["logit_bias"] = {int(key): value for key, value in params["logit_bias"].items()}
    plain = {name: record[name] for name in record if name not in _REQUEST_FIELDS}
    request = Request(
        **plain | _shifted(record, _REQUEST_TIMES, now),
        params=SamplingParams(**params),
        stop_ids=frozenset(record["stop_ids"]),
    )
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
    if tokenizer is not None and not request.is_beam:
        sequence.text = _text_of(sequence, tokenizer)
    return sequence


def _text_of(sequence: Sequence, tokenizer: Tokenizer) -> TextStream:
    request = sequence.request
    text = TextStream(tokenizer, request.prompt_token_ids, request.params.stop_strings)
    for token in sequence.output_ids:
        if token not in request.stop_ids:  # which ends the sequence and is no text
            text.append(token)
    if sequence.finish_reason is not None:
        text.finish()
    return text


def record_output(output: RequestOutput, now: float) -> dict[str, Any]:
    """An output that has not been handed out."""
    metrics = dataclasses.asdict(output.metrics)
    prompt_logprobs = output.prompt_logprobs
    return _plain(output, ("outputs", "metrics", "prompt_logprobs")) | {
        "metrics": metrics | _shifted(metrics, _METRIC_TIMES, -now),
        "prompt_logprobs": prompt_logprobs and [x and _record_logprobs(x) for x in prompt_logprobs],
        "outputs": [
            _plain(part, ("logprobs",))
            | {"logprobs": part.logprobs and [_record_logprobs(x) for x in part.logprobs]}
            for part in output.outputs
        ],
    }


def output_of(record: dict[str, Any], now: float) -> RequestOutput:
    """The output that a record was made of."""
    metrics, prompt_logprobs = record["metrics"], record["prompt_logprobs"]
    parts = [
        CompletionOutput(
            **part | {"logprobs": part["logprobs"] and [_logprobs_of(x) for x in part["logprobs"]]}
        )
        for part in record["outputs"]
    ]
    made = {
        "metrics": RequestMetrics(**metrics | _shifted(metrics, _METRIC_TIMES, now)),
        "prompt_logprobs": prompt_logprobs and [x and _logprobs_of(x) for x in prompt_logprobs],
        "outputs": parts,
    }
    return RequestOutput(**record | made)


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
