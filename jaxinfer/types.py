"""What flows between the floors: requests, sampling parameters, step plans and outputs. No JAX here.

All are plain frozen dataclasses. Names and defaults of `SamplingParams` are vLLM's, since that is what
people's scripts already say.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np

from jaxinfer.errors import InvalidArgumentError, JaxinferError

MAX_LOGPROBS = 20
MAX_SAMPLES = 128
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 8192  # of all stop strings together
MAX_BAD_WORDS = 64
MAX_BAD_WORD_TOKENS = 16
MAX_LOGIT_BIAS = 100.0
MAX_INT32 = 2**31 - 1
SEED_BITS = 64


class FinishReason(StrEnum):
    """Why a sample ended."""

    STOP = "stop"  # an end token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, the context, or the page pool is used up
    ABORT = "abort"  # the client went away or asked for it


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen and when to stop.

    Logits are changed in this order: allowed tokens, bad words, `min_tokens`, `logit_bias`, penalties (repetition,
    frequency, presence), temperature, `min_p`, `top_k`, `top_p`. Reported log-probabilities are of the model's own
    distribution, before all of these.

    Attributes:
      n: samples for the prompt, 1 to 128; sample i uses a seed derived from `seed` and i.
      presence_penalty: taken off the logit of every token in the output so far, -2 to 2.
      frequency_penalty: taken off for each time the token is in the output so far, -2 to 2.
      repetition_penalty: positive logits of tokens in the prompt or the output so far are divided by it, negative
        ones multiplied; in (0, 100], 1 changes nothing.
      temperature: 0 is greedy; otherwise logits are divided by it.
      top_p: keep the smallest set of tokens whose probabilities add up to this, in (0, 1].
      top_k: keep the k most likely tokens; 0 or -1 keeps all.
      min_p: keep tokens at least this fraction as likely as the likeliest, in [0, 1].
      seed: same seed, same tokens, whatever else runs; None draws one for each request.
      stop: strings that end the output; they are cut from the text.
      stop_token_ids: further end tokens; unlike the model's own they are not affected by `ignore_eos`.
      bad_words: strings that are not generated: the last token of one, where it would complete it, is never chosen.
        At most 64, each of at most 16 tokens.
      include_stop_str_in_output: leave the stop string (or the stop token's text) in the text.
      ignore_eos: go on after the model's own end tokens.
      max_tokens: most tokens to generate; None is the rest of the context.
      min_tokens: nothing ends the output before it has so many: end tokens are not chosen, stop strings not looked at.
      logprobs: how many of the likeliest tokens to report at each position (0 to 20), besides the chosen one.
      prompt_logprobs: the same for each position of the prompt but the first; such a request reads no cached prefix.
      detokenize: False gives token ids and no text.
      skip_special_tokens: leave control tokens out of the text.
      spaces_between_special_tokens: False takes out the spaces that some tokenizers put between control tokens.
      logit_bias: added to the logits of these token ids, -100 to 100.
      allowed_token_ids: if given, no other token is chosen.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        _check_int("n", self.n, 1, MAX_SAMPLES)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.0, 100.0, above_low=True)
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_float("top_p", self.top_p, 0.0, 1.0, above_low=True)
        _check_int("top_k", self.top_k, -1, MAX_INT32)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2 ** (SEED_BITS - 1)), 2**SEED_BITS - 1)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, MAX_INT32)
        _check_int("min_tokens", self.min_tokens, 0, MAX_INT32 if self.max_tokens is None else self.max_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, MAX_LOGPROBS)
        for name in _BOOL_PARAMS:
            if not isinstance(getattr(self, name), bool):
                raise InvalidArgumentError(name, getattr(self, name), "true or false")
        stop = _strings("stop", (self.stop,) if isinstance(self.stop, str) else self.stop, MAX_STOP_STRINGS)
        if (length := sum(map(len, stop))) > MAX_STOP_CHARACTERS:
            raise InvalidArgumentError("stop", f"{length} characters", f"at most {MAX_STOP_CHARACTERS} of all together")
        if stop and not self.detokenize:
            raise InvalidArgumentError("stop", list(stop), "stop strings need detokenize, since they are found in text")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "bad_words", _strings("bad_words", self.bad_words, MAX_BAD_WORDS))
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise InvalidArgumentError("allowed_token_ids", [], "at least one token id; leave it out to allow all")
            object.__setattr__(self, "allowed_token_ids", allowed)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return self.stop  # type: ignore[return-value]  # a tuple since __post_init__

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalizes(self) -> bool:
        """Whether the choice of a token depends on those before it by a penalty."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


_BOOL_PARAMS = (
    *("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens"),
    "spaces_between_special_tokens",
)


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidArgumentError(name, value, f"an integer from {low} to {high}")


def _check_float(name: str, value: object, low: float, high: float, *, above_low: bool = False) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not low <= value <= high or (above_low and value == low):  # type: ignore[operator]
        raise InvalidArgumentError(name, value, f"a number in {'(' if above_low else '['}{low:g}, {high:g}]")


def _strings(name: str, values: Any, most: int) -> tuple[str, ...]:
    if values is None:
        return ()
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise InvalidArgumentError(name, values, "a list of strings")
    texts = tuple(values)
    if len(texts) > most:
        raise InvalidArgumentError(name, f"{len(texts)} strings", f"at most {most}")
    for text in texts:
        if not isinstance(text, str) or not text:
            raise InvalidArgumentError(name, text, "non-empty strings")
    return texts


def _token_ids(name: str, values: Any) -> tuple[int, ...]:
    if values is None:
        return ()
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise InvalidArgumentError(name, values, "a list of token ids")
    ids = tuple(values)
    for token_id in ids:
        _check_int(name, token_id, 0, MAX_INT32)
    return ids


def _logit_bias(bias: Any) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise InvalidArgumentError("logit_bias", bias, "a mapping of token ids to numbers")
    for token_id, value in bias.items():
        _check_int("logit_bias", token_id, 0, MAX_INT32)
        _check_float(f"logit_bias[{token_id}]", value, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
    return dict(bias)


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
      timeout_s: seconds from its submission until it ends with DeadlineExceededError, wherever it stands; one whose
        time would run out before its first token is not started. None waits for ever.
    """

    request_id: str
    params: SamplingParams
    text: str | None = None
    token_ids: Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    parse_special: bool = False
    priority: int = 0
    timeout_s: float | None = None

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
    """Log-probabilities at one position: of the token there, and of the likeliest ones.

    `top` is sorted, likeliest first: as many as were asked for, and the chosen token, last, if it is not one of them.
    """

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
class PromptLogprobs:
    """Log-probabilities of the prompt's tokens, from the second on; sent once, before any Delta."""

    positions: Sequence[PositionLogprobs]


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


type Event = PromptLogprobs | Delta | Finished | Failed


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
    waiting_tokens: int  # prompt tokens of requests that have not started
    audit_breaches_total: int  # idle moments at which the page books did not add up
    kv_dtype: str  # of the pages' values; the rest of a token's bytes are scales
    kv_token_bytes: int  # of a replica, over all its devices

    @property
    def kv_tokens(self) -> int:
        """What the pages hold."""
        return self.total_pages * self.page_size

    def past(self) -> EngineStats:
        """What stays of it when its loop has been left: the totals."""
        names = ("running", "waiting", "total_pages", "free_pages", "cached_pages", "waiting_tokens")
        gauges: dict[str, Any] = dict.fromkeys(names, 0)
        return replace(self, output_tokens_per_s=0.0, **gauges)

    @classmethod
    def total(cls, parts: Sequence[EngineStats]) -> EngineStats:
        """Of several replicas together: sums, but for what is the same in all, and a mean of what is a step's."""
        if len(parts) == 1:
            return parts[0]
        same = {name: getattr(parts[0], name) for name in ("page_size", "kv_dtype", "kv_token_bytes")}
        sums = {
            name: sum(getattr(part, name) for part in parts) for name in cls.__dataclass_fields__ if name not in same
        }
        host_ms = sum(part.host_ms_per_step * part.steps_total for part in parts) / max(sums["steps_total"], 1)
        # One process counts compilations once, whoever asks.
        compiles = max(part.compiles_after_warmup for part in parts)
        return cls(**sums | same | {"host_ms_per_step": host_ms, "compiles_after_warmup": compiles})


# One row of sampling parameters as the device takes them; a plan carries one for each of its sequences.
SAMPLING_ROW = np.dtype(
    [
        ("temperature", np.float32),  # 0 is greedy
        ("top_p", np.float32),
        ("top_k", np.int32),  # 0 keeps all
        ("min_p", np.float32),
        ("seed", np.uint32, (2,)),  # of the sample's random stream; the position is folded in on the device
        ("num_logprobs", np.int32),  # -1: none asked; 0: the chosen token's alone
        ("num_prompt_logprobs", np.int32),  # the same, of the prompt's tokens
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("repetition_penalty", np.float32),
        ("min_position", np.int32),  # no end token is sampled before it
        ("ruled", np.int32),  # whether the slot has an entry: see `SlotEntry`
    ]
)


class SlotEntry(NamedTuple):
    """What the device keeps of a sequence that has rules for its logits, from its start on; see `logit_rules`.

    Attributes:
      slot: whose it is.
      prompt_token_ids, output_token_ids: int32, those known so far.
      end_token_ids: int32, not sampled before `min_position`.
      bias_token_ids, bias: int32 and float32, `logit_bias`.
      allowed_token_ids: int32, or None where all are.
      banned_words: [B, MAX_BAD_WORD_TOKENS] int32, padded with -1 in front.
    """

    slot: int
    prompt_token_ids: np.ndarray
    output_token_ids: np.ndarray
    end_token_ids: np.ndarray
    bias_token_ids: np.ndarray
    bias: np.ndarray
    allowed_token_ids: np.ndarray | None
    banned_words: np.ndarray


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
      scored: [X, 3] int32, (sequence, position, token): prompt tokens whose log-probability is asked for. The step
        computes the position before each.
      entries: of the sequences that start with this plan and have rules.
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
    scored: np.ndarray
    entries: tuple[SlotEntry, ...] = ()

    @property
    def num_seqs(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_rows(self) -> int:
        """Hidden states that become logits: one for each token sampled, one for each scored."""
        return int(np.count_nonzero(self.sampled)) + len(self.scored)


@dataclass(frozen=True, slots=True, eq=False)
class StepTokens:
    """What the host reads back of one step, row for row as in its plan. S sequences, X scored prompt tokens.

    Attributes:
      token_ids: [S] int32, the sampled tokens; -1 where none could be chosen (all are banned, or the logits are not
        numbers); meaningless where the plan's `sampled` is false.
      logprobs: [S] float32 and ranks [S] int32 (1 is likeliest) of the sampled tokens, or None if none asked.
      top_ids, top_logprobs: [S, MAX_LOGPROBS], the likeliest tokens in order, or None if none asked.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray | None = None
    ranks: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    scored: StepTokens | None = None  # the same of the plan's scored tokens, [X, ...]
