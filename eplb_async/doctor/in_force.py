"""Every setting with the value that it has in this environment, and where that comes from."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from eplb_async.doctor.judges.environment import refusals
from eplb_async.service_settings import ServiceSettings
from eplb_async.settings import Settings
from eplb_async.settings_table import SettingRow, rows
from eplb_async.variables import PREFIX

__all__ = ["Line", "as_json", "as_text", "look"]

_RECORDS: dict[str, type[Settings] | type[ServiceSettings]] = {
    kind.__name__: kind for kind in (Settings, ServiceSettings)
}
_INDENT = "    "


@dataclass(frozen=True, slots=True)
class Line:
    """A setting as it is here.

    Attributes:
        row: What the table of settings says of it.
        value: What it is, as it is written in Python; of a secret only whether it is set.
        source: ``"default"``, or ``"variable"``.
    """

    row: SettingRow
    value: str
    source: str


def look(environ: Mapping[str, str]) -> tuple[list[Line], dict[str, str]]:
    """All settings, and of the variables that are refused why."""
    ours = {name: text for name, text in environ.items() if name.startswith(PREFIX)}
    refused = refusals(ours)
    sound = {name: text for name, text in ours.items() if name not in refused}
    values: dict[str, object] = {name: kind.from_env(sound) for name, kind in _RECORDS.items() if name not in refused}
    lines = []
    for row in rows():
        if row.variable not in ours:
            lines.append(Line(row, "not set" if row.name == "secret" else row.default, "default"))
        elif row.variable in refused or row.record in refused:
            lines.append(Line(row, "refused", "variable"))
        else:
            value = "set" if row.name == "secret" else repr(getattr(values[row.record], row.name))
            lines.append(Line(row, value, "variable"))
    return lines, refused


def as_text(lines: Sequence[Line], refused: Mapping[str, str], width: int) -> str:
    """A paragraph for each, and what is refused at the end."""
    told, record = [], ""
    for line in lines:
        row = line.row
        if row.record != record:
            record = row.record
            told.append(f"{record}\n")
        here = "default" if line.source == "default" else f"from the environment; default {row.default}"
        told.append(f"{row.variable} = {line.value}  [{row.unit}: {row.allowed}; {here}]")
        told.append(textwrap.fill(row.effect, width, initial_indent=_INDENT, subsequent_indent=_INDENT) + "\n")
    told += [f"refused: {why if name in why else f'{name}: {why}'}" for name, why in refused.items()]
    return "\n".join(told).rstrip()


def as_json(lines: Sequence[Line], refused: Mapping[str, str]) -> str:
    """``settings``, a list of what the table has with ``value`` and ``source``; ``refused``, by variable."""
    settings = [{**asdict(line.row), "value": line.value, "source": line.source} for line in lines]
    return json.dumps({"settings": settings, "refused": dict(refused)})
