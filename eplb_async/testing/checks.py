"""What must hold in a ring of pure protocols, by number of the invariant."""

from __future__ import annotations

from collections.abc import Sequence

from eplb_async.core import events
from eplb_async.core.events import Phase
from eplb_async.core.steps import NEVER
from eplb_async.testing.board import Board, Face
from eplb_async.testing.moves import USES, Violation

_EXCLUSIONS = USES.index("exclusions")
_REASONS = tuple(USES.index(name) for name in ("closes", "exclusions", "cuts"))


def agreement(board: Board) -> None:
    """Raises `Violation` if two ranks that count are of different minds (I-7), in two views, or left out."""
    uses = board.uses()
    if board.lost_links and not uses[_EXCLUSIONS]:
        _one_view(board)
    live = [r for r in board.alive() if not board.is_excluded(r)]
    if not any(uses[i] for i in _REASONS):
        for rank in range(board.ep_size):
            body = board.body(rank)
            if body.alive and body.start == 1 and rank not in live:  # one that comes back is not in at once
                raise Violation(
                    f"rule 6: the others go on without rank {rank}, of which nothing proves that it is gone"
                )
    for a in live:
        for b in live:
            if a != b:
                _pair(board, a, b)
        _steps(board, a, live)


def _steps(board: Board, rank: int, live: Sequence[int]) -> None:
    """Rule 11: no step ran with different placements on two ranks."""
    ran = board.body(rank).ran
    for other in live:
        for number, (mine, theirs) in enumerate(zip(ran, board.body(other).ran, strict=False), 1):
            if mine != theirs:
                raise Violation(f"rule 11: step {number} ran with {mine} on rank {rank}, {theirs} on rank {other}")


def _one_view(board: Board) -> None:
    """Behind cut links, two views that are both installed on all their members would go on apart."""
    whole = {}
    for rank in board.alive():
        face = board.face(rank)
        members = [q for q in range(board.ep_size) if face.members >> q & 1 and board.body(q).alive]
        if all(board.face(q).term == face.term == board.face(q).promised for q in members):
            whole[face.term] = face.members
    if len(whole) > 1:
        raise Violation(f"I-7: two views at once, by term: {whole}")


def _pair(board: Board, a: int, b: int) -> None:
    _, epoch, upto = board.body(a).ended
    other = board.body(b).ended
    mine, face = board.face(a), board.face(b)
    if epoch:
        if epoch == other[1] and upto != other[2]:
            raise Violation(f"I-7: epoch {epoch} ended at {upto} on rank {a}, at {other[2]} on rank {b}")
        if face.epoch == epoch and face.committed > upto:
            raise Violation(f"I-7: epoch {epoch} ended at {upto} on rank {a}, rank {b} has committed {face.committed}")
    if mine.term == face.term and mine.members != face.members:
        raise Violation(f"ranks {a} and {b} have different members in term {mine.term}")


def commit(board: Board, rank: int, face: Face, commit: events.Commit, staged: Sequence[bool]) -> None:
    """Raises `Violation` if a rank may not apply these layers.

    Args:
        board: The ring, as it stands.
        rank: Who applies.
        face: Its protocol before.
        commit: What it was told.
        staged: By layer, whether its READ arrived whole.
    """
    body = board.body(rank)
    if not body.applied == commit.first < commit.upto:
        raise Violation(f"rank {rank} commits [{commit.first}, {commit.upto}) after {body.applied}")
    if body.steps is not None:
        number, _, _, hold, *_ = body.steps
        for layer in range(commit.first, commit.upto):
            if commit.at[layer] <= number or (body.applied <= layer and commit.at[layer] < hold < NEVER):
                raise Violation(f"rule 11: rank {rank} hears in step {number}, hold {hold}, of a commit at {commit.at}")
    for layer in range(commit.first, commit.upto):
        if not staged[layer] and not board.is_excluded(rank):
            raise Violation(f"I-6: rank {rank} commits layer {layer} from a READ that is not whole")
    for member in range(board.ep_size):
        if face.members >> member & 1:
            term, epoch, upto = board.body(member).voted
            this = (face.term, commit.epoch)  # who has voted in a later one has ended this one
            if (term, epoch) < this or ((term, epoch) == this and upto < commit.upto):
                raise Violation(f"I-19: rank {rank} commits {commit.upto}, rank {member} prepared {upto} of {epoch}")


def ended(board: Board, rank: int, committed: int, *, complete: bool) -> None:
    """Raises `Violation` if an attempt ends twice, or says that it is complete when it is not, or the other way."""
    body = board.body(rank)
    if body.owed != 1:
        raise Violation(f"rank {rank} ends an attempt that is over already")
    if complete != (committed == len(body.rows)):
        raise Violation(f"rank {rank} ends at {committed}, complete={complete}")


def idle_together(board: Board) -> bool:
    """Whether all who are alive are idle in one view of exactly them, with no lost link between them."""
    alive = board.alive()
    members = sum(1 << r for r in alive)
    if board.lost_links and any(board.is_cut(a, b) for a in alive for b in alive):
        return False
    for rank in alive:
        face = board.face(rank)
        if face.phase is not Phase.IDLE or face.outside or face.term != face.promised or face.members != members:
            return False
        if face.leaving >> rank & 1 or board.body(rank).due:
            return False
    return True
