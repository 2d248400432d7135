"""Every error that leaves this library.

Messages say what was being done, to whom, and what to try next; attributes carry the parts; ``__cause__``
keeps NIXL's own exception.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


class EplbError(Exception):
    """Base of all errors of this library."""


class PlacementError(EplbError, ValueError):
    """A placement is wrong: shape, ids, an expert without any copy, or sizes that do not divide."""


class ExpertsLost(PlacementError):
    """No rank of the view holds some experts any more, and nothing was given to load them with.

    Attributes:
        lost: These experts, by layer.
    """

    def __init__(self, message: str, *, lost: Mapping[int, Sequence[int]] | None = None) -> None:
        self.lost: dict[int, tuple[int, ...]] = {layer: tuple(experts) for layer, experts in (lost or {}).items()}
        super().__init__(message)


class ExpertLoadFailed(EplbError):
    """``load_expert`` failed, or gave what is not one expert of the layer; ``__cause__`` is what it raised.

    Attributes:
        layer: The layer it was asked for.
        expert: The logical expert it was asked for.
    """

    def __init__(self, message: str, *, layer: int | None = None, expert: int | None = None) -> None:
        self.layer = layer
        self.expert = expert
        super().__init__(message)


class WeightsError(EplbError, ValueError):
    """A weight tensor cannot be moved, or moved away since ``open``; names layer, tensor and strides."""


class HandshakeError(EplbError):
    """A peer's introduction is missing, damaged, unauthenticated or of another layout.

    Attributes:
        failures: Reason per peer, keyed by rank (or by agent name where no rank is known).
    """

    def __init__(self, message: str, *, failures: Mapping[int | str, str] | None = None) -> None:
        self.failures: dict[int | str, str] = dict(failures or {})
        if self.failures:
            message += "".join(f"\n  {_who(peer)}: {why}" for peer, why in self.failures.items())
        super().__init__(message)


class TransferError(EplbError):
    """A transfer could not be made or did not end well."""


class NixlTransferFailed(TransferError, RuntimeError):
    """A NIXL transfer ended in a bad state.

    ``str()`` begins with ``NIXL transfer failed with state=`` so that log rules and ``except RuntimeError``
    clauses written for vLLM's communicator go on working.

    Attributes:
        state: NIXL's state at the time: ``"ERR"``, or ``"PROC"`` where a deadline passed.
        status: NIXL's name for the error, e.g. ``"nixlBackendError"``; empty if it raised none.
        peer: Agent name of the peer.
        rank: The peer's rank, where known.
        layer: Layer being moved, where known.
        experts: Logical experts in the failed READ, where known.
        nbytes: Bytes the transfer was to move.
        elapsed: Seconds since the first post.
        phase: What was being done: ``"make"``, ``"post"``, ``"poll"``, ``"notify"``.
        failures: Further failures of the same operation.
    """

    default_state = "ERR"

    def __init__(
        self,
        detail: str = "",
        *,
        state: str | None = None,
        status: str = "",
        peer: str = "",
        rank: int | None = None,
        layer: int | None = None,
        experts: Sequence[int] = (),
        nbytes: int = 0,
        elapsed: float = 0.0,
        phase: str = "",
    ) -> None:
        self.detail = detail
        self.state = state or self.default_state
        self.status = status
        self.peer = peer
        self.rank = rank
        self.layer = layer
        self.experts = tuple(experts)
        self.nbytes = nbytes
        self.elapsed = elapsed
        self.phase = phase
        self.failures: tuple[Exception, ...] = ()
        super().__init__(detail)

    def __str__(self) -> str:
        parts = [f"NIXL transfer failed with state={self.state}"]
        if self.status:
            parts.append(f"status={self.status}")
        if self.phase:
            parts.append(f"phase={self.phase}")
        if self.peer:
            parts.append(f"peer={self.peer}")
        if self.rank is not None:
            parts.append(f"rank={self.rank}")
        if self.layer is not None:
            parts.append(f"layer={self.layer}")
        if self.experts:
            shown = ",".join(map(str, self.experts[:8])) + (",…" if len(self.experts) > 8 else "")
            parts.append(f"experts={shown}")
        if self.nbytes:
            parts.append(f"nbytes={self.nbytes}")
        if self.elapsed:
            parts.append(f"elapsed={self.elapsed:.3f}s")
        text = " ".join(parts)
        if self.detail:
            text += f": {self.detail}"
        if self.failures:
            text += f" (and {len(self.failures)} more in .failures)"
        return text


class NixlTransferTimeout(NixlTransferFailed, TimeoutError):
    """The deadline passed while the transfer was still ``PROC``; its memory stays leased until it ends."""

    default_state = "PROC"


class NixlPeerDisconnected(NixlTransferFailed):
    """The peer is gone: its process died, exited, or destroyed its agent."""


class IntegrityError(EplbError):
    """The bytes read are not the bytes meant: another expert, another weight version, or damaged.

    Attributes:
        layer: Layer of the expert.
        expert: The logical expert that was meant.
        rank: Rank that it came from.
        slot: Slot of that rank.
    """

    def __init__(
        self,
        message: str,
        *,
        layer: int | None = None,
        expert: int | None = None,
        rank: int | None = None,
        slot: int | None = None,
    ) -> None:
        self.layer = layer
        self.expert = expert
        self.rank = rank
        self.slot = slot
        super().__init__(message)


class MigrationError(EplbError, RuntimeError):
    """An epoch ended without (all of) the new placement.

    Attributes:
        epoch: Number of the epoch; 0 if none was begun.
        origin: Rank that asked for the end, where known.
        reason: What that rank said.
        committed_layers: Layers ``[0, committed_layers)`` hold the new placement, on every rank of the view.
        failures: Further failures of the same migration.
    """

    def __init__(
        self,
        message: str,
        *,
        epoch: int = 0,
        origin: int | None = None,
        reason: str = "",
        committed_layers: int = 0,
    ) -> None:
        self.epoch = epoch
        self.origin = origin
        self.reason = reason
        self.committed_layers = committed_layers
        self.failures: tuple[Exception, ...] = ()
        super().__init__(message)


class MigrationAborted(MigrationError):
    """The epoch ended early, on every rank of the view at the same layer; migrate again when ready."""


class MigrationTimeout(MigrationAborted, TimeoutError):
    """This rank's deadline passed while it waited for others; the message says for whom."""


class MigrationInDoubt(MigrationError):
    """This rank voted and cannot learn the decision yet; it applies nothing until a view or ``exclude`` says."""


class ActivationTimeout(MigrationError, TimeoutError):
    """A step did not come, or could not begin, or users of a layer did not leave it, in time.

    What is committed is applied when it comes, or they have left.

    Attributes:
        layer: The layer that waits.
        step: The first step to run with the new placement of the layer, or the one that could not begin; 0 where layers
            are applied at once.
        ranks: Ranks that are waited for: those that have come least far, or whose votes are missing, or this one.
    """

    def __init__(
        self,
        message: str,
        *,
        layer: int,
        step: int,
        ranks: Iterable[int] = (),
        epoch: int = 0,
        reason: str = "",
        committed_layers: int = 0,
    ) -> None:
        self.layer = layer
        self.step = step
        self.ranks = tuple(ranks)
        super().__init__(message, epoch=epoch, reason=reason, committed_layers=committed_layers)


class RebalanceFailed(EplbError, RuntimeError):
    """A round of the service ended without a placement, or without its migration, for a reason of another rank.

    Attributes:
        round: Number of the round; 0 if none was begun.
        reason: Why.
        ranks: Ranks that it is due to, where known.
    """

    def __init__(self, message: str, *, round: int = 0, reason: str = "", ranks: Iterable[int] = ()) -> None:
        self.round = round
        self.reason = reason
        self.ranks = tuple(ranks)
        super().__init__(message)


class RebalanceTimeout(RebalanceFailed, TimeoutError):
    """``rebalance`` did not end within its timeout; the round goes on in the background."""


class CommunicatorBusy(EplbError, RuntimeError):
    """A second operation was asked for while one is running, or memory is still leased."""


class CommunicatorClosed(EplbError, RuntimeError):
    """The communicator or agent is closed, fenced by its peers, or belongs to a parent process."""


def describe(error: BaseException) -> str:
    """Class and text of any error, also of one whose ``str()`` fails."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__} (it cannot say what)"


def _who(peer: int | str) -> str:
    return f"rank {peer}" if isinstance(peer, int) else str(peer)
