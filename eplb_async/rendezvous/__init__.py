"""How ranks find each other: a store that all reach, and the sealed introductions they leave in it."""

from eplb_async.rendezvous.base import Rendezvous
from eplb_async.rendezvous.blob import BlobError, Introduction, open_sealed, seal
from eplb_async.rendezvous.environment import EnvRendezvous, Launch
from eplb_async.rendezvous.exchange import exchange, withdraw
from eplb_async.rendezvous.file import FileRendezvous
from eplb_async.rendezvous.group import gather
from eplb_async.rendezvous.keys import Joined, derive_key, job_key, join, next_incarnation
from eplb_async.rendezvous.resolve import resolve
from eplb_async.rendezvous.snapshot import GroupRendezvous
from eplb_async.rendezvous.store import StoreRendezvous
from eplb_async.rendezvous.tcp import TcpRendezvous

__all__ = [
    "BlobError",
    "EnvRendezvous",
    "FileRendezvous",
    "GroupRendezvous",
    "Introduction",
    "Joined",
    "Launch",
    "Rendezvous",
    "StoreRendezvous",
    "TcpRendezvous",
    "derive_key",
    "exchange",
    "gather",
    "job_key",
    "join",
    "next_incarnation",
    "open_sealed",
    "resolve",
    "seal",
    "withdraw",
]
