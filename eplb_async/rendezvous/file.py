"""A rendezvous in a file on a disk that all ranks share.

Our own, because of what torch's ``FileStore`` does (measured, torch 2.13): where a record is cut short, as by
a rank killed while it wrote, its constructor never returns and holds the GIL, so every thread of every rank
that opens the file stops. It waits for ever for a lock that a stopped process holds, makes a removed
file again, readable by all, and deletes the file when the last of its users is gone, under a job that has
just begun on it.

The file is a log. It begins with ``EPLBRDV1``; then come records::

    key length u32 | value length u32 (all ones: deleted) | CRC-32 of key and value u32 | key | value

written under an exclusive ``flock``, read under a shared one. A record that a dying process left unfinished
can only be the last; readers ignore it and the next writer overwrites it.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import threading
import time
import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from eplb_async.errors import HandshakeError

_MAGIC = b"EPLBRDV1"
_RECORD = struct.Struct(">III")
_DELETED = 0xFFFFFFFF
_MAX_FILE_BYTES = 4 << 30
_FASTEST, _SLOWEST = 0.001, 0.02


class FileRendezvous:
    """A rendezvous in a file.

    The file is made 0600; one that exists must be a regular file, ours, and closed to everybody else. It is
    never deleted, so that a second run on the same path works: remove it when no rank uses it. Every wait for
    its lock is bounded by ``timeout``. Locks on a network file system are as good as that system.

    Args:
        path: The file; its directory must exist.
        timeout: Seconds for each call.

    Attributes:
        url: How messages name it.
        trusted: True: the file is private.

    Raises:
        HandshakeError: The file cannot be made or must not be used; says why.
    """

    def __init__(self, path: str | os.PathLike[str], *, timeout: float = 60.0) -> None:
        self._path = Path(path).absolute()
        self.url = f"file://{self._path}"
        self.trusted = True
        self._timeout = timeout
        self._mutex = threading.Lock()
        self._values: dict[str, bytes] = {}
        self._offset = 0
        self._fd = _open_private(self._path)
        self._close = weakref.finalize(self, os.close, self._fd)
        try:
            with self._locked("open", fcntl.LOCK_SH):
                pass
        except BaseException:
            self._close()
            raise

    def set(self, key: str, value: bytes) -> None:
        """Store ``value`` under ``key``."""
        with self._locked(f"write {key!r}", fcntl.LOCK_EX):
            self._append(key, value)

    def get(self, key: str) -> bytes | None:
        """Return the value of ``key``, or None if it has none yet."""
        with self._locked(f"read {key!r}", fcntl.LOCK_SH):
            return self._values.get(key)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, atomically over all ranks."""
        with self._locked(f"count {key!r}", fcntl.LOCK_EX):
            total = int(self._values.get(key, b"0")) + amount
            self._append(key, str(total).encode())
            return total

    def delete(self, key: str) -> None:
        """Remove ``key``."""
        with suppress(HandshakeError), self._locked(f"delete {key!r}", fcntl.LOCK_EX):
            if key in self._values:
                self._append(key, None)

    def close(self) -> None:
        """Let go of the file, which stays; a call that runs ends first, within its timeout."""
        with self._mutex:
            self._close()

    @contextmanager
    def _locked(self, what: str, kind: int) -> Iterator[None]:
        """Hold the file's lock, with all records read."""
        deadline = time.monotonic() + self._timeout
        if not self._mutex.acquire(timeout=self._timeout):
            raise self._late(what)
        try:
            if not self._close.alive:
                raise HandshakeError(f"cannot {what}: the rendezvous {self.url} is closed")
            self._require_same()
            pause = _FASTEST
            while not _try_lock(self._fd, kind):
                if time.monotonic() >= deadline:
                    raise self._late(what)
                time.sleep(pause)
                pause = min(_SLOWEST, 2 * pause)
            try:
                self._read_on()
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        except (OSError, ValueError) as error:
            raise HandshakeError(
                f"cannot {what}: the rendezvous {self.url} failed: {error}; is its disk full or unreachable?"
            ) from error
        finally:
            self._mutex.release()

    def _read_on(self) -> None:
        """Take in what was written since the last time; holds the lock."""
        size = os.fstat(self._fd).st_size
        if size < self._offset:
            raise self._damaged("it has become shorter")
        if size > _MAX_FILE_BYTES:
            raise self._damaged(f"its {size} bytes are more than a rendezvous holds")
        data = os.pread(self._fd, size - self._offset, self._offset)
        at = 0
        if self._offset == 0:
            if data[: len(_MAGIC)] != _MAGIC[: len(data)]:
                raise self._damaged("it holds something else")
            if len(data) < len(_MAGIC):
                return  # new, or its first writer died at once
            at = len(_MAGIC)
        while len(data) - at >= _RECORD.size:
            key_size, value_size, checksum = _RECORD.unpack_from(data, at)
            middle = at + _RECORD.size + key_size
            end = middle + (0 if value_size == _DELETED else value_size)
            if end > len(data):
                break  # unfinished
            if zlib.crc32(data[at + _RECORD.size : end]) != checksum:
                if end == len(data):
                    break  # unfinished: its length was on disk before its content
                raise self._damaged(f"its record at byte {self._offset + at} does not match its checksum")
            key = data[at + _RECORD.size : middle].decode()
            if value_size == _DELETED:
                self._values.pop(key, None)
            else:
                self._values[key] = data[middle:end]
            at = end
        self._offset += at

    def _append(self, key: str, value: bytes | None) -> None:
        """Write a record; holds the exclusive lock."""
        name, content = key.encode(), value or b""
        size = _DELETED if value is None else len(content)
        record = _RECORD.pack(len(name), size, zlib.crc32(name + content)) + name + content
        if self._offset == 0:
            record = _MAGIC + record
        os.ftruncate(self._fd, self._offset)  # whatever a dying writer left
        written = 0
        while written < len(record):
            written += os.pwrite(self._fd, record[written:], self._offset + written)
        self._offset += len(record)
        if value is None:
            self._values.pop(key, None)
        else:
            self._values[key] = content

    def _require_same(self) -> None:
        try:
            same = os.path.samestat(os.fstat(self._fd), os.lstat(self._path))
        except OSError:
            same = False
        if not same:
            raise HandshakeError(
                f"the rendezvous file {self._path} was removed or replaced since this rank opened it; use a "
                "path that nothing cleans up, and start all ranks again"
            )
        _require_private(self._path, self._fd)

    def _late(self, what: str) -> HandshakeError:
        return HandshakeError(
            f"cannot {what}: the lock of the rendezvous {self.url} was not free for {self._timeout:g} s; is "
            "a stopped process holding it (lslocks shows which)?"
        )

    def _damaged(self, how: str) -> HandshakeError:
        return HandshakeError(
            f"refusing the rendezvous file {self._path}: {how}; remove it if no rank uses it, or use another"
        )


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _open_private(path: Path) -> int:
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
        _require_private(path, fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _require_private(path: Path, fd: int) -> None:
    info = os.fstat(fd)
    mode = stat.S_IMODE(info.st_mode)
    if not stat.S_ISREG(info.st_mode):
        why = "it is not a regular file; choose another path"
    elif info.st_uid != os.geteuid():
        why = f"it belongs to user {info.st_uid}, not to {os.geteuid()}; whoever owns it could forge peers"
    elif mode & 0o077:
        why = f"its mode is {mode:04o}, so others could forge peers; chmod 600 it or remove it"
    else:
        return
    raise HandshakeError(f"refusing the rendezvous file {path}: {why}")
