"""``autofuse explain SCRIPT.py`` as a person types it: graphs before and after fusion, or why there are none."""

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def explain(*arguments, **environment):
    command = [sys.executable, "-m", "autofuse", "explain", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, timeout=300)


def row_of(text, phase):
    """The cells of a graph's row: ``22 → 10`` and its like."""
    (line,) = [line for line in text.splitlines() if line.startswith(phase)]
    return " ".join(line.split())


def test_inception_loses_half_of_its_nodes(tmp_path):
    store = tmp_path / "store.sqlite3"
    result = explain(EXAMPLES / "inception.py", "--steps", 4, AUTOFUSE_STORE=str(store), COLUMNS="100")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("4 batches in ")  # the script's own output
    row = row_of(result.stdout, "inference")
    assert row.startswith("inference 22 → 10 24 → 12 8 → 4 20 → 8 ")
    assert "4 calls" in result.stdout and "inception.py:" in result.stdout
    assert not store.exists()


def test_a_training_script_shows_both_directions_and_its_exit_code(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch\n"
        "model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))\n"
        "for size in (3, 5, 3):\n"
        "    model(torch.randn(size, 8)).sum().backward()\n"
        "sys.exit(int(sys.argv[1]))\n"
    )
    result = explain(script, "7", COLUMNS="100")
    assert result.returncode == 7 and "ended with exit code 7" in " ".join(result.stdout.split())
    assert "→" in row_of(result.stdout, "forward") and "→" in row_of(result.stdout, "backward")
    assert "mean of 3" in result.stdout


def test_a_script_without_modules_says_so(tmp_path):
    script = tmp_path / "plain.py"
    script.write_text("import torch; torch.ones(3)")
    result = explain(script)
    assert result.returncode == 0
    assert "Nothing was captured of" in result.stdout and "it called no nn.Module." in " ".join(result.stdout.split())
