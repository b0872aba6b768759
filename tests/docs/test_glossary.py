"""The glossary says of each word what it is in the field, what it means here, and which definition it stands for."""

from __future__ import annotations

import re

import pytest

from scripts.generate_docs import ROOT

ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in (ROOT / "docs/glossary.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| our word")
]
DEFINITION = re.compile(r"`([\w/]+\.py): (\w+)`")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_word_stands_for_something_that_is_defined_there(row: list[str]) -> None:
    _, _, meaning, where = row
    assert meaning.endswith(".")
    found = DEFINITION.findall(where)
    assert found and DEFINITION.sub("", where).strip(" ,") == ""
    for path, name in found:
        text = (ROOT / "autofuse" / path).read_text()
        assert re.search(rf"^\s*(?:(?:class|def) {name}\b|{name}(?:: .*)? = )", text, re.MULTILINE), (path, name)


def test_words_are_in_order() -> None:
    words = [row[0] for row in ROWS]
    assert words == sorted(words) and len(set(words)) == len(words)
