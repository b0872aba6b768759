"""A shell completes commands, options, scripts and names of nodes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autofuse.cli.app import parse
from autofuse.db.store import Store
from tests.report.report_records import GELU, NORM, fill, open_store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    opened = open_store(tmp_path / "store.sqlite3")
    fill(opened)
    opened.close()
    return opened


def complete(words: str, store: Path) -> list[str]:
    """What bash is told for the last of the words."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("AUTOFUSE_")}
    environ |= {
        "_AUTOFUSE_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1),
        "AUTOFUSE_STORE": str(store), "AUTOFUSE_NONSENSE": "1",
    }  # fmt: skip
    code = "import sys; sys.argv[0] = 'autofuse'; from autofuse.__main__ import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


def test_commands_options_and_names(store: Store, tmp_path: Path) -> None:
    assert complete("autofuse rep", store.path) == ["report", "repro"]
    assert "--json-schema" in complete("autofuse report --j", store.path)
    for command in ("show", "repro", "explain"):
        assert complete(f"autofuse {command} af_", store.path) == sorted(
            [GELU[1], NORM[1], "af_loss_log_softmax_nll_loss_forward_070809"]
        )
    assert complete("autofuse show af_n", tmp_path / "none.sqlite3") == []
    (tmp_path / "garbage.sqlite3").write_bytes(b"garbage" * 1000)
    assert complete("autofuse show af_n", tmp_path / "garbage.sqlite3") == []
    assert complete("autofuse run tr", store.path) == ["tr"], "a file, which the shell completes"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_its_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(["completion", shell]) == 0
    assert f"_AUTOFUSE_COMPLETE={shell}_complete" in capsys.readouterr().out


def test_another_shell_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert parse(["completion", "tcsh"]) == 2
    assert "bash" in capfd.readouterr().err
