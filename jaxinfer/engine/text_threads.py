"""Threads beside an event loop, on which prompts become tokens: a short one never waits for a long one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

SHORT_TEXT_BYTES = 1 << 16  # some 30 ms of work
SHORT_TEXT_THREADS = 4


class TextThreads:
    """A few threads for short texts, and one for long ones, which wait for each other."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(SHORT_TEXT_THREADS, "short-text")
        self._long = ThreadPoolExecutor(1, "long-text")

    def submit[**P, T](self, size: int, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Runs a function that handles a text of so many bytes or characters."""
        threads = self._short if size <= SHORT_TEXT_BYTES else self._long
        return threads.submit(function, *args, **kwargs)

    async def run[**P, T](self, size: int, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Waits, on an event loop, for what `submit` runs."""
        return await asyncio.wrap_future(self.submit(size, function, *args, **kwargs))

    def close(self) -> None:
        """Lets the threads end once they have done what was submitted."""
        self._short.shutdown(wait=False)
        self._long.shutdown(wait=False)


async def result_or_undo[T](work: Future[T], *, never_began: Callable[[], object], undo: Callable[[], object]) -> T:
    """Waits, on an event loop, for work on a thread, which nobody can stop.

    If the wait is cancelled, `never_began` is called where the work had not begun, and now never will; else `undo`,
    once the work has succeeded.
    """
    try:
        return await asyncio.shield(asyncio.wrap_future(work))
    except asyncio.CancelledError:
        if work.cancel():
            never_began()
        else:
            work.add_done_callback(lambda done: done.exception() or undo())
        raise
