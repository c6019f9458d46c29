"""The loop thread: it alone owns scheduler, runner and live requests. All else reaches it by messages."""

from __future__ import annotations

import heapq
import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from jaxinfer.engine.live_request import LiveRequest
from jaxinfer.engine.observer import Observer
from jaxinfer.engine.scheduler import NewToken, Scheduler, ScoredPrompt
from jaxinfer.errors import EngineDeadError, JaxinferError, RequestFailedError, StepFailedError
from jaxinfer.types import EngineStats, Event, Failed, Finished, FinishReason, StepPlan, StepTokens

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3  # in a row; then the device is taken for lost
RATE_SECONDS = 10.0
AUDIT_AFTER_S = 0.05  # of idleness: not between two requests that follow each other


class Flight(Protocol):
    """A step under way."""

    @property
    def plan(self) -> StepPlan: ...


class StepRunner(Protocol):
    """What runs plans, in the order given: on devices of this process, or of others.

    Any error but EngineDeadError fails the step alone; that one says that what steps run on is lost.
    """

    @property
    def compiles_after_warm_up(self) -> int: ...

    def dispatch(self, plan: StepPlan) -> Flight:
        """Starts a step and returns at once."""

    def read(self, flight: Any) -> StepTokens:
        """Waits for a step's tokens."""

    def reset(self) -> None:
        """A new, empty state."""


class EngineLoop:
    """Plans, dispatches, reads, commits, and sends events, a step ahead of the tokens.

    `on_start` and `on_end` hear of each request once, on this thread; `on_death` of the loop dying of an error.

    Attributes:
      stats: as of the last step.
      audit_breaches: idle moments at which the page books did not add up.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        *,
        observer: Observer,
        on_start: Callable[[LiveRequest], None],
        on_end: Callable[[LiveRequest], None],
        on_death: Callable[[EngineDeadError], None],
    ):
        self._scheduler, self._runner, self._observer = scheduler, runner, observer
        self._on_start, self._on_end, self._on_death = on_start, on_end, on_death
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._live: dict[str, LiveRequest] = {}
        self._not_started: dict[str, LiveRequest] = {}
        self._deadlines: list[tuple[float, int, LiveRequest]] = []  # a heap; those of ended requests stay until due
        self._numbers = itertools.count()
        self._stopping = self._leaving = self._dead = False
        self._progress_at: float | None = None  # when the loop last began a step; None while it is idle
        self._step_seconds = 0.0  # the last step's
        self.audit_breaches = 0
        self._audited_steps = 0
        self._failed_steps = 0
        self._waiting_tokens = 0  # prompt tokens of those not started
        self._steps = self._prompt_tokens = self._output_tokens = self._cached_tokens = 0
        self._host_seconds = 0.0
        self._rate: deque[tuple[float, int]] = deque()
        self._thread = threading.Thread(target=self._main, name="jaxinfer-loop", daemon=True)
        self.stats = self._snapshot()

    def start(self) -> None:
        self._thread.start()

    @property
    def seconds_without_progress(self) -> float:
        """Since the step it is in began; 0 while it is idle. From any thread."""
        since = self._progress_at
        return 0.0 if since is None else time.monotonic() - since

    # Messages, from any thread.

    def submit(self, live: LiveRequest) -> None:
        """Takes on a request, new or from a loop that was left; one that has begun goes ahead of all that are here."""
        self._inbox.put(lambda: self._add(live))

    def abort(self, request_id: str) -> None:
        self._inbox.put(lambda: self._abort(request_id))

    def fail_all(self, error: JaxinferError) -> None:
        """Ends every live request with the error."""
        self._inbox.put(lambda: self._fail_all(error))

    def die(self, error: EngineDeadError) -> None:
        """Ends the loop and every live request with the error, as if its runner had raised it."""

        def fail() -> None:
            if not self._dead:
                raise error

        self._inbox.put(fail)

    def call(self, function: Callable[[], None]) -> None:
        """Runs a function on the loop thread between two steps."""
        self._inbox.put(function)

    def leave(self) -> list[LiveRequest]:
        """Ends the thread once the step under way is read, and returns what still lives. All cached pages are lost."""

        def set_leaving() -> None:
            self._leaving = True

        self._inbox.put(set_leaving)
        self._thread.join()
        self._scheduler.reset_cache()
        self.stats = self._snapshot()
        return list(self._live.values())

    def end_left(self, error: JaxinferError, also: Iterable[LiveRequest] = ()) -> None:
        """Ends what lived when the loop was left, and some that never came to it."""
        self._live |= {live.request_id: live for live in also}
        for live in list(self._live.values()):
            self._end(live, error)

    def stop(self, timeout: float) -> None:
        """Ends the thread after the step it is in, and waits for that for `timeout` seconds."""

        def set_stopping() -> None:
            self._stopping = True

        self._inbox.put(set_stopping)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    # The loop.

    def _main(self) -> None:
        try:
            self._run()
        except BaseException as error:
            if isinstance(error, EngineDeadError):
                logger.error("the engine loop ended: %s", error)
                dead = error
            else:
                logger.exception("the engine loop died")
                dead = EngineDeadError(f"the engine stopped: {type(error).__name__}: {error}")
            self._on_death(dead)  # from here on nothing more is submitted
            self._dead = True
            while not self._inbox.empty():
                self._inbox.get()()
            # The scheduler is not asked any more: it may be what broke.
            for live in list(self._live.values()):
                self._end(live, dead)

    def _run(self) -> None:
        flight: Flight | None = None
        while True:
            if flight is None and not self._scheduler.has_unfinished:
                self._wait()
            self._take_messages()
            if self._stopping:
                return
            self._expire()
            now = time.monotonic()
            if self._progress_at is not None:
                self._step_seconds = now - self._progress_at
            self._progress_at = now
            begun = time.perf_counter()
            waited = 0.0
            plan = None if self._leaving else self._scheduler.plan()
            if plan is None and flight is None:
                if self._leaving:
                    return
                if self._scheduler.has_unfinished:
                    raise RuntimeError("requests wait, nothing runs, and none can be planned")
                continue
            try:
                following = None if plan is None else self._dispatch(plan)
            except EngineDeadError:
                raise
            except Exception as error:
                assert plan is not None
                self._step_failed(plan, error)
                flight = None
                continue
            if flight is not None:
                before = time.perf_counter()
                try:
                    tokens = self._runner.read(flight)
                except EngineDeadError:
                    raise
                except Exception as error:
                    self._step_failed(flight.plan, error)
                    flight = None
                    continue
                waited = time.perf_counter() - before
                self._failed_steps = 0
                self._commit(flight, tokens)
            flight = following
            self._host_seconds += time.perf_counter() - begun - waited

    def _wait(self) -> None:
        """Until there is a message, which is taken. Nothing runs meanwhile, so the page books must add up."""
        self._progress_at = None
        self._deadlines.clear()
        self.stats = self._snapshot()
        try:
            message = self._inbox.get(timeout=AUDIT_AFTER_S)
        except queue.Empty:
            if self._steps > self._audited_steps:
                self._audit()
            message = self._inbox.get()
        message()

    def _take_messages(self) -> None:
        try:
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            pass

    def _audit(self) -> None:
        self._audited_steps = self._steps
        pages = self._scheduler.pages
        try:
            self._scheduler.audit()
            if pages.num_in_use:
                raise JaxinferError(f"{pages.num_in_use} pages are in use while nothing runs")
        except JaxinferError as error:
            self.audit_breaches += 1
            logger.error("idle audit: %s", error)
        self.stats = self._snapshot()

    def _expire(self) -> None:
        """Ends requests whose time is over, and those that wait and would get no step before it is."""
        now = time.monotonic()
        running = []
        while self._deadlines and self._deadlines[0][0] <= now + self._step_seconds:
            entry = heapq.heappop(self._deadlines)
            deadline, _, live = entry
            if self._live.get(live.request_id) is not live:
                continue
            if live.started and deadline > now:
                running.append(entry)
                continue
            self._scheduler.abort(live.request_id)
            self._end(live, live.timed_out())
        for entry in running:
            heapq.heappush(self._deadlines, entry)

    def _dispatch(self, plan: StepPlan) -> Flight:
        flight = self._runner.dispatch(plan)
        self._steps += 1
        if self._not_started:
            for live in [live for live in self._not_started.values() if live.samples[0].last_step >= 0]:
                live.start()
                self._no_longer_waits(live)
                self._prompt_tokens += live.samples[0].num_prompt_tokens
                self._cached_tokens += live.samples[0].num_cached_tokens
                self._on_start(live)
        return flight

    def _commit(self, flight: Flight, tokens: StepTokens) -> None:
        num_tokens = 0
        for result in self._scheduler.commit(flight.plan, tokens):
            live = self._live.get(result.sequence.request_id)
            if live is None:  # failed by an earlier sample's token of this step
                continue
            try:
                if isinstance(result, ScoredPrompt):
                    live.score(result, tokens)
                elif result.token_id < 0:
                    self._end(live, _no_token(result))
                else:
                    num_tokens += 1
                    events, stop = live.push(result, tokens)
                    if stop is not None:
                        self._scheduler.finish(result.sequence, FinishReason.STOP, stop)
                    self._send(live, events)
            except Exception as error:
                self._request_failed(live, error)
        self._output_tokens += num_tokens
        now = time.monotonic()
        self._rate.append((now, num_tokens))
        self._observer.on_step(flight.plan.num_tokens, flight.plan.num_seqs, now - (self._progress_at or now))
        self.stats = self._snapshot()

    # What may go wrong.

    def _request_failed(self, live: LiveRequest, error: Exception) -> None:
        about = {"request_id": live.request_id}
        logger.error("request %s failed", live.request_id, exc_info=error, extra=about)
        self._scheduler.abort(live.request_id)
        self._end(live, RequestFailedError(f"{type(error).__name__} while its output was made: {error}"))

    def _step_failed(self, plan: StepPlan, error: Exception) -> None:
        self._failed_steps += 1
        logger.error("step %d failed (%d in a row)", plan.step, self._failed_steps, exc_info=error)
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise RuntimeError(f"{self._failed_steps} steps failed in a row, the last with: {error}") from error
        ended = self._scheduler.fail(plan)
        failed = StepFailedError(f"step {plan.step} failed: {type(error).__name__}: {error}")
        for request_id in dict.fromkeys(sequence.request_id for sequence in ended):
            self._end(self._live[request_id], failed)
        self._runner.reset()

    def _end(self, live: LiveRequest, error: JaxinferError) -> None:
        try:
            self._send(live, [Failed(error)])
        except Exception:  # its sink is broken: there is nobody left to tell
            about = {"request_id": live.request_id}
            logger.exception("request %s could not be told of its end", live.request_id, extra=about)

    def _send(self, live: LiveRequest, events: list[Event]) -> None:
        """Hands events to the client's side; a request that ends is forgotten first, so that its id is free again."""
        if events and isinstance(events[-1], (Finished, Failed)) and self._live.pop(live.request_id, None) is live:
            if live.request_id in self._not_started:
                self._no_longer_waits(live)
            self._on_end(live)
            self._observer.on_end(live.record(events[-1]))
        live.send(events)

    def _no_longer_waits(self, live: LiveRequest) -> None:
        del self._not_started[live.request_id]
        self._waiting_tokens -= live.num_prompt_tokens

    # Messages, on the loop thread.

    def _add(self, live: LiveRequest) -> None:
        self._live[live.request_id] = live
        if not live.started:
            self._not_started[live.request_id] = live
            self._waiting_tokens += live.num_prompt_tokens
        try:
            if not self._dead:
                enqueue = self._scheduler.resume if live.started else self._scheduler.add
                enqueue(live.samples)
                if live.deadline is not None:
                    heapq.heappush(self._deadlines, (live.deadline, next(self._numbers), live))
        except JaxinferError as error:
            self._end(live, error)

    def _abort(self, request_id: str) -> None:
        live = self._live.get(request_id)
        if live is None or self._dead:
            return
        self._scheduler.abort(request_id)
        try:
            self._send(live, live.abort())
        except Exception as error:
            self._request_failed(live, error)

    def _fail_all(self, error: JaxinferError) -> None:
        for live in list(self._live.values()):
            if not self._dead:
                self._scheduler.abort(live.request_id)
            self._end(live, error)

    def _snapshot(self) -> EngineStats:
        now = time.monotonic()
        while self._rate and self._rate[0][0] < now - RATE_SECONDS:
            self._rate.popleft()
        # Over the time since the first of these steps, so that a burst reads right from its start.
        span = max(now - self._rate[0][0], 1e-3) if len(self._rate) > 1 else RATE_SECONDS
        scheduler, pages = self._scheduler, self._scheduler.pages
        return EngineStats(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            total_pages=scheduler.config.num_pages,
            free_pages=pages.num_free,
            cached_pages=pages.num_cached,
            page_size=scheduler.config.page_size,
            output_tokens_per_s=sum(count for _, count in list(self._rate)[1:]) / span,
            prompt_tokens_total=self._prompt_tokens,
            output_tokens_total=self._output_tokens,
            cached_tokens_total=self._cached_tokens,
            preemptions_total=scheduler.num_preemptions,
            steps_total=self._steps,
            compiles_after_warmup=self._runner.compiles_after_warm_up,
            host_ms_per_step=1e3 * self._host_seconds / max(self._steps, 1),
            waiting_tokens=self._waiting_tokens,
            audit_breaches_total=self.audit_breaches,
            kv_dtype=scheduler.config.kv_dtype or "",
            kv_token_bytes=scheduler.config.kv_token_bytes,
        )


def _no_token(new: NewToken) -> RequestFailedError:
    at = len(new.sequence.output_token_ids)
    return RequestFailedError(
        f"no token can be chosen at output position {at} of sample {new.sequence.index}: allowed_token_ids, bad_words, "
        "min_tokens and logit_bias leave none, or the model's logits are not numbers"
    )
