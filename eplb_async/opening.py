"""``await X.open(...)`` and ``async with X.open(...) as x`` from one coroutine."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar


class Closable(Protocol):
    """What :class:`Opening` opens."""

    async def aclose(self) -> object:
        """Close it."""
        ...


T = TypeVar("T", bound=Closable)


class Opening(Generic[T]):
    """An object that is being opened: await it, or use it with ``async with``, which also closes it.

    Args:
        opener: Makes the coroutine that opens; called once, when awaited or entered.
    """

    def __init__(self, opener: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._opener = opener
        self._opened: T | None = None

    def __await__(self) -> Generator[Any, None, T]:
        return self._opener().__await__()

    async def __aenter__(self) -> T:
        self._opened = await self._opener()
        return self._opened

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._opened is not None:
            await self._opened.aclose()
