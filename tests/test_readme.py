"""What the documents say about the repository is so."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def tree_paths(tree: str) -> list[str]:
    """Paths of an indented tree, two spaces a level, each followed by its description."""
    paths, parents = [], []
    for line in tree.splitlines():
        indent, name = re.match(r"( *)(\S+)", line).groups()
        del parents[len(indent) // 2 :]
        parents.append(name)
        paths.append("/".join(part.rstrip("/") for part in parents) + "/" * name.endswith("/"))
    return paths


def test_the_example_is_the_file():
    assert code_blocks("python") == [(ROOT / "example.py").read_text(encoding="utf-8")]


def test_there_are_two_commands_of_one_line():
    main_job, tests = code_blocks("sh")
    assert main_job.count("\n") == tests.count("\n") == 1
    assert "paged-jax chat" in main_job
    assert tests.endswith("-m pytest\n")


def test_continuous_integration_runs_the_test_command():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    # It takes the n-th block out of the page and runs it.
    assert 'bash -euo pipefail -c "$(readme_command 2)"' in script
    assert re.search(r"readme_command\(\) \{\n.*README\.md\n\}", script)


def test_a_tree_is_read_by_its_indentation():
    tree = "a/   one\n  b/    two\n    c.py  x\n  d\ne.py   y\n"
    assert tree_paths(tree) == ["a/", "a/b/", "a/b/c.py", "a/d", "e.py"]


@pytest.mark.parametrize("path", tree_paths(code_blocks("text")[-1]))
def test_the_tree_names_what_exists(path):
    assert (ROOT / path).is_dir() if path.endswith("/") else (ROOT / path).exists()


@pytest.mark.parametrize("document", ["README.md", *sorted(p.name for p in ROOT.glob("docs/*.md"))])
def test_links_lead_somewhere(document):
    path = ROOT / document if document == "README.md" else ROOT / "docs" / document
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), target


def test_the_architecture_page_names_every_module_and_no_other():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+\.py)`", page))
    modules = {
        file.relative_to(ROOT).as_posix().removeprefix("paged_jax/")
        for top in ("paged_jax", "models", "pallas_kernels")
        for file in (ROOT / top).rglob("*.py")
        # The symlink's target is walked by itself.
        if "paged_jax/models" not in file.as_posix()
    }
    # The table speaks of `__init__.py` only where there is something in it.
    assert sorted(m for m in modules - named if not m.endswith("/__init__.py")) == []
    assert sorted(m for m in named - modules if not (ROOT / m).exists()) == []
