"""Passwords in the values of settings: kept out of what we print, record and hand on to other processes' arguments.

In: a setting's value. Out: the same with *** in place of passwords.
Guarantee: what stands between a user's name and the last @ is hidden, also where it is not escaped as it should be.
"""

from __future__ import annotations

import re

SECRETS = ("fleet.url",)  # settings whose values may hold a password

_IN_AUTHORITY = re.compile(r"(://[^:/@\s]*):.*@", re.DOTALL)
_IN_QUERY = re.compile(r"(?<=password=)[^&\s]+", re.IGNORECASE)


def masked(url: str) -> str:
    """A URL with *** in place of its passwords."""
    return _IN_QUERY.sub("***", _IN_AUTHORITY.sub(r"\1:***@", url))


def has_password(url: str) -> bool:
    return masked(url) != url
