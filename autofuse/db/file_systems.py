"""Which file systems other machines write to as well.

In: a path. Out: the type of its file system where that is one of a network, as Linux names it.
Guarantee: only a name; what is not known counts as local, but for file systems of fuse. SQLite's shared log lives in
memory that processes of one machine share, so on these file systems a store uses a journal instead, which needs locks
alone.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

NETWORK = frozenset((
    "nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "pvfs2", "orangefs", "afs", "ncpfs", "cifs", "smb3",
    "smbfs", "9p", "virtiofs", "vboxsf", "prl_fs", "wekafs", "panfs", "gfs2", "ocfs2",
))  # fmt: skip
# FUSE types on disks of this machine: ntfs and exfat, root folders of rootless containers, encrypted folders. Every
# other FUSE type (sshfs, s3fs, rclone, glusterfs, gcsfuse, unknown ones) counts as a network: a journal is right on
# every file system, a shared log is not.
LOCAL_FUSE = frozenset((
    "fuseblk", "fuse-overlayfs", "ntfs", "ntfs-3g", "exfat", "exfat-fuse", "fuse2fs", "ext2", "encfs", "gocryptfs",
    "cryfs",
))  # fmt: skip
MOUNTS = Path("/proc/self/mountinfo")
_ESCAPED = re.compile(rb"\\([0-7]{3})")  # blanks and the like in names of folders


def network_type(path: Path) -> str:
    """The type of a path's network file system, such as "nfs4" or "fuse.sshfs"; "" for a local one, or if unknown."""
    try:
        lines = MOUNTS.read_bytes().splitlines()
    except OSError:
        return ""
    place = Path(os.path.realpath(path))
    found, deepest = "", -1
    for line in lines:  # later mounts hide earlier ones at the same place
        fields, _, rest = line.partition(b" - ")
        mount, kind = fields.split()[4:5], rest.split()[:1]
        if not mount or not kind:
            continue
        folder = Path(os.fsdecode(_ESCAPED.sub(lambda found: bytes([int(found[1], 8) & 255]), mount[0])))
        if place.is_relative_to(folder) and len(folder.parts) >= deepest:
            found, deepest = os.fsdecode(kind[0]), len(folder.parts)
    return found if found in NETWORK or _is_of_fuse_and_not_local(found) else ""


def _is_of_fuse_and_not_local(kind: str) -> bool:
    """Whether a type is "fuse" or "fuseblk", with or without a subtype ("fuse.sshfs"), and not in LOCAL_FUSE."""
    family, _, subtype = kind.partition(".")
    return family in ("fuse", "fuseblk") and not {family, subtype} & LOCAL_FUSE
