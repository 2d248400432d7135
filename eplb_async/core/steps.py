"""Where a rank's engine stands among its steps, and what that lets happen (rule 11): no threads, no clock.

Ranks run steps in lock-step, so step *n* is the same step on all. A vote for a layer carries its *hold*, the first
step that this rank does not begin undecided; COMMIT says *at*, the largest hold; and each rank applies the layer after
the last step below ``at`` and before the next one. So no step runs with different placements, and none waits for a
collective of ours.
"""

from __future__ import annotations

Frozen = tuple[int, int, int, int, int, tuple[tuple[int, int], ...]]
NEVER = 1 << 62
MAX_STEP = (1 << 32) - 2_000
"""The highest number of a step: holds are unsigned 32-bit numbers."""


class StepCounter:
    """The steps of one rank's engine.

    Args:
        margin: Whole steps that begin after a vote before the engine waits for the decision; the same on all ranks.

    Attributes:
        number: The last step begun; 0 before the first.
        stride: Twice the step that runs or wants to begin; one more between that and the next.
        idle_after: The last step after which the engine was idle.
        hold: The first step that is not begun undecided; ``NEVER`` while no vote is outstanding.
        undecided: The layer that was voted for last.
        due: Step of each layer that is committed and not applied.
        gate: The first step that may not begin as things are.
    """

    def __init__(self, margin: int) -> None:
        self.margin = margin
        self.number = 0
        self.stride = 1
        self.idle_after = 0
        self.hold = NEVER
        self.undecided = -1
        self.due: dict[int, int] = {}
        self.gate = NEVER

    def voted(self, layer: int) -> int:
        """This rank votes for a layer: returns the hold to send, which says in which step it votes.

        An idle one holds the very next step, as all that are idle there do, and all bring what is decided forward.
        """
        stride = self.stride
        first = (stride >> 1) + 1
        idle = stride == (self.idle_after << 1) + 1
        self.hold, self.undecided = min(self.hold, first if idle else first + self.margin), layer
        self.set_gate()
        return first + self.margin

    def decide(self) -> None:
        """No vote of this rank is outstanding any more."""
        self.hold = NEVER
        self.set_gate()

    def commit(self, layer: int, at: int) -> None:
        """A layer is to be applied before step ``at``, and after those below it."""
        self.due[layer] = self._brought_forward(at)
        self.set_gate()

    def is_time(self, layer: int, *, held: bool = False) -> bool:
        """Whether a layer that is due may be applied now.

        Args:
            layer: The layer.
            held: Whether the step that wants to begin waits.
        """
        number, outside = self.stride >> 1, self.stride & 1
        return number + 1 >= self.due[layer] if outside else held and number >= self.due[layer]

    def applied(self, layer: int) -> None:
        """The layer is applied: its step may begin."""
        del self.due[layer]
        self.set_gate()

    def idle(self, number: int | None = None) -> None:
        """The engine is idle after its last step, as it is on every rank.

        Args:
            number: That step, where this rank has not run it.
        """
        if number is not None:
            self.number = number
            self.stride = (number << 1) + 1
        self.idle_after = self.number
        if self.hold != NEVER:
            self.hold = min(self.hold, self.number + 1)
        self.due = {layer: self._brought_forward(at) for layer, at in self.due.items()}
        self.set_gate()

    def _brought_forward(self, at: int) -> int:
        """Idle between two steps, the same two on all ranks: what was to come soon after comes there.

        Votes from before send holds of at most the next step and the margin, votes from after send larger ones. So
        all ranks bring the same layers forward, whenever they hear of them; and none that has voted before begins the
        next step undecided.
        """
        first = self.idle_after + 1
        return first if first < at <= first + self.margin else at

    def set_gate(self) -> None:
        """Something has changed that the gate depends on."""
        self.gate = min(self.hold, *self.due.values(), NEVER)

    def freeze(self) -> Frozen:
        """Its state as a value."""
        return (self.number, self.stride, self.idle_after, self.hold, self.undecided, tuple(sorted(self.due.items())))

    def thaw(self, frozen: Frozen) -> None:
        """Stands where :meth:`freeze` was called."""
        self.number, self.stride, self.idle_after, self.hold, self.undecided, due = frozen
        self.due = dict(due)
        self.set_gate()
