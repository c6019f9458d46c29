"""One sample of a request while it lives: its tokens, its pages, and how far it has been computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from jaxinfer.kv_cache.prefix import page_key, root_key
from jaxinfer.types import MAX_BAD_WORD_TOKENS, FinishReason, SamplingParams, SlotEntry

_MASK64 = (1 << 64) - 1
NO_WORDS = np.zeros((0, MAX_BAD_WORD_TOKENS), np.int32)


class Status(Enum):
    """Where a sequence stands in the scheduler. A preempted one waits again."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """Mutable state of one sample. Only the scheduler changes it, on the engine's loop thread.

    Attributes:
      index: the sample's number within its request.
      prompt_token_ids: [P] int32, one array shared by all samples.
      seed: 64 bits, of this sample's own random stream.
      leader: sample 0, whose prompt pages the other samples share; None for sample 0 itself.
      cache_namespace: keeps prefixes apart that must not share pages (adapter, salt, KV dtype).
      use_prefix_cache: False computes the whole prompt (its logprobs are asked for).
      output_token_ids: tokens the host has read back.
      num_tokens: prompt and output tokens, those sampled but not yet read back included.
      num_computed_tokens: tokens whose keys and values are in the cache once every plan made so far has run.
      num_cached_tokens: prompt tokens the prefix index gave when the sequence first ran.
      page_ids: pages in order of position; replaced, never emptied, when the sequence loses them.
      page_keys: prefix keys of the first pages, as far as they have been needed.
      order: (priority, arrival, index): who runs first; who is preempted last.
      max_total_tokens: where max_tokens, the context or the pool end it: prompt and output together.
      end_token_ids: tokens that end it.
      banned_words: [B, MAX_BAD_WORD_TOKENS] int32: its `bad_words` as tokens, padded with -1 in front.
      next_scored: the first prompt position whose log-probability is asked for and not read back yet.
      last_step: the newest plan that touches its pages, -1 before the first.
    """

    request_id: str
    index: int
    prompt_token_ids: np.ndarray
    params: SamplingParams
    seed: int
    priority: int = 0
    leader: Sequence | None = None
    cache_namespace: bytes = b""
    use_prefix_cache: bool = True

    output_token_ids: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_prompt_tokens: int = field(init=False)
    num_tokens: int = field(init=False)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    slot: int = -1
    page_ids: list[int] = field(default_factory=list)
    page_keys: list[bytes] = field(default_factory=list)
    order: tuple[int, int, int] = (0, 0, 0)
    max_total_tokens: int = 0
    end_token_ids: frozenset[int] = frozenset()
    banned_words: np.ndarray = field(default_factory=lambda: NO_WORDS)
    next_scored: int = 1
    last_step: int = -1

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_tokens = len(self.prompt_token_ids)

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of its prompt are still to be computed; sample 0 does it for all."""
        asked = self.params.prompt_logprobs is not None and self.leader is None
        return asked and self.next_scored < self.num_prompt_tokens

    @property
    def ruled(self) -> bool:
        """Whether its logits are changed before a token is chosen (see `sampling.logit_rules`)."""
        params = self.params
        changed = params.penalizes or params.logit_bias or params.allowed_token_ids is not None
        return bool(changed or params.min_tokens or len(self.banned_words))

    @property
    def num_known_tokens(self) -> int:
        """Tokens whose ids the host knows."""
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def num_in_flight(self) -> int:
        """Sampled tokens that are still on the device."""
        return self.num_tokens - self.num_known_tokens

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    def token_slice(self, start: int, end: int) -> np.ndarray:
        """Token ids [end - start] int32 of positions `start` to `end`, all of them known to the host."""
        prompt_len = self.num_prompt_tokens
        if end <= prompt_len:
            return self.prompt_token_ids[start:end]
        outputs = np.array(self.output_token_ids[max(start - prompt_len, 0) : end - prompt_len], np.int32)
        return outputs if start >= prompt_len else np.concatenate([self.prompt_token_ids[start:], outputs])

    def slot_entry(self) -> SlotEntry:
        """What the device has to know of it at its start, or when it starts again."""
        bias = self.params.logit_bias or {}
        allowed = self.params.allowed_token_ids
        return SlotEntry(
            slot=self.slot,
            prompt_token_ids=self.prompt_token_ids,
            output_token_ids=np.array(self.output_token_ids, np.int32),
            end_token_ids=np.array(sorted(self.end_token_ids), np.int32),
            bias_token_ids=np.array(list(bias), np.int32),
            bias=np.array(list(bias.values()), np.float32),
            allowed_token_ids=None if allowed is None else np.array(allowed, np.int32),
            banned_words=self.banned_words,
        )

    def keys_of_pages(self, count: int, page_size: int) -> list[bytes]:
        """Prefix keys of at least the first `count` pages, which must be full of known tokens."""
        keys = self.page_keys
        if len(keys) < count:
            parent = keys[-1] if keys else root_key(self.cache_namespace)
            raw = memoryview(self.token_slice(len(keys) * page_size, count * page_size).tobytes())
            stride = 4 * page_size
            for offset in range(0, len(raw), stride):
                parent = page_key(parent, raw[offset : offset + stride])
                keys.append(parent)
        return keys


def make_samples(
    request_id: str,
    prompt_token_ids: np.ndarray,
    params: SamplingParams,
    *,
    seed: int,
    priority: int = 0,
    cache_namespace: bytes = b"",
    banned_words: np.ndarray = NO_WORDS,
) -> list[Sequence]:
    """The `params.n` sequences of one request; `seed` is the request's (drawn before, if the client gave none).

    Where log-probabilities of the prompt are asked for, all of it is computed: what a cached page holds has none.
    """
    prompt = np.ascontiguousarray(prompt_token_ids, dtype=np.int32)
    samples: list[Sequence] = []
    for index in range(params.n):
        samples.append(
            Sequence(
                request_id=request_id,
                index=index,
                prompt_token_ids=prompt,
                params=params,
                seed=sample_seed(seed, index),
                priority=priority,
                leader=samples[0] if samples else None,
                cache_namespace=cache_namespace,
                use_prefix_cache=params.prompt_logprobs is None,
                banned_words=banned_words,
            )
        )
    return samples


def sample_seed(seed: int, index: int) -> int:
    """64-bit seed of sample `index`: sample 0 has the request's own, so that n=1 is the first of n."""
    seed &= _MASK64
    return seed if index == 0 else _mix64(_mix64(seed) + index)


def _mix64(value: int) -> int:
    """The step of splitmix64 (Steele, Lea and Flood, 2014): a bijection that scatters neighbouring values."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
