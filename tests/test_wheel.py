"""An installed wheel is whole: profiles, migrations, commands, with nothing of the checkout at hand."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a wheel of this checkout installs; built from a copy, for a build leaves files behind."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "checkout"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, copy)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("autofuse", "configs"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
    build = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--quiet", "--wheel-dir", str(folder), str(copy)], check=True, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder / "site")
    return folder / "site"


def run(site: Path, folder: Path, *arguments: str) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("AUTOFUSE_")} | {"PYTHONPATH": str(site)}
    command = [sys.executable, "-P", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_has_all_files_of_the_package(site: Path) -> None:
    found = {
        path.relative_to(site / "autofuse").as_posix() for path in (site / "autofuse").rglob("*") if path.is_file()
    }
    package = ROOT / "autofuse"
    kept = {path.relative_to(package).as_posix() for path in package.rglob("*") if path.is_file()}
    profiles = {path.name for path in (ROOT / "configs").glob("*.toml")} - {"autofuse.toml"}
    assert {f"settings/profiles/{name}" for name in profiles} <= found
    assert {name for name in kept if "__pycache__" not in name} - found == set()


def test_config_shows_a_profile_outside_of_the_checkout(site: Path, tmp_path: Path) -> None:
    assert run(site, tmp_path, "-c", "import autofuse; print(autofuse.__file__)").startswith(str(site))
    (tmp_path / "autofuse.toml").write_text('[run]\nprofile = "thorough"\n')
    text = run(site, tmp_path, "-m", "autofuse", "config")
    assert "thorough" in text, text


def test_beside_a_torch_nothing_large_is_installed(site: Path) -> None:
    """Of what may be large only torch itself is asked for, in all releases that autofuse runs with."""
    (metadata,) = site.glob("autofuse-*.dist-info/METADATA")
    asked = [
        line.removeprefix("Requires-Dist: ") for line in metadata.read_text().splitlines() if "Requires-Dist" in line
    ]
    always = [line for line in asked if "extra ==" not in line]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert len(always) == len(project["dependencies"])
    (torch,) = (line for line in always if line.startswith(("torch", "triton", "nvidia")))
    assert torch.startswith("torch<") and torch.endswith(">=2.11")
