"""Writes the table of ``settings.md`` from the records of settings: ``python docs/settings_page.py``."""

from __future__ import annotations

from pathlib import Path

from eplb_async.settings_table import rows
from eplb_async.variables import OTHERS

PAGE = Path(__file__).with_name("settings.md")
BEGIN, END = "<!-- settings: begin -->", "<!-- settings: end -->"


def table() -> str:
    """All settings, and below them the other variables with our prefix."""
    lines = ["| name | variable | default | unit | allowed | effect |", "|---|---|---|---|---|---|"]
    for row in rows():
        cells = (f"`{row.name}`", f"`{row.variable}`", f"`{row.default}`", row.unit, row.allowed, row.effect)
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "Variables that are no settings:", ""]
    lines += [f"- `{variable}` is {purpose}." for variable, purpose in OTHERS.items()]
    return "\n".join(lines)


def render(text: str) -> str:
    """The page with a fresh table between the markers."""
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"the page lacks {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
