import pytest
import tokenizers

from paged_jax import LLM, BeamSearchParams, SamplingParams
from paged_jax.models.tokenizer import Tokenizer
from tests.byte_tokenizer import byte_backend
from tests.llm_harness import GREEDY, OPTIONS, PROMPTS, assert_idle, open_texting, run, tokens


@pytest.fixture(scope="module")
def llm(toy):
    """Token ids only, pool of 40 tokens."""
    with LLM(toy, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def texting(toy):
    """The same model with a tokenizer of bytes and no end of sequence."""
    with open_texting(toy) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    """After every test all blocks are free and nobody waits."""
    yield
    for name in {"llm", "texting"} & set(request.fixturenames):
        assert_idle(request.getfixturevalue(name))


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


def test_a_seed_decides_what_is_drawn_wherever_the_request_stands(llm):
    params = [SamplingParams(seed=seed) for seed in (1, 2, 1)]
    first, second, third = tokens(run(llm, [PROMPTS[0]] * 3, params))
    assert first == third != second
    for neighbours in (0, 1, 5):
        prompts = [*PROMPTS[1 : 1 + neighbours], PROMPTS[0]]
        each = [SamplingParams(max_tokens=9)] * neighbours + [params[0]]
        assert tokens(run(llm, prompts, each))[-1] == first


def test_one_seed_for_all_prompts_gives_equal_prompts_equal_tokens(llm):
    found = tokens(run(llm, [PROMPTS[0]] * 4, SamplingParams(seed=1)))
    assert found == found[:1] * 4
    unseeded = tokens(run(llm, [PROMPTS[0]] * 4, SamplingParams()))
    assert len(set(map(tuple, unseeded))) == 4


def test_two_llms_of_one_engine_seed_draw_the_same(toy):
    found = []
    for seed in (0, 0, 1):
        with LLM(toy, **OPTIONS, seed=seed) as llm:
            found.append(tokens(run(llm, PROMPTS[:2], SamplingParams())))
    assert found[0] == found[1] != found[2]


def test_choices_of_a_request_differ_and_repeat(llm):
    params = SamplingParams(n=4, seed=1, max_tokens=8)
    first, second = (run(llm, [PROMPTS[0], PROMPTS[1]], params) for _ in range(2))
    for output, again in zip(first, second, strict=True):
        assert [choice.index for choice in output.outputs] == [0, 1, 2, 3]
        assert len({tuple(choice.token_ids) for choice in output.outputs}) == 4
        assert output.outputs == again.outputs
    # The first choice is what the seed gives without others.
    assert tokens(first) == tokens(run(llm, PROMPTS[:2], SamplingParams(seed=1, max_tokens=8)))


def test_beams_come_best_first_with_text_and_their_log_probability(texting):
    params = BeamSearchParams(beam_width=3, max_tokens=5, length_penalty=0.0)
    two = texting.beam_search(["ab", "c"], params, use_tqdm=False)
    for output in two:
        assert [beam.index for beam in output.outputs] == [0, 1, 2]
        sums = [beam.cumulative_logprob for beam in output.outputs]
        assert sums == sorted(sums, reverse=True)
        assert len({tuple(beam.token_ids) for beam in output.outputs}) == 3
        decode = texting.get_tokenizer().decode
        assert [b.text for b in output.outputs] == [decode(b.token_ids) for b in output.outputs]
    each = [params, BeamSearchParams(beam_width=1, max_tokens=5)]
    [first, second] = texting.beam_search(["ab", "c"], each, use_tqdm=False)
    assert first.outputs == two[0].outputs
    greedy = SamplingParams(temperature=0.0, max_tokens=5)
    assert tokens([second]) == tokens(run(texting, "c", greedy))


def test_cached_prefixes_are_counted_and_a_salt_keeps_them_apart(llm):
    ids = list(range(30, 39))

    def cached(salt=None):
        prompt = {"prompt_token_ids": ids} | ({} if salt is None else {"cache_salt": salt})
        [output] = run(llm, prompt)
        found.append(output.outputs[0].token_ids)
        return output.num_cached_tokens

    found, before = [], llm.stats()
    assert [cached(), cached(), cached("x"), cached("x"), cached("y")] == [0, 8, 0, 8, 0]
    llm.reset_prefix_cache()
    assert [cached(), cached("x")] == [0, 0]
    assert found == found[:1] * 7
    after = llm.stats()
    assert after["prefix_queries_tokens"] - before["prefix_queries_tokens"] == 7 * 9
    assert after["prefix_hits_tokens"] - before["prefix_hits_tokens"] == 2 * 8


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


def test_progress_counts_every_token_of_the_call(llm, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "paged_jax.progress.RequestProgress.update", lambda _, *counts: seen.append(counts)
    )
    stream = llm.stream(PROMPTS[2], GREEDY)
    outputs = run(llm, PROMPTS[:2], SamplingParams(n=2, seed=1, max_tokens=20))
    assert seen == sorted(seen)
    assert seen[-1] == (2, sum(len(c.token_ids) for out in outputs for c in out.outputs))
    stream.close()


def test_all_texts_begin_with_the_space_after_the_prompt(texting, monkeypatch):
    """Decoders of SentencePiece strip it from the first token that they are given."""
    vocabulary = {f"\u2581w{i}": i for i in range(258)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="\u2581w0"))
    backend.decoder = tokenizers.decoders.Metaspace()
    words = Tokenizer(backend, special_tokens={})
    monkeypatch.setattr(texting.engine, "tokenizer", words)
    prompt, params = PROMPTS[0], BeamSearchParams(beam_width=3, max_tokens=5)
    [searched] = texting.beam_search(prompt, params, use_tqdm=False)
    outputs = [*run(texting, prompt), *texting.stream(prompt, GREEDY), searched]
    for output in outputs:
        for choice in output.outputs:
            whole = words.decode([*prompt, *choice.token_ids])
            assert choice.text == whole.removeprefix(words.decode(prompt))
            assert choice.text.startswith(" ")


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
        ({"prompt_token_ids": [1], "cache_salt": 1}, r"cache_salt \(1\) must be text"),
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


@pytest.mark.parametrize("token", [-1, 258])
def test_a_refused_prompt_leaves_those_alone_that_run(llm, alone, token):
    stream = llm.stream(PROMPTS[0], GREEDY)
    read = [next(stream)]
    for call, params in ((llm.generate, GREEDY), (llm.beam_search, BeamSearchParams(beam_width=2))):
        with pytest.raises(ValueError, match=f"prompt token id {token} is outside"):
            call([PROMPTS[1], [1, token]], params, use_tqdm=False)
    assert tokens([[*read, *stream][-1]]) == alone[:1]


def test_a_text_may_have_tokens_that_the_model_lacks(texting, monkeypatch):
    backend = byte_backend([], 258)
    backend.add_special_tokens(["<new>"])
    monkeypatch.setattr(texting.engine, "tokenizer", Tokenizer(backend, special_tokens={}))
    with pytest.raises(ValueError, match=r"prompt token id 258 is outside the vocabulary \[0, 258"):
        run(texting, "a<new>")


def test_parameters_must_be_as_many_as_prompts(llm):
    with pytest.raises(ValueError, match=r"SamplingParams \(1\) must be as many as prompts \(2\)"):
        run(llm, PROMPTS[:2], [GREEDY])


def test_parameters_must_be_sampling_params(llm):
    with pytest.raises(ValueError, match="must be SamplingParams, not dict"):
        run(llm, PROMPTS[0], {"temperature": 0.0})


def test_beam_search_and_sampling_take_their_own_parameters(llm):
    beams = BeamSearchParams(beam_width=2)
    for call in (run, lambda llm, *arguments: llm.stream(*arguments)):
        with pytest.raises(ValueError, match="must be SamplingParams, not BeamSearchParams"):
            call(llm, PROMPTS[0], beams)
    with pytest.raises(ValueError, match="must be BeamSearchParams, not SamplingParams"):
        llm.beam_search(PROMPTS[0], GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match=r"BeamSearchParams \(1\) must be as many as prompts"):
        llm.beam_search(PROMPTS[:2], [beams], use_tqdm=False)
    with pytest.raises(ValueError, match=r"beam_width \(5\) must be at most max_num_seqs \(4\)"):
        llm.beam_search(PROMPTS[0], BeamSearchParams(beam_width=5), use_tqdm=False)


def test_a_stop_string_needs_a_tokenizer(llm):
    with pytest.raises(ValueError, match="stop needs a tokenizer"):
        run(llm, PROMPTS[0], SamplingParams(stop="x"))


def test_chat_needs_a_tokenizer(llm):
    with pytest.raises(ValueError, match="no tokenizer: chat needs one"):
        llm.chat([{"role": "user", "content": "a"}], use_tqdm=False)


def test_a_stream_refuses_its_prompt_when_it_is_made(llm):
    with pytest.raises(ValueError, match="prompt is empty"):
        llm.stream([])


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
