"""A request from arrival to its last event: its samples' text, log-probabilities, times and ends."""

from __future__ import annotations

import time
from collections.abc import Callable

from jaxinfer.engine.logprob_rows import LogprobRows, position_logprobs
from jaxinfer.engine.observer import Observer, RequestRecord, SampleRecord
from jaxinfer.engine.scheduler import NewToken, ScoredPrompt
from jaxinfer.engine.sequence import Sequence
from jaxinfer.errors import DeadlineExceededError
from jaxinfer.text.detokenizer import Detokenizer, Piece, TokensOnly
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.types import (
    Delta,
    Event,
    Failed,
    Finished,
    FinishReason,
    PositionLogprobs,
    PromptLogprobs,
    SampleEnd,
    StepTokens,
    Timings,
    Usage,
)

# Called on the engine's loop thread with each request's events, in order; must not block.
type Sink = Callable[[list[Event]], None]


class LiveRequest:
    """Turns a request's tokens into events. Used by the loop thread alone, once it is submitted.

    Attributes:
      replica: which one serves it.
      deadline: by `time.monotonic`, when it ends with DeadlineExceededError; None is never.
    """

    def __init__(
        self,
        samples: list[Sequence],
        tokenizer: Tokenizer,
        sink: Sink,
        observer: Observer,
        timeout_s: float | None = None,
    ):
        self._observer, self.replica = observer, 0
        first = samples[0]
        self.request_id, self.samples, self._sink = first.request_id, samples, sink
        params = first.params
        prompt = first.prompt_token_ids.tolist()
        self._texts: list[Detokenizer | TokensOnly] = [
            Detokenizer(
                tokenizer,
                stop=params.stop_strings,
                skip_special_tokens=params.skip_special_tokens,
                include_stop=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
                prompt_ids=prompt,
            )
            if params.detokenize
            else TokensOnly()
            for _ in samples
        ]
        # Sent whole, before the first token; None once sent, or where they are not asked for.
        self._prompt_logprobs = None if params.prompt_logprobs is None else LogprobRows(params.prompt_logprobs)
        self._logprobs: list[list[PositionLogprobs]] = [[] for _ in samples]
        self._ends: dict[int, SampleEnd] = {}
        self._arrival = time.monotonic()
        self.deadline = None if timeout_s is None else self._arrival + timeout_s
        self._timeout_s = timeout_s
        self._started: float | None = None
        # Of each sample's first and newest token.
        self._token_times: list[tuple[float, float] | None] = [None] * len(samples)
        self._over = False

    @property
    def num_prompt_tokens(self) -> int:
        return self.samples[0].num_prompt_tokens

    @property
    def started(self) -> bool:
        return self._started is not None

    def start(self) -> None:
        """The first step that computes it has been planned."""
        self._started = time.monotonic()
        self._observer.on_start(self._started - self._arrival)

    def timed_out(self) -> DeadlineExceededError:
        """What tells that its time ran out."""
        where = "while it was generated" if any(self._token_times) else "before its first token"
        return DeadlineExceededError(f"the request's {self._timeout_s:g} s ran out {where}")

    def score(self, scored: ScoredPrompt, tokens: StepTokens) -> None:
        """Takes in log-probabilities of the prompt, in order of position."""
        assert self._prompt_logprobs is not None
        assert tokens.scored is not None
        self._prompt_logprobs.append(tokens.scored, slice(scored.first, scored.first + scored.num_tokens))

    def push(self, new: NewToken, tokens: StepTokens) -> tuple[list[Event], str | None]:
        """Takes in a token; returns events to send, and the stop string it completed, if one."""
        events, stop = self._push(new, tokens)
        if self._prompt_logprobs is not None:
            events.insert(0, PromptLogprobs(self._prompt_logprobs))
            self._prompt_logprobs = None
        return events, stop

    def _push(self, new: NewToken, tokens: StepTokens) -> tuple[list[Event], str | None]:
        sequence = new.sequence
        self._clock(sequence.index)
        text, waiting = self._texts[sequence.index], self._logprobs[sequence.index]
        if tokens.logprobs is not None and sequence.params.logprobs is not None:
            waiting.append(position_logprobs(tokens, new.row, sequence.params.logprobs))
        if new.finish is FinishReason.STOP:
            # An end token's text is not part of the output unless asked for, its id is.
            if sequence.params.include_stop_str_in_output:
                piece = _join(text.push(new.token_id), text.flush())
            else:
                piece = text.flush()
                piece = piece._replace(token_ids=(*piece.token_ids, new.token_id))
            stop = new.token_id if piece.stop is None else piece.stop
            return self._finish(sequence, piece, new.finish, stop), None
        pushed = text.push(new.token_id)
        if pushed is not None and pushed.stop is not None:
            return self._finish(sequence, pushed, FinishReason.STOP, pushed.stop), pushed.stop
        if new.finish is not None:
            rest = _join(pushed, text.flush())
            # The end of the text may decide that a stop string stands.
            reason = new.finish if rest.stop is None else FinishReason.STOP
            return self._finish(sequence, rest, reason, rest.stop), None
        return ([] if pushed is None else [self._delta(sequence.index, pushed)]), None

    def _clock(self, index: int) -> None:
        now, times = time.monotonic(), self._token_times[index]
        if times is None:
            self._token_times[index] = (now, now)
            self._observer.on_first_token(now - self._arrival)
        else:
            self._token_times[index] = (times[0], now)
            self._observer.on_next_token(now - times[1])

    def abort(self) -> list[Event]:
        """Ends every sample that still lives."""
        events: list[Event] = []
        for sequence in self.samples:
            if sequence.index not in self._ends:
                piece = self._texts[sequence.index].flush()
                events += self._finish(sequence, piece, FinishReason.ABORT, None)
        return events

    def send(self, events: list[Event]) -> None:
        """Hands events to the client's side, but none after the last one."""
        if events and not self._over:
            self._over = isinstance(events[-1], (Finished, Failed))
            self._sink(events)

    def _delta(self, index: int, piece: Piece) -> Delta:
        waiting = self._logprobs[index]
        logprobs = tuple(waiting[: len(piece.token_ids)])
        del waiting[: len(piece.token_ids)]
        return Delta(index, piece.text, piece.token_ids, logprobs)

    def _finish(
        self, sequence: Sequence, piece: Piece, reason: FinishReason, stop_reason: str | int | None
    ) -> list[Event]:
        events: list[Event] = [self._delta(sequence.index, piece)] if piece.text or piece.token_ids else []
        self._ends[sequence.index] = SampleEnd(sequence.index, reason, stop_reason)
        if len(self._ends) == len(self.samples):
            events.append(self._finished())
        return events

    def _finished(self) -> Finished:
        ends = tuple(self._ends[index] for index in sorted(self._ends))
        return Finished(ends, self._usage(), self._timings())

    def _usage(self) -> Usage:
        return Usage(
            self.samples[0].num_prompt_tokens,
            sum(len(sequence.output_token_ids) for sequence in self.samples),
            self.samples[0].num_cached_tokens,
        )

    def _timings(self) -> Timings:
        now = time.monotonic()
        since = lambda at: (now if at is None else at) - self._arrival
        first = min((times[0] for times in self._token_times if times is not None), default=None)
        return Timings(since(self._started), since(first), now - self._arrival)

    def record(self, last: Finished | Failed) -> RequestRecord:
        """What an observer hears of it at its end."""
        samples = []
        for end in last.ends if isinstance(last, Finished) else ():
            first, newest = self._token_times[end.index] or (None, None)
            samples.append(
                SampleRecord(
                    finish_reason=end.finish_reason,
                    output_tokens=len(self.samples[end.index].output_token_ids),
                    first_token_s=None if first is None else first - self._arrival,
                    last_token_s=None if newest is None else newest - self._arrival,
                )
            )
        params = self.samples[0].params
        return RequestRecord(
            request_id=self.request_id,
            samples=tuple(samples),
            error_code=last.error.code if isinstance(last, Failed) else None,
            usage=last.usage if isinstance(last, Finished) else self._usage(),
            timings=last.timings if isinstance(last, Finished) else self._timings(),
            n=params.n,
            max_tokens=params.max_tokens,
        )


def _join(first: Piece | None, rest: Piece) -> Piece:
    if first is None:
        return rest
    return Piece(first.text + rest.text, first.token_ids + rest.token_ids, first.stop or rest.stop)
