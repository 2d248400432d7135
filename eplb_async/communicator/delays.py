"""What a migration waits for and did not get in time, as errors and words for whoever called it."""

from __future__ import annotations

from collections.abc import Mapping

from eplb_async.communicator.attempt import Attempt
from eplb_async.communicator.driver import Driver
from eplb_async.core.events import Phase
from eplb_async.core.protocol import Protocol
from eplb_async.errors import ActivationTimeout, MigrationInDoubt, MigrationTimeout


class Delays:
    """Looks at one rank's driver, steps and users; changes nothing.

    Args:
        driver: The driver.
        num_layers: Layers of a migration.
    """

    def __init__(self, driver: Driver, num_layers: int) -> None:
        self._driver = driver
        self._num_layers = num_layers

    def overdue(self, attempt: Attempt, timeout: float) -> ActivationTimeout | None:
        """The error of an epoch that is over, but for layers that cannot be applied by the deadline of ``migrate``."""
        driver, steps, users = self._driver, self._driver.steps, self._driver.users
        if users is not None and (in_use := users.waiting) and attempt.run is not None:
            layer, count = min(in_use.items())
            rank = driver.identity.rank
            return ActivationTimeout(
                f"layer {layer} is committed, and its {count} users on rank {rank}, which it waits for, did not leave "
                f"within {timeout:g} s. It is applied when the last of them leaves using({layer}), and the next "
                "migrate waits for that",
                layer=layer,
                step=0,
                ranks=(rank,),
                epoch=driver.protocol.epoch,
                reason=_waits_for_users(in_use),
                committed_layers=attempt.run.due.stop,
            )
        if steps is None or not (due := steps.waiting):
            return None
        layer, at = min(due.items())
        behind = driver.strides.behind()
        return ActivationTimeout(
            f"layer {layer} is committed, and step {at}, before which it is to be applied, did not come within "
            f"{timeout:g} s; least far are ranks {list(behind)}, this rank began step {steps.number} last. It is "
            "applied when the step comes, and the next migrate waits for that. An engine that has stopped stepping "
            "says so with idle(), on every rank",
            layer=layer,
            step=at,
            ranks=behind,
            epoch=driver.protocol.epoch,
            reason=f"step {at} did not come",
            committed_layers=max(due) + 1,
        )

    def timed_out(self, attempt: Attempt, timeout: float) -> str:
        """Why this rank gives an attempt up at its deadline: how far it came, and what it waits for."""
        protocol, users = self._driver.protocol, self._driver.users
        waiting = f", waiting for ranks {sorted(protocol.waiting_for)}" if protocol.waiting_for else ""
        waiting += _no_majority(protocol)
        if attempt.run is not None and attempt.run.waiting:
            waiting += f", waiting for {attempt.run.waiting} of this rank"
        if users is not None and (in_use := users.waiting):
            waiting += f", and {_waits_for_users(in_use)}"
        if attempt.held:
            waiting += f"; {attempt.held}"
        undecided = f", layer {protocol.committed} undecided" if protocol.prepared > protocol.committed else ""
        return (
            f"timed out after {timeout:g} s in phase {protocol.phase.value} with {protocol.prepared} of "
            f"{self._num_layers} layers prepared{undecided}{waiting}"
        )

    def unsettled(self, what: str, timeout: float) -> MigrationTimeout | MigrationInDoubt:
        """The error of what could not begin because an earlier migration had not settled."""
        driver, steps, users = self._driver, self._driver.steps, self._driver.users
        rank = driver.identity.rank
        if driver.protocol.phase is Phase.IN_DOUBT:
            return MigrationInDoubt(
                f"{what} not begun: an earlier migration is still in doubt: {driver.last_error}",
                origin=rank,
                reason=driver.last_error,
            )
        why = f"timed out after {timeout:g} s: an earlier migration or a view change had not settled"
        why += _no_majority(driver.protocol)
        if steps is not None and (due := steps.waiting):
            waits = ", ".join(f"layer {layer} for step {at}" for layer, at in due.items())
            why += f" ({waits} waits; least far are ranks {list(driver.strides.behind())})"
        if users is not None and (in_use := users.waiting):
            why += f" ({_waits_for_users(in_use)})"
        return MigrationTimeout(f"{what} not begun: {why}", origin=rank, reason=why)


def not_applied(in_use: Mapping[int, int], due: range) -> list[str]:
    """What was not applied when all was closed, in words.

    Args:
        in_use: Users of the layer that was waited for.
        due: That layer, and those after it.
    """
    users = [f": {count} users of layer {layer} had not left" for layer, count in in_use.items()]
    return [f"layer {layer}, committed and not applied{''.join(users)}" for layer in due]


def _no_majority(protocol: Protocol) -> str:
    if protocol.has_majority:
        return ""
    lost = sorted(protocol.gone & protocol.members)
    return f", and without ranks {lost} there is no majority: say which are dead with exclude()"


def _waits_for_users(in_use: Mapping[int, int]) -> str:
    return ", ".join(f"layer {layer} is committed and waits for {n} users to leave it" for layer, n in in_use.items())
