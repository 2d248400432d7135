"""The reading of a session's health."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from eplb_async.communicator.agents import Agents
from eplb_async.communicator.report import Health

if TYPE_CHECKING:
    from eplb_async.communicator.session import Session


def health_of(session: Session, agents: Agents, now: float) -> Health:
    """What is going on; reads only, so any thread may call it.

    Args:
        session: The session.
        agents: Its agents.
        now: Loop time.
    """
    driver, protocol, endpoint = session.driver, session.driver.protocol, session.endpoint
    standing, stats, steps, throttle = driver.standing, endpoint.stats(), session.steps, session.throttle
    moving = protocol.prepared if standing.phase in ("open", "settling", "in_doubt") else None
    dropped = Counter(dict(driver.dropped)) + Counter(dict(protocol.dropped))
    dropped["too many"] += endpoint.dropped
    due = {} if steps is None else steps.waiting
    return Health(
        phase="suspended" if standing.phase == "idle" and session.owner.suspended else standing.phase,
        seconds_in_phase=max(0.0, now - standing.since),
        seconds_left=None if standing.deadline is None else standing.deadline - now,
        rank=driver.identity.rank,
        term=protocol.term,
        members=tuple(sorted(protocol.members)),
        epoch=protocol.epoch,
        layer=moving if stats.oldest_layer is None else stats.oldest_layer,
        prepared=protocol.prepared,
        committed=protocol.committed,
        num_layers=session.placement.num_layers,
        waiting_for=tuple(sorted(protocol.waiting_for)),
        degraded=dict(driver.degraded),
        reads_in_flight=stats.in_flight + stats.quarantined,
        oldest_read_seconds=stats.oldest_seconds,
        oldest_read_peer=stats.oldest_peer,
        oldest_read_rank=stats.oldest_rank,
        oldest_read_layer=stats.oldest_layer,
        oldest_read_bytes=stats.oldest_bytes,
        quarantined_bytes=stats.quarantined_bytes,
        recycled=agents.recycled,
        weight_version=session.version,
        paused=throttle.paused,
        max_bytes_per_second=throttle.bytes_per_second,
        step=0 if steps is None else steps.number,
        due=due,
        behind=driver.strides.behind() if due else (),
        in_use={} if session.users is None else session.users.waiting,
        callback_errors=session.runs.callback_errors,
        half_written=tuple(sorted(session.owner.half_written)),
        dropped={why: count for why, count in dropped.items() if count},
        last_error=driver.last_error,
        group=driver.identity.group,
        polls=agents.polls,
        telemetry_errors=0 if session.emitter is None else session.emitter.errors,
    )
