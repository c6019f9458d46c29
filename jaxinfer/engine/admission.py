"""Who may wait: bounds on the requests that have not started, and on the tokens of their prompts."""

from __future__ import annotations

import threading
import time
from collections import deque

from jaxinfer.errors import QueueFullError

MIN_RETRY_S, MAX_RETRY_S = 0.1, 60.0  # of the hint in a refusal


class Admission:
    """Counts what waits, from when a request comes until it starts or ends. Threads may share it.

    A request comes before its prompt is tokenized, which takes time, and brings its tokens after that.
    """

    def __init__(self, max_waiting: int, max_waiting_tokens: int):
        self._max_requests, self._max_tokens = max_waiting, max_waiting_tokens
        self._lock = threading.Lock()
        self.requests = self.tokens = 0
        self._starts: deque[float] = deque(maxlen=32)  # when the last of them started

    def come(self) -> None:
        """Raises QueueFullError if as many requests or tokens wait as may."""
        with self._lock:
            if self.requests >= self._max_requests:
                raise self._full(f"{self.requests} requests are waiting, the limit is {self._max_requests}")
            if self.tokens >= self._max_tokens:
                raise self._full(f"{self.tokens} prompt tokens are waiting, the limit is {self._max_tokens}")
            self.requests += 1

    def bring(self, num_tokens: int) -> None:
        """Adds the tokens of a prompt. One that is alone may be as long as it likes.

        Raises:
          QueueFullError: with these, more tokens would wait than may; they are not added.
        """
        with self._lock:
            if self.tokens and self.tokens + num_tokens > self._max_tokens:
                waiting = f"{self.tokens} prompt tokens are waiting, and this prompt has {num_tokens}"
                raise self._full(f"{waiting}: over the limit of {self._max_tokens}")
            self.tokens += num_tokens

    def go(self, num_tokens: int, *, started: bool) -> None:
        """A request that came and brought so many tokens waits no longer."""
        with self._lock:
            self.requests -= 1
            self.tokens -= num_tokens
            if started:
                self._starts.append(time.monotonic())

    def _full(self, why: str) -> QueueFullError:
        """With a hint: the time in which a tenth of the queue starts, as things went lately."""
        starts = self._starts
        interval = (time.monotonic() - starts[0]) / len(starts) if starts else 1.0
        error = QueueFullError(f"{why}; try again later")
        error.retry_after_s = min(max(interval * self.requests / 10, MIN_RETRY_S), MAX_RETRY_S)
        return error
