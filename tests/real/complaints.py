"""What a rank's process complains of: warnings, which are errors there, and what nobody could catch."""

from __future__ import annotations

import asyncio
import gc
import sys
import warnings

from eplb_async.communicator import AsyncEplbCommunicator

_found: list[str] = []


async def listen(comm: AsyncEplbCommunicator) -> None:
    """From now on every warning is an error, and what is only printed is kept."""
    warnings.simplefilter("error")
    sys.unraisablehook = lambda what: _found.append(f"{what.object!r}: {what.exc_value!r}")
    asyncio.get_running_loop().set_exception_handler(lambda _, context: _found.append(str(context)))


async def found(comm: AsyncEplbCommunicator) -> list[str]:
    """All of it."""
    gc.collect()
    return _found
