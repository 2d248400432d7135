"""The command line's table of commands."""

from __future__ import annotations

import subprocess
import sys

import pytest

from eplb_async import cli


def test_help_names_every_command_and_loads_nothing_slow() -> None:
    """No torch, no NIXL, no matplotlib: help is there at once, that of a command too."""
    code = (
        "import sys; from eplb_async import cli\n"
        "try: cli.main(sys.argv[1:])\n"
        "finally: print(sorted({'torch', 'nixl', 'matplotlib'} & set(sys.modules)))"
    )
    for arguments in (["--help"], *([name, "--help"] for name in cli._COMMANDS)):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith("[]\n"), arguments
        if arguments == ["--help"]:
            assert all(name in done.stdout for name in cli._COMMANDS)


@pytest.mark.parametrize("arguments", [[], ["dance"]])
def test_a_command_is_needed(arguments: list[str]) -> None:
    """One that exists; argparse says which there are."""
    with pytest.raises(SystemExit) as refused:
        cli.main(arguments)
    assert refused.value.code == 2
