"""``eplb-async doctor``: its arguments, and what it does with them."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

from eplb_async.arguments import count, positive

if TYPE_CHECKING:
    from eplb_async.doctor.examine import Question

__all__ = ["add_arguments", "run"]

EPILOG = """\
Exit status: 0 if all is well or there are only warnings, 1 if something failed, 2 for wrong arguments. With --peers
start it on every rank at the same time: under torchrun nothing more is needed, otherwise give --rendezvous, --rank and
--ep-size. Without these, --peers starts two ranks on this machine. See docs/doctor.md.
"""
_DEFAULT_TIMEOUT, _DEFAULT_FLOOR = 60.0, 0.25
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_INTERRUPTED, _TERMINATED = 130, 143


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.epilog = EPILOG
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument(
        "--timeout", type=positive, default=_DEFAULT_TIMEOUT, help="seconds for everything (default %(default)g)"
    )
    parser.add_argument("--settings", action="store_true", help="show every setting and its value here, and end")
    parser.add_argument("--rendezvous", metavar="URL", help="try this rendezvous, as a rank that opens would")
    parser.add_argument("--rank", type=count(0, (1 << 16) - 1), help="this rank, with --rendezvous")
    parser.add_argument("--ep-size", type=count(1, 1 << 16), help="ranks in the group, with --rendezvous")
    parser.add_argument("--group", default="default", help="group on the rendezvous (default %(default)s)")
    parser.add_argument("--peers", action="store_true", help="measure a READ from every peer")
    parser.add_argument(
        "--floor-gbps",
        type=positive,
        default=_DEFAULT_FLOOR,
        metavar="GB/S",
        help="gigabytes a second that a READ must reach (default %(default)g)",
    )
    parser.add_argument(
        "--memory",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where to read from and into (default %(default)s: on the GPU where there is one)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Look, and print what was found.

    Returns:
        Exit status: 0 if nothing failed, 1 if something did, 2 for arguments that do not go together; 130 when
        interrupted.
    """
    question = _question(arguments)
    if isinstance(question, str):
        print(f"doctor: {question}", file=sys.stderr)
        return 2
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        if arguments.settings:
            return _settings(as_json=arguments.json)
        return _report(question, as_json=arguments.json)
    except KeyboardInterrupt:
        print("doctor: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:  # who reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminated(*_: Any) -> None:
    raise SystemExit(_TERMINATED)


def _settings(*, as_json: bool) -> int:
    from eplb_async.doctor import in_force, show

    lines, refused = in_force.look(os.environ)
    print(in_force.as_json(lines, refused) if as_json else in_force.as_text(lines, refused, show.width()), flush=True)
    return 1 if refused else 0


def _report(question: Question, *, as_json: bool) -> int:
    from eplb_async.doctor import show
    from eplb_async.doctor.examine import examine
    from eplb_async.doctor.finding import Finding, Status, worst

    findings: list[Finding] = []
    rank = f"rank {question.rank}: " if question.rendezvous else ""
    brief = question.peers and question.rank > 0  # rank 0 tells the rest
    for finding in examine(question):
        findings.append(finding)
        if not as_json and not (brief and finding.status is Status.OK and not finding.check.startswith("peer")):
            print(rank + show.as_text(finding), flush=True)
    print(show.as_json(findings) if as_json else f"{rank}{show.summary(findings)}", flush=True)
    return 1 if worst(findings) is Status.FAILED else 0


def _question(arguments: argparse.Namespace) -> Question | str:
    """The question, or what is wrong with the arguments."""
    from eplb_async.doctor.examine import Question

    url, rank, ep_size = arguments.rendezvous, arguments.rank, arguments.ep_size
    if arguments.peers and url is None and rank is None and set(_TORCHRUN) <= set(os.environ):
        url = "env://"
    if url == "env://" and rank is None and ep_size is None:
        try:
            rank, ep_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        except (KeyError, ValueError):
            return "env:// needs RANK and WORLD_SIZE in the environment, as torchrun sets them"
    if url is not None and (rank is None or ep_size is None):
        return "--rendezvous needs --rank and --ep-size"
    if url is None and rank is not None:
        return "--rank needs --rendezvous"
    if rank is not None and ep_size is not None and rank >= ep_size:
        return f"--rank {rank} is not in a group of --ep-size {ep_size}"
    return Question(
        timeout=arguments.timeout,
        floor=arguments.floor_gbps,
        memory=arguments.memory,
        peers=arguments.peers,
        rendezvous=url,
        rank=rank or 0,
        ep_size=ep_size,
        group=arguments.group,
    )
