"""Writes the state diagram of ``protocol.md`` from the table of moves: ``python docs/protocol_diagram.py``."""

from __future__ import annotations

from pathlib import Path

from eplb_async.core.transitions import mermaid

PAGE = Path(__file__).with_name("protocol.md")
BEGIN, END = "<!-- diagram: begin -->", "<!-- diagram: end -->"


def render(text: str) -> str:
    """The page with a fresh diagram between the markers."""
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"the page lacks {BEGIN} and {END}")
    return f"{before}{BEGIN}\n```mermaid\n{mermaid()}```\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
