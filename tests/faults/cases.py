"""The cases of the fault campaign, and what the protocol's rules allow to come out of each.

Three layers. A phase is about the second layer: where it is reached, the first is committed. A victim that moves no
rows (source, bystander) votes for all layers at BEGIN, so what the others still commit without it is theirs to say.

Sets of layers say what may be committed on those who go on:

- what no survivor knows to be committed is not (rule 7), what one knows is, on all;
- a message that was sent before its sender died may or may not have arrived, so both are allowed;
- a stopped rank's messages have been sent and do arrive, a killed rank's votes count if they do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tests.faults.roles import LAYERS, Role, role

PHASES = ("before JOIN", "BEGIN", "mid-READ", "PREPARED", "COMMIT decided", "mid-apply")
ROLES = ("coordinator", "source", "reader", "bystander")
SIGNALS = ("kill", "stop, returns", "stop, excluded")
LAYER = 1
MIB = 1 << 20

_COMMITTED: dict[tuple[str, str], set[int]] = {
    ("before JOIN", "coordinator"): {0},
    ("before JOIN", "source"): {0},
    ("before JOIN", "reader"): {0},
    ("before JOIN", "bystander"): {0},
    ("BEGIN", "coordinator"): {0},
    ("BEGIN", "source"): {0},
    ("BEGIN", "reader"): {0},
    ("BEGIN", "bystander"): {0},
    ("mid-READ", "coordinator"): {0, 1},  # it has applied layer 0; its COMMIT may not have arrived
    ("mid-READ", "source"): {1, 2},  # it has voted for all: what was read in full may be committed
    ("mid-READ", "reader"): {1},
    ("mid-READ", "bystander"): {1, 2, 3},
    ("PREPARED", "coordinator"): {1},  # the partner, which holds its vote back, has applied layer 0
    ("PREPARED", "source"): {1, 2},
    ("PREPARED", "reader"): {1, 2},
    ("PREPARED", "bystander"): {1, 2, 3},
    ("COMMIT decided", "coordinator"): {1, 2},  # one of the others was told
    ("COMMIT decided", "source"): {2, 3},  # the next layer's READ may have been served just before
    ("COMMIT decided", "reader"): {2},
    ("COMMIT decided", "bystander"): {2, 3},
    ("mid-apply", "coordinator"): {1, 2},
    ("mid-apply", "source"): {2, 3},
    ("mid-apply", "reader"): {2},
    ("mid-apply", "bystander"): {2, 3},
}


@dataclass(frozen=True)
class Case:
    """One case.

    Attributes:
        signal: One of ``SIGNALS``. ``returns``: it goes on, nobody excluded it; ``excluded``: it goes on after that.
        phase: One of ``PHASES``.
        role_name: One of ``ROLES``.
        transport: ``"tcp"`` or ``"auto"``.
        num_ranks: Ranks.
        told: For a coordinator's COMMIT: how many of the others had been told.
    """

    signal: str
    phase: str
    role_name: str
    transport: str = "tcp"
    num_ranks: int = 3
    told: int = 1

    @property
    def role(self) -> Role:
        """Victim and placements."""
        return role(self.role_name, self.num_ranks)

    @property
    def is_killed(self) -> bool:
        """Whether the victim dies."""
        return self.signal == "kill"

    @property
    def is_lead(self) -> bool:
        """Whether the victim keeps the books."""
        return self.role_name == "coordinator"

    @property
    def moves_nothing(self) -> bool:
        """Whether the victim has no rows to read, and so has voted for all layers since BEGIN."""
        return self.role_name in ("source", "bystander")

    @property
    def committed(self) -> set[int]:
        """The layers that may be committed on those who go on."""
        allowed = _COMMITTED[self.phase, self.role_name]
        begun = self.phase not in PHASES[:2]
        if self.is_lead and self.phase == "COMMIT decided" and self.told == 0:
            return {2} if self.signal == "stop, returns" else {1}
        if self.role_name == "bystander" and begun and not self.is_killed:
            return {LAYERS}  # its votes arrive; nobody needs it for anything else
        if self.role_name == "source" and begun and not self.is_killed and self.transport == "auto":
            return {LAYERS}  # on one host READs need nothing of a process that stands still
        if self.is_lead and begun and self.signal == "stop, returns":
            # It goes on where it stood, and counts the votes that came meanwhile.
            return {1, 2} if self.phase in ("mid-READ", "PREPARED") else {2}
        return allowed

    def kinds(self, rank: int) -> set[str]:
        """The errors that a survivor may raise, where not all layers are committed."""
        from_victim = self.phase != "before JOIN" and self.role.reads_from_victim(rank)
        if self.is_killed:
            # The death is proved: nobody times out, and with a majority nobody is in doubt.
            return {"MigrationAborted"} | ({"NixlPeerDisconnected"} if from_victim else set())
        late = {"MigrationTimeout"} | ({"NixlTransferTimeout"} if from_victim else set())
        if not self.is_lead:
            return late | {"MigrationAborted"}  # END of the first whose time is up
        return late | ({"MigrationInDoubt"} if self.phase != "before JOIN" else set())  # rule 9: who has voted

    @property
    def held(self) -> dict[int, tuple[str, int | None]]:
        """Who is held where (``holds.POINTS``), and the peer that this is about."""
        victim, partner = self.role.victim, self.role.partner
        match self.phase:
            case "before JOIN":
                return {}
            case "BEGIN":
                return {victim: ("begin", None)}
            case "mid-READ" if self.moves_nothing:
                return {partner: ("reading", victim if self.role_name == "source" else None)}
            case "mid-READ":
                return {victim: ("reading", None)}
            case "PREPARED" if self.moves_nothing:
                return {partner: ("staged", None)}
            case "PREPARED" if self.is_lead:  # it votes, and no COMMIT follows: another keeps its vote back
                return {victim: ("staged", None), partner: ("staged", None)}
            case "PREPARED":
                return {victim: ("voted", None)}
            case "COMMIT decided" if self.is_lead:
                return {victim: ("telling", [rank for rank in range(self.num_ranks) if rank != victim][self.told])}
            case "COMMIT decided":
                return {victim: ("told", None)}
        return {victim: ("applying", None)}

    @property
    def row_bytes(self) -> tuple[int, ...]:
        """Rows, large where a READ must be under way for a while."""
        return (2 * MIB, 4096) if self.phase == "mid-READ" else (MIB // 8, 4096)

    def __str__(self) -> str:
        parts = [self.signal, self.phase, self.role_name]
        if self.is_lead and self.phase == "COMMIT decided":
            parts.append(f"{self.told} told")
        return " / ".join([*parts, self.transport, f"{self.num_ranks} ranks"])


def cases() -> Iterator[Case]:
    """All on tcp with three ranks, then samples on the default transport and with four."""
    for phase in PHASES:
        for name in ROLES:
            for signal in SIGNALS:
                case = Case(signal, phase, name)
                yield case
                if case.is_lead and phase == "COMMIT decided":
                    yield replace(case, told=0)
    sample = [
        ("kill", "before JOIN", "coordinator"),
        ("kill", "mid-READ", "source"),
        ("kill", "PREPARED", "coordinator"),
        ("kill", "COMMIT decided", "coordinator"),
        ("kill", "mid-apply", "reader"),
        ("stop, returns", "mid-READ", "reader"),
        ("stop, returns", "COMMIT decided", "coordinator"),
        ("stop, excluded", "PREPARED", "source"),
        ("stop, excluded", "mid-apply", "coordinator"),
    ]
    for args in sample:
        yield Case(*args, transport="auto")
    for args in sample:
        yield Case(*args, num_ranks=4)
