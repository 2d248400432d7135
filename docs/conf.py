"""Builds these pages and the API reference: ``python -m sphinx -n -W --keep-going -b html docs docs/_build/html``.

Nothing is fetched: no other project's inventory, font or script. Names of other packages are therefore not linked.
"""

from __future__ import annotations

import re
from dataclasses import is_dataclass
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

README = Path(__file__).parent.parent / "README.md"

project = "eplb_async"
author = "the authors of eplb_async"
release = version = installed("eplb-async")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
default_role = "py:obj"
html_theme = "furo"
html_title = "eplb_async"
html_show_copyright = False
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_typehints_format = "short"
autodoc_type_aliases = {"WeightsLike": "WeightsLike", "LoadExpert": "LoadExpert"}
napoleon_numpy_docstring = False
maximum_signature_line_length = 100
python_use_unqualified_type_names = True

nitpick_ignore_regex = [  # other packages, which nothing here links to
    ("py:.*", r"(asyncio|collections\.abc|numpy|np|torch|types|typing)\..*"),
]

_WRITTEN_BY_USERS = {"Settings", "ServiceSettings", "Spec", "Limits"}


def _front_page(app: Sphinx, docname: str, source: list[str]) -> None:
    """The first page is the README and the index; the sidebar has what the index links to, a tree for each heading."""
    if docname != "index":
        source[0] = source[0].replace("](../README.md", "](index.md")
        return
    trees = []
    for part in re.split(r"^##? ", source[0], flags=re.MULTILINE)[1:]:
        pages = dict.fromkeys(re.findall(r"\]\(([\w/.-]+)\.(?:md|rst)\)", part))
        trees.append(
            "\n".join(["```{toctree}", ":hidden:", f":caption: {part.splitlines()[0]}", "", *pages, "```", ""])
        )
    readme = README.read_text(encoding="utf-8").replace("](docs/", "](")
    source[0] = "\n".join([readme, f"#{source[0]}", *trees])


def _signature(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str, None] | None:
    """No arguments for what users do not construct: errors, records that they are given, what ``open`` makes."""
    if not signature or not isinstance(obj, type) or obj.__name__ in _WRITTEN_BY_USERS:
        return None
    given = is_dataclass(obj) and vars(obj)["__init__"].__doc__ is None
    return ("", None) if given or issubclass(obj, Exception) or hasattr(obj, "open") else None


def setup(app: Sphinx) -> None:
    """Connects the above."""
    app.add_lexer("mermaid", TextLexer)  # code hosts draw it; here it is read
    app.connect("source-read", _front_page)
    app.connect("autodoc-process-signature", _signature)
