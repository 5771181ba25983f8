"""When requests come and how long they are: read from a file, or drawn like a chat service's."""

import dataclasses
import json
import math
import numbers
import random
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike

# Means of ShareGPT's prompts and outputs in Kwon et al. 2023, figure 11. The widths of the
# lognormals are ours, chosen for the long tails of that figure: an approximation, not a fit.
_PROMPT_MEAN, _PROMPT_SIGMA = 161.31, 1.1
_OUTPUT_MEAN, _OUTPUT_SIGMA = 337.99, 0.8

_STRIDE = 2**16
_GROUPS = 2**30


@dataclass(frozen=True, kw_only=True)
class TraceRequest:
    """One request of a trace; a line of its file."""

    arrival: float
    """Seconds from the start."""
    prompt_tokens: int
    output_tokens: int
    """Tokens after which it stops by itself."""
    prefix_group: str | None = None
    """Requests of one group begin with the same tokens."""
    prefix_tokens: int = 0
    """How many tokens of the prompt those are."""
    priority: int = 0
    """Lower is sooner, under the policy "priority"."""

    def __post_init__(self) -> None:
        for name, least in (("prompt_tokens", 1), ("output_tokens", 1), ("prefix_tokens", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} ({value!r}) must be an integer of at least {least}")
        if not isinstance(self.priority, int):
            raise ValueError(f"priority ({self.priority!r}) must be an integer")
        arrival = self.arrival
        if not isinstance(arrival, numbers.Real) or not 0 <= arrival < math.inf:
            raise ValueError(f"arrival ({arrival!r}) must be a number of seconds of at least 0")
        if self.prefix_tokens > self.prompt_tokens:
            raise ValueError(
                f"prefix_tokens ({self.prefix_tokens}) must be at most "
                f"prompt_tokens ({self.prompt_tokens})"
            )
        if self.prefix_tokens and self.prefix_group is None:
            raise ValueError("prefix_tokens needs a prefix_group")


def read_trace(path: str | PathLike[str]) -> list[TraceRequest]:
    """Reads a file of JSON lines, an object with the fields of `TraceRequest` in each.

    Returns: The requests by arrival.
    Raises: ValueError that names the wrong line, or for a file without requests.
    """
    known = {field.name for field in dataclasses.fields(TraceRequest)}
    requests = []
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                fields = json.loads(line)
                if not isinstance(fields, dict) or not fields.keys() <= known:
                    raise ValueError(f"it must be an object of {', '.join(sorted(known))}")
                requests.append(TraceRequest(**fields))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path}, line {number} is no request: {error}") from error
    if not requests:
        raise ValueError(f"{path} holds no requests")
    return sorted(requests, key=lambda request: request.arrival)


def sharegpt_like(
    num_requests: int, *, request_rate: float, seed: int, max_model_len: int
) -> list[TraceRequest]:
    """Draws requests with lengths like ShareGPT's conversations and Poisson arrivals.

    Lengths are lognormal: prompts of mean 161 and sigma 1.1, outputs of mean 338 and sigma 0.8. The
    means are ShareGPT's, the shape is an approximation. Both are cut to half of `max_model_len`,
    which takes a little off the means.

    Args:
      request_rate: Requests per second; infinite: all arrive at once.
    """
    draw = random.Random(seed)
    longest = max_model_len // 2
    arrival, requests = 0.0, []
    for _ in range(num_requests):
        if request_rate < math.inf:
            arrival += draw.expovariate(request_rate)
        lengths = []
        for mean, sigma in ((_PROMPT_MEAN, _PROMPT_SIGMA), (_OUTPUT_MEAN, _OUTPUT_SIGMA)):
            length = draw.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)
            lengths.append(min(longest, max(1, round(length))))
        requests.append(
            TraceRequest(arrival=arrival, prompt_tokens=lengths[0], output_tokens=lengths[1])
        )
    return requests


def uniform(
    num_requests: int,
    *,
    prompt_tokens: int,
    output_tokens: int,
    prefix_tokens: int = 0,
    request_rate: float = math.inf,
    burstiness: float = 1.0,
    seed: int = 0,
) -> list[TraceRequest]:
    """Requests of equal lengths.

    Args:
      prefix_tokens: Leading tokens that all prompts have in common.
      request_rate: Requests per second; infinite: all arrive at once.
      burstiness: Shape of the gamma distribution of the times between arrivals: 1 is Poisson, less
        comes in bursts, more is more regular.
    """
    if not burstiness > 0 or not request_rate > 0:
        raise ValueError(f"burstiness ({burstiness}) and request_rate must be above 0")
    draw = random.Random(seed)
    arrival, made = 0.0, []
    for _ in range(num_requests):
        made.append(
            TraceRequest(
                arrival=arrival,
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
                prefix_group="all" if prefix_tokens else None,
                prefix_tokens=prefix_tokens,
            )
        )
        if request_rate < math.inf:
            arrival += draw.gammavariate(burstiness, 1 / (request_rate * burstiness))
    return made


def write_trace(path: str | PathLike[str], trace: Sequence[TraceRequest]) -> None:
    """Writes what `read_trace` reads; fields at their defaults are left out."""
    defaults = {field.name: field.default for field in dataclasses.fields(TraceRequest)}
    with open(path, "w", encoding="utf-8") as lines:
        for request in trace:
            given = {k: v for k, v in dataclasses.asdict(request).items() if v != defaults[k]}
            lines.write(json.dumps(given) + "\n")


def token_ids(trace: Sequence[TraceRequest]) -> list[tuple[list[int], list[int]]]:
    """Prompt and output ids per request: equal within the prefix of a group, nowhere else."""
    groups: dict[str, int] = {}
    made = []
    for i, request in enumerate(trace):
        own = i * _STRIDE % _GROUPS
        prompt = list(range(own, own + request.prompt_tokens))
        if request.prefix_group is not None:
            group = _GROUPS + groups.setdefault(request.prefix_group, len(groups)) * _STRIDE
            prompt[: request.prefix_tokens] = range(group, group + request.prefix_tokens)
        first = own + request.prompt_tokens
        made.append((prompt, list(range(first, first + request.output_tokens))))
    return made
