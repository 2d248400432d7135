"""Variables of the environment and numbers of settings: which there are, and what is refused, by name."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from eplb_async._types import Hidden

PREFIX = "EPLB_ASYNC_"
SERVICE_PREFIX = "EPLB_ASYNC_SERVICE_"
VLLM_SWITCH = "EPLB_ASYNC_VLLM"

OTHERS = {
    VLLM_SWITCH: "read by the plugin for vLLM: 0 leaves vLLM's own communicator in its place",
    "EPLB_ASYNC_SOAK_SECONDS": "read by the soak tests: how long they run, in seconds",
    "EPLB_ASYNC_SOAK_SEED": "read by the soak tests: what happens in them",
}
"""Variables with our prefix that are no settings, and who reads them."""

_SWITCH = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


class Range(NamedTuple):
    """What a number may be.

    Attributes:
        lowest: Least value.
        highest: Largest value.
        unit: What is counted.
        least: Where 0 is a value of its own: the least one besides.
    """

    lowest: float
    highest: float
    unit: str
    least: float | None = None

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, int | float) or not self.lowest <= value <= self.highest:
            return False
        return self.least is None or value == 0 or value >= self.least

    def __str__(self) -> str:
        return self.asked("")

    def asked(self, kind: str) -> str:
        """What a value may be, in words; ``kind`` is ``"a number from "`` or so."""
        if self.least is None:
            return f"{kind}{self.lowest} to {self.highest}"
        return f"0, or {kind}{self.least} to {self.highest}"


def variable_of(name: str, prefix: str = PREFIX) -> str:
    """The variable of a setting."""
    return prefix + name.upper()


def defaults_of(kind: type) -> dict[str, Any]:
    """The default of each field of a dataclass of settings."""
    return {field.name: field.default for field in fields(kind)}


def words_of(kind: type) -> dict[str, tuple[object, ...]]:
    """The values of each field of a dataclass of settings that has a few: words, or a switch's."""
    hints = get_type_hints(kind)
    words = {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}
    return words | {name: (True, False) for name, hint in hints.items() if hint is bool}


def check(settings: object, ranges: Mapping[str, Range], what: str) -> None:
    """Refuse numbers out of range, or that are not whole where the default is an ``int``; and words that are none.

    Raises:
        ValueError: Names ``what`` it is, which one, its value, and what it may be.
    """
    kind = type(settings)
    defaults = defaults_of(kind)
    for name, allowed in ranges.items():
        value, whole = getattr(settings, name), type(defaults[name]) is int
        if isinstance(value, bool) or (whole and not isinstance(value, int)) or value not in allowed:
            number = "a whole number from " if whole else "a number from "
            raise ValueError(f"{what} {name}={value!r} is not {allowed.asked(number)}")
    for name, words in words_of(kind).items():
        value = getattr(settings, name)
        if not any(value is word or (isinstance(word, str) and value == word) for word in words):
            raise ValueError(f"{what} {name}={value!r} is not {' or '.join(map(repr, words))}")


def from_variables(
    environ: Mapping[str, str] | None,
    prefix: str,
    defaults: Mapping[str, Any],
    what: str,
    *,
    others: Collection[str] = (),
) -> dict[str, Any]:
    """Settings that ``<prefix><NAME>`` variables give, each of the type of its default.

    Args:
        environ: Variables to read; default ``os.environ``.
        prefix: What their names begin with.
        defaults: Default of each setting.
        what: What a setting is called in an error.
        others: Variables with this prefix that somebody else reads; they are left alone.

    Raises:
        ValueError: A variable names none, or its value is malformed.
    """
    values = {}
    known = {variable_of(name, prefix): name for name in defaults}
    for variable, text in (os.environ if environ is None else environ).items():
        if not variable.startswith(prefix) or variable in others:
            continue
        if variable not in known:
            names = [name.removeprefix(PREFIX) for name in (*known, *others)]
            near = difflib.get_close_matches(variable.removeprefix(PREFIX).upper(), names, 1, 0.75)
            hint = f"; did you mean {PREFIX}{near[0]}?" if near else ""
            raise ValueError(f"{variable} names no {what}{hint} (`eplb-async doctor --settings` lists all)")
        values[known[variable]] = _parse(variable, text, defaults[known[variable]])
    return values


def _parse(variable: str, text: str, like: object) -> object:
    """The value of a variable, of the type of another value.

    Raises:
        ValueError: The text is no such value.
    """
    try:
        if isinstance(like, bool):
            return _SWITCH[text.lower()]
        if isinstance(like, bytes):
            return Hidden(text.encode())
        return int(text) if isinstance(like, int) else float(text) if isinstance(like, float) else text
    except (KeyError, ValueError):
        shown = "" if isinstance(like, bytes) else f"={text!r}"
        whole = "a whole number" if isinstance(like, int) else "a number"
        kind = f"a switch: {', '.join(_SWITCH)}" if isinstance(like, bool) else whole
        raise ValueError(f"{variable}{shown} is not {kind}") from None
