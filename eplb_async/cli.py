"""The command line, ``eplb-async``.

A command is a module beside what it runs, with two functions: ``add_arguments(parser)``, and ``run(arguments)``
which returns the exit status. Only the module of the command that is called is imported, and it imports what is
slow to import in ``run``.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

_COMMANDS = {
    "demo": ("eplb_async.demo.command", "move experts between real ranks on this machine, and check"),
    "bench": ("eplb_async.bench.command", "compare the library with plainer ways of moving the same bytes"),
    "plan": ("eplb_async.planning.command", "show what a migration between two placements would move"),
    "doctor": ("eplb_async.doctor.command", "look for what is wrong with a machine, its settings and its peers"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    given = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="eplb-async", description="Moves mixture-of-experts weights between expert-parallel ranks."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, (module, purpose) in _COMMANDS.items():
        command = commands.add_parser(name, help=purpose, description=f"{purpose[0].upper()}{purpose[1:]}.")
        if name in given:
            importlib.import_module(module).add_arguments(command)
    arguments = parser.parse_args(given)
    module, _ = _COMMANDS[arguments.command]
    status: int = importlib.import_module(module).run(arguments)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
