"""Runs one case: reach the phase, send the signal, and see what holds on those who go on."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eplb_async.testing.processes import Failure, RankProcesses, Spec
from tests.faults.cases import LAYER, Case
from tests.faults.leftovers import Belongings
from tests.faults.roles import LAYERS
from tests.procs import stop, wait_until

HOLDS = "tests.faults.holds"
UCX_FATAL = "ucp_request.inl"
"""What UCX prints when it aborts a source that must answer a peer that is gone (docs/decisions/0002)."""
_SETTINGS = {
    "staging_layers": 1,
    "max_post_bytes": 1 << 20,
    "max_stretch_bytes": 0,  # phases are of one layer
    "settle_timeout": 1.0,
    "ping_interval": 0.1,
}


class TooSlow(Exception):
    """The migration timed out before it was where the case wants it: the machine is busy."""


class Aborted(Exception):
    """UCX aborted a rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        super().__init__(f"UCX aborted rank {rank}")


@dataclass
class Outcome:
    """A row of the table.

    Attributes:
        case: The case.
        results: What ``migrate`` did on each rank that went on.
        victim: What it did on the victim, if that lived on.
        committed: Layers committed on those who went on.
        seconds: From the signal to the last survivor's result.
        aborted: Ranks that UCX aborted.
        tries: How often it took to reach the phase before the migration timed out.
    """

    case: Case
    results: dict[int, str] = field(default_factory=dict)
    victim: str = ""
    committed: int | None = None
    seconds: float = 0.0
    aborted: list[int] = field(default_factory=list)
    tries: int = 1


class Campaign:
    """One case on one group of processes.

    Args:
        case: The case.
        directory: For the rendezvous and what the ranks print.
        patience: Seconds that a migration has where somebody will be stopped.
    """

    def __init__(self, case: Case, directory: Path, patience: float) -> None:
        self.case = case
        self.role = case.role
        self.victim = self.role.victim
        self.others = [rank for rank in range(case.num_ranks) if rank != self.victim]
        self.outcome = Outcome(case)
        self.timeout = 60.0 if case.is_killed else patience
        self._directory = directory
        self._answers: dict[int, Any] = {}
        self._owned = Belongings()
        spec = Spec(
            placement=self.role.old,
            rendezvous=f"file://{directory}/rendezvous",
            row_bytes=case.row_bytes,
            transport=case.transport,
            loop="uvloop" if case.moves_nothing else "asyncio",
            settings=_SETTINGS,
            logs=str(directory),
        )
        self.ranks = RankProcesses(spec)

    def run(self) -> Outcome:
        """Run it; returns the row of the table.

        Raises:
            TooSlow: The phase was not reached in time.
            AssertionError: Something does not hold.
        """
        with self.ranks:
            try:
                try:
                    self._run()
                except Aborted as aborted:
                    self._without(aborted.rank)
                self._close()
            except BaseException:
                for rank in range(self.case.num_ranks):  # whoever is held or stopped would not end by itself
                    if self.ranks.exit_code(rank, 0) is None:
                        self.ranks.kill(rank)
                raise
        return self.outcome

    def _run(self) -> None:
        self._reach()
        self._note_belongings()
        started = time.monotonic()
        if self.case.is_killed:
            self.ranks.kill(self.victim)
        else:
            stop(self.ranks.pid(self.victim))
        self._let_go()
        answers = self._answers
        for rank in self.others:
            answers[rank] = self._result(rank)
        self.outcome.seconds = time.monotonic() - started
        self.outcome.results = {rank: kind(answer) for rank, answer in answers.items()}
        match self.case.signal:
            case "kill":
                assert self.ranks.exit_code(self.victim) == -signal.SIGKILL
                self._check(self.others, answers)
                self._migrate(self.role.without, self.others)
            case "stop, returns":
                self._doubts(answers)
                self._return()
                self._check([*self.others, self.victim], answers)
                done = self.outcome.committed == LAYERS
                self._migrate(self.role.old if done else self.role.new, [*self.others, self.victim])
            case "stop, excluded":
                self._doubts(answers)
                for rank in self.others:
                    self._ask(rank, "exclude", self.victim)
                self._settle(answers)
                self._check(self.others, answers)
                self._migrate(self.role.without, self.others)
                self._wake_the_excluded()

    # ------------------------------------------------------------------------------------------- the phase
    def _reach(self) -> None:
        case, held = self.case, self.case.held
        if not held:
            for rank in self.others:
                self.ranks.send(rank, "migrate", self.role.new, self.timeout)
            for rank in self.others:
                waits_for = (self.victim,) if rank == 0 or case.is_lead else (0,)
                self.ranks.send(rank, "waiting_for", *waits_for)
                if (answer := self.ranks.receive(rank)) is not None:
                    raise TooSlow(answer)
            return
        for rank, (where, peer) in held.items():
            self._ask(rank, "run", HOLDS, "arm", where, LAYER, peer)
        for rank in range(case.num_ranks):
            self.ranks.send(rank, "migrate", self.role.new, self.timeout)
        for rank, (where, _) in held.items():
            self._token(rank, "kept" if where == "staged" else "reached")
        if case.phase == "PREPARED" and case.is_lead:
            self._token(self.victim, "cast")
        if case.phase == "PREPARED" and case.moves_nothing:
            self._token(self.victim, "prepared", LAYERS)
        if case.phase == "mid-READ" and case.transport == "tcp":  # on one host the READ is over when it is posted
            for rank in held:
                health = self._ask(rank, "health")
                if "reads_in_flight" not in health:
                    raise TooSlow(health)
                assert health["reads_in_flight"] > 0

    def _token(self, rank: int, command: str, *args: Any) -> None:
        self.ranks.send(rank, "run", HOLDS, command, *args)
        if (answer := self.ranks.receive(rank)) != command:
            raise TooSlow(answer)

    def _let_go(self) -> None:
        """Whoever was held and is not the victim goes on; a stopped victim does when it is continued."""
        for rank in self.case.held:
            if rank != self.victim or not self.case.is_killed:
                self.ranks.send(rank, "run", HOLDS, "let_go")

    # ------------------------------------------------------------------------------------------ the outcome
    def _doubts(self, answers: dict[int, Any]) -> None:
        """Who is in doubt says so (rule 9, I-9)."""
        for rank, answer in answers.items():
            phase = self._ask(rank, "health")["phase"]
            assert (phase == "in_doubt") == (kind(answer) == "MigrationInDoubt"), (rank, phase, answer)

    def _settle(self, answers: dict[int, Any]) -> None:
        """An excluded rank is out of every view, and nobody is in doubt any more."""
        for rank in answers:
            self._ask(rank, "members", *self.others)

    def _return(self) -> None:
        """The stopped rank goes on: nobody has given it up."""
        self.ranks.resume(self.victim)
        if self.case.phase != "before JOIN":
            answer = self._result(self.victim)
            self.outcome.victim = kind(answer)
        for rank in (*self.others, self.victim):
            self._ask(rank, "phase", "idle")

    def _check(self, members: list[int], answers: dict[int, Any]) -> None:
        """One set of layers on all, every byte of it right, and each result says the same (I-7, I-9)."""
        case, old, new = self.case, self.role.old, self.role.new
        for rank in members:
            self._ask(rank, "phase", "idle")
        found = [self._ask(rank, "placement") for rank in members]
        assert all(placement == found[0] for placement in found), [str(p) for p in found]
        committed = next(n for n in range(LAYERS + 1) if old.with_layers(new, n) == found[0])
        self.outcome.committed = committed
        assert [self._ask(rank, "check") for rank in members] == [0] * len(members)
        assert committed in case.committed, f"{committed} layers committed, allowed are {case.committed}"
        for rank, answer in answers.items():
            if isinstance(answer, Failure):
                text = f"rank {rank}: {answer.kind}: {answer.text}"
                assert answer.kind in case.kinds(rank), f"{text}; allowed are {sorted(case.kinds(rank))}"
                assert "EplbError" in answer.bases, text
                if answer.kind in ("MigrationAborted", "MigrationTimeout"):
                    assert answer.parts["committed_layers"] == committed, text
                elif answer.kind == "MigrationInDoubt":
                    assert answer.parts["committed_layers"] <= committed, text
                elif answer.kind.startswith("Nixl"):
                    assert answer.parts["rank"] == self.victim, text
                if answer.kind != "MigrationInDoubt":
                    assert committed < LAYERS, f"{text}, although all layers are committed"
            else:
                assert committed == LAYERS, f"rank {rank} succeeded with {committed} layers committed"

    def _migrate(self, target: Any, members: list[int]) -> None:
        """One more migration, among those who are in the view."""
        for rank in members:
            self.ranks.send(rank, "migrate", target, 30.0)
        for rank in members:
            answer = self._result(rank)
            assert not isinstance(answer, Failure), f"the next migration on rank {rank}: {answer}"
        assert [self._ask(rank, "check", target) for rank in members] == [0] * len(members)
        for rank in members:
            assert self._ask(rank, "placement") == target
            health = self._ask(rank, "health")
            assert health["members"] == tuple(sorted(members))
            assert (self.victim in health["degraded"]) == (self.victim not in members), health["degraded"]

    def _wake_the_excluded(self) -> None:
        """A rank that was stopped and is out goes on: it is fenced, and changes nothing on the others (rule 8)."""
        for rank in self.others:
            self._ask(rank, "run", HOLDS, "paint")
        self.ranks.resume(self.victim)
        try:
            if self.case.phase != "before JOIN":
                self.outcome.victim = kind(self._result(self.victim))
            answer = self._ask(self.victim, "migrate", self.role.new, 20.0)
            assert isinstance(answer, Failure), "an excluded rank has migrated"
            assert self._ask(self.victim, "health")["phase"] == "fenced", answer
            assert answer.kind == "CommunicatorClosed", answer
            assert "fenced" in answer.text, answer
            self.outcome.victim += ", fenced" if self.outcome.victim else "fenced"
            self._check_the_excluded()
        except Aborted as aborted:
            self._died(aborted.rank)
        assert set(self.outcome.aborted) <= {self.victim}
        for rank in self.others:
            assert self._ask(rank, "check", self.role.without) == 0, "the excluded rank's return changed a row"
            assert self._ask(rank, "run", HOLDS, "smudged") == 0, "it wrote memory that was free"
        self._migrate(self.role.after, self.others)

    def _check_the_excluded(self) -> None:
        """Its rows are whole layers; only a coordinator may have applied one more than the others (DESIGN §5)."""
        assert self.outcome.committed is not None
        mine = self._ask(self.victim, "placement")
        allowed = self.outcome.committed + (1 if self.case.is_lead else 0)
        assert mine in [self.role.old.with_layers(self.role.new, n) for n in range(min(allowed, LAYERS) + 1)]
        assert self._ask(self.victim, "check") == 0

    # ------------------------------------------------------------------------------------- ranks that died
    def _without(self, rank: int) -> None:
        """UCX took a survivor too: what the rest holds is whole, layer by layer, and they say how they ended."""
        self._died(rank)
        for other in self.others:
            try:
                if other in self.outcome.aborted:
                    continue
                if other not in self._answers:
                    self.outcome.results[other] = kind(self._result(other))
                assert self._ask(other, "check") == 0
            except Aborted as aborted:
                self._died(aborted.rank)

    def _died(self, rank: int) -> None:
        self.outcome.aborted.append(rank)

    def _is_ucx(self, rank: int) -> bool:
        code = self.ranks.exit_code(rank, 0.1)
        return code == -signal.SIGABRT and UCX_FATAL in self._log(rank)

    def _log(self, rank: int) -> str:
        return (self._directory / f"rank{rank}.log").read_text(errors="replace")

    # ------------------------------------------------------------------------------------------ calls
    def _result(self, rank: int) -> Any:
        """What ``migrate`` did on a rank."""
        while isinstance(answer := self._receive(rank), str):
            pass
        return answer

    def _ask(self, rank: int, command: str, *args: Any) -> Any:
        self.ranks.send(rank, command, *args)
        while (answer := self._receive(rank)) == "let_go":
            pass
        return answer

    def _receive(self, rank: int) -> Any:
        try:
            return self.ranks.receive(rank, 70.0)
        except TimeoutError as error:
            if self._is_ucx(rank):
                raise Aborted(rank) from None
            raise AssertionError(f"{error}\n{self._log(rank)}") from None

    # ------------------------------------------------------------------------------------- what is left
    def _note_belongings(self) -> None:
        for rank in range(self.case.num_ranks):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                self._owned.note(self.ranks.pid(rank))

    def _close(self) -> None:
        """Those who live close; then no process, port or shared memory is left."""
        self._note_belongings()
        alive = [rank for rank in range(self.case.num_ranks) if self.ranks.exit_code(rank, 0) is None]
        for rank in alive:
            self.ranks.send(rank, "close")
        for rank in alive:
            with contextlib.suppress(Aborted):
                self._receive(rank)
        self.ranks.__exit__(None, None, None)
        for rank in alive:
            code = self.ranks.exit_code(rank)
            assert code == 0 or self._is_ucx(rank), f"rank {rank} ended with {code}\n{self._log(rank)}"
            if code:
                self._died(rank)
        assert self._owned.sockets, "no listening socket was seen: the check below would check nothing"
        wait_until(lambda: not self._owned.left(), what=f"the end of {self._owned.left()}")
        for rank in range(self.case.num_ranks):
            assert not Path(f"/proc/{self.ranks.pid(rank)}").exists()


def kind(answer: Any) -> str:
    """A result in a word."""
    return answer.kind if isinstance(answer, Failure) else "success"


def table(outcomes: list[Outcome]) -> Iterator[str]:
    """The rows, aligned."""
    rows = [("case", "outcome on the others", "the victim", "layers", "seconds to detect")]
    for outcome in outcomes:
        kinds = sorted(set(outcome.results.values()))
        aborted = [f"UCX aborted rank {rank}" for rank in outcome.aborted]
        rows.append(
            (
                str(outcome.case),
                ", ".join(kinds),
                "; ".join(filter(None, [outcome.victim, *aborted])),
                "-" if outcome.committed is None else str(outcome.committed),
                f"{outcome.seconds:.2f}",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
