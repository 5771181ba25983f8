"""The tables of docs/api.md and docs/server.md against the code that they describe."""

import argparse
import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import paged_jax
from paged_jax import LLM, AsyncLLM, BeamSearchParams, Engine, EngineConfig, SamplingParams
from paged_jax.outputs import CompletionOutput, RequestOutput
from paged_jax.sampling_params import StructuredOutputsParams

DOCS = Path(__file__).resolve().parents[1] / "docs"
API = (DOCS / "api.md").read_text(encoding="utf-8")
SERVER = (DOCS / "server.md").read_text(encoding="utf-8")


def section(page: str, title: str) -> str:
    """Text under a heading of the second level."""
    found = re.search(rf"^## {re.escape(title)}\s*$(.*?)(?=^## |\Z)", page, re.M | re.S)
    assert found, title
    return found[1]


def rows(text: str) -> list[list[str]]:
    """Cells of all tables."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [row for row in cells if not set(row[0]) <= set("-")]


def names(cell: str) -> list[str]:
    """What a cell has in code style."""
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize("kind", [SamplingParams, BeamSearchParams, EngineConfig])
def test_fields_and_defaults_of_options(kind):
    table = {
        names(row[0])[0]: row[1]
        for row in rows(section(API, f"`{kind.__name__}`"))
        if len(row) == 3 and names(row[0])
    }
    fields = {field.name: field.default for field in dataclasses.fields(kind)}
    assert set(table) == set(fields)
    for name, default in fields.items():
        shown = table[name].strip("`")
        expected = "" if default is dataclasses.MISSING else str(default)
        assert shown.strip('"') == expected, name


@pytest.mark.parametrize("kind", [RequestOutput, CompletionOutput])
def test_fields_of_outputs(kind):
    table = rows(section(API, f"`{kind.__name__}`"))
    shown = {names(row[0])[0] for row in table if not row[0].startswith('`"') and names(row[0])}
    assert shown == {field.name for field in dataclasses.fields(kind)}


def test_fields_of_structured_outputs():
    text = section(API, "`SamplingParams`").split("StructuredOutputsParams", 1)[1]
    shown = {names(row[0])[0] for row in rows(text) if names(row[0])}
    assert shown == {field.name for field in dataclasses.fields(StructuredOutputsParams)}


def public_names(kind: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(kind) if not name.startswith("_")}


@pytest.mark.parametrize("kind", [LLM, AsyncLLM, Engine])
def test_methods(kind):
    shown = set()
    for row in rows(section(API, f"`{kind.__name__}`")):
        for name in names(row[0]):
            called = re.match(r"(?:await )?(\w+)(\(.*\))?$", name)
            if called and len(row) == 2:
                shown.add((called[1], called[2]))
    # Rows of `stats()` are keys.
    methods = {name: given for name, given in shown if given is not None}
    for name, given in methods.items():
        assert hasattr(kind, name), name
        parameters = list(inspect.signature(getattr(kind, name)).parameters)[1:]
        for word in re.findall(r"(?:^|[(, ])\*{0,2}([a-z_]+)(?==|,|\))", given):
            assert word in parameters, f"{name}: {word}"
    missing = {
        name
        for name in public_names(kind)
        if name not in methods and f"`{name}" not in section(API, f"`{kind.__name__}`")
    }
    # What `Engine` and `LLM` inherit or offer to each other, and no user calls.
    assert missing <= {"check", "add_checked", "step_as_told", "engine", "dispatcher"}, missing


def test_keys_of_stats(toy):
    from tests.llm_harness import OPTIONS

    with LLM(toy, **OPTIONS) as llm:
        found = set(llm.stats())
    text = section(API, "`Engine`").split("`stats()` returns", 1)[1]
    shown = {name for row in rows(text) for name in names(row[0])}
    assert shown == found


def test_public_names_have_an_example_or_a_table():
    for name in paged_jax.__all__:
        text = section(API, f"`{name}`")
        assert "```python" in text or rows(text), name


def test_flags_of_the_server():
    from paged_jax.cli import options, serve

    parser, engine = argparse.ArgumentParser(), argparse.ArgumentParser()
    serve.add_arguments(parser)
    options.add_engine(engine)
    others = {flag for action in engine._actions for flag in action.option_strings}
    flags = {
        action.option_strings[0]: action.default
        for action in parser._actions
        if action.option_strings and not set(action.option_strings) <= others
    }
    table = {names(row[0])[0]: row[1] for row in rows(section(SERVER, "Options")) if names(row[0])}
    assert set(table) == set(flags)
    for flag, default in flags.items():
        if default not in (None, []):
            assert table[flag] == f"{default:g}" if isinstance(default, float) else str(default)


def test_fields_of_bodies():
    from paged_jax.server.fields import ChatBody, CompletionBody, ResponseFormat, StreamOptions

    text = section(SERVER, "Fields")
    shown = set(names(text))
    for kind in (CompletionBody, ChatBody, StreamOptions):
        assert set(kind.model_fields) <= shown, set(kind.model_fields) - shown
    listed = {name for row in rows(text) for name in names(row[0])}
    assert listed <= {*CompletionBody.model_fields, *ChatBody.model_fields}
    for kind in ResponseFormat.model_fields["type"].annotation.__args__:
        assert f'"{kind}"' in text


def test_paths_and_metrics_of_the_server(toy):
    import asyncio

    from prometheus_client import generate_latest

    from paged_jax.server.app import make_app
    from tests.server.harness import toy_llm

    llm = toy_llm(toy)
    app = make_app(llm)
    document = app.openapi()
    paths = {
        f"{method.upper()} {path}" for path, found in document["paths"].items() for method in found
    }
    shown = {name for row in rows(section(SERVER, "Paths")) for name in names(row[0])}
    assert paths <= shown
    families = set(
        re.findall(r"^# TYPE (\S+) ", generate_latest(app.state.metrics.registry).decode(), re.M)
    )
    documented = {
        name for row in rows(section(SERVER, "Logs and metrics")) for name in names(row[0])
    }
    ours = {name for name in families if ":" in name and not name.endswith("_created")}
    assert documented == ours
    asyncio.run(llm.shutdown())
