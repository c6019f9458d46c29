"""What an engine tells whoever measures it: steps, tokens and the ends of requests, as numbers and without text."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from jaxinfer.types import FinishReason, Timings, Usage

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRecord:
    """One sample of a request that ended.

    Attributes:
      finish_reason: why it ended.
      output_tokens: how many it has.
      first_token_s, last_token_s: seconds from the request's arrival to its first and last token; None if it has none.
    """

    finish_reason: FinishReason
    output_tokens: int
    first_token_s: float | None
    last_token_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request that ended, with all its samples.

    Attributes:
      samples: in order of index; empty if the request failed.
      error_code: the `code` of the error that it failed with; None if it did not fail.
      usage, timings: of the request as a whole; up to its failure, if it failed.
      n, max_tokens: as asked for; `max_tokens` None is the rest of the context.
    """

    request_id: str
    samples: tuple[SampleRecord, ...]
    error_code: str | None
    usage: Usage
    timings: Timings
    n: int
    max_tokens: int | None


class Observer:
    """Hears what an engine does. This one ignores it all; subclasses override what they need.

    All methods but `on_refuse` are called on the engine's loop thread, between steps and some of them for every token:
    they must not block, and should take about a microsecond. An exception is logged by the engine, which from then on
    calls the observer no more.
    """

    def on_refuse(self, code: str) -> None:
        """A request was refused with the error of this code, and nothing was started. Called on any thread."""

    def on_start(self, seconds: float) -> None:
        """The first step of a request was planned, `seconds` after its arrival. Once a request."""

    def on_step(self, num_tokens: int, num_seqs: int, seconds: float) -> None:
        """A step's tokens were taken in: so many tokens of so many sequences were computed.

        `seconds` is the loop's turn that took them in; while steps follow each other, from one step to the next.
        """

    def on_first_token(self, seconds: float) -> None:
        """A sample's first token came, `seconds` after the request's arrival. Once a sample."""

    def on_next_token(self, seconds: float) -> None:
        """A sample's next token came, `seconds` after its previous one."""

    def on_end(self, record: RequestRecord) -> None:
        """A request that was not refused has ended, well or not."""


class GuardedObserver(Observer):
    """Hands everything on to `inner`, until that raises: then it hears no more, and nothing else is harmed.

    Loops of several replicas call it at once; `inner` hears one after the other.
    """

    def __init__(self) -> None:
        self.inner = Observer()
        self._lock = threading.Lock()

    def on_refuse(self, code: str) -> None:
        self._call(self.inner.on_refuse, code)

    def on_start(self, seconds: float) -> None:
        self._call(self.inner.on_start, seconds)

    def on_step(self, num_tokens: int, num_seqs: int, seconds: float) -> None:
        self._call(self.inner.on_step, num_tokens, num_seqs, seconds)

    def on_first_token(self, seconds: float) -> None:
        self._call(self.inner.on_first_token, seconds)

    def on_next_token(self, seconds: float) -> None:
        self._call(self.inner.on_next_token, seconds)

    def on_end(self, record: RequestRecord) -> None:
        self._call(self.inner.on_end, record)

    def _call(self, method: Callable[..., None], *args: object) -> None:
        try:
            with self._lock:
                method(*args)
        except Exception:
            logger.exception("the observer %s failed; it hears no more", type(self.inner).__name__)
            self.inner = Observer()
