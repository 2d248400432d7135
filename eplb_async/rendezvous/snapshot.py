"""A ``torch.distributed`` ProcessGroup as a rendezvous: each rank's introduction, gathered once.

A group is no store. Its ranks are together at one moment, so they gather twice as they open: to see that they
open the same thing, and make the job's key; then their introductions. Afterwards nothing can be left there, and a
rank that starts again has no way into the group: ``reconnect`` needs a store.
"""

from __future__ import annotations

import itertools
import secrets
import struct
import threading
import time
from hashlib import blake2b
from typing import TYPE_CHECKING

from eplb_async.errors import HandshakeError
from eplb_async.rendezvous.blob import KEY_SIZE
from eplb_async.rendezvous.group import check_group, gather

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_HELLO = struct.Struct(f">II{KEY_SIZE}s")
_KEY_LENGTH = struct.Struct(">I")
_MAX_KEY = 4096
_starts = itertools.count(1)


class GroupRendezvous:
    """A rendezvous on a ProcessGroup, trusted as it is, never destroyed by us.

    Every rank of the group makes one at once, and sets one value; what all have set is there when ``set`` returns.
    A second ``set`` raises.

    Attributes:
        url: How messages name it.
        trusted: Only its members see what is gathered.
        lasting: Nothing stays in it.
        one_time: Why no rank can come back by it.
    """

    trusted = True
    lasting = False
    one_time = (
        "a ProcessGroup gathers introductions once, as all ranks open: a rank that starts again is in no such group. "
        'Where ranks are to come back, open with "env://", "file://…", or a Store that outlives them'
    )

    def __init__(self, group: ProcessGroup, *, rank: int, ep_size: int, timeout: float) -> None:
        """Meet at the group: collective. Blocks: call it off the event loops.

        Args:
            group: The group, with a CPU backend.
            rank: This rank; the group's own.
            ep_size: Ranks in the group; all of them.
            timeout: Seconds until all ranks must have come, and have set their value.

        Raises:
            ValueError: It is no group of this process, of another rank or size, or has no CPU backend.
            HandshakeError: Not all came in time.
        """
        check_group(group)
        self.url = f"the caller's {type(group).__name__}"
        self._group = group
        self._deadline = time.monotonic() + timeout
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}
        self._outcome: HandshakeError | None = None
        hellos = self._gather(_HELLO.pack(rank, ep_size, secrets.token_bytes(KEY_SIZE)))
        self._check(hellos)
        self._key = blake2b(b"".join(hellos), digest_size=KEY_SIZE).digest()

    def set(self, key: str, value: bytes) -> None:
        """Gather one key and value of every rank; blocks until all have come here."""
        with self._lock:
            if self._outcome is not None:
                raise self._outcome
            self._outcome = HandshakeError(f"cannot write {key!r} to {self.url}: {self.one_time}")
            name = key.encode()
            try:
                gathered = self._gather(_KEY_LENGTH.pack(len(name)) + name + value)
                named = [_split(rank, data) for rank, data in enumerate(gathered)]
                self._check_group(key, [other for other, _ in named])
                self._values = dict(named)
            except HandshakeError as error:
                self._outcome = error  # a second attempt would be another collective, which nobody else makes
                raise

    def get(self, key: str) -> bytes | None:
        """Return what a rank has set; of every group's ``key`` the one that all ranks made."""
        return self._key if key.endswith("/key") else self._values.get(key)

    def add(self, key: str, amount: int) -> int:
        """Count a start in this process: nobody else counts there."""
        return next(_starts)

    def delete(self, key: str) -> None:
        """Forget a value."""
        self._values.pop(key, None)

    def close(self) -> None:
        """Let go of the group."""
        self._values = {}

    def _gather(self, data: bytes) -> list[bytes]:
        return gather(self._group, data, timeout=max(0.001, self._deadline - time.monotonic()))

    def _check(self, hellos: list[bytes]) -> None:
        """Refuse numbers that are not the group's, on every rank alike."""
        for place, hello in enumerate(hellos):
            if len(hello) != _HELLO.size:
                raise HandshakeError(f"rank {place} of {self.url} does something else: do all ranks open on it now?")
            rank, ep_size, _ = _HELLO.unpack(hello)
            if (rank, ep_size) != (place, len(hellos)):
                raise ValueError(
                    f"rank {rank} of {ep_size} cannot open on {self.url}: there it is rank {place} of {len(hellos)}. "
                    'Give the numbers of the group, or a group of those that open: new_group(ranks, backend="gloo")'
                )

    def _check_group(self, key: str, keys: list[str]) -> None:
        """Refuse ranks that open another group at this moment."""
        ours = key.rpartition("/")[0]
        for rank, other in enumerate(keys):
            if other.rpartition("/")[0] != ours:
                raise HandshakeError(
                    f"rank {rank} of {self.url} opens {other!r} at this moment, and this rank {key!r}: groups must be "
                    "opened one after the other, in the same order on every rank"
                )


def _split(rank: int, data: bytes) -> tuple[str, bytes]:
    """A rank's key and value."""
    length = _KEY_LENGTH.unpack_from(data)[0] if len(data) >= _KEY_LENGTH.size else len(data)
    end = _KEY_LENGTH.size + length
    if length > _MAX_KEY or end > len(data):
        raise HandshakeError(
            f"rank {rank} of the ProcessGroup answered with {len(data)} bytes that are no introduction"
        )
    return data[_KEY_LENGTH.size : end].decode(errors="replace"), data[end:]
