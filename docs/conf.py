"""Builds these pages and the API reference: ``python -m sphinx -n -W --keep-going -b html docs docs/_build/html``.

Nothing is fetched: no other project's inventory, font or script. Names of other packages are therefore not linked.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from dataclasses import is_dataclass
from enum import Enum
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

from docutils.nodes import Element
from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

PUBLIC = [
    "eplb_async",
    *(f"eplb_async.{name}" for name in ("nixl", "policy", "rendezvous", "service", "telemetry", "testing")),
]
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

autoclass_content = "both"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "no-value": True}
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_type_aliases = {
    "Command": "eplb_async.core.events.Command",
    "Hook": "eplb_async.telemetry.event.Hook",
    "LoadExpert": "eplb_async.communicator.loading.LoadExpert",
    "Policy": "eplb_async.service.decision.Policy",
    "WeightsLike": "eplb_async.weights.tensors.WeightsLike",
}
napoleon_numpy_docstring = False
maximum_signature_line_length = 100
python_use_unqualified_type_names = True

_OTHERS = "|".join(sorted({*sys.stdlib_module_names, "msgspec", "numpy", "np", "prometheus_client", "torch"}))
nitpick_ignore_regex = [
    ("py:.*", rf"({_OTHERS})\..*"),  # other packages, which nothing here links to
    ("py:.*", r"eplb_async\..*\.[A-Z]"),  # type variables
    ("py:class", "Store|ProcessGroup|NativeFactory"),  # torch's, imported only for type checkers; for tests
]

# Users make these records, and are given all others; they are given these classes, and make all others.
_MADE_BY_USERS = {"Limits", "ServiceSettings", "Settings", "Spec"}
_GIVEN_TO_USERS = {"Forward", "Mail", "MemoryNative", "Opening", "Peer", "Region", "Rows", "Steps", "Use"}


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


def _is_given(obj: Any) -> bool:
    """Whether users are given it, or catch it, and do not construct it."""
    if is_dataclass(obj):
        return obj.__name__ not in _MADE_BY_USERS and vars(obj)["__init__"].__doc__ is None
    given = obj.__name__ in _GIVEN_TO_USERS or hasattr(obj, "open") or getattr(obj, "_is_protocol", False)
    return given or issubclass(obj, Exception | Enum)


def _signature(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """As it is written, and nothing for what users do not construct."""
    if signature and isinstance(obj, type) and _is_given(obj):
        return "", None
    if inspect.isasyncgenfunction(getattr(obj, "__wrapped__", None)) and returns:
        returns = re.sub(
            r"\b~?(collections\.abc\.)?AsyncIterator\b", "~contextlib.AbstractAsyncContextManager", returns
        )
    plain = [text and re.sub(r"TypeAliasForwardRef\('([\w.]+)'\)", r"\1", text) for text in (signature, returns)]
    return plain[0] and plain[0].replace("<factory>", "..."), plain[1]


def _docstring(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Nor its arguments. What a property is may have a colon, which napoleon takes for the end of a type."""
    if what in ("attribute", "data", "property"):
        lines[:0] = ["..", ""]  # a comment
    if what == "class" and isinstance(obj, type) and obj.__name__ in _GIVEN_TO_USERS and "Args:" in lines:
        first = lines.index("Args:")
        stop = next((i for i in range(first + 1, len(lines)) if lines[i][:1].strip()), len(lines))
        del lines[first:stop]


def _find(app: Sphinx, env: BuildEnvironment, node: Element, text: Element) -> Element | None:
    """A name without its module is the only one of that name, at least outside of ``core``. Aliases are data."""
    objects, name = env.domains.python_domain.objects, node.get("reftarget", "")
    found = {(at.docname, at.node_id): full for full, at in objects.items() if f".{full}".endswith(f".{name}")}
    if len(found) > 1:
        found = {at: full for at, full in found.items() if not full.startswith("eplb_async.core.")}
    if node.get("refdomain") != "py" or len(found) != 1:
        return None
    return env.domains.python_domain.resolve_xref(
        env, node["refdoc"], app.builder, "obj", next(iter(found.values())), node, text
    )


def _nothing_left_out(app: Sphinx, env: BuildEnvironment) -> None:
    """Whatever the packages export has an entry."""
    entries = list(env.domains.python_domain.objects)
    for package in map(importlib.import_module, PUBLIC):
        for name in package.__all__:
            value = getattr(package, name)
            home = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
            if home not in entries and not any(
                f"{entry}.".startswith(f"{package.__name__}.") and entry.endswith(f".{name}") for entry in entries
            ):
                logging.getLogger(__name__).warning("%s.%s has no entry in docs/api", package.__name__, name)


def setup(app: Sphinx) -> None:
    """Connects the above."""
    app.add_lexer("mermaid", TextLexer)  # code hosts draw it; here it is read
    app.connect("source-read", _front_page)
    app.connect("autodoc-process-signature", _signature)
    app.connect("autodoc-process-docstring", _docstring, priority=400)  # before napoleon
    app.connect("env-check-consistency", _nothing_left_out)
    app.connect("missing-reference", _find)
