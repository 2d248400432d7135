"""Every setting as a row: what there is, what it may be, and what it does; for ``doctor --settings`` and the docs.

Defaults and types are the records', ranges and units stand beside them, and what a setting does is its line in the
record's docstring: nothing is said twice.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass

from eplb_async import service_settings, settings
from eplb_async.service_settings import ServiceSettings
from eplb_async.settings import Settings
from eplb_async.variables import PREFIX, SERVICE_PREFIX, Range, defaults_of, variable_of, words_of

__all__ = ["SettingRow", "rows"]

_LINE = re.compile(r"^    (\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)
_SECRET = ("bytes", "16 bytes or more")


@dataclass(frozen=True, slots=True)
class SettingRow:
    """A setting.

    Attributes:
        name: Its name in the record.
        variable: Its variable of the environment.
        default: Its default, as it is written in Python.
        unit: What is counted; ``switch`` or ``word`` where nothing is.
        allowed: What it may be, as it is written in the variable.
        effect: What it does, with code in backticks; empty where Python runs without docstrings.
        record: The record that it is a field of: ``Settings`` or ``ServiceSettings``.
    """

    name: str
    variable: str
    default: str
    unit: str
    allowed: str
    effect: str
    record: str


def rows() -> list[SettingRow]:
    """All settings: those of `Settings`, then those of `ServiceSettings`, in the order of their fields."""
    return [
        *_rows(Settings, settings.RANGES, PREFIX),
        *_rows(ServiceSettings, service_settings.RANGES, SERVICE_PREFIX),
    ]


def _rows(kind: type, ranges: dict[str, Range], prefix: str) -> Iterator[SettingRow]:
    text = (inspect.getdoc(kind) or "").partition("Attributes:\n")[2]
    effects = {name: " ".join(line.replace("``", "`").split()) for name, line in _LINE.findall(text)}
    words = words_of(kind)
    for name, default in defaults_of(kind).items():
        if name in ranges:
            unit, allowed = ranges[name].unit, str(ranges[name])
        elif name in words:
            switch = type(default) is bool
            unit = "switch" if switch else "word"
            allowed = "1, true, yes or 0, false, no" if switch else ", ".join(map(str, words[name]))
        else:
            unit, allowed = _SECRET
        yield SettingRow(
            name, variable_of(name, prefix), repr(default), unit, allowed, effects.get(name, ""), kind.__name__
        )
