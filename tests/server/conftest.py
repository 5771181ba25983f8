"""Servers that several tests share."""

import pytest

from paged_jax import LLM
from tests.llm_harness import OPTIONS
from tests.server.harness import byte_tokenizer, serving, toy_llm


@pytest.fixture(scope="module")
def server(toy):
    """Of the toy model."""
    with serving(toy_llm(toy)) as running:
        yield running
        running.settle()


@pytest.fixture(scope="module")
def direct(toy):
    """The same model without a server: what answers must be."""
    with LLM(toy, tokenizer=byte_tokenizer(), **OPTIONS) as llm:
        yield llm
