"""What a rank needs before it can introduce itself: its incarnation, and the job's key.

Keys on the rendezvous, all under the group's name: ``{group}/incarnation/{rank}`` counts a rank's starts,
``{group}/key`` holds the job's key where no secret is set, ``{group}/blob/{rank}`` the introductions, and with
``env://`` ``{group}/place/{rank}`` says which process of the world has the rank.

With a secret the key is derived from it and nothing is stored. Without one (loopback, a private file, a store
that the caller trusts) rank 0 makes a random key the first time a group meets on a store, and every later run
and every rank that starts again **uses the one that is there**. A fresh key per run would be no safer, since
who can read one can read the other, but it would break: a rank that starts before rank 0 would seal with
the stale key, and a restarted rank 0 could no longer verify the peers that live on. So a key is never stale;
only introductions are, and ``exchange`` deals with those.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from concurrent.futures import Executor
from dataclasses import dataclass, field

from eplb_async._types import Hidden
from eplb_async.core.text import one_line
from eplb_async.errors import HandshakeError
from eplb_async.rendezvous.base import Rendezvous
from eplb_async.rendezvous.blob import KEY_SIZE
from eplb_async.threads import DaemonExecutor

logger = logging.getLogger(__name__)

_FASTEST, _SLOWEST = 0.005, 0.05
_MAX_STARTS = 1 << 46  # some of them are times in milliseconds


@dataclass(frozen=True, slots=True)
class Joined:
    """This rank's place in a run.

    Attributes:
        incarnation: Identity of this start, from 1 up.
        key: The job's key.
    """

    incarnation: int
    key: bytes = field(repr=False)


def next_incarnation(rendezvous: Rendezvous, group: str, rank: int) -> int:
    """Count a start of this rank; blocks.

    A store that may end, and begin anew without what it counted, says with ``born`` where to count from.
    """
    count = rendezvous.add(f"{group}/incarnation/{rank}", 1)  # first: it may find that the store has begun anew
    return int(getattr(rendezvous, "born", 0)) + count


def note_place(rendezvous: Rendezvous, group: str, rank: int) -> None:
    """Say who has this rank, where processes have numbers of a world, and warn if it was another one; blocks.

    Two expert-parallel groups of one world that share a name share their ranks' keys.
    """
    place, where = getattr(rendezvous, "place", ""), f"{group}/place/{rank}"
    if not place:
        return
    before = rendezvous.get(where)
    if before and before != place.encode():
        logger.warning(
            "rank %d of group %r was the process with %s, and is the one with %s now. If both run, two groups share "
            "one name, and will not find their peers: open each with a group= of its own",
            rank,
            group,
            one_line(before.decode(errors="replace")),
            place,
        )
    rendezvous.set(where, place.encode())


def derive_key(secret: bytes, group: str) -> bytes:
    """The job's key of a group, from a secret that all ranks share."""
    return Hidden(hmac.digest(secret, b"eplb-async/1/" + group.encode(), "sha256"))


def job_key(rendezvous: Rendezvous, *, group: str, rank: int, secret: bytes | None) -> bytes | None:
    """One attempt at the job's key; blocks on the rendezvous, but does not wait for rank 0.

    Args:
        rendezvous: Where the key is kept if there is no secret.
        group: Group on it.
        rank: This rank; 0 makes the key.
        secret: The job's secret, or None.

    Returns:
        The key; None if rank 0 has not made it yet.

    Raises:
        HandshakeError: There is no secret and the rendezvous is not one that keeps a key safe, or what it
            keeps is no key.
    """
    if secret:
        return derive_key(secret, group)
    if not rendezvous.trusted:
        raise HandshakeError(
            f"the rendezvous {rendezvous.url} is not private and no secret is set: set the same "
            "EPLB_ASYNC_SECRET on every rank"
        )
    where = f"{group}/key"
    found = rendezvous.get(where)
    if found is None and rank == 0:
        rendezvous.set(where, secrets.token_bytes(KEY_SIZE))
        found = rendezvous.get(where)
    if found is None:
        return None
    if len(found) != KEY_SIZE:
        raise HandshakeError(
            f"{where!r} on the rendezvous {rendezvous.url} is no job key ({len(found)} bytes): something "
            "else wrote there; use another group or another rendezvous"
        )
    return derive_key(found, group)


async def join(
    rendezvous: Rendezvous,
    *,
    group: str,
    rank: int,
    secret: bytes | None,
    timeout: float,
    executor: Executor | None = None,
) -> Joined:
    """Count this start and get the job's key, waiting for rank 0 to make it.

    Cancelled or timed out: the start may have been counted, which does no harm.

    Raises:
        HandshakeError: No key in time, or the rendezvous failed; says which.
    """
    loop = asyncio.get_running_loop()
    pool = executor or DaemonExecutor(1, name="eplb-join")
    doing = "count this start"
    try:
        async with asyncio.timeout(timeout):
            incarnation = await loop.run_in_executor(pool, next_incarnation, rendezvous, group, rank)
            if not 0 < incarnation <= _MAX_STARTS:
                raise HandshakeError(
                    f"the rendezvous {rendezvous.url} counts {incarnation} starts of rank {rank}: something else "
                    "wrote there; use another group or another rendezvous"
                )
            await loop.run_in_executor(pool, note_place, rendezvous, group, rank)
            doing = "read the job's key"
            pause = _FASTEST
            while True:
                key = await loop.run_in_executor(
                    pool, lambda: job_key(rendezvous, group=group, rank=rank, secret=secret)
                )
                if key is not None:
                    return Joined(incarnation, key)
                doing = "find the job's key, which rank 0 makes: is rank 0 running, and without a secret too?"
                await asyncio.sleep(pause)
                pause = min(_SLOWEST, 2 * pause)
    except TimeoutError:
        raise HandshakeError(
            f"rank {rank} waited {timeout:g} s at the rendezvous {rendezvous.url} to {doing}"
        ) from None
    except (HandshakeError, asyncio.CancelledError):
        raise
    except Exception as error:  # whatever a caller's Rendezvous raises
        raise HandshakeError(f"the rendezvous {rendezvous.url} failed: {error!r}") from error
    finally:
        if executor is None:
            pool.shutdown(wait=False, cancel_futures=True)
