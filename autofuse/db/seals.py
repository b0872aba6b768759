"""Seals of what the store keeps to be run: binaries of kernels, and the files of Triton's cache.

In: a name and bytes. Out: the text that stands beside them in the store.
Guarantee: only who has this user's key can make a seal, so what another user has written, what is damaged, and what
came with a store that was copied from elsewhere is told from what was compiled here. Decisions, which are data, carry
none.
"""

from __future__ import annotations

import hmac

from autofuse.errors import StoreError
from autofuse.private_files import Untrusted, default_store, seal

_MARK = "seal:"


def seal_of(name: str, data: bytes) -> str:
    """The seal of bytes under a name. Raises StoreError where this user has no key and none can be made."""
    try:
        return _MARK + seal(name, data).hex()
    except (OSError, Untrusted) as error:
        raise StoreError(
            f"expected a key of this user's in {default_store().parent}, found: {error}; "
            "name a folder of your own with XDG_DATA_HOME=PATH"
        ) from error


def is_sealed(name: str, data: object, found: object) -> bool:
    """Whether ``found`` is this user's seal of ``data`` under this name. Raises StoreError as `seal_of` does.

    SQLite does not enforce column types, so a damaged row may hold anything.
    """
    if not isinstance(data, bytes) or not isinstance(found, str) or not found.isascii():
        return False
    return hmac.compare_digest(found, seal_of(name, data))
