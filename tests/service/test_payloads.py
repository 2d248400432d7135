"""Payloads: what is sent arrives, and bytes that cannot be are refused, whatever they are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_async.core.placement import Placement
from eplb_async.service.payloads import (
    Ask,
    Declined,
    Loads,
    Message,
    PayloadError,
    Refused,
    Verdict,
    Want,
    Why,
    decode,
)

PLACEMENT = Placement.initial(2, 4, ep_size=3, num_redundant=2)
OUT = Placement(np.array([[0, 1, 2, 3, -1, -1]] * 2), ep_size=3)
MESSAGES: list[Message] = [
    Ask(term=3, round=9),
    Loads(term=3, round=9, loads=np.arange(8.0).reshape(2, 4), steps=12),
    Verdict(term=3, round=9, outcome="moved", reason="gäin", before=0.5, after=0.75, moves=7, placement=OUT),
    Verdict(term=3, round=9, outcome="failed", reason="rank 2 did not answer"),
    Want(term=3, round=1, force=True),
    Declined(term=3, round=1, outcome="too_soon", reason="3 s are left"),
    Refused(term=3, round=9, why=Why.STALE, reason="seen", seen=11),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_what_is_sent_arrives(message: Message) -> None:
    again = decode(message.encode(), PLACEMENT)
    assert type(again) is type(message)
    assert again.encode() == message.encode()
    if isinstance(message, Verdict) and isinstance(again, Verdict):
        assert (again.placement, again.reason, again.outcome) == (message.placement, message.reason, message.outcome)


def test_text_is_one_line_and_not_endless() -> None:
    """What a member says goes to the log of others."""
    message = Refused(term=0, round=1, why=Why.FAILED, reason="a\nb\x1b[31m" + "é" * 5000)
    again = decode(message.encode(), PLACEMENT)
    assert isinstance(again, Refused)
    assert again.reason.startswith("a b [31m")
    assert len(again.reason.encode()) <= 2048


@given(data=st.data())
def test_no_bytes_do_more_than_be_refused(data: st.DataObject) -> None:
    """Cut, grown and changed payloads are either refused, or a message with the same bytes."""
    raw = bytearray(data.draw(st.sampled_from(MESSAGES)).encode())
    match data.draw(st.sampled_from(["cut", "grow", "change", "random"])):
        case "cut":
            del raw[data.draw(st.integers(0, len(raw))) :]
        case "grow":
            raw += data.draw(st.binary(min_size=1, max_size=20))
        case "change":
            for _ in range(data.draw(st.integers(1, 4))):
                raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        case "random":
            raw = bytearray(data.draw(st.binary(max_size=200)))
    try:
        message = decode(bytes(raw), PLACEMENT)
    except PayloadError:
        return
    if isinstance(message, Loads):
        assert (message.loads >= 0).all()
        assert np.isfinite(message.loads).all()
    if isinstance(message, Verdict):
        assert (message.placement is not None) == (message.outcome == "moved")


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (Loads(term=0, round=1, loads=np.full((2, 4), np.nan), steps=1), "not a number"),
        (Verdict(term=0, round=1, outcome="moved", placement=OUT), "balancedness of nan"),
        (Verdict(term=0, round=1, outcome="no_load", before=np.inf), "balancedness of inf"),
        (Verdict(term=0, round=1, outcome="no_load", after=-1.0), "balancedness of"),
        (Verdict(term=0, round=1, outcome="not_worth_it", before=0.5, after=0.5, moves=10**6), "1000000 moves"),
        (Loads(term=0, round=1, loads=np.full((2, 4), -1.0), steps=1), "negative"),
        (Loads(term=0, round=1, loads=np.full((2, 4), np.inf), steps=1), "not finite"),
        (Loads(term=0, round=1, loads=np.ones((3, 4)), steps=1), "which is not float64"),
        (Verdict(term=0, round=1, outcome="moved", placement=Placement.initial(2, 6, ep_size=3)), "cannot be"),
        (Verdict(term=0, round=1, outcome="moved", placement=Placement.initial(1, 6, ep_size=3)), "which is not int32"),
        (Verdict(term=0, round=1, outcome="moved"), "a placement of 0 bytes"),
        (Verdict(term=0, round=1, outcome="failed", placement=PLACEMENT), "not to be used"),
    ],
)
def test_what_is_wrong_is_said(message: Message, words: str) -> None:
    with pytest.raises(PayloadError, match=words):
        decode(message.encode(), PLACEMENT)
