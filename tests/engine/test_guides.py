"""Requests whose grammar cannot go on: they end with an error, and nobody else notices."""

import asyncio

import pytest

from paged_jax import LLM, AsyncLLM, SamplingParams
from paged_jax.engine import guide
from paged_jax.engine.guide import GuideError
from paged_jax.models.tokenizer import Tokenizer
from tests.byte_tokenizer import byte_backend
from tests.llm_harness import OPTIONS, assert_idle

GUIDED = SamplingParams(
    temperature=0.0, max_tokens=12, n=2, structured_outputs={"regex": "[a-z ]+"}
)
OTHER = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    backend = byte_backend(["<s>", "</s>"], 258)
    return Tokenizer(backend, special_tokens={"eos_token": "</s>"}, eos_token_ids=(1,))


@pytest.fixture
def failing(monkeypatch):
    """Grammars forget how to go on after their fourth token."""
    accept = guide.Grammar.accept

    def accept_three(self, token):
        self.count = getattr(self, "count", 0) + 1
        if self.count == 4:
            raise GuideError("structured_outputs: too many states")
        accept(self, token)

    monkeypatch.setattr(guide.Grammar, "accept", accept_three)


def test_a_guide_that_fails_ends_its_request_alone(toy, tokenizer, failing):
    with LLM(toy, tokenizer=tokenizer, **OPTIONS) as llm:
        engine = llm.engine
        [alone] = llm.generate("hi", OTHER, use_tqdm=False)
        engine.add_request("other", "hi", OTHER)
        engine.add_request("guided", "hi", GUIDED)
        ended = {}
        while engine.has_unfinished():
            for output in engine.step():
                if output.finished:
                    ended[output.request_id] = output
        assert engine.error is None  # no dispatch has failed
        failed = ended["guided"]
        assert failed.error == "GuideError: structured_outputs: too many states"
        assert [choice.finish_reason for choice in failed.outputs] == ["error"] * 2
        assert [len(choice.token_ids) for choice in failed.outputs] == [4, 4]
        assert ended["other"].outputs[0].token_ids == alone.outputs[0].token_ids
        with pytest.raises(GuideError, match="too many states"):
            llm.generate("hi", GUIDED, use_tqdm=False)
        assert_idle(llm)


def test_who_reads_its_stream_is_told(toy, tokenizer, failing):
    async def main():
        async with AsyncLLM(toy, tokenizer=tokenizer, **OPTIONS) as llm:
            with pytest.raises(GuideError, match="too many states"):
                async for _ in llm.generate("hi", GUIDED):
                    pass
            llm.check_health()
            outputs = [output async for output in llm.generate("hi", OTHER)]
            assert outputs[-1].finished

    asyncio.run(main())


@pytest.mark.parametrize("wanted", [{"json": {"$ref": "#"}}, {"grammar": "start: x\nx: x"}])
def test_what_no_text_satisfies_is_refused(toy, tokenizer, wanted):
    with LLM(toy, tokenizer=tokenizer, **OPTIONS) as llm:
        params = SamplingParams(structured_outputs=wanted)
        with pytest.raises(ValueError, match=r"^structured_outputs: there is no text[^\n]*$"):
            llm.generate("hi", params, use_tqdm=False)
        assert_idle(llm)


def test_one_that_cannot_begin_is_refused(toy, tokenizer, monkeypatch):
    def fail(self):
        raise GuideError("structured_outputs: too large")

    monkeypatch.setattr(guide.Grammar, "_fill", fail)
    with LLM(toy, tokenizer=tokenizer, **OPTIONS) as llm:
        with pytest.raises(ValueError, match=r"^structured_outputs: too large"):
            llm.engine.add_request("a", "hi", GUIDED)
        assert_idle(llm)
