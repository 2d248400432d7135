"""What a walk may leave out, and why nothing is missed.

A walk compares states of ranks and bodies (`Ring.check`). Each of the following keeps exactly the reachable
combinations of those, and changes only what is said to be under way. Tests compare them with plain walks.

Dead letters
    A message that its receiver ignores now, without an answer, and will ignore in every later state, is taken off
    its link. Delivering it leads nowhere, and delivering it or not makes two states of one. Which messages these
    are is said in `is_dead`; all rests on numbers that only grow: the term that a rank promised, the epoch and the
    attempt that it has seen. Messages that start or answer a view change are kept: what a rank does with those
    also depends on who is gone. Where ranks come back all messages are kept: one that comes back may be left out
    again while it lives, if the opener of the next term has not heard of its view, and is then fenced by the answer
    (rule 8) to whatever it had sent.

Order on a link
    Where messages may arrive in any order, the order in which they were sent decides nothing.

The dead
    What a dead rank had sent may arrive or be lost. To lose it is to never deliver it, so there is no act of losing
    it. For the way back to rest such a message may not be relied on, and one that is left does not disturb rest.

Not used, because it would be wrong: symmetry of the ranks. The lowest that stays coordinates and opens views, and
each READs from the next, so no two ranks are alike.
"""

from __future__ import annotations

from eplb_async.core import messages
from eplb_async.testing.board import Board

_BUSINESS = (
    messages.Join,
    messages.AbortRequest,
    messages.Prepared,
    messages.Begin,
    messages.Commit,
    messages.End,
)
"""Messages that belong to one installed term."""


def is_dead(board: Board, protocol: int, letter: int) -> bool:
    """Whether a message can never again matter to a rank in a protocol state, while nothing worse than crashes happens.

    It must do nothing now: no other state, no command, and an answer at most to who is no member (rule 8), which is
    dead then. That this stays so:

    - Of a term below the one promised: nothing of it is accepted any more (rule 7).
    - Of the term that is installed: what is ignored there now stays ignored. Attempts and epochs only grow, an
      epoch begins once and votes only grow. Only a COMMIT that is ahead of its BEGIN waits for its time.
    - Of a later term, or the one promised and not installed yet: it waits for its time, and is not dead.

    Args:
        board: Where both have their numbers.
        protocol: Number of the receiver's protocol state.
        letter: Number of the message.
    """
    message, face = board.message(letter), board.faces[protocol]
    if not isinstance(message, _BUSINESS) or (message.term >= face.promised and message.term > face.term):
        return False
    if isinstance(message, messages.Commit) and message.term == face.promised and message.epoch > face.epoch:
        return False
    reaction = board.react(protocol, letter)
    heard = any(face.members >> to & 1 for to, _ in reaction.sends)
    return reaction.after == protocol and not (reaction.told or reaction.impossible or heard)
