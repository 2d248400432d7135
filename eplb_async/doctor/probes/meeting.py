"""Ranks that run the doctor at once find each other as the library's do: same rendezvous, same secret.

Each leaves a hello with a nonce, signed with the job's key, and answers the nonces of the others: so one with another
secret is told from one that never came, and from a hello that an earlier run has left.
"""

from __future__ import annotations

import asyncio
import hmac
import os
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Annotated, TypeVar

import msgspec

from eplb_async.core.text import is_one_line
from eplb_async.errors import HandshakeError
from eplb_async.rendezvous import Rendezvous
from eplb_async.rendezvous.exchange import exchange

__all__ = ["Hello", "Meeting", "nonce"]

_DIGEST, _NONCE = 32, 16
_MOST_BYTES = 1 << 20
_PAUSE = 0.02

T = TypeVar("T")


class Hello(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """What a rank says of itself.

    Attributes:
        rank: It.
        ep_size: Ranks in its group.
        nonce: Of this run of it.
        node: Its host.
        card: Its agent's card; empty where it has no agent.
    """

    rank: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    ep_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    nonce: Annotated[bytes, msgspec.Meta(min_length=_NONCE, max_length=_NONCE)]
    node: Annotated[str, msgspec.Meta(max_length=256)]
    card: Annotated[bytes, msgspec.Meta(max_length=_MOST_BYTES)]


class Meeting:
    """This rank among the others.

    Args:
        rendezvous: Where they meet.
        group: Prefix of the keys.
        hello: Ours.
        key: The job's key.
        pool: Where the rendezvous is called.

    Attributes:
        met: The hello of each rank that proved that it is there and holds the key.
        seen: Ranks that left a hello of whatever kind.
        refused: Why a rank's newest hello was refused.
    """

    def __init__(self, rendezvous: Rendezvous, *, group: str, hello: Hello, key: bytes, pool: Executor) -> None:
        self.met: dict[int, Hello] = {}
        self.seen: set[int] = set()
        self.refused: dict[int, str] = {}
        self._rendezvous = rendezvous
        self._group = group
        self._hello = hello
        self._key = key
        self._pool = pool

    async def meet(self, seconds: float) -> dict[int, str]:
        """Meet everybody else. Cancelled or timed out: :attr:`met` has those that were met.

        Returns:
            Why the others were not met, by rank; of all of them where our own hello could not be left.
        """
        hello = msgspec.msgpack.encode(self._hello)
        try:
            await exchange(
                self._rendezvous,
                group=self._group,
                rank=self._hello.rank,
                ep_size=self._hello.ep_size,
                sealed=self._mac(b"hello", hello) + hello,
                deadline_per_peer=seconds,
                on_peer=self._on_peer,
                executor=self._pool,
            )
        except HandshakeError as error:
            others = set(range(self._hello.ep_size)) - {self._hello.rank}
            return {rank: str(error.failures.get(rank, error)) for rank in others - set(self.met)}
        return {}

    async def leave(self, seconds: float) -> None:
        """Say that we are done, and wait until all that were met are, or are given up. Cancelled: no longer said."""
        try:
            async with asyncio.timeout(seconds):
                await self._call(lambda: self._rendezvous.set(self._done(self._hello), b"done"))
                for hello in self.met.values():
                    await self._until(self._done(hello), b"done")
        except Exception:  # a rendezvous whose host has left first, or one that is not done in time
            return

    def kind(self, rank: int) -> str:
        """What kind of trouble a rank that was not met is: ``"absent"``, ``"secret"`` or ``"silent"``."""
        return "secret" if rank in self.refused else "silent" if rank in self.seen else "absent"

    async def _on_peer(self, peer: int, sealed: bytes) -> None:
        self.seen.add(peer)
        self.refused.pop(peer, None)
        digest, body = sealed[:_DIGEST], sealed[_DIGEST:]
        if not hmac.compare_digest(digest, self._mac(b"hello", body)):
            self.refused[peer] = "its hello is signed with another secret, or is left from an earlier run with one"
            raise HandshakeError(self.refused[peer])
        try:
            hello = msgspec.msgpack.decode(body, type=Hello)
        except msgspec.MsgspecError as error:
            raise HandshakeError(f"its hello is of another version of the library: {error}") from None
        if not is_one_line(hello.node):
            raise HandshakeError(f"says that its host is {hello.node!r}")
        if (hello.rank, hello.ep_size) != (peer, self._hello.ep_size):
            raise HandshakeError(
                f"says it is rank {hello.rank} of {hello.ep_size}, not {peer} of {self._hello.ep_size}"
            )
        # Of both nonces: an answer to our newest hello is no proof that theirs, which we hold, is their newest.
        ours = self._mac(b"answer", self._hello.nonce + hello.nonce)
        await self._call(lambda: self._rendezvous.set(self._answer(self._hello.rank, peer), ours))
        await self._until(self._answer(peer, self._hello.rank), self._mac(b"answer", hello.nonce + self._hello.nonce))
        self.met[peer] = hello

    async def _until(self, key: str, value: bytes) -> None:
        def there() -> bool:
            return hmac.compare_digest(self._rendezvous.get(key) or b"", value)

        while not await self._call(there):
            await asyncio.sleep(_PAUSE)

    async def _call(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function)

    def _answer(self, of: int, to: int) -> str:
        return f"{self._group}/answer/{of}/{to}"

    def _done(self, hello: Hello) -> str:
        return f"{self._group}/done/{hello.rank}/{hello.nonce.hex()}"

    def _mac(self, what: bytes, data: bytes) -> bytes:
        return hmac.digest(self._key, b"eplb-async doctor " + what + data, "sha256")


def nonce() -> bytes:
    """A new one."""
    return os.urandom(_NONCE)
