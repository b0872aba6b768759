"""Files that only this user may have written: the only module that decides which files are trusted.

In: a folder, names and bytes. Out: the same bytes in a later process, or ``Untrusted`` with the reason and the remedy.
Guarantee: nothing is read unless file, folder and all folders above are real and may be written to by nobody but this
user and root (`check_folder`, `check_beside`). Files that are unpickled or run as code must also carry a seal: a keyed
hash of name and content with this user's key (`PrivateFolder`, `seal`). So files that another user put there, that were
cut, altered or renamed, or that came with a copied store are refused.

The key is in the user's own data folder, readable by the user alone. Reading and writing cost a hash of the content.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import hmac
import os
import pwd
import secrets
import shlex
import stat
import tempfile
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import platformdirs

from autofuse.errors import AutofuseError

MOST_FILES, MOST_BYTES = 128, 256 << 20  # the oldest go
_MAGIC = b"autofuse1\n"
_SEAL_BYTES = 32
_KEY_BYTES = 32
UID_MAP = Path("/proc/self/uid_map")


def default_store() -> Path:
    """Where results are kept unless told otherwise."""
    return platformdirs.user_data_path("autofuse") / "store.sqlite3"


class Untrusted(AutofuseError):
    """A file or folder that others may have written to, or that is not what was written."""


class PrivateFolder:
    """Sealed files in one folder, which is made when the first is written."""

    def __init__(self, path: Path, key_file: Path | None = None) -> None:
        self.path = path
        self._key_file = key_file

    def write(self, name: str, data: bytes) -> None:
        """Put a file there, whole or not at all. Raises OSError, and Untrusted where the folder is no private one."""
        make_folder(self.path)
        sealed = _MAGIC + self._seal(name, data) + data
        descriptor, temporary = tempfile.mkstemp(prefix=".", dir=self.path)  # for its owner alone
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(sealed)
            os.replace(temporary, self.path / name)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def read(self, name: str) -> bytes:
        """What was written under this name. Raises FileNotFoundError, OSError, and Untrusted."""
        if not os.path.lexists(self.path / name):
            raise FileNotFoundError(self.path / name)
        check_folder(self.path)
        found = read_own(self.path / name)
        start = len(_MAGIC) + _SEAL_BYTES
        seal, data = found[len(_MAGIC) : start], found[start:]
        if not found.startswith(_MAGIC) or not hmac.compare_digest(seal, self._seal(name, data)):
            raise Untrusted(f"{self.path / name} is not as this user's autofuse wrote it: cut, altered or copied")
        return data

    def names(self) -> list[str]:
        """Of all files, also of those that `read` would refuse."""
        with contextlib.suppress(OSError):
            return sorted(entry.name for entry in os.scandir(self.path) if not entry.name.startswith("."))
        return []

    def newest(self) -> list[str]:
        """Of all files, the newest first."""
        found: list[tuple[float, str]] = []
        for name in self.names():
            with contextlib.suppress(OSError):
                found.append((os.lstat(self.path / name).st_mtime, name))
        return [name for _, name in sorted(found, reverse=True)]

    def remove(self, name: str) -> None:
        with contextlib.suppress(OSError):
            (self.path / name).unlink()

    def prune(self, most: int = MOST_FILES, most_bytes: int = MOST_BYTES) -> None:
        """Remove the oldest of our files beyond ``most`` and ``most_bytes``; nothing where others may write."""
        files = []
        with contextlib.suppress(OSError, Untrusted):
            check_folder(self.path)
            files = [(entry.stat(follow_symlinks=False), entry.path) for entry in os.scandir(self.path)]
        kept_bytes = 0
        newest_first = sorted(files, key=lambda item: -item[0].st_mtime)
        ours = (item for item in newest_first if stat.S_ISREG(item[0].st_mode) and _is_sealed(item[1]))
        for number, (found, path) in enumerate(ours):
            kept_bytes += found.st_size
            if number >= most or kept_bytes > most_bytes:
                with contextlib.suppress(OSError):
                    os.unlink(path)

    def _seal(self, name: str, data: bytes) -> bytes:
        return seal(name, data, self._key_file)


def _is_sealed(path: str) -> bool:
    """Whether a file begins as those that are written here."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC
    return False


# ---- who may write ---------------------------------------------------------------------------------------------


def make_folder(path: Path) -> None:
    """Make a folder, and all that are missing above it, for this user alone. Raises OSError and Untrusted."""
    missing = [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]
    check_above(path)
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
    check_folder(path)


def check_folder(path: Path) -> None:
    """Raises Untrusted unless only this user and root may change the folder, or put another one in its place."""
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise Untrusted(f"{path} is no real folder")
    problem = _problem(path, found, 0o022)
    if problem:
        raise Untrusted(f"{path} {problem}")
    check_above(path)


def check_above(path: Path) -> None:
    """Raises Untrusted unless only this user and root may put anything in the place of ``path``."""
    for parent in filter(os.path.lexists, _parents(path)):
        # A link is as safe as the folder that holds it, and what it leads to is looked at by itself.
        link = os.lstat(parent)
        if link.st_uid != os.geteuid() and not _is_of_root(parent, link):
            raise Untrusted(f"{parent}, above {path}, belongs to another user")
        found = os.stat(parent)
        is_of_root = _is_of_root(Path(os.path.realpath(parent)), found)
        is_shared_safely = bool(found.st_mode & stat.S_ISVTX) and is_of_root  # as /tmp is
        problem = _problem(parent, found, 0 if is_shared_safely else 0o022, is_of_root)
        if problem:
            raise Untrusted(f"{parent}, above {path}, {problem}")


def check_beside(path: Path, suffixes: Iterable[str] = ("",)) -> None:
    """Raises Untrusted unless the folder that holds ``path`` is as `check_folder` wants it, through links or not, and
    unless ``path`` and what lies beside it under its name and a suffix, where there, are this user's own files."""
    folder = Path(os.path.realpath(path.parent))
    if not stat.S_ISDIR(os.lstat(folder).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    for place in dict.fromkeys((folder, path.parent.absolute())):
        if place == folder or os.path.islink(place):
            check_folder(place if place == folder else place.parent)
    for suffix in suffixes:
        file = folder / (path.name + suffix)
        with contextlib.suppress(FileNotFoundError):
            _check_own(file, os.lstat(file))


def check_file(path: Path) -> None:
    """Raises Untrusted unless a file, and a link that leads there, are this user's or root's. For what is only read."""
    if os.lstat(path).st_uid not in (os.geteuid(), 0):
        raise Untrusted(f"{path} belongs to another user")
    problem = _problem(path, os.stat(path), 0o022)
    if problem:
        raise Untrusted(f"{path} {problem}")


def _check_own(path: Path, found: os.stat_result, forbidden: int = 0o022) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise Untrusted(f"{path} is a link")
    problem = _problem(path, found, forbidden) if stat.S_ISREG(found.st_mode) else "is no regular file"
    if problem:
        raise Untrusted(f"{path} {problem}")


def _parents(path: Path) -> Iterator[Path]:
    """Folders above, as they are written and as they are."""
    written = Path(os.path.abspath(path))
    yield from dict.fromkeys([*written.parents, *Path(os.path.realpath(written)).parents])


def _is_of_root(path: Path, found: os.stat_result) -> bool:
    """Whether a folder above, or a link there, is root's.

    In a user namespace that has no root, the owner of "/" stands for it, and for all other users of the machine: there
    only what lies in a folder of root's that nobody else may write to counts, up to "/".
    """
    if found.st_uid == 0 or found.st_uid != root_stand_in():
        return found.st_uid == 0
    if path == path.parent:
        return True
    above = os.stat(path.parent)
    return not above.st_mode & 0o022 and _is_of_root(Path(os.path.realpath(path.parent)), above)


@cache
def root_stand_in() -> int | None:
    """Who owns what is root's, in a user namespace that has no root; None elsewhere."""
    try:
        lines = [tuple(map(int, line.split())) for line in UID_MAP.read_text().splitlines()]
    except (OSError, ValueError):
        return None
    has_root = any(first <= 0 < first + count for first, _, count in lines)
    owner = os.stat("/").st_uid
    return None if has_root or not lines or owner == os.geteuid() else owner


def _problem(path: Path, found: os.stat_result, forbidden: int, is_of_root: bool = False) -> str:
    """Why others may have changed it, and what mends it; "" where they may not have."""
    if found.st_uid not in (os.geteuid(), 0) and not is_of_root:
        return "belongs to another user"
    mode = found.st_mode & forbidden
    if mode & 0o020 and _is_of_one(found.st_gid):
        mode &= ~0o020
    if not mode:
        return ""
    if mode & ~0o022:
        return f"may be read by others (type: chmod go= {shlex.quote(str(path))})"
    return f"may be written to by others (type: chmod go-w {shlex.quote(str(path))})"


@cache
def _is_of_one(group: int) -> bool:
    """Whether a group is this user's own, as many systems make one for each user."""
    try:
        own, name = grp.getgrgid(group), pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False
    return own.gr_name == name and not set(own.gr_mem) - {name}


def open_own(path: Path, flags: int) -> int:
    """A descriptor of a file of this user's, made for them alone where there is none; never through a link.

    Raises OSError and Untrusted.
    """
    try:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if os.path.islink(path):
            raise Untrusted(f"{path} is a link") from error
        raise
    try:
        _check_own(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_own(path: Path, forbidden: int = 0o022) -> bytes:
    """A regular file of this user's or root's that has none of the ``forbidden`` permissions."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if os.path.islink(path):
            raise Untrusted(f"{path} is a link") from error
        raise
    with os.fdopen(descriptor, "rb") as file:
        _check_own(path, os.fstat(descriptor), forbidden)
        return file.read()


# ---- the key ---------------------------------------------------------------------------------------------------


def seal(name: str, data: bytes, key_file: Path | None = None) -> bytes:
    """What only who has this user's key can make of a name and a content. Raises OSError and Untrusted."""
    text = name.encode()
    found = hmac.new(_key(key_file or default_store().with_name("seal.key")), digestmod="sha256")
    found.update(len(text).to_bytes(8, "little") + text)
    found.update(data)
    return found.digest()


@cache
def _key(path: Path) -> bytes:
    """This user's key, made at the first use. Raises OSError and Untrusted."""
    make_folder(path.parent)
    if not os.path.lexists(path):
        descriptor, temporary = tempfile.mkstemp(prefix=".", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_bytes(_KEY_BYTES))
            with contextlib.suppress(FileExistsError):  # another process was first: its key counts
                os.link(temporary, path)
        finally:
            os.unlink(temporary)
    found = read_own(path, 0o077)
    if len(found) != _KEY_BYTES:
        raise Untrusted(f"{path} holds {len(found)} bytes in place of {_KEY_BYTES}: remove it, a new one will be made")
    return found
