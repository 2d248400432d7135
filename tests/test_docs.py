"""The pages say what the code does: settings, errors, messages, diagram, snippets, links, and what the code cites."""

from __future__ import annotations

import inspect
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

import eplb_async
from eplb_async import errors
from eplb_async.core import messages
from eplb_async.core.events import Phase
from eplb_async.settings_table import rows
from eplb_async.variables import OTHERS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
WORKED = [DOCS / "concepts.md", DOCS / "plan.md", DOCS / "policy.md", DOCS / "service.md"]
RUN = [DOCS / "testing.md", *WORKED]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[[^]]+\]\(([^)\s]+)\)")
_TESTS = re.compile(r"`(tests/[\w/]+\.py)`(?: \(([^)]*)\))?")


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def blocks(path: Path, language: str) -> Iterator[str]:
    return (body for kind, body in _BLOCK.findall(text_of(path)) if kind == language)


def name_of(value: object) -> str:
    return str(value.relative_to(ROOT)) if isinstance(value, Path) else ""


def anchors(path: Path) -> set[str]:
    """GitHub's anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(_BLOCK, "", text_of(path)), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def sources() -> str:
    """All code and tests, in one string."""
    folders = (ROOT / "eplb_async", ROOT / "tests", ROOT / "examples")
    return "\n".join(text_of(path) for folder in folders for path in sorted(folder.rglob("*.py")))


def test_the_table_of_settings_is_fresh() -> None:
    """The page is what ``python docs/settings_page.py`` writes."""
    render = runpy.run_path(str(DOCS / "settings_page.py"))["render"]
    page = text_of(DOCS / "settings.md")
    assert page == render(page), "stale: run python docs/settings_page.py"


def test_every_argument_of_open_is_on_the_page_of_settings() -> None:
    """Beside the settings; those that are for tests are not."""
    given = set(inspect.signature(eplb_async.AsyncEplbCommunicator.open).parameters) - {"engine", "native", "settings"}
    page = text_of(DOCS / "settings.md").partition("## Arguments that are no settings")[2].partition("\n## ")[0]
    assert [name for name in sorted(given) if f"`{name}`" not in page] == []


def test_every_variable_of_ours_is_known() -> None:
    """Whatever code, examples and tests read with our prefix is a setting or among the others."""
    read = set(re.findall(r"environ(?:\.get\(|\[)\"(EPLB_ASYNC_\w+)\"", sources()))
    assert read
    assert read <= {row.variable for row in rows()} | set(OTHERS)


def test_every_public_error_is_explained() -> None:
    """Each error class has a row of its own."""
    rows = set(re.findall(r"^\| `(\w+)`", text_of(DOCS / "errors.md"), re.MULTILINE))
    public = {
        name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__
    }
    assert public
    assert public <= rows


def test_the_runbook_has_every_phase_and_every_reason_for_a_drop() -> None:
    """What ``health()`` may show is explained where the engineer on call looks for it."""
    page, code = text_of(DOCS / "runbook.md"), "\n".join(text_of(path) for path in (ROOT / "eplb_async").rglob("*.py"))
    reasons = set(re.findall(r"raise (?:Ignored|WireError)\(\"(\w+)\"", code))
    reasons |= set(re.findall(r"dropped\[\"([\w ]+)\"\]", code)) | {"early", "impossible"}
    assert {"leap", "forged", "too many"} <= reasons
    listed = page.partition("## Messages that were dropped")[2]
    assert [reason for reason in sorted(reasons) if f"`{reason}`" not in listed] == []
    phases = {phase.value for phase in Phase} | {"activating", "view_change", "closing", "suspended"}
    explained = page.partition("## What each phase says")[2].partition("\n## ")[0]
    assert [phase for phase in sorted(phases) if f"`{phase}`" not in explained] == []


def test_every_public_name_is_in_the_api_reference() -> None:
    """Each name that the package exports has its entry under that name; how it renders is for the build."""
    pages = "\n".join(text_of(path) for path in (DOCS / "api").glob("*.rst"))
    entries = re.findall(r"^\.\. auto(?:class|exception|function):: eplb_async\.(\w+)$", pages, re.MULTILINE)
    assert sorted(entries) == sorted(eplb_async.__all__)


def test_ci_builds_the_pages() -> None:
    """With references that lead nowhere as errors, from this configuration."""
    assert (DOCS / "conf.py").is_file()
    assert "python -m sphinx -n -W --keep-going -q -b html docs " in text_of(ROOT / ".ci" / "run")


def test_every_page_of_the_api_reference_is_found() -> None:
    """Each is in the list of their index."""
    listed = re.findall(r"^   (\w+)$", text_of(DOCS / "api" / "index.rst"), re.MULTILINE)
    assert sorted(listed) == sorted(path.stem for path in (DOCS / "api").glob("*.rst") if path.stem != "index")


def test_every_message_is_named() -> None:
    """Each kind of control message is in the table of the protocol page."""
    page = text_of(DOCS / "protocol.md")
    kinds = [kind.__name__ for kind in messages.Message.__subclasses__()]
    assert kinds
    assert [kind for kind in kinds if f"`{kind}`" not in page] == []


def test_the_diagram_is_fresh() -> None:
    """The page is what ``python docs/protocol_diagram.py`` writes."""
    render = runpy.run_path(str(DOCS / "protocol_diagram.py"))["render"]
    page = text_of(DOCS / "protocol.md")
    assert page == render(page), "stale: run python docs/protocol_diagram.py"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_blocks_compile(page: Path) -> None:
    """What a reader copies is Python."""
    for body in blocks(page, "python"):
        compile(body, str(page), "exec")


@pytest.mark.parametrize(
    "body",
    [body for page in RUN for body in blocks(page, "python")],
    ids=lambda body: re.findall(r"^from eplb_async\.([\w.]+) import", body, re.MULTILINE)[-1],
)
def test_snippets_run(body: str) -> None:
    """The snippets of the test kit and the worked example run; those that start processes are only defined."""
    exec(compile(body, "snippet", "exec"), {"__name__": "snippet"})


@pytest.mark.parametrize("page", WORKED, ids=name_of)
def test_the_worked_example_prints_what_the_page_says(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The block after the example is its output."""
    exec(compile(next(blocks(page, "python")), str(page), "exec"), {})
    assert capsys.readouterr().out in list(blocks(page, "text"))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_resolve(page: Path) -> None:
    """Each link leads to a file here, and to a heading in it if it names one."""
    for link in _LINK.findall(re.sub(_BLOCK, "", text_of(page))):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


def test_every_page_is_in_the_index() -> None:
    """Nothing is written that nobody finds."""
    linked = {(DOCS / link).resolve() for link in _LINK.findall(text_of(DOCS / "index.md"))}
    assert {page.resolve() for page in PAGES[1:]} - linked == {(DOCS / "index.md").resolve()}


@pytest.mark.parametrize("page", [DOCS / "cases.md", DOCS / "guarantees.md"], ids=name_of)
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    """Each path is a file, and each name that follows it in brackets is a function of it; no name stands alone."""
    body = text_of(page)
    cited: set[str] = set()
    for path, listed in _TESTS.findall(body):
        assert (ROOT / path).is_file(), path
        names = re.findall(r"`(\w+)`", listed)
        defined = set(re.findall(r"^(?:async )?def (\w+)\(", text_of(ROOT / path), re.MULTILINE))
        assert set(names) <= defined, (path, set(names) - defined)
        cited |= set(names)
    assert cited
    assert set(re.findall(r"`(test_\w+)`", body)) <= cited


def test_every_case_has_its_row() -> None:
    """C1 to C36 in order; a case without a test says why, and the page counts them."""
    page = text_of(DOCS / "cases.md")
    rows = re.findall(r"^\| (C\d+) \|.*\| ([^|]*) \|$", page, re.MULTILINE)
    assert [case for case, _ in rows] == [f"C{number}" for number in range(1, 37)]
    missing = [case for case, held_by in rows if not _TESTS.search(held_by)]
    assert all("no test yet: " in held_by for case, held_by in rows if case in missing)
    assert f"{len(rows) - len(missing)} of the {len(rows)} are held" in page
    assert re.findall(r"\bC\d+\b", page.partition("Not yet: ")[2].partition("\n\n")[0]) == missing


def test_the_readme_has_the_test_command_that_ci_runs() -> None:
    """After the marker comes a block that begins with pip and ends with the tests."""
    body = text_of(ROOT / "README.md").partition("\n<!-- test-command -->\n```bash\n")[2].partition("```")[0]
    lines = body.splitlines()
    assert lines[0].startswith("pip install -c constraints.txt")
    assert lines[-1] == "python -m pytest -q"


def test_what_the_code_cites_is_written() -> None:
    """Invariants, rows on NIXL, sections of the design and decisions that code and tests name exist."""
    code = sources()
    design, nixl = text_of(DOCS / "design.md"), text_of(DOCS / "nixl.md")
    rows = {int(number) for number in re.findall(r"^\| (\d+) \|", nixl, re.MULTILINE)}
    cited = {int(number) for number in re.findall(r"\bN-(\d+)\b", code)}
    for first, last in re.findall(r"NIXL\.md, (\d+)(?:-(\d+))?", code):
        cited |= set(range(int(first), int(last or first) + 1))
    assert cited <= rows, sorted(cited - rows)
    invariants = set(re.findall(r"^\| (I-\d+) \|", design, re.MULTILINE))
    assert set(re.findall(r"\bI-\d+\b", code)) <= invariants
    sections = set(re.findall(r"^## (\d+)\. ", design, re.MULTILINE))
    assert {
        section for cite in re.findall(r"DESIGN (§\d+(?:, §\d+)*)", code) for section in re.findall(r"\d+", cite)
    } <= sections
    for number in re.findall(r"docs/decisions/(\d{4})", code):
        assert list((DOCS / "decisions").glob(f"{number}-*.md")), number
