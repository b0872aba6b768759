"""Documents point to what exists: relative links, their anchors, paths in backticks, and tests by their names."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.generate_docs import ROOT
from tests.test_layers import FLOORS

LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"")
PATH = re.compile(r"`((?:[\w.*-]+/)+[\w.*-]*|[\w-]+\.(?:py|md))(?::[\w: .]*)?`")
TEST = re.compile(r"`(tests/[\w/]+\.py)(?::[: ]*(\w+))?`|`(test_\w+)`")  # a file, a test in it, one more in it
CODE_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
HISTORY = "CHANGELOG.md"  # names files as they were called then
MADE_BY_A_RUN = ("gpu.json", "build/")


def documents() -> list[str]:
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return sorted({line for line in lines if (ROOT / line).is_file()})


def anchor(heading: str) -> str:
    """As GitHub and mkdocs make it: lower case, blanks to hyphens, all but words and hyphens left out."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def broken_links(path: Path, text: str) -> Iterator[str]:
    for match in LINK.finditer(CODE_BLOCK.sub("", text)):
        target, _, name = (match[1] or match[2]).partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        file = (path.parent / target).resolve() if target else path
        if not file.exists():
            yield f"{target}: there is no such file"
        elif name and file.suffix == ".md" and name not in map(anchor, HEADING.findall(file.read_text())):
            yield f"{target}#{name}: the file has no such heading"


def missing_paths(path: Path, text: str) -> Iterator[str]:
    """Of the repository, of the document's folder, or of the package; ``*`` stands for what it does in a shell."""
    for match in PATH.finditer(CODE_BLOCK.sub("", text)):
        name = match[1]
        if not name.startswith(MADE_BY_A_RUN) and not any(
            next(base.glob(name), None) for base in (ROOT, path.parent, ROOT / "autofuse")
        ):
            yield name


def missing_tests(text: str) -> Iterator[str]:
    """Tests that a document names and that are not in the file it names for them, in the same paragraph or row."""
    for block in re.split(r"\n\n|\n(?=[|\-*])", CODE_BLOCK.sub("", text)):
        path = ""
        for match in TEST.finditer(block):
            path, test = match[1] or path, match[2] or match[3]
            if test and not (path and re.search(rf"^(?:async )?def {test}\b", (ROOT / path).read_text(), re.MULTILINE)):
                yield f"{path}: {test}"


@pytest.mark.parametrize("name", documents())
def test_links_and_paths_of_a_document_exist(name: str) -> None:
    path = ROOT / name
    text = path.read_text(encoding="utf-8")
    assert not list(broken_links(path, text))
    assert name == HISTORY or not [*missing_paths(path, text), *missing_tests(text)]


def test_the_page_of_floors_names_every_floor_in_order() -> None:
    rows = [line for line in (ROOT / "docs/ARCHITECTURE.md").read_text().splitlines() if line.startswith("| `")]
    entries = [re.sub(r"(codegen/).+", r"\1", entry) for floor in FLOORS for entry in floor if entry != "__init__.py"]
    places = [next((n for n, row in enumerate(rows) if f"`{entry}`" in row.split("|")[1]), entry) for entry in entries]
    assert not [place for place in places if isinstance(place, str)], "floors that docs/ARCHITECTURE.md does not name"
    assert places == sorted(places)


def test_what_does_not_exist_is_found() -> None:
    page = ROOT / "docs" / "page.md"
    text = "[a](../README.md) [b](gone.md) [c](../README.md#gone) `ir/gone.py` `ir/shape.py: Dim` `ir/s*.py` `x/gone/`"
    assert list(broken_links(page, text)) == [
        "gone.md: there is no such file",
        "../README.md#gone: the file has no such heading",
    ]
    assert list(missing_paths(page, text)) == ["ir/gone.py", "x/gone/"]
    row = "`tests/docs/test_links.py: test_{}`, `test_gone`".format("what_does_not_exist_is_found")
    assert list(missing_tests(f"{row}\n\n`test_alone`")) == ["tests/docs/test_links.py: test_gone", ": test_alone"]
