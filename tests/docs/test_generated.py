"""Documents made from code say what the code says, and the annotated file of settings is one that works."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from autofuse.errors import SettingsError
from autofuse.private_files import default_store
from autofuse.settings.layers import OWN_CHOICE, SPECS, load, profile_names
from scripts.generate_docs import PAGES, ROOT, STORE, tables_of

SETTING = re.compile(r"# (\w+ = .*|\[\w+\])")


@pytest.mark.parametrize("path", PAGES)
def test_a_generated_document_is_as_the_code_says(path: str) -> None:
    assert (ROOT / path).read_text(encoding="utf-8") == PAGES[path](), "run scripts/generate_docs.py"


def test_no_generated_text_is_about_this_machine() -> None:
    texts = "".join(text() for text in PAGES.values())
    assert str(default_store()) not in texts
    assert texts.count(STORE) == 2


def test_the_annotated_file_sets_nothing_as_it_is() -> None:
    assert tomllib.loads((ROOT / "configs/autofuse.toml").read_text()) == {}


def test_every_line_of_the_annotated_file_works_once_its_mark_is_off(tmp_path: Path) -> None:
    lines = (ROOT / "configs/autofuse.toml").read_text().splitlines()
    switched_on = [found[1] for line in lines if (found := SETTING.fullmatch(line))]
    own = tuple(f"{name.partition('.')[2]} =" for name in OWN_CHOICE)  # no project's file to say
    text = "\n".join(line for line in switched_on if not line.startswith(own))
    (tmp_path / "autofuse.toml").write_text(text)
    (tmp_path / ".git").mkdir()
    settings = load(environ={}, cwd=tmp_path)
    named = [name for name in SPECS if settings.origin(name) == str(tmp_path / "autofuse.toml")]
    assert set(SPECS) - set(named) == set(OWN_CHOICE)
    assert not settings.changed()


def test_the_annotated_file_is_no_profile(tmp_path: Path) -> None:
    assert profile_names() == ["quick", "default", "thorough"]
    with pytest.raises(SettingsError, match="quick, default, thorough"):
        load({"run.profile": "autofuse"}, {}, tmp_path)


def test_tables_of_words_are_found_by_their_form() -> None:
    module = type(re)("words")
    vars(module).update(REASONS={"a": "b"}, NUMBERS={"a": 1}, lower={"a": "b"})
    assert tables_of(module) == {"REASONS": {"a": "b"}}
