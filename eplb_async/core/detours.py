"""Which rank to READ an expert from instead, when a source has failed in this migration."""

from __future__ import annotations

from eplb_async.core.plan import MigrationPlan, Move

__all__ = ["Detours"]


class Detours:
    """What one reader has learnt of its sources in one migration.

    Any member that holds an expert in the old placement will do: it keeps its rows of a layer until COMMIT of that
    layer, which needs the reader's vote (I-6).

    Args:
        plan: The migration.
    """

    def __init__(self, plan: MigrationPlan) -> None:
        self._plan = plan
        self._tried: dict[tuple[int, int], set[int]] = {}
        self._shaky: set[int] = set()

    @property
    def needless(self) -> bool:
        """Whether no source has failed, so that every move goes as it was planned."""
        return not self._shaky

    def instead(self, layer: int, move: Move) -> Move | None:
        """The move that takes the place of one that failed, each source once for each layer and expert.

        The nearest source is taken, of those that have not failed at all if there are any.

        Returns:
            The move; ``None`` if it was no READ, or no source is left.
        """
        if not move.is_read:
            return None
        tried = self._tried.setdefault((layer, move.expert), set())
        tried.add(move.source)
        self._shaky.add(move.source)
        left = [s for s in self._plan.sources(layer, move.expert, move.reader) if s[0] not in tried]
        return _from(move, min(left, key=lambda s: s[0] in self._shaky)) if left else None

    def around(self, layer: int, move: Move) -> Move:
        """The move itself, or, if its source has failed before, from the nearest that has not, if there is one."""
        if move.source not in self._shaky or not move.is_read:
            return move
        sound = [s for s in self._plan.sources(layer, move.expert, move.reader) if s[0] not in self._shaky]
        return _from(move, sound[0]) if sound else move


def _from(move: Move, source: tuple[int, int]) -> Move:
    return move._replace(source=source[0], source_slot=source[1])
