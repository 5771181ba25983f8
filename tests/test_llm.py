import itertools

import pytest

from paged_jax import LLM, SamplingParams
from paged_jax.models.tokenizer import Tokenizer
from tests.byte_tokenizer import TEMPLATE, byte_backend

# One shape for every LLM here: compiled programs are shared and compiled once.
OPTIONS = {
    "max_num_seqs": 4,
    "block_size": 4,
    "num_blocks": 10,
    "max_model_len": 64,
    "max_num_batched_tokens": 16,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9], [10, 11, 12, 13], [14, 15], [200, 201, 202]]


@pytest.fixture(scope="module")
def llm(toy):
    """Token ids only, pool of 40 tokens."""
    with LLM(toy, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def texting(toy):
    """The same model with a tokenizer of bytes and no end of sequence."""
    tokenizer = Tokenizer(
        byte_backend(["<s>", "</s>"], 258), special_tokens={}, chat_template=TEMPLATE
    )
    with LLM(toy, tokenizer=tokenizer, **OPTIONS) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    """After every test all blocks are free and nobody waits."""
    yield
    for name in {"llm", "texting"} & set(request.fixturenames):
        assert is_idle(request.getfixturevalue(name))


def is_idle(llm):
    names = ("num_used", "num_running", "num_waiting")
    return not llm.engine.has_unfinished() and [llm.stats()[name] for name in names] == [0, 0, 0]


def run(llm, prompts, params=GREEDY):
    return llm.generate(prompts, params, use_tqdm=False)


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def alone(llm):
    """Greedy tokens of each prompt run by itself."""
    return [tokens(run(llm, [prompt]))[0] for prompt in PROMPTS]


# What generate takes and returns.


def test_outputs_stand_in_the_order_of_the_prompts(llm, alone):
    # Short ones finish first; six prompts share four rows.
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in (6, 1, 5, 2, 4, 3)]
    outputs = run(llm, PROMPTS, params)
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    lengths = [params.max_tokens for params in params]
    assert tokens(outputs) == [ids[:n] for ids, n in zip(alone, lengths, strict=True)]
    assert all(output.finished for output in outputs)
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}


def test_calls_repeat(llm, alone):
    assert tokens(run(llm, PROMPTS)) == alone
    assert tokens(run(llm, PROMPTS)) == alone


def test_a_prompt_may_be_given_twice(llm, alone):
    assert tokens(run(llm, [PROMPTS[0]] * 3)) == [alone[0]] * 3


@pytest.mark.parametrize(
    "prompt",
    [[1, 2, 3], (1, 2, 3), [[1, 2, 3]], {"prompt_token_ids": [1, 2, 3]}],
    ids=["ids", "tuple", "list of ids", "mapping"],
)
def test_one_prompt_may_have_any_form(llm, alone, prompt):
    outputs = run(llm, prompt)
    assert tokens(outputs) == [alone[0]]
    assert outputs[0].prompt is None
    assert outputs[0].outputs[0].text == ""


def test_text_is_a_prompt_where_there_is_a_tokenizer(texting):
    ids = texting.get_tokenizer().encode("ab")
    expected = tokens(run(texting, {"prompt_token_ids": ids}))
    forms = ["ab", ["ab"], {"prompt": "ab"}]
    outputs = [run(texting, form)[0] for form in forms]
    assert tokens(outputs) == expected * 3
    assert [output.prompt for output in outputs] == ["ab"] * 3


def test_no_prompts_give_no_outputs(llm):
    assert run(llm, []) == []


def test_parameters_default_to_those_of_sampling_params(llm):
    [output] = llm.generate([1, 2, 3], use_tqdm=False)
    assert len(output.outputs[0].token_ids) == SamplingParams().max_tokens


def test_a_seed_decides_what_is_drawn(llm):
    params = [SamplingParams(seed=seed) for seed in (1, 2, 1)]
    first, second, third = tokens(run(llm, [PROMPTS[0]] * 3, params))
    assert first == third != second


def test_logprobs_rank_the_greedy_token_first(llm):
    [output] = run(llm, [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=3, logprobs=2))
    completion = output.outputs[0]
    for token, entries in zip(completion.token_ids, completion.logprobs, strict=True):
        assert entries[token].rank == 1
        assert len(entries) == 2
    total = sum(
        e[t].logprob for t, e in zip(completion.token_ids, completion.logprobs, strict=True)
    )
    assert completion.cumulative_logprob == pytest.approx(total)


def test_a_request_alone_ends_when_the_pool_is_full(llm):
    [output] = run(llm, [1] * 30, SamplingParams(temperature=0.0, max_tokens=None))
    # 40 tokens are in the pool; the last one was sampled and not written.
    assert len(output.outputs[0].token_ids) == 11
    assert output.outputs[0].finish_reason == "length"


def test_the_progress_bar_leaves_stdout_alone(llm, capsys):
    llm.generate([1, 2, 3], GREEDY)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "1/1" in shown.err


def test_a_stop_string_cuts_the_text(texting):
    free = run(texting, "ab")[0].outputs[0]
    stop = next(c for c in free.text if c != "\N{REPLACEMENT CHARACTER}")
    params = SamplingParams(temperature=0.0, max_tokens=6, stop=stop)
    cut = run(texting, "ab", params)[0].outputs[0]
    assert cut.text == free.text[: free.text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)


def test_chat_renders_one_conversation_or_several(texting):
    hello = [{"role": "user", "content": "a"}]
    rendered = "<s>user:a</s><s>assistant:"
    assert texting.render(hello)["prompt"] == rendered
    [one] = texting.chat(hello, GREEDY, use_tqdm=False)
    two = texting.chat([hello, hello], GREEDY, use_tqdm=False)
    assert one.prompt == rendered
    assert tokens(two) == tokens([one]) * 2


# What is refused; nothing has run then and nothing is held.


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([[]], "prompt is empty"),
        ({"prompt_token_ids": []}, "prompt is empty"),
        ([-1], r"prompt token id -1 is outside the vocabulary \[0, 258\)"),
        ([258], "prompt token id 258 is outside"),
        ([10**6], "prompt token id 1000000 is outside"),
        ([[1.5]], "prompt token id 1.5 must be an integer"),
        ([[True]], "prompt token id True must be an integer"),
        ([1] * 64, r"prompt \(64 tokens\) must be shorter than max_model_len \(64\)"),
        ([1] * 41, r"needs 11 KV blocks of 4 and the pool has 10: .*raise num_blocks"),
        ("text", "no tokenizer: give prompt_token_ids"),
        ({"prompt": "text"}, "no tokenizer: give prompt_token_ids"),
        ({"prompt_ids": [1]}, "unknown key 'prompt_ids'"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_prompt_that_cannot_run_is_refused_in_one_line(llm, prompt, message):
    before = llm.stats()
    with pytest.raises(ValueError, match=message) as caught:
        run(llm, prompt)
    assert "\n" not in str(caught.value)
    assert llm.stats() == before


def test_a_refused_prompt_keeps_the_good_ones_of_its_call_from_running(llm):
    before = llm.stats()
    with pytest.raises(ValueError, match="outside the vocabulary"):
        run(llm, [*PROMPTS, [258]])
    assert llm.stats() == before


def test_a_field_that_is_not_built_is_refused(llm):
    before = llm.stats()
    with pytest.raises(NotImplementedError, match=r"SamplingParams\.n "):
        run(llm, PROMPTS[:2], [GREEDY, SamplingParams(n=2)])
    assert llm.stats() == before


def test_parameters_must_be_as_many_as_prompts(llm):
    with pytest.raises(ValueError, match=r"sampling_params \(1\) must be as many as prompts \(2\)"):
        run(llm, PROMPTS[:2], [GREEDY])


def test_parameters_must_be_sampling_params(llm):
    with pytest.raises(ValueError, match="must be SamplingParams, not dict"):
        run(llm, PROMPTS[0], {"temperature": 0.0})


def test_a_stop_string_needs_a_tokenizer(llm):
    with pytest.raises(ValueError, match="stop needs a tokenizer"):
        run(llm, PROMPTS[0], SamplingParams(stop="x"))


def test_chat_needs_a_tokenizer(llm):
    with pytest.raises(ValueError, match="no tokenizer: chat needs one"):
        llm.chat([{"role": "user", "content": "a"}], use_tqdm=False)


def test_a_stream_refuses_its_prompt_when_it_is_made(llm):
    with pytest.raises(ValueError, match="prompt is empty"):
        llm.stream([])


# Streams.


def test_a_stream_yields_growing_prefixes(texting):
    # "é" and the end may be held back for a while; what was shown stays.
    outputs = list(texting.stream("ab", GREEDY))
    texts = [output.outputs[0].text for output in outputs]
    assert all(later.startswith(sooner) for sooner, later in itertools.pairwise(texts))
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3, 4, 5, 6]
    assert [output.finished for output in outputs] == [False] * 5 + [True]
    assert outputs[-1].outputs == run(texting, "ab")[0].outputs


@pytest.mark.parametrize("num_read", [0, 1, 3])
def test_closing_a_stream_early_frees_its_blocks(llm, num_read):
    stream = llm.stream(PROMPTS[0], GREEDY)
    for _ in range(num_read):
        next(stream)
    stream.close()
    assert is_idle(llm)


def test_a_stream_goes_on_beside_other_calls(llm, alone):
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    assert tokens(run(llm, PROMPTS[1:])) == alone[1:]
    last = list(stream)[-1]
    assert last.finished
    assert tokens([last]) == alone[:1]


def test_two_streams_may_be_read_in_turn(llm, alone):
    streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS[:2]]
    last = {}
    for outputs in itertools.zip_longest(*streams):
        last |= {output.request_id: output for output in outputs if output is not None}
    assert tokens(last.values()) == alone[:2]


def test_an_aborted_stream_ends_and_says_so(llm):
    outputs = []
    for output in llm.stream(PROMPTS[0], GREEDY):
        outputs.append(output)
        llm.abort(output.request_id)
    assert [output.outputs[0].finish_reason for output in outputs] == [None, "abort"]
    assert is_idle(llm)


def test_aborting_an_unknown_request_does_nothing(llm):
    llm.abort("nobody")


# Failures in a dispatch.


def fail_at(monkeypatch, llm, number, error):
    """Lets the runner raise in its dispatch of this number, once."""
    runner, count = llm.engine.runner, itertools.count(1)
    original = runner.run

    def run(*args):
        if next(count) == number:
            # A real failure has taken the donated pool with it.
            runner.kv.kv.delete()
            raise error
        return original(*args)

    monkeypatch.setattr(runner, "run", run)


@pytest.mark.parametrize("error", [RuntimeError("device lost"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("number", [1, 2])
def test_an_error_in_a_dispatch_leaves_an_empty_usable_engine(
    llm, alone, monkeypatch, error, number
):
    fail_at(monkeypatch, llm, number, error)
    with pytest.raises(type(error)) as caught:
        run(llm, PROMPTS)
    assert caught.value is error
    assert is_idle(llm)
    assert tokens(run(llm, PROMPTS)) == alone


def test_a_stream_whose_request_was_dropped_says_so(llm, monkeypatch):
    stream = llm.stream(PROMPTS[0], GREEDY)
    next(stream)
    fail_at(monkeypatch, llm, 1, RuntimeError("device lost"))
    with pytest.raises(RuntimeError, match="device lost"):
        run(llm, PROMPTS)
    with pytest.raises(RuntimeError, match="the request is gone"):
        next(stream)


def test_an_interrupt_between_dispatches_frees_the_blocks(llm, alone, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("paged_jax.progress.RequestProgress.update", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(llm, PROMPTS)
    assert is_idle(llm)
    assert tokens(run(llm, PROMPTS)) == alone


# Making and closing.


def test_a_closed_llm_refuses_calls_and_may_be_closed_again(toy):
    with LLM(toy, **OPTIONS) as llm:
        stream = llm.stream(PROMPTS[0], GREEDY)
        llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        run(llm, PROMPTS[0])
    with pytest.raises(RuntimeError, match="closed"):
        next(stream)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("no/such/path", "model 'no/such/path' is neither a built-in name"),
        (__file__, "neither a directory nor a .gguf file"),
    ],
    ids=["missing", "other file"],
)
def test_a_model_that_is_not_there_is_refused(model, message):
    with pytest.raises(ValueError, match=message):
        LLM(model)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"garbage" * 100], ids=["empty", "cut", "other"])
def test_an_unreadable_gguf_file_is_refused_in_one_line(tmp_path, content):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="cannot read GGUF file") as caught:
        LLM(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "bfloat16"}, r"dtype \('bfloat16'\) applies to checkpoints"),
        ({"max_num_sequences": 4}, "unknown option 'max_num_sequences'; options: dtype, "),
        ({"block_size": 0}, "block_size"),
    ],
)
def test_an_option_that_cannot_act_is_refused(toy, options, message):
    with pytest.raises(ValueError, match=message):
        LLM(toy, **options)


def test_a_tokenizer_directory_must_hold_a_tokenizer(toy, tmp_path):
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        LLM(toy, tokenizer=tmp_path, **OPTIONS)
