"""What flows between the floors: requests, sampling parameters, step plans and outputs. No JAX here.

All are plain frozen dataclasses. Names and defaults of `SamplingParams` are vLLM's, since that is what
people's scripts already say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np

from jaxinfer.errors import InvalidArgumentError, JaxinferError

MAX_LOGPROBS = 20
MAX_SAMPLES = 128
MAX_STOP_STRINGS = 64
SEED_BITS = 64


class FinishReason(StrEnum):
    """Why a sample ended."""

    STOP = "stop"  # an end token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, the context, or the page pool is used up
    ABORT = "abort"  # the client went away or asked for it


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen and when to stop.

    Attributes:
      n: samples for the prompt, 1 to 128; sample i uses a seed derived from `seed` and i.
      temperature: 0 is greedy; otherwise logits are divided by it.
      top_p: keep the smallest set of tokens whose probabilities add up to this, in (0, 1].
      top_k: keep the k most likely tokens; 0 or -1 keeps all.
      min_p: keep tokens at least this fraction as likely as the likeliest, in [0, 1].
      seed: same seed, same tokens, whatever else runs; None draws one for each request.
      stop: strings that end the output; they are cut from the text.
      stop_token_ids: further end tokens; unlike the model's own they are not affected by `ignore_eos`.
      max_tokens: most tokens to generate; None is the rest of the context.
      ignore_eos: go on after the model's own end tokens.
      logprobs: how many of the likeliest tokens to report at each position (0 to 20), besides the chosen one.
      skip_special_tokens: leave control tokens out of the text.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    max_tokens: int | None = 16
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _check_int("n", self.n, 1, MAX_SAMPLES)
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_float("top_p", self.top_p, 0.0, 1.0, above_low=True)
        _check_int("top_k", self.top_k, -1, 2**31 - 1)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2 ** (SEED_BITS - 1)), 2**SEED_BITS - 1)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        stop = () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if len(stop) > MAX_STOP_STRINGS:
            raise InvalidArgumentError("stop", f"{len(stop)} strings", f"at most {MAX_STOP_STRINGS}")
        for text in stop:
            if not isinstance(text, str) or not text:
                raise InvalidArgumentError("stop", text, "non-empty strings")
        object.__setattr__(self, "stop", stop)
        ids = tuple(self.stop_token_ids or ())
        for token_id in ids:
            _check_int("stop_token_ids", token_id, 0, 2**31 - 1)
        object.__setattr__(self, "stop_token_ids", ids)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return self.stop  # type: ignore[return-value]  # a tuple since __post_init__

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidArgumentError(name, value, f"an integer from {low} to {high}")


def _check_float(name: str, value: object, low: float, high: float, *, above_low: bool = False) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not low <= value <= high or (above_low and value == low):  # type: ignore[operator]
        raise InvalidArgumentError(name, value, f"a number in {'(' if above_low else '['}{low:g}, {high:g}]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a client asks for, before tokenization. Exactly one of `text`, `token_ids` and `messages` is set.

    Attributes:
      request_id: unique among live requests.
      text: a prompt taken as plain text. Strings that look like control tokens stay text unless
        `parse_special` is set.
      token_ids: a prompt already tokenized.
      messages: chat messages, each a mapping with `role` and `content`, rendered by the model's chat template.
        Control-token strings inside `content` always stay text.
      priority: smaller runs earlier; equal priorities run first come, first served.
    """

    request_id: str
    params: SamplingParams
    text: str | None = None
    token_ids: Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    parse_special: bool = False
    priority: int = 0

    def __post_init__(self) -> None:
        given = [name for name in ("text", "token_ids", "messages") if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidArgumentError("prompt", given, "exactly one of text, token_ids and messages")


class TokenLogprob(NamedTuple):
    """Log-probability of one token under the model's unmodified distribution, and its rank (1 is likeliest)."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Log-probabilities at one generated position: the chosen token, then the likeliest ones in order."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a finished request; `cached_tokens` of the prompt came from the prefix cache."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds from arrival: to the first step that computed it, to its first token, to its end."""

    queue_s: float
    first_token_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of one sample: text, and the token ids that text came from."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class SampleEnd:
    """How one sample ended; `stop_reason` is the stop string or token id that ended it, if one did."""

    index: int
    finish_reason: FinishReason
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a request that did not fail; exactly one of `Finished` and `Failed` is ever sent."""

    ends: tuple[SampleEnd, ...]
    usage: Usage
    timings: Timings


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event of a request that failed."""

    error: JaxinferError


type Event = Delta | Finished | Failed


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the engine, read by the server and the benchmark."""

    running: int
    waiting: int
    total_pages: int
    free_pages: int
    cached_pages: int
    page_size: int
    output_tokens_per_s: float  # over the last ten seconds
    prompt_tokens_total: int
    output_tokens_total: int
    cached_tokens_total: int
    preemptions_total: int
    steps_total: int
    compiles_after_warmup: int
    host_ms_per_step: float


# One row of sampling parameters as the device takes them; a plan carries one for each of its sequences.
SAMPLING_ROW = np.dtype(
    [
        ("temperature", np.float32),  # 0 is greedy
        ("top_p", np.float32),
        ("top_k", np.int32),  # 0 keeps all
        ("min_p", np.float32),
        ("seed", np.uint32, (2,)),  # of the sample's random stream; the position is folded in on the device
        ("num_logprobs", np.int32),  # -1: none asked; 0: the chosen token's alone
    ]
)


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """All the runner needs to know of one step, as flat NumPy so that it can travel. S sequences, T tokens.

    Sequences with one token (decodes) come first, then prefill chunks. Tokens of sequence i lie at positions
    `starts[i]` to `starts[i] + query_lens[i] - 1`; the cache holds those before. The arrays are the plan's own:
    nobody changes them later.

    Attributes:
      step: counts plans from 0.
      slots: [S] int32, each sequence's row in device state (0 to max_num_seqs - 1), stable while it runs.
      starts: [S] int32.
      query_lens: [S] int32, at least 1.
      token_ids: [T] int32, sequence after sequence; -1 is the token this slot sampled last, still on the device.
      page_table: [S, M] int32, page ids in order of position; M is the largest any row needs, the rest is 0.
      sampled: [S] bool, whether the row's last token yields a new token (false for all but a prompt's last chunk).
      sampling: [S] of SAMPLING_ROW.
      page_copies: [C, 2] int32, (source, target) pages copied before the step writes.
    """

    step: int
    slots: np.ndarray
    starts: np.ndarray
    query_lens: np.ndarray
    token_ids: np.ndarray
    page_table: np.ndarray
    sampled: np.ndarray
    sampling: np.ndarray
    page_copies: np.ndarray

    @property
    def num_seqs(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class StepTokens:
    """What the host reads back of one step, row for row as in its plan. S sequences.

    Attributes:
      token_ids: [S] int32, the sampled tokens; meaningless where the plan's `sampled` is false.
      logprobs: [S] float32 and ranks [S] int32 (1 is likeliest) of the sampled tokens, or None if none asked.
      top_ids, top_logprobs: [S, MAX_LOGPROBS], the likeliest tokens in order, or None if none asked.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray | None = None
    ranks: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
