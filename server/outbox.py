"""What a request has yielded and its client has not yet been sent.

A client that keeps up gets each token in a message of its own. While one lags, what waits for it is merged: adjacent
deltas of a sample become one, so that lagging costs little memory and catching up takes few messages.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from typing import Any

from jaxinfer.types import Delta, Event, Failed, Finished, PromptLogprobs

MAX_MERGED_TOKENS = 4096  # of a delta; with 20 log-probabilities for each it is a message of 1.3 MB
_MERGE_AT = 64  # events


def merge_deltas(events: Iterable[Event]) -> list[Event]:
    """The same events in fewer: adjacent deltas of one sample are joined, to at most MAX_MERGED_TOKENS each.

    Deltas of different samples have no order among them, so what other samples say in between parts none.
    """
    groups: list[list[Event]] = []
    latest: dict[int, list[Event]] = {}  # of a sample: the group its next delta may join
    room: dict[int, int] = {}  # and for how many tokens more
    for event in events:
        group = [event]
        if isinstance(event, Delta):
            room[event.index] = room.get(event.index, -1) - len(event.token_ids)
            if room[event.index] >= 0:
                latest[event.index].append(event)
                continue
            room[event.index], latest[event.index] = MAX_MERGED_TOKENS - len(event.token_ids), group
        else:
            room.clear()
        groups.append(group)
    return [group[0] if len(group) == 1 else _joined(group) for group in groups]


def _joined(parts: list[Any]) -> Delta:
    return Delta(
        parts[0].index,
        "".join(part.text for part in parts),
        tuple(token_id for part in parts for token_id in part.token_ids),
        tuple(at for part in parts for at in part.logprobs),
    )


class Outbox(AsyncIterator[PromptLogprobs | Delta | Finished]):
    """Takes events in on the engine's thread and gives them out, merged, on the event loop it was made in.

    Attributes:
      over: whether the last event is in.
      finished: that event, once it is in, if it is no failure.
    """

    def __init__(self) -> None:
        self.over = False
        self.finished: Finished | None = None
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._waiting: list[Event] = []
        self._merge_at = _MERGE_AT
        self._given: list[Event] = []  # taken out and not yet handed on, last first
        self._news = asyncio.Event()

    def put(self, events: list[Event]) -> None:
        """For `Engine.submit`. From any thread; what comes after a last event is dropped."""
        with self._lock:
            if self.over:
                return
            self.over = isinstance(events[-1], (Finished, Failed))
            if isinstance(events[-1], Finished):
                self.finished = events[-1]
            unheard = not self._waiting
            self._waiting += events
            if len(self._waiting) >= self._merge_at:
                self._waiting = merge_deltas(self._waiting)
                self._merge_at = 2 * len(self._waiting) + _MERGE_AT
        if unheard or self.over:
            with suppress(RuntimeError):  # the event loop is closed: nobody listens any more
                self._loop.call_soon_threadsafe(self._news.set)

    async def __anext__(self) -> PromptLogprobs | Delta | Finished:
        """Ends after Finished.

        Raises:
          JaxinferError: in place of Failed.
        """
        while not self._given:
            if self.over and not self._waiting:
                raise StopAsyncIteration
            await self._news.wait()
            self._given = self._take()[::-1]
        event = self._given.pop()
        if isinstance(event, Failed):
            raise event.error
        return event

    async def whole(self) -> list[Event]:
        """All events, once the last one is in; errors as in iteration. For one that has not been iterated."""
        while not self.over:
            await self._news.wait()
            self._news.clear()
        events = self._take()
        if isinstance(events[-1], Failed):
            raise events[-1].error
        return events

    def close(self) -> None:
        """Drops what waits, and whatever comes yet."""
        with self._lock:
            self.over = True
            self._waiting, self._given = [], []

    def _take(self) -> list[Event]:
        with self._lock:
            self._news.clear()
            events, self._waiting, self._merge_at = self._waiting, [], _MERGE_AT
        return merge_deltas(events)
