"""The command line, where the script ``eplb-async`` is not on the path: ``python -m eplb_async``."""

from eplb_async.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
