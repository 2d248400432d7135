"""Mail in parts: whole, once, in order, or not at all; and what a peer can make this rank keep is bounded."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_async.core.messages import Word
from eplb_async.core.wire import MAX_PARTS, MAX_WORD
from eplb_async.core.words import MAX_MAIL, Assembly, cut

sizes = st.sampled_from([0, 1, MAX_WORD - 1, MAX_WORD, MAX_WORD + 1, 3 * MAX_WORD, 3 * MAX_WORD + 5])


def payload(serial: int, size: int) -> bytes:
    return bytes([serial % 251]) * size


def words(serial: int, size: int, *, sender: int = 1, topic: int = 7) -> list[Word]:
    return [replace(word, sender=sender) for word in cut(payload(serial, size), topic=topic, serial=serial)]


@pytest.mark.parametrize(
    ("size", "parts"), [(0, 1), (1, 1), (MAX_WORD, 1), (MAX_WORD + 1, 2), (MAX_MAIL - 1, 128), (MAX_MAIL, 128)]
)
def test_a_message_is_cut_into_full_words(size: int, parts: int) -> None:
    made = words(1, size)
    assert [word.part for word in made] == list(range(parts))
    assert {word.parts for word in made} == {parts}
    assert all(len(word.data) == MAX_WORD for word in made[:-1])
    assembly = Assembly(dropped := Counter())
    assert [assembly.add(word) for word in made][-1] == payload(1, size)
    assert not dropped
    assert len(assembly) == 0


@given(st.lists(st.tuples(st.integers(0, 2), sizes), max_size=8), st.data())
def test_what_comes_in_order_comes_all(messages: list[tuple[int, int]], data: st.DataObject) -> None:
    """Senders interleaved as they like: each one's messages come whole and in its order."""
    lines: dict[int, list[Word]] = {}
    for serial, (sender, size) in enumerate(messages, 1):
        lines.setdefault(sender, []).extend(words(serial, size, sender=sender))
    assembly = Assembly(dropped := Counter())
    came: dict[int, list[bytes]] = {sender: [] for sender in lines}
    while left := [sender for sender, line in lines.items() if line]:
        sender = data.draw(st.sampled_from(left))
        if (whole := assembly.add(lines[sender].pop(0))) is not None:
            came[sender].append(whole)
    for sender, got in came.items():
        assert got == [payload(serial, size) for serial, (s, size) in enumerate(messages, 1) if s == sender]
    assert not dropped


@given(st.lists(sizes, min_size=1, max_size=4), st.data())
def test_lost_doubled_and_overtaken_words_cost_messages_and_nothing_else(
    lengths: list[int], data: st.DataObject
) -> None:
    """Whatever the network does to words: what comes was sent, whole, at most once, in order; the rest is counted."""
    sent = [word for serial, size in enumerate(lengths, 1) for word in words(serial, size)]
    arriving = data.draw(st.lists(st.sampled_from(sent), max_size=2 * len(sent)))
    assembly = Assembly(dropped := Counter())
    came = [whole for word in arriving if (whole := assembly.add(word)) is not None]
    whole = [payload(serial, size) for serial, size in enumerate(lengths, 1)]
    where = -1
    for message in came:
        where = whole.index(message, where + 1)  # raises if it is none of those that may still come
    assert len(assembly) <= 1
    assert set(dropped) <= {"stale", "duplicate", "incomplete"}


def test_parts_of_one_message_may_come_in_any_order() -> None:
    assembly = Assembly(Counter())
    assert [assembly.add(word) for word in reversed(words(1, 2 * MAX_WORD + 9))] == [
        None,
        None,
        payload(1, 2 * MAX_WORD + 9),
    ]


def test_a_newer_message_ends_an_unfinished_one() -> None:
    """Of each sender one unfinished message is kept; parts of the older one are late from then on."""
    first, second = words(1, 2 * MAX_WORD), words(2, 2 * MAX_WORD, topic=8)
    assembly = Assembly(dropped := Counter())
    assert [assembly.add(word) for word in (first[0], second[0], first[1], second[1])] == [
        None,
        None,
        None,
        payload(2, 2 * MAX_WORD),
    ]
    assert dropped == {"incomplete": 1, "stale": 1}
    assert assembly.add(second[0]) is None
    assert dropped["stale"] == 2


def test_another_view_begins_anew() -> None:
    assembly = Assembly(dropped := Counter())
    first = words(9, 2 * MAX_WORD)
    assembly.add(first[0])
    assembly.clear()
    assert dropped == {"incomplete": 1}
    assert assembly.add(first[1]) is None
    assert assembly.add(words(10, 5)[0]) == payload(10, 5)
    assembly.clear()
    assert assembly.add(words(1, 5)[0]) == payload(1, 5)


@pytest.mark.parametrize(
    "word",
    [
        Word(topic=7, serial=1, part=2, parts=2, data=b"x"),
        Word(topic=7, serial=1, part=0, parts=2, data=bytes(MAX_WORD - 1)),
        Word(topic=7, serial=1, part=1, parts=2, data=b""),
        Word(topic=7, serial=1, part=0, parts=2, data=b""),
    ],
    ids=["beyond", "short", "empty end", "empty part"],
)
def test_a_word_that_no_cutting_makes_is_dropped(word: Word) -> None:
    assembly = Assembly(dropped := Counter())
    assert assembly.add(word) is None
    assert dropped == {"impossible": 1}
    assert len(assembly) == 0


@pytest.mark.parametrize("change", [{"topic": 8}, {"parts": 3}])
def test_a_word_that_contradicts_its_message_is_dropped(change: dict[str, int]) -> None:
    first, second = words(1, 2 * MAX_WORD)
    assembly = Assembly(dropped := Counter())
    assert assembly.add(first) is None
    assert assembly.add(replace(second, **change)) is None
    assert dropped == {"impossible": 1}
    assert assembly.add(second) == payload(1, 2 * MAX_WORD)


def test_a_liar_makes_a_rank_keep_one_message() -> None:
    """A thousand messages begun and none finished: one is kept, of the largest size at most."""
    assembly = Assembly(dropped := Counter())
    for serial in range(1, 1001):
        assembly.add(Word(topic=serial % 9, serial=serial, part=0, parts=MAX_PARTS, data=bytes(MAX_WORD)))
    assert len(assembly) == 1
    assert dropped == {"incomplete": 999}
