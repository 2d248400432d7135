"""What a process owns that could outlive it: listening sockets and shared memory. Asked of Linux."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path

_LISTEN = "0A"


@dataclass
class Belongings:
    """What was seen to belong to some processes.

    Attributes:
        sockets: Inodes of listening sockets, and their addresses.
        files: Files in ``/dev/shm``.
        segments: System V shared memory ids.
    """

    sockets: dict[int, str] = field(default_factory=dict)
    files: set[str] = field(default_factory=set)
    segments: set[int] = field(default_factory=set)

    def note(self, pid: int) -> None:
        """Add what a process has now."""
        listening = _listening()
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = os.readlink(entry)
                if target.startswith("socket:[") and (inode := int(target[8:-1])) in listening:
                    self.sockets[inode] = listening[inode]
                if target.startswith("/dev/shm/"):
                    self.files.add(target.removesuffix(" (deleted)"))
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            parts = line.split(maxsplit=5)
            if len(parts) == 6 and parts[5].startswith("/dev/shm/"):
                self.files.add(parts[5].removesuffix(" (deleted)"))
            elif len(parts) == 6 and parts[5].startswith("/SYSV"):
                self.segments.add(int(parts[4]))

    def left(self) -> list[str]:
        """Which of it still exists, in words."""
        listening, segments = _listening(), _segments()
        return [
            *(f"listening socket {address}" for inode, address in self.sockets.items() if inode in listening),
            *(f"file {name}" for name in self.files if Path(name).exists()),
            *(f"shared memory {segment}" for segment in self.segments if segment in segments),
        ]


def _listening() -> dict[int, str]:
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            parts = line.split()
            if parts[3] == _LISTEN:
                found[int(parts[9])] = parts[1]
    return found


def _segments() -> set[int]:
    return {int(line.split()[1]) for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]}
