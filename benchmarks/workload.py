"""The seeded offline workload: random prompts and exact output lengths, for every engine alike."""

from typing import NamedTuple

import numpy as np

PROMPT_LEN_RANGE = (16, 256)
OUTPUT_LEN_RANGE = (16, 192)
MAX_MODEL_LEN = 512
# Below 20 lie SmolLM2's control tokens; its vocabulary holds 49152 entries.
TOKEN_ID_RANGE = (20, 49000)


class Request(NamedTuple):
    """One prompt and the number of tokens to generate for it, end-of-text ignored."""

    prompt_token_ids: list[int]
    output_len: int


def make_workload(num_requests: int, *, seed: int, pass_index: int) -> list[Request]:
    """Draws the requests of one pass.

    Lengths depend on `seed` alone, token ids on `pass_index` too: every pass has the shapes of the
    first, and none can be answered from the first one's cached prefixes.
    """
    lengths = np.random.default_rng(seed)
    prompt_lens = lengths.integers(*PROMPT_LEN_RANGE, size=num_requests, endpoint=True)
    output_lens = lengths.integers(*OUTPUT_LEN_RANGE, size=num_requests, endpoint=True)
    ids = np.random.default_rng((seed, pass_index))
    return [
        Request(ids.integers(*TOKEN_ID_RANGE, size=prompt_len).tolist(), int(output_len))
        for prompt_len, output_len in zip(prompt_lens, output_lens, strict=True)
    ]
