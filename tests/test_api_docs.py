"""The public names are few, and docs/api.md describes each of them and nothing else."""

import re
from pathlib import Path

import paged_jax

API_PAGE = Path(__file__).resolve().parents[1] / "docs" / "api.md"


def documented_names(page: str) -> list[str]:
    """Names with a heading of their own, of the form "## `Name`"."""
    return re.findall(r"^## `(\w+)`\s*$", page, flags=re.MULTILINE)


def test_public_names_are_at_most_ten_and_unique():
    assert len(set(paged_jax.__all__)) == len(paged_jax.__all__) <= 10


def test_public_names_are_those_of_the_api_page():
    names = documented_names(API_PAGE.read_text(encoding="utf-8"))
    assert sorted(names) == sorted(paged_jax.__all__)


def test_only_second_level_headings_in_code_style_count():
    page = "# `Title`\n## `LLM`\n### `LLM.generate`\n## Prompts\ntext ## `Engine`\n## `Engine`\n"
    assert documented_names(page) == ["LLM", "Engine"]
