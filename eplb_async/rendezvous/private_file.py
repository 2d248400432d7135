"""Files that nobody else can have put in our way."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from eplb_async.errors import HandshakeError


def open_private(path: Path) -> int:
    """Open or make the file, for us alone; returns its descriptor."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if path.is_symlink():
            why = "it is a symbolic link; give the real path"
        elif not path.parent.is_dir():
            why = f"there is no directory {path.parent}; make it, on a disk that all ranks share"
        elif path.is_dir():
            why = "it is a directory; name a file in it"
        else:
            why = f"{error.strerror or error}; choose a file that the user of this process may make and write"
        raise HandshakeError(f"cannot open the rendezvous file {path}: {why}") from error
    try:
        require_private(path, fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def require_private(path: Path, fd: int) -> None:
    """Raise ``HandshakeError`` unless the open file is regular, ours, and closed to everybody else."""
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        why = "it is not a regular file; choose another path"
    elif info.st_uid != os.geteuid():
        why = f"it belongs to user {info.st_uid}, not to {os.geteuid()}; whoever owns it could forge peers"
    elif info.st_mode & 0o077:
        why = f"its mode is {stat.S_IMODE(info.st_mode):04o}, so others could forge peers; chmod 600 it"
    else:
        return
    raise HandshakeError(f"refusing the rendezvous file {path}: {why}")
