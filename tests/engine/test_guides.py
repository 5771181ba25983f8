"""Requests whose grammar cannot go on: they end with an error, and nobody else notices."""

import asyncio
import subprocess
import sys

import pytest

from paged_jax import LLM, AsyncLLM, SamplingParams
from paged_jax.engine import grammar
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
    accept = grammar.Grammar.accept

    def accept_three(self, token):
        self.count = getattr(self, "count", 0) + 1
        if self.count == 4:
            raise GuideError("structured_outputs: too many states")
        accept(self, token)

    monkeypatch.setattr(grammar.Grammar, "accept", accept_three)


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

    monkeypatch.setattr(grammar.Grammar, "_fill", fail)
    with LLM(toy, tokenizer=tokenizer, **OPTIONS) as llm:
        with pytest.raises(ValueError, match=r"^structured_outputs: too large"):
            llm.engine.add_request("a", "hi", GUIDED)
        assert_idle(llm)


def lark(count: int) -> dict:
    lines = (f'r{i}: "a" r{i + 1}' for i in range(count))
    return {"grammar": "\n".join(["start: r0", *lines, f'r{count}: "b"'])}


def terminals(count: int) -> dict:
    lines = (f'T{i}: "a" T{i + 1}' for i in range(count))
    return {"grammar": "\n".join(["start: T0", *lines, f'T{count}: "b"'])}


def schema(count: int) -> dict:
    def part(i: int) -> dict:
        return {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}}

    parts = {f"d{i}": part(i) for i in range(count)}
    return {"json": {"$ref": "#/$defs/d0", "$defs": {**parts, f"d{count}": {"type": "null"}}}}


def meet(count: int) -> dict:
    patterns = " & ".join(f"/.*a.{{{i}}}/" for i in range(count))
    return {"grammar": f"start: T\nT: {patterns}"}


# What llguidance in this process would die of, or never return from.
@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (lark(3000), "in too long a chain"),
        (terminals(10_000), "in too long a chain"),
        (schema(1000), "in too long a chain"),
        (meet(40), "takes more than 0.7 s"),
    ],
    ids=["rules", "terminals", "references", "intersections"],
)
def test_a_grammar_that_would_end_the_process_is_refused(
    toy, tokenizer, monkeypatch, wanted, message
):
    monkeypatch.setattr(grammar, "MAX_GRAMMAR_SECONDS", 0.7 if "takes" in message else 60.0)
    with LLM(toy, tokenizer=tokenizer, **OPTIONS) as llm:
        params = SamplingParams(structured_outputs=wanted)
        with pytest.raises(ValueError, match=f"^structured_outputs cannot be used: .*{message}"):
            llm.generate("hi", params, use_tqdm=False)
        assert_idle(llm)


@pytest.mark.parametrize("wanted", [lark(150), terminals(150), schema(100)])
def test_long_chains_of_rules_may_be(toy, tokenizer, wanted):
    params = SamplingParams(structured_outputs=wanted, max_tokens=4, temperature=0.0)
    with LLM(toy, tokenizer=tokenizer, **OPTIONS) as llm:
        [output] = llm.generate("hi", params, use_tqdm=False)
        assert output.outputs[0].token_ids


def test_the_trial_of_a_grammar_is_a_process_of_its_own():
    """That the child does what it is there for: without it, the same grammar is fatal."""
    code = """if True:
        import sys
        from llguidance import LLMatcher, LLTokenizer
        LLMatcher(LLTokenizer("byte"), sys.stdin.read())
    """
    text = f"%llguidance {{}}\n{lark(20_000)['grammar']}"
    done = subprocess.run([sys.executable, "-c", code], input=text, text=True)
    assert done.returncode < 0
    with pytest.raises(ValueError, match="in too long a chain"):
        grammar.try_grammar(text)


@pytest.mark.parametrize("value", ["[1]", "null", "5", "true", '[["a", 1]]', {"a": object()}])
def test_a_schema_is_an_object(toy, tokenizer, value):
    params = SamplingParams(structured_outputs={"json": value})
    with (
        LLM(toy, tokenizer=tokenizer, **OPTIONS) as llm,
        pytest.raises(ValueError, match=r"^structured_outputs cannot be used: json"),
    ):
        llm.generate("hi", params, use_tqdm=False)


def test_a_schema_that_is_too_deep_is_refused(toy, tokenizer):
    deep: dict = {}
    for _ in range(5000):
        deep = {"not": deep}
    for value in (deep, '{"not":' * 5000 + "{}" + "}" * 5000):
        params = SamplingParams(structured_outputs={"json": value})
        with (
            LLM(toy, tokenizer=tokenizer, **OPTIONS) as llm,
            pytest.raises(ValueError, match=r"^structured_outputs cannot be used: json is"),
        ):
            llm.generate("hi", params, use_tqdm=False)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_grammar_waits_for_min_tokens(toy, tokenizer, ignore_eos):
    params = SamplingParams(
        temperature=0.0,
        max_tokens=9,
        min_tokens=6,
        ignore_eos=ignore_eos,
        logit_bias={1: 100.0},
        structured_outputs={"regex": "a*"},
    )
    with LLM(toy, tokenizer=tokenizer, **OPTIONS) as llm:
        [output] = llm.generate("hi", params, use_tqdm=False)
        assert output.outputs[0].text == "a" * 6
        assert output.outputs[0].finish_reason == "stop"
