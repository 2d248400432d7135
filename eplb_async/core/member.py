"""A rank as a member of views: who is gone, who is back, how the next view comes about (rules 6-8, 10, 12)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from eplb_async.core import events, messages
from eplb_async.core.coordinator import Coordinator
from eplb_async.core.events import Command, Phase
from eplb_async.core.messages import Message
from eplb_async.core.participant import Participant
from eplb_async.core.returns import NOT_MET, Meeting, Returns
from eplb_async.core.views import Change, Contradiction, Ignored, Superseded, View, bit, clip, each, names


class Member:
    """The half of ``Protocol`` that knows the group; the other half knows the epoch.

    Attributes:
        dropped: Messages that moved nothing, counted by why.
    """

    __slots__ = (
        "_change",
        "_install_message",
        "_lead",
        "_out",
        "_over",
        "_part",
        "_returns",
        "_view",
        "dropped",
        "num_layers",
        "rank",
    )

    def __init__(self, *, rank: int, ep_size: int, num_layers: int, majority_rule: bool) -> None:
        if not 0 <= rank < ep_size or num_layers < 1:
            raise ValueError(f"no rank {rank} of {ep_size}, or no layers ({num_layers})")
        self.rank = rank
        self.num_layers = num_layers
        self.dropped: Counter[str] = Counter()
        self._view = View(rank, ep_size, majority_rule, members=(1 << ep_size) - 1)
        self._part = Participant(num_layers)
        self._returns = Returns()
        self._lead = self._books({}) if rank == 0 else None
        self._change: Change | None = None
        self._install_message: messages.Install | None = None
        self._over: Phase | None = None
        self._out: list[Command] = []

    def _send(self, to: int, message: Message) -> None:
        """Sends; what a rank tells itself is heard at once."""
        if to == self.rank:
            self._receive(message)
        else:
            self._out.append(events.Send(to, message))

    def _receive(self, message: Message) -> None:
        raise NotImplementedError

    def _books(self, attempts: dict[int, int]) -> Coordinator:
        view = self._view
        return Coordinator(self.rank, view.installed, view.members, self.num_layers, last_attempt=dict(attempts))

    def _finish(self, origin: int, reason: str, *, again: bool = False) -> None:
        self._out += self._part.finish(origin, reason, rank=self.rank, again=again)

    def _shut(self, phase: Phase, reason: str) -> None:
        """Out of the group, for good."""
        self._finish(-1, reason)
        self._over = phase
        self._lead = self._change = None
        self._out.append(events.Closed() if phase is Phase.CLOSED else events.Fenced(reason))

    def _leave_if_alone(self) -> None:
        """A closing rank need not wait for others that are gone or close too."""
        view = self._view
        if not self._over and view.leaving & bit(self.rank) and not view.staying:
            self._shut(Phase.CLOSED, "this rank closes")

    def _declare(self, ranks: int) -> None:
        """A word, unlike a proof, spreads: a term that was opened without it is opened anew."""
        if self._view.declare(ranks):
            self._change = None

    def _members_changed(self) -> None:
        view = self._view
        self._leave_if_alone()
        if self._over:
            return
        if not view.settled and view.owner != self.rank:
            if not view.gone & bit(view.owner):
                self._send(view.owner, self._state())
            elif view.opener not in (-1, self.rank):
                # It may have opened a lower term before, and wait for this rank's answer to that.
                self._send(view.opener, messages.Term(term=view.promised, sender=self.rank))
        self._try_view()

    def _tell_view(self, rank: int) -> None:
        """Tells a rank which view there is: one that is no member is fenced by it, one that has missed it is in."""
        view = self._view
        if view.settled and rank != self.rank:
            self._send(
                rank,
                self._install_message
                if view.members & bit(rank) and self._install_message is not None
                else messages.Install(
                    term=view.installed,
                    sender=self.rank,
                    members=view.members,
                    upto=0,
                    at=(0,) * self.num_layers,
                    next_epoch=0,
                ),
            )

    def _state(self) -> messages.State:
        part, view = self._part, self._view
        here = part.begun
        return messages.State(
            term=view.promised,
            sender=self.rank,
            last_epoch=part.epoch if here else part.last_epoch,
            upto=part.committed if here else part.last_upto,
            ended=not here,
            at=part.at if here else part.last_at,
            highest_epoch=part.epoch,
            gone=view.gone,
            declared=view.declared & view.members,
            leaving=view.leaving,
            installed_term=view.installed,
            members=view.members,
            last_attempt=part.attempt,
        )

    def _try_view(self) -> None:
        """Opens a term if one is due and it is this rank's to open; goes on with the one that is open."""
        view = self._view
        if self._over or view.defers or view.opener != self.rank or not view.majority():
            return
        if self._change is not None and self._change.term == view.promised and not view.settled:
            self._try_install(self._change)
            return
        if not view.broken and not (view.settled and self._returns.ready(view)):
            return
        view.promised = view.next_term()
        self._change = change = Change(view.promised)
        change.add(self._state())
        self._say_view(view.remaining)
        self._try_install(change)

    def _say_view(self, ranks: int) -> None:
        """Asks these for their STATE."""
        view = self._view
        message = messages.View(
            term=view.promised,
            sender=self.rank,
            gone=view.gone & view.members,
            declared=view.declared & view.members,
            installed_term=view.installed,
            members=view.members,
        )
        for rank in each(ranks & ~bit(self.rank)):
            self._send(rank, message)

    def _try_install(self, change: Change) -> None:
        view = self._view
        try:
            decision = change.decide(view, self._returns.ready(view))
        except Superseded:
            self._shut(Phase.FENCED, "a newer view without this rank exists")
            return
        if decision is None:
            return
        old = view.members
        install = messages.Install(
            term=change.term,
            epoch=decision.epoch,
            sender=self.rank,
            members=decision.members,
            upto=decision.upto,
            at=decision.at,
            next_epoch=decision.highest_epoch + 1,
        )
        self._install(install, decision.attempts)
        for rank in each((old | decision.base | decision.members) & ~bit(self.rank)):  # who is out too: rule 8
            self._send(rank, install)
        self._say_met()

    def _install(self, message: messages.Install, attempts: dict[int, int]) -> None:
        """The next view. All commit the last epoch exactly up to what it says (I-7, I-19)."""
        part, view = self._part, self._view
        is_member = bool(message.members & bit(self.rank))
        leaves = bool(view.leaving & bit(self.rank))
        if part.begun and (is_member or leaves):
            if part.epoch == message.epoch:
                part.check(message.upto)
                self._out += part.commit(message.upto, message.at)
            elif part.committed and is_member:
                raise Contradiction("the view ends another epoch than the one that has commits here")
        without, back = view.members & ~message.members, message.members & ~view.members
        reason = f"the view changed: {names(message.members)} go on"
        reason += f" without {names(without)}" if without else f" with {names(back)} back" if back else " as they were"
        if not is_member:
            phase = Phase.CLOSED if leaves else Phase.FENCED
            self._shut(phase, f"{reason} (term {message.term}, said rank {message.sender})")
            return
        # An epoch that any member of the new view has begun ends; one that none has may be made again by all.
        again = not part.begun and part.asked is None and not leaves and message.epoch <= part.last_epoch
        self._finish(-1, clip(reason), again=again)
        if view.outside:  # of the last epoch it knows what the view says, like those who were in it
            part.last_epoch, part.last_upto, part.last_at = message.epoch, message.upto, message.at
        view.install(message.term, message.members)
        self._install_message = replace(message, sender=self.rank)
        self._returns.installed(view.members)
        part.epoch = max(part.epoch, message.next_epoch - 1)
        self._change = None
        self._lead = None
        if view.coordinator == self.rank:
            self._lead = self._books(attempts)
        self._out.append(events.Installed(view.installed, frozenset(each(view.members))))
        self._leave_if_alone()

    def _on_view(self, message: messages.View) -> None:
        view, sender = self._view, message.sender
        both = bit(sender) | bit(self.rank)
        newer = message.installed_term > view.installed and message.members & both == both
        if not view.members & bit(sender) and not newer:
            self._tell_view(sender)
            raise Ignored("foreign")
        # It can never agree; answering would only set two openers against each other.
        if view.gone & view.members & bit(sender):
            raise Ignored("gone")
        if message.term <= view.promised:
            if message.term < view.promised:
                self._send(sender, messages.Term(term=view.promised, sender=self.rank))
            elif not view.settled and sender == view.owner:
                self._send(sender, self._state())  # asked again: the answer may be lost
            raise Ignored("stale")
        view.promised = message.term
        view.behind = newer
        self._change = None
        view.declare(message.declared)
        view.suspect(message.gone)
        self._send(sender, self._state())
        self._leave_if_alone()
        self._try_view()

    def _on_term(self, message: messages.Term) -> None:
        view = self._view
        if self._change is None or view.settled or message.term <= view.promised or view.opener != self.rank:
            raise Ignored("stale")
        view.promised = message.term
        self._change = None
        self._try_view()

    def _on_state(self, message: messages.State) -> None:
        view, change = self._view, self._change
        if change is None or change.term != message.term or message.term != view.promised:
            raise Ignored("stale")
        if not change.add(message):
            raise Ignored("duplicate")
        view.leaving |= message.leaving & view.members & ~bit(self.rank)
        view.suspect(message.gone & view.remaining)
        if message.declared & ~view.declared & ~bit(self.rank):
            self._declare(message.declared)
        self._try_view()

    def _on_install(self, message: messages.Install) -> None:
        view = self._view
        waits = view.outside or bool(message.members & bit(self.rank))  # for the view that was promised
        if message.term <= view.installed or (message.term < view.promised and waits):
            raise Ignored("stale")
        was_outside, before = view.outside, view.members
        self._install(message, {})
        if self._over:
            return
        if was_outside:  # it speaks in the view, so that all know that it is in
            for rank in each(view.members & ~bit(self.rank)):
                self._send(rank, messages.Pong(term=view.installed, sender=self.rank))
        for rank in each(view.members & ~before):  # the opener may have died before it told who comes back
            self._tell_view(rank)
        self._say_met()
        self._try_view()

    def _on_met(self, message: messages.Met) -> None:
        if self._view.coordinator != self.rank:
            raise Ignored("foreign")
        if not self._returns.hear(message.sender, message.rank, Meeting(message.start, message.digest)):
            raise Ignored("duplicate")
        self._try_view()

    def _met(self, rank: int, met: Meeting) -> None:
        """Rule 12: whom this rank has met again, or waits for no more."""
        view, returns = self._view, self._returns
        if self._over or view.members & bit(rank) or returns.own.get(rank, NOT_MET) == met:
            return
        returns.want(rank, met)
        if view.settled:
            self._send(view.coordinator, self._met_message(rank, met))

    def _say_met(self) -> None:
        """Says again whom it has met: the coordinator may be new, or the message lost."""
        view = self._view
        if view.settled:
            for rank, met in tuple(self._returns.own.items()):
                self._send(view.coordinator, self._met_message(rank, met))

    def _met_message(self, rank: int, met: Meeting) -> messages.Met:
        return messages.Met(term=self._view.installed, sender=self.rank, rank=rank, start=met.start, digest=met.digest)

    def _heard_of(self, message: Message) -> None:
        """A member speaks: in this view, or before it has heard of it."""
        view = self._view
        if message.term >= view.installed:
            view.arriving &= ~bit(message.sender)
        elif view.members & bit(message.sender) and isinstance(message, messages.Ping | messages.Pong):
            self._tell_view(message.sender)

    @property
    def _waits(self) -> bool:
        """Whether anything is waited for: then pings go out."""
        view = self._view
        if self._over:
            return False
        due = self._part.active or not view.settled or bool(view.leaving & bit(self.rank)) or bool(self._returns.own)
        looks = bool((view.suspects | view.arriving) & view.remaining)
        return due or looks or bool(view.broken and view.majority())

    def _waited(self) -> int:
        """The ranks that a message is waited for from.

        Other threads ask too (``health``): what can be replaced meanwhile is looked at once.
        """
        view, lead, change = self._view, self._lead, self._change
        waited, owner = view.suspects | view.arriving, 0
        if self._over or not self._waits:
            return 0
        if change is not None:
            waited |= change.missing(view)
        elif not view.settled and not (view.gone | bit(self.rank)) & bit(view.owner):
            owner = bit(view.owner)
        elif not view.settled or view.leaving & bit(self.rank) or (view.broken and view.majority()):
            waited |= view.staying & -view.staying
        elif self._part.active and lead is None:
            waited |= bit(view.coordinator)
        elif self._part.active and lead is not None:
            waited |= lead.missing
        elif self._returns.own:
            waited |= bit(view.coordinator) if lead is None else self._returns.missing(view)
        return ((waited & view.remaining) | owner) & ~bit(self.rank)
