"""``autofuse run`` against plain ``python``: stdout, exit code, and where python adds no frames of its own, stderr.

All cases run with autofuse switched off, which takes the same path through the command line and through ``script`` in
a fraction of a second; the telling ones run once more with a session, which imports torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.cli.fidelity_cases import CASES, WITH_MODULES, Case

AUTOFUSE = (sys.executable, "-m", "autofuse", "run")
CONSOLE = (str(Path(sys.executable).with_name("autofuse")), "run")

WITH_SESSION = [
    "sys.exit(text)",
    "uncaught exception",
    "KeyboardInterrupt",
    "atexit after sys.exit",
    "forked child exits by itself",
    "portrait of a package",
    "multiprocessing spawn",
    "deep recursion",
    "signal dispositions",
]


def lay_out(case: Case, folder: Path) -> None:
    for name, content in case.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    for name, goal in case.links.items():
        (folder / name).symlink_to(goal)


def run(prefix: tuple[str, ...], case: Case, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("AUTOFUSE_", "PYTHON", "COVERAGE"))}
    environ |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONUTF8": "1"} | variables
    return subprocess.run(
        [*prefix, *case.command], cwd=folder, env=environ, input=case.stdin, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_same_as_python(case: Case, tmp_path: Path) -> None:
    lay_out(case, tmp_path)
    plain = run((sys.executable,), case, tmp_path)
    ours = run(AUTOFUSE, case, tmp_path, AUTOFUSE_DISABLE="1")
    assert ours.stdout == plain.stdout, ours.stderr
    assert ours.returncode == plain.returncode, ours.stderr
    if not case.stderr_differs:
        assert ours.stderr == plain.stderr


@pytest.mark.parametrize("case", [c for c in CASES if c.name in WITH_SESSION], ids=lambda c: c.name)
def test_same_as_python_with_a_session(case: Case, tmp_path: Path) -> None:
    lay_out(case, tmp_path)
    plain = run((sys.executable,), case, tmp_path)
    ours = run(AUTOFUSE, case, tmp_path, AUTOFUSE_STORE=str(tmp_path / "store.sqlite3"), AUTOFUSE_TUNE="off")
    assert ours.stdout == plain.stdout, ours.stderr
    assert ours.returncode == plain.returncode, ours.stderr


@pytest.mark.parametrize("case", WITH_MODULES, ids=lambda c: c.name)
def test_same_as_python_with_captured_modules(case: Case, tmp_path: Path) -> None:
    lay_out(case, tmp_path)
    plain = run((sys.executable,), case, tmp_path)
    variables = {"AUTOFUSE_TUNE": "off", "AUTOFUSE_CAPTURE_AT_ONCE": "true"}
    ours = run(AUTOFUSE, case, tmp_path, AUTOFUSE_STORE=str(tmp_path / "store.sqlite3"), **variables)
    assert (ours.stdout, ours.returncode) == (plain.stdout, plain.returncode), ours.stderr
    assert [line for line in ours.stderr.splitlines() if not line.startswith("autofuse: ")] == plain.stderr.splitlines()


@pytest.mark.parametrize("name", ["portrait of a script", "portrait of a module", "KeyboardInterrupt"])
def test_console_script_is_the_same(name: str, tmp_path: Path) -> None:
    case = next(c for c in CASES if c.name == name)
    lay_out(case, tmp_path)
    plain = run((sys.executable,), case, tmp_path)
    ours = run(CONSOLE, case, tmp_path, AUTOFUSE_DISABLE="1")
    assert (ours.stdout, ours.returncode) == (plain.stdout, plain.returncode)


@pytest.mark.parametrize("name", ["portrait of a script", "portrait of a module", "portrait of a folder"])
def test_safe_path_puts_nothing_on_the_path(name: str, tmp_path: Path) -> None:
    case = next(c for c in CASES if c.name == name)
    lay_out(case, tmp_path)
    command = ("-P", "-m", "autofuse", "run")
    plain = run((sys.executable, "-P"), case, tmp_path)
    ours = run((sys.executable, *command), case, tmp_path, AUTOFUSE_DISABLE="1")
    if name == "portrait of a module":  # the module is not on the path: python says 1, we call it a wrong command line
        assert (plain.returncode, ours.returncode) == (1, 2)
    else:
        assert (ours.stdout, ours.returncode) == (plain.stdout, plain.returncode)


def test_options_before_the_script_are_ours_and_two_dashes_end_them(tmp_path: Path) -> None:
    case = Case("", {"script.py": "import sys; print(sys.argv)"}, ("--", "script.py", "--quiet", "--", "-m"))
    lay_out(case, tmp_path)
    ours = run((*AUTOFUSE, "--tune", "off", "--set", "tuner.trials=3", "-q"), case, tmp_path, AUTOFUSE_DISABLE="1")
    assert ours.stdout == "['script.py', '--quiet', '--', '-m']\n"


def test_zip_file_and_compiled_script_run(tmp_path: Path) -> None:
    import py_compile
    import zipfile

    source = tmp_path / "script.py"
    source.write_text("import sys; print(sys.argv, __name__, __file__)")
    py_compile.compile(str(source), cfile=str(tmp_path / "script.pyc"))
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.write(source, "__main__.py")
    for name in ("script.pyc", "app.zip"):
        case = Case("", {}, (name, "x"))
        plain = run((sys.executable,), case, tmp_path)
        ours = run(AUTOFUSE, case, tmp_path, AUTOFUSE_DISABLE="1")
        assert plain.returncode == 0
        assert (ours.stdout, ours.returncode) == (plain.stdout, plain.returncode)


def test_an_interrupt_in_our_code_shows_the_scripts_frames_only(tmp_path: Path) -> None:
    script = """
        import functools
        from autofuse.dynamo_skip import define

        def step():
            made["call"]()

        made = {"signal": __import__("signal")}
        made["signal"].signal(2, made["signal"].default_int_handler)  # a job in the background inherits none
        define("def call():\\n    signal.raise_signal(signal.SIGINT)", "fused node", made)
        step()
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    ours = run((*AUTOFUSE, "--tune", "off"), Case("", {}, ("script.py",)), tmp_path)
    assert ours.stderr.count("in step") == 1 and "KeyboardInterrupt" in ours.stderr and "<autofuse" not in ours.stderr


@pytest.mark.parametrize("whose", ["ours", "the script's"])
def test_an_error_out_of_generated_code_is_said_to_be_so(whose: str, tmp_path: Path) -> None:
    script = """
        import sys
        from autofuse.dynamo_skip import define

        def broken():
            raise RuntimeError("broken")

        made = {}
        define("def call(inner): return inner() if inner else int('x')", "fused node", made)
        made["call"](None if sys.argv[1] == "ours" else broken)
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    ours = run((*AUTOFUSE, "--tune", "off"), Case("", {}, ("script.py", whose)), tmp_path)
    assert ours.returncode == 1 and "Error" in ours.stderr
    assert ("AUTOFUSE_DISABLE=1" in ours.stderr) == (whose == "ours")


@pytest.mark.parametrize("redirect", ["2>&-", "2>/dev/full", ">&- 2>&-"])
def test_closed_and_full_streams_do_not_change_the_exit_code(redirect: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys; sys.exit(3)")
    # Garbage for a store: our side has something to say on the stream that takes nothing.
    (tmp_path / "store.sqlite3").write_bytes(b"garbage")
    command = f"{sys.executable} -m autofuse run --store store.sqlite3 --tune off script.py {redirect}"
    plain = subprocess.run(f"{sys.executable} script.py {redirect}", shell=True, cwd=tmp_path)
    assert subprocess.run(command, shell=True, cwd=tmp_path).returncode == plain.returncode == 3


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("nosuch.py",), ["nosuch.py", "autofuse run SCRIPT.py"]),
        (("-m", "nosuch_module"), ["nosuch_module", "autofuse run -m MODULE"]),
        (("-m", "json.nosuch"), ["json.nosuch"]),
        (("empty",), ["__main__.py"]),
        ((), ["SCRIPT"]),
    ],
)
def test_nothing_to_run_is_a_usage_error(command: tuple[str, ...], words: list[str], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    ours = run(AUTOFUSE, Case("", {}, command), tmp_path, AUTOFUSE_DISABLE="1")
    assert ours.returncode == 2
    assert ours.stdout == ""
    assert all(word in ours.stderr for word in words), ours.stderr
