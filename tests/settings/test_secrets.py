"""Passwords in settings: shown, recorded and handed to child processes as ***, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofuse.settings.groups import FleetSettings
from autofuse.settings.layers import Settings, load
from autofuse.settings.secrets import has_password, masked

URL = "postgresql+psycopg://someone:s3cret@db.example:5432/fleet?sslmode=verify-full"


def settings(url: str, tmp_path: Path) -> Settings:
    return load({"tuner.trials": 7}, environ={"AUTOFUSE_FLEET_URL": url}, cwd=tmp_path)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (URL, URL.replace("s3cret", "***")),
        ("postgresql+psycopg://someone@db/fleet", "postgresql+psycopg://someone@db/fleet"),
        (
            "postgresql+psycopg://db/fleet?user=a&password=s3cret&x=1",
            "postgresql+psycopg://db/fleet?user=a&password=***&x=1",
        ),
        ("postgresql+psycopg://db/fleet?sslpassword=s3cret", "postgresql+psycopg://db/fleet?sslpassword=***"),
        ("postgresql+psycopg://a:s3/cr@et@db/fleet", "postgresql+psycopg://a:***@db/fleet"),
        ("", ""),
    ],
)
def test_what_is_shown(url: str, shown: str) -> None:
    assert masked(url) == shown and has_password(url) == (url != shown)


@given(
    st.text(min_size=1).filter(lambda text: "*" not in text and text not in "postgresql+psycopg://someone:@db/fleet")
)
def test_no_password_is_shown_however_it_is_written(password: str) -> None:
    assert masked(f"postgresql+psycopg://someone:{password}@db/fleet") == "postgresql+psycopg://someone:***@db/fleet"


def test_it_is_in_no_record_and_in_no_argument(tmp_path: Path) -> None:
    found = settings(URL, tmp_path)
    assert found.fleet.url == URL
    everywhere = [found.for_records(), found.as_dict(), found.as_arguments(), found.shown("fleet.url"), repr(found)]
    assert "s3cret" not in str(everywhere)
    assert found.for_records()["tuner.trials"] == "7"


def test_a_child_process_has_the_same_settings(tmp_path: Path) -> None:
    for url in (URL, "postgresql+psycopg://someone@db/fleet", ""):
        found = settings(url, tmp_path)
        arguments = dict(text.split("=", 1) for text in found.as_arguments() if text != "--set")
        child = load(arguments, environ=found.as_variables(), cwd=tmp_path)
        assert child.fleet.url == url and child.tuner.trials == 7
        assert ("fleet.url" in arguments) == (url == "postgresql+psycopg://someone@db/fleet")


def test_a_project_names_no_server_and_not_what_it_forgets(tmp_path: Path) -> None:
    text = f'[fleet]\nurl = "{URL}"\nhelp = false\nkeep_days = 1\nkeep_keys = 1\nkeep_measurements = 1\n'
    (tmp_path / "autofuse.toml").write_text(text)
    found = load({}, environ={}, cwd=tmp_path)
    assert found.fleet == FleetSettings(help=False)
    assert any(
        "fleet.url is not read from a project's file" in line and "s3cret" not in line for line in found.warnings
    )
