"""Remote agents: one peer, and the book of those that an agent knows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from eplb_async.errors import CommunicatorBusy, HandshakeError, NixlTransferFailed
from eplb_async.nixl.card import Card, unseal
from eplb_async.nixl.native import Extent, Native
from eplb_async.nixl.regions import Coverage, Rows
from eplb_async.settings import Settings


class Peer:
    """A remote agent that we may read from.

    Attributes:
        name: Its agent name.
        blob: The metadata that it was added with.
        gone: Whether it is known gone: disconnected, removed, or replaced by newer metadata of its name.
    """

    def __init__(self, name: str, blob: bytes, extents: list[Extent]) -> None:
        self.name = name
        self.blob = blob
        self.gone = False
        self._extents = {extent.name: extent for extent in extents}
        self.coverage = Coverage(extents)

    def region(self, name: str) -> Rows:
        """The peer's region of that name.

        Raises:
            KeyError: It has none; the message lists those it has.
        """
        try:
            return Rows(self._extents[name], self.name)
        except KeyError:
            raise KeyError(f"peer {self.name} has no region {name!r}, only {sorted(self._extents)}") from None

    @property
    def bare(self) -> bool:
        """Whether it has no memory that could be read, only messages."""
        return not self._extents

    def __repr__(self) -> str:
        return f"<Peer {self.name!r}{' (gone)' if self.gone else ''}>"


class Peers:
    """The peers that a native agent has loaded.

    Args:
        native: The agent.
        settings: The secret that peers must prove they hold, and the size of what they may show.
        is_read: Whether READs from the peer of that name have not ended.
        on_disconnect: Called with a peer's name, once, when it is found gone.
    """

    def __init__(
        self,
        native: Native,
        settings: Settings,
        *,
        is_read: Callable[[str], bool],
        on_disconnect: Callable[[str], object],
    ) -> None:
        self._native = native
        self._settings = settings
        self._is_read = is_read
        self._on_disconnect = on_disconnect
        self._peers: dict[str, Peer] = {}
        self._retired: list[Peer] = []

    def get(self, name: str) -> Peer | None:
        """The peer of that name, if it is loaded."""
        return self._peers.get(name)

    def add(self, blob: bytes) -> Peer:
        """Check a peer's card and load it; loading the same one again returns the same peer.

        A newer card of a known peer replaces it by remove and add, since loading alone would keep old extents
        readable (NIXL.md, 25).

        Raises:
            HandshakeError: The card is bad, our own, or NIXL refuses it.
            CommunicatorBusy: READs from the peer being replaced are in flight.
        """
        card = unseal(blob, self._settings.secret or b"", limit=self._settings.max_blob_bytes)
        if card.name == self._native.name:
            raise HandshakeError(f"metadata blob refused: it is agent {card.name!r}'s own")
        known = self._peers.get(card.name)
        if known is not None:
            if known.blob == blob and not known.gone:
                return known
            self.remove(known)
        try:
            self._load(card)
        except NixlTransferFailed as error:
            raise HandshakeError(f"NIXL refused the metadata of {card.name!r}: {error}") from error
        peer = self._peers[card.name] = Peer(card.name, blob, card.extents())
        return peer

    def remove(self, peer: Peer) -> None:
        """Forget a peer.

        Raises:
            CommunicatorBusy: READs from it may still write; removing it would not stop them (NIXL.md, 19).
        """
        if self._is_read(peer.name):
            raise CommunicatorBusy(f"READs from {peer.name} have not ended; removing it would not stop them")
        peer.gone = True
        if self._peers.pop(peer.name, None) is not None:
            with contextlib.suppress(NixlTransferFailed):
                self._native.remove_remote(peer.name)

    def retire(self, peer: Peer) -> None:
        """Forget a peer now, or else when READs from it have ended."""
        self._retired.append(peer)
        self.sweep()

    def sweep(self) -> None:
        """Forget retired peers whose READs have ended; called whenever one has."""
        for peer in [peer for peer in self._retired if not self._is_read(peer.name)]:
            self._retired.remove(peer)
            self.remove(peer)

    def __len__(self) -> int:
        return len(self._peers)

    def lost(self, name: str) -> None:
        """NIXL says that the peer of that name is gone."""
        peer = self._peers.get(name)
        if peer is not None and not peer.gone:
            peer.gone = True
            self._on_disconnect(name)

    def _load(self, card: Card) -> None:
        name = self._native.add_remote(card.metadata)
        try:
            if name != card.name:
                raise HandshakeError(f"card of {card.name!r} carries the metadata of another agent, {name!r}")
            self._native.connect(name)
        except BaseException:
            with contextlib.suppress(NixlTransferFailed):
                if name not in self._peers:
                    self._native.remove_remote(name)
            raise
