"""The requests of soak.py, drawn from a seed, and what must be true of each reply."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxinfer.engine.engine import Engine
from jaxinfer.errors import JaxinferError
from jaxinfer.types import Delta, Event, Finished, FinishReason, PromptLogprobs, SampleEnd, SamplingParams
from server.wire import Generation

# What is asked.


@dataclass(frozen=True)
class Case:
    """One request, and what is to become of it.

    Attributes:
      prompt_ids: the prompt's tokens, however it is sent.
      error: the code of the error it must end with; None if it is sound.
      abort: "cancel", "rpc" (Abort), "deadline", or None.
      abort_after_s: seconds from its sending; None where `abort_after_tokens` says when.
      abort_after_tokens: of all samples together; 0 is after the end.
      probe: the number of the probe that it repeats.
    """

    prompt: Any
    prompt_ids: list[int]
    params: SamplingParams
    priority: int = 0
    unary: bool = False
    error: str | None = None
    model: str | None = None
    request_id: str | None = None
    abort: str | None = None
    abort_after_s: float | None = None
    abort_after_tokens: int | None = None
    probe: int | None = None


class Cases:
    """Draws requests; the same seed and number give the same request."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._engine, self._seed = engine, seed
        self._vocab = engine.model_config.vocab_size
        texts = {i: engine.detokenize([i]) for i in range(engine.tokenizer.vocab_size)}
        # Prompts end with a whole character, so that the output's text stands by itself.
        self._ids = [i for i, text in texts.items() if text.isascii() and text.isprintable() and text]
        self._words = sorted({texts[i].strip() for i in self._ids} - {""})
        rng = random.Random(f"{seed} prefixes")
        self._prefixes = [rng.choices(self._ids, k=rng.randint(8, 72)) for _ in range(8)]
        self.probes: list[Case] = []

    def sound(self, rng: random.Random) -> Case:
        """A request that nothing is wrong with and that is not aborted."""
        longest = self._engine.scheduler_config.max_model_len - 1
        ids = list(rng.choice(self._prefixes)) if rng.random() < 0.4 else []
        lengths = (1, rng.randint(1, 8), rng.randint(8, 48), longest)
        ids += rng.choices(self._ids, k=rng.choices(lengths, (2, 3, 3, 1))[0])
        ids = prompt = ids[: rng.randint(longest - 8, longest)]
        if rng.random() < 0.2:
            prompt = " ".join(rng.choices(self._words, k=rng.randint(1, 12)))
            ids = self._engine.tokenize(prompt)
        elif rng.random() < 0.1:
            prompt = [{"role": "user", "content": " ".join(rng.choices(self._words, k=rng.randint(1, 6)))}]
            ids = self._engine.tokenize_chat(prompt)
        return Case(prompt, ids, self._params(rng), rng.choice((0, 0, 0, -1, 1)), unary=rng.random() < 0.1)

    def _params(self, rng: random.Random) -> SamplingParams:
        some = lambda values, most: rng.sample(values, rng.randint(1, most))
        some_ids = lambda most: some(range(self._vocab), most)
        [max_tokens] = rng.choices((1, rng.randint(1, 8), rng.randint(8, 40), None), (1, 3, 3, 1))
        draws: dict[str, Callable[[], Any]] = {
            "n": lambda: rng.randint(1, 4),
            "temperature": lambda: rng.choice((0.0, 0.0, 0.3, 1.5)),
            "top_p": lambda: rng.uniform(0.1, 1.0),
            "top_k": lambda: rng.choice((-1, 1, 5, 100)),
            "min_p": lambda: rng.uniform(0.0, 0.5),
            "presence_penalty": lambda: rng.uniform(-2.0, 2.0),
            "frequency_penalty": lambda: rng.uniform(-2.0, 2.0),
            "repetition_penalty": lambda: rng.uniform(0.5, 2.0),
            "seed": lambda: rng.randrange(-(2**63), 2**64),
            "stop": lambda: some(self._words, 6),
            "stop_token_ids": lambda: some_ids(8),
            # So many remain that bad words and end tokens never take the last.
            "allowed_token_ids": lambda: rng.sample(range(self._vocab), 32),
            "bad_words": lambda: some(self._words, 3),
            "logit_bias": lambda: {i: rng.uniform(-100.0, 5.0) for i in some_ids(6)},
            "min_tokens": lambda: rng.randint(0, min(max_tokens or 12, 12)),
            "logprobs": lambda: rng.randint(0, 20),
            "prompt_logprobs": lambda: rng.randint(0, 20),
            "include_stop_str_in_output": lambda: True,
            "ignore_eos": lambda: True,
            "detokenize": lambda: False,
            "skip_special_tokens": lambda: False,
            "spaces_between_special_tokens": lambda: False,
        }
        fields = {name: draw() for name, draw in draws.items() if rng.random() < 0.2}
        if "detokenize" in fields:
            fields.pop("stop", None)
        return SamplingParams(max_tokens=max_tokens, **fields)

    def probe_candidates(self) -> Iterator[Case]:
        """Half of them greedy."""
        number = 0
        while True:
            rng = random.Random(f"{self._seed} probe {number}")
            case = self.sound(rng)
            changes: dict[str, Any] = {"seed": rng.getrandbits(64), "logprobs": 2}
            changes |= {"temperature": 0.0 if number % 2 else rng.uniform(0.5, 1.5), "max_tokens": rng.randint(4, 24)}
            yield replace(case, params=replace(case.params, **changes | {"min_tokens": 0}))
            number += 1

    def draw(self, number: int) -> Case:
        rng = random.Random(f"{self._seed} request {number}")
        kind = rng.random()
        if kind < 0.05:
            return self._unsound(rng)
        case = self.sound(rng)
        if kind < 0.13 and self.probes:
            probe = rng.randrange(len(self.probes))
            case = replace(self.probes[probe], probe=probe, priority=case.priority, unary=case.unary)
        if rng.random() < 0.32:  # of these some end before
            case = self._aborted(rng, case)
        return case

    def _aborted(self, rng: random.Random, case: Case) -> Case:
        how = rng.choice(("cancel", "rpc", "deadline"))
        if how == "deadline" or case.unary or rng.random() < 0.5:
            return replace(
                case, abort=how, abort_after_s=rng.choice((0.0, rng.uniform(1e-3, 0.03), rng.uniform(0, 0.3)))
            )
        return replace(case, abort=how, abort_after_tokens=rng.choice((0, 1, rng.randint(2, 20))))

    def _unsound(self, rng: random.Random) -> Case:
        good, vocab = SamplingParams(max_tokens=4), self._vocab
        case = Case("the fox", [], good, error="invalid_argument", unary=rng.random() < 0.3)
        eos = self._engine.model_config.eos_token_ids[:1]
        token = next(i for i in self._ids if self._engine.detokenize([i]).strip())  # a bad word may not be a space
        longest = self._engine.scheduler_config.max_model_len
        raw = rng.choice(
            (("temperature", -1.0), ("top_p", 0.0), ("n", 0), ("n", 129), ("min_tokens", 5), ("top_k", -2))
        )
        past_the_client = replace(good)
        object.__setattr__(past_the_client, *raw)  # which would refuse it too
        return rng.choice(
            [
                *(replace(case, prompt=prompt) for prompt in ("", [], [vocab], [token] * longest)),
                replace(case, request_id="x" * 257),
                replace(case, model="another", error="model_not_found"),
                replace(case, params=past_the_client),
                replace(case, params=replace(good, stop_token_ids=[vocab])),
                replace(case, params=replace(good, logit_bias={vocab: 1.0})),
                replace(case, params=replace(good, allowed_token_ids=[vocab])),
                replace(case, params=replace(good, bad_words=["  "])),
                *(replace(case, params=replace(good, allowed_token_ids=[e], min_tokens=1)) for e in eos),
                # Sound by itself; that no token is left shows when it runs.
                replace(
                    case,
                    error="request_failed",
                    params=replace(good, allowed_token_ids=[token], bad_words=[self._engine.detokenize([token])]),
                ),
            ]
        )


# What comes back.


@dataclass
class Reply:
    """All that one request yielded."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    finished: Finished | None = None
    error: JaxinferError | None = None
    cancelled: bool = False
    faults: list[str] = field(default_factory=list)

    def add(self, event: Event) -> None:
        if self.finished is not None:
            self.faults.append(f"event after Finished: {event}")
        if isinstance(event, Finished):
            self.finished = event
        elif isinstance(event, PromptLogprobs):
            if self.tokens or self.prompt_logprobs:
                self.faults.append("PromptLogprobs twice, or after a Delta")
            self.prompt_logprobs.append(event)
        elif isinstance(event, Delta):
            self.tokens.setdefault(event.index, []).extend(event.token_ids)
            self.texts[event.index] = self.texts.get(event.index, "") + event.text
            self.logprobs.setdefault(event.index, []).extend(event.logprobs)

    def add_whole(self, generation: Generation) -> None:
        if generation.prompt_logprobs is not None:
            self.add(generation.prompt_logprobs)
        for sample in generation.samples:
            self.add(sample.output)
        self.add(Finished(tuple(sample.end for sample in generation.samples), generation.usage, generation.timings))

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens.values()))

    @property
    def reason(self) -> FinishReason:
        """ABORT if a sample has it, else LENGTH if one has, else STOP."""
        assert self.finished is not None
        reasons = {end.finish_reason for end in self.finished.ends}
        return next(each for each in (FinishReason.ABORT, FinishReason.LENGTH, FinishReason.STOP) if each in reasons)

    @property
    def output(self) -> tuple[Any, ...]:
        """What the same request must yield again."""
        assert self.finished is not None
        return self.tokens, self.texts, self.finished.ends

    @property
    def margin(self) -> float:
        """The least difference of log-probability between the two likeliest tokens."""
        tops = [at.top for positions in self.logprobs.values() for at in positions]
        return min((top[0].logprob - top[1].logprob for top in tops), default=np.inf)


def check(engine: Engine, case: Case, reply: Reply) -> Iterator[str]:
    """What is wrong with a reply that ended in Finished, each as "kind: details"."""
    finished, params, prompt = reply.finished, case.params, case.prompt_ids
    assert finished is not None
    usage, times = finished.usage, finished.timings
    if [end.index for end in finished.ends] != list(range(params.n)) or not reply.tokens.keys() <= set(range(params.n)):
        yield f"samples: n={params.n}, but {sorted(reply.tokens)} came and {finished.ends} ended"
    if usage.output_tokens != reply.num_tokens:
        yield f"output tokens: {usage.output_tokens} are counted, {reply.num_tokens} came"
    if usage.prompt_tokens != len(prompt):
        yield f"prompt tokens: {usage.prompt_tokens} are counted, {len(prompt)} were sent"
    if not 0 <= usage.cached_tokens < len(prompt) or (usage.cached_tokens and params.prompt_logprobs is not None):
        yield f"cached tokens: {usage.cached_tokens} of {len(prompt)}"
    if not 0 <= times.queue_s <= times.first_token_s <= times.total_s:
        yield f"times out of order: {times}"
    scored = [at.chosen.token_id for event in reply.prompt_logprobs for at in event.positions]
    if scored != (prompt[1:] if params.prompt_logprobs is not None and reply.num_tokens else []):
        yield f"prompt log-probabilities: {len(scored)} came, or of other tokens"
    limits = engine.scheduler_config
    most = min(limits.max_model_len, limits.num_pages * limits.page_size + 1) - len(prompt)
    most = most if params.max_tokens is None else min(most, params.max_tokens)
    banned = [engine.tokenize(word, add_bos=False) for word in params.bad_words or ()]
    for end in finished.ends:
        ids, text = reply.tokens.get(end.index, []), reply.texts.get(end.index, "")
        positions = reply.logprobs.get(end.index, [])
        sample = f"sample {end.index} ({end.finish_reason.value}, {end.stop_reason!r}, {len(ids)} tokens)"
        if len(ids) > most or (end.finish_reason is FinishReason.LENGTH and len(ids) != most):
            yield f"length: {sample}, and {most} are the most"
        if end.finish_reason is FinishReason.STOP and (end.stop_reason is None or len(ids) < max(params.min_tokens, 1)):
            yield f"stop: {sample}, min_tokens={params.min_tokens}"
        if params.allowed_token_ids is not None and not set(ids) <= set(params.allowed_token_ids):
            yield f"tokens that are not allowed: {sample}, {ids}"
        if any(ids[i : i + len(word)] == word for word in banned for i in range(len(ids))):
            yield f"bad words: {sample}, {ids}"
        last = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else engine.model_config.eos_token_ids)}
        if last.intersection(ids[:-1]):
            yield f"went on after an end token: {sample}, {ids}"
        if params.logprobs is None and positions:
            yield f"log-probabilities nobody asked for: {sample}"
        if params.logprobs is not None:
            if [at.chosen.token_id for at in positions] != ids:
                yield f"log-probabilities: {sample}, {len(positions)} came, or of other tokens"
            if any(at.chosen.logprob > 0 or len(at.top) - params.logprobs not in (0, 1) for at in positions):
                yield f"values of log-probabilities: {sample}, {positions}"
        if not _text_is_right(engine, case, ids, end, text):
            yield f"text: {sample}, {text!r} does not go with {ids}"


def _text_is_right(engine: Engine, case: Case, ids: list[int], end: SampleEnd, text: str) -> bool:
    """Whether a sample's text is that of its tokens, cut at the first stop string."""
    params, stop = case.params, end.stop_reason
    if not params.detokenize:
        return not text
    if isinstance(stop, int) and not params.include_stop_str_in_output:
        ids = ids[:-1]
    decode = lambda ids: engine.detokenize(ids, skip_special_tokens=params.skip_special_tokens)
    whole = decode([*case.prompt_ids[-1:], *ids])[len(decode(case.prompt_ids[-1:])) :]
    begins = [whole.find(each) for each in params.stop_strings if each in whole]
    if isinstance(stop, str):
        begin = len(text) - (len(stop) if params.include_stop_str_in_output else 0)
        first = begin == min(begins, default=None) or params.min_tokens > 0  # before that, none counts
        return first and whole.startswith(text) and whole.startswith(stop, begin)
    if end.finish_reason is FinishReason.ABORT:  # what may have become a stop string is cut
        return whole.startswith(text)
    return text == whole and (not begins or params.min_tokens > 0)
