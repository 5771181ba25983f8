"""Chat templates: what they render, what messages they are given, and what they may not do."""

import json
from pathlib import Path

import pytest
import tokenizers

from paged_jax.models.tokenizer import Tokenizer
from tests.byte_tokenizer import byte_backend

# Rendered by Hugging Face transformers; the file names the version.
REFERENCE = json.loads((Path(__file__).parents[1] / "data" / "chat_templates.json").read_text())
SPECIAL = REFERENCE["special_tokens"]
HELLO = [{"role": "user", "content": "Hello"}]
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": [1, 2]}'}}


def chat(template) -> Tokenizer:
    return Tokenizer(byte_backend([], 256), special_tokens=SPECIAL, chat_template=template)


def render(template, messages=HELLO, **options) -> str:
    return chat(template).apply_chat_template(messages, **options)


# What Hugging Face renders.


@pytest.mark.parametrize("row", REFERENCE["rows"], ids=lambda row: row["template"])
def test_templates_render_as_in_transformers(row):
    text = render(
        REFERENCE["templates"][row["template"]],
        row["messages"],
        tools=row["tools"],
        add_generation_prompt=row["add_generation_prompt"],
        **row["variables"],
    )
    assert text == row["rendered"]


def test_templates_can_ask_for_the_date():
    year, rest = render("{{ strftime_now('%Y|%b') }}").split("|")
    assert year.isdigit()
    assert rest.isalpha()


def test_variables_go_before_special_tokens():
    assert render("{{ bos_token }}{{ eos_token }}", bos_token="x") == "x</s>"


# Several templates.


def test_a_template_is_chosen_by_name_and_by_tools():
    both = {"rag": "r", "default": "d", "tool_use": "t{{ tools | length }}"}
    assert render(both) == "d"
    assert render(both, tools=[{}, {}]) == "t2"
    assert render(both, tools=[{}], chat_template="rag") == "r"
    assert render(both, chat_template="{{ messages[0].content }}!") == "Hello!"
    assert render({"default": "d"}, tools=[{}]) == render("d", tools=[{}]) == "d"
    assert render(None, chat_template="given") == "given"


def test_no_default_among_several_is_an_error_with_their_names():
    with pytest.raises(ValueError, match=r"by name \(rag, tool_use\) and no default: give chat_te"):
        render({"rag": "r", "tool_use": "t"})


# What messages may hold.


def test_no_content_is_empty_text():
    messages = [{"role": "assistant", "content": None, "tool_calls": [CALL]}]
    template = "({{ messages[0].content }})"
    assert render(template, messages) == "()"
    del messages[0]["content"]
    assert render(template, messages) == "()"
    asking = "{% if messages[0].content is none %}none{% else %}text{% endif %}"
    assert render(asking, messages) == "none"
    assert render(asking, HELLO) == "text"


def test_arguments_of_tool_calls_are_objects():
    template = (
        "{% for m in messages %}{% for c in m.tool_calls %}"
        "{% set f = c.function if c.function is defined else c %}"
        "{{ c.id }} {{ f.name }} {{ f.arguments | tojson }};{% endfor %}{% endfor %}"
    )
    short = {"name": "sub", "arguments": {"b": 1}}
    bare = {"id": 3, "function": {"name": "now", "arguments": ""}}
    calls = [CALL, short, bare, {"id": 4, "function": {"name": "no", "arguments": None}}]
    messages = [{"role": "assistant", "content": None, "tool_calls": calls}]
    rendered = 'c1 add {"a": [1, 2]}; sub {"b": 1};3 now {};4 no {};'
    assert render(template, messages) == rendered
    assert CALL["function"]["arguments"] == '{"a": [1, 2]}'  # the caller's are not changed


def test_arguments_are_json_where_a_template_adds_them_to_text():
    template = (
        "{% for c in messages[0]['tool_calls'] %}"
        "{{ c['function']['name'] + ' ' + c['function']['arguments'] + ';' }}{% endfor %}"
    )
    calls = [{"function": {"name": "f", "arguments": given}} for given in ('{"a":1}', {"é": 2}, "")]
    messages = [{"role": "assistant", "content": None, "tool_calls": calls}]
    assert render(template, messages) == 'f {"a":1};f {"é": 2};f {};'
    calls[0]["function"]["arguments"] = "[1]"
    with pytest.raises(ValueError, match="must be a JSON object"):
        render(template, messages)


def test_an_answer_of_a_tool_reaches_the_template():
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.tool_call_id }};{% endfor %}"
    )
    assert render(template, messages) == "user:Hello;assistant:;tool:42c1;"


PARTS = [{"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}, *HELLO]


@pytest.mark.parametrize(
    ("template", "rendered"),
    [
        ("{% for m in messages %}{{ m.content }};{% endfor %}", "a\nb;Hello;"),
        # Takes lists only.
        (
            "{% for m in messages %}"
            "{% for part in m['content'] | selectattr('type', 'eq', 'text') %}[{{ part.text }}]"
            "{% endfor %};{% endfor %}",
            "[a][b];[Hello];",
        ),
        # Takes both.
        (
            "{% macro show(content) %}{% if content is string %}{{ content }}{% else %}"
            "{% for part in content %}[{{ part.text }}]{% endfor %}{% endif %}{% endmacro %}"
            "{% for m in messages %}{{ show(m.content) }};{% endfor %}",
            "[a][b];Hello;",
        ),
    ],
)
def test_parts_are_joined_where_a_template_does_not_take_them(template, rendered):
    assert render(template, PARTS) == rendered


def test_what_a_template_does_not_know_is_ignored():
    message = {"role": "user", "content": "Hello", "name": "x", "refusal": None, "audio": {}}
    assert render("{{ messages[0].content }}", [message]) == "Hello"
    unused = {"role": "assistant", "content": "Hello", "tool_calls": None}
    template = "{% if 'tool_calls' in messages[0] %}calls{% endif %}{{ messages[0].content }}"
    assert render(template, [unused]) == "Hello"


def calling(**call):
    return [{"role": "assistant", "content": None, "tool_calls": [call]}]


def saying(content):
    return [*HELLO, {"role": "user", "content": content}]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "non-empty list"),
        ("Hello", "non-empty list"),
        (HELLO[0], "non-empty list"),
        (["Hello"], r"messages\[0\] must be a mapping, not str"),
        ([*HELLO, {"content": "x"}], r"messages\[1\]\['role'\] must be a string"),
        ([{"role": "user"}], r"messages\[0\]\['content'\] must be a string, a list of text parts,"),
        (saying(3), r"messages\[1\]\['content'\] must be a string"),
        (saying({"type": "text"}), r"messages\[1\]\['content'\] must be a string"),
        (saying(["x"]), r"messages\[1\]\['content'\]\[0\] must be a mapping, not str"),
        (saying([{"type": "text"}]), r"messages\[1\]\['content'\]\[0\]\['text'\] must be a string"),
        (
            saying([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]),
            r"messages\[1\]\['content'\]\[1\] has type 'image_url', which is not supported .*'tex",
        ),
        (saying([{"text": "a"}]), "has type None, which is not supported"),
        (calling(function="f"), r"messages\[0\]\['tool_calls'\]\[0\]\['function'\] must be a map"),
        (calling(arguments="{"), r"\['tool_calls'\]\[0\]\['arguments'\] is no JSON: "),
        (
            calling(function={"arguments": "[1]"}),
            r"\['function'\]\['arguments'\] must be a JSON ob",
        ),
        (calling(arguments="[" * 100_000), r"\['arguments'\] is no JSON: "),
        (calling(arguments="0"), r"\['tool_calls'\]\[0\]\['arguments'\] must be a JSON object"),
        ([HELLO[0] | {"tool_calls": "x"}], r"\['tool_calls'\] must be a list, not str"),
        ([HELLO[0] | {"tool_calls": ["x"]}], r"\['tool_calls'\]\[0\] must be a mapping, not str"),
    ],
)
def test_malformed_messages_are_refused(messages, reason):
    with pytest.raises(ValueError, match=reason):
        render("x", messages)


# What goes wrong in a template.


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "^the chat template failed: roles must"),
        ("{% for %}", "^the chat template failed: [^\n]+$"),
        ("{{ messages[0].content + 1 }}", "the chat template failed"),
        ("{{ nothing.at.all }}", "the chat template failed: 'nothing' is undefined"),
        ("{% include 'file' %}", "the chat template failed"),
        (
            "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
            "the chat template failed: maximum rec",
        ),
        (None, "no chat template"),
    ],
)
def test_a_failing_template_is_a_value_error(template, reason):
    tokenizer = chat(template)
    with pytest.raises(ValueError, match=reason):
        tokenizer.apply_chat_template(HELLO)
    assert tokenizer.decode(tokenizer.encode("Hello")) == "Hello"  # which needs no template


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ ''['__class__']['__mro__'] }}", "unsafe"),
        ("{{ (''|attr('__class__')).__mro__ }}", "unsafe"),
        ("{{ '{0.__class__.__mro__}'.format('') }}", "unsafe"),
        ("{{ raise_exception.__globals__.json }}", "unsafe"),
        ("{{ strftime_now.__code__.co_code }}", "unsafe"),
        ("{{ self.__init__.__globals__ }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].update(role='x') }}", "unsafe"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
    ],
)
def test_templates_are_kept_in_the_sandbox(template, reason):
    with pytest.raises(ValueError, match=f"^the chat template failed: .*{reason}"):
        render(template)


@pytest.mark.parametrize("what", ["''.__class__", "''['__class__']", "cycler.__init__"])
def test_what_is_unsafe_is_not_even_shown(what):
    assert render(f"{{{{ {what} }}}}") == ""


def test_objects_of_the_caller_are_kept_too():
    with pytest.raises(ValueError, match="unsafe"):
        render("{{ tools[0].__init__.__globals__ }}", tools=[Path()])


# With a model.


@pytest.mark.parametrize("template", [None, "{% for %}"])
def test_completions_need_no_template(toy, template):
    from paged_jax import LLM
    from tests.llm_harness import GREEDY, OPTIONS, assert_idle, run

    tokenizer = Tokenizer(byte_backend([], 258), special_tokens={}, chat_template=template)
    with LLM(toy, tokenizer=tokenizer, **OPTIONS) as llm:
        with pytest.raises(ValueError, match="chat template"):
            llm.chat(HELLO, GREEDY, use_tqdm=False)
        assert_idle(llm)
        [output] = run(llm, "Hello")
        assert len(output.outputs[0].token_ids) == 6


def test_chat_hands_tools_and_variables_to_the_template(toy, monkeypatch):
    from paged_jax import LLM
    from tests.llm_harness import OPTIONS

    backend = byte_backend(["<s>"], 258)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    template = "{{ bos_token }}{{ messages[0].content }} {{ tools | length }} {{ thinking }}"
    tokenizer = Tokenizer(backend, special_tokens={"bos_token": "<s>"}, chat_template=template)
    options = {"tools": [{}, {}], "chat_template_kwargs": {"thinking": False}}
    with LLM(toy, tokenizer=tokenizer, **OPTIONS) as llm:
        monkeypatch.setattr(llm, "generate", lambda prompts, *_, **__: prompts)
        [prompt] = llm.chat(HELLO, **options)
        assert prompt["prompt"] == "<s>Hello 2 False"
        assert prompt["prompt_token_ids"] == tokenizer.encode("Hello 2 False")
        assert prompt["prompt_token_ids"].count(0) == 1
        assert llm.chat([HELLO, HELLO], **options) == [prompt, prompt]
        assert llm.render(HELLO, [{}, {}], thinking=False) == prompt
