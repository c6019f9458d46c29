"""What the engine's tests share: many engines over one compiled runner, answers collected from them, and the truth.

A runner is compiled once. Each test puts a new engine on it, with a scheduler of its own (see `tiny_engines`).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rule_reference import changed_logits
from tiny_engines import engine_on

from jaxinfer.config import ModelConfig
from jaxinfer.engine.engine import Engine, EngineState
from jaxinfer.engine.sequence import sample_seed
from jaxinfer.errors import JaxinferError
from jaxinfer.models.decoder import DecoderStructure
from jaxinfer.sampling.logit_rules import RuleInputs, SlotRules, rules_shapes
from jaxinfer.sampling.sampler import SamplingInputs, sample
from jaxinfer.types import Delta, Event, Failed, Finished, FinishReason, Request, SamplingParams
from pallas_kernels.paged_attention import paged_attention, pool_shape
from pallas_kernels.paged_attention.reference import token_positions

TIMEOUT = 60.0  # of anything a test waits for: far more than it takes, far less than for ever
NOISE = 1e-3  # in a logit; the tiny models' are up to about 6, and float32 moves them by about 1e-5


class Answer:
    """Everything one request sent back. Its `sink` may be called from any thread."""

    def __init__(self, request_id: str, on_events: Callable[[list[Event]], None] | None = None):
        self.request_id = request_id
        self.events: list[Event] = []
        self._on_events = on_events
        self._over = threading.Event()
        self._some = threading.Event()

    def sink(self, events: list[Event]) -> None:
        self.events += events
        try:
            if self._on_events is not None:
                self._on_events(events)
        finally:
            self._some.set()
            if any(isinstance(event, (Finished, Failed)) for event in events):
                self._over.set()

    def wait(self) -> Answer:
        assert self._over.wait(TIMEOUT), f"{self.request_id} never ended"
        return self

    def wait_first(self) -> Answer:
        assert self._some.wait(TIMEOUT), f"{self.request_id} never began"
        return self

    @property
    def over(self) -> bool:
        return self._over.is_set()

    @property
    def error(self) -> JaxinferError | None:
        last = self.wait().events[-1]
        return last.error if isinstance(last, Failed) else None

    @property
    def finished(self) -> Finished:
        last = self.wait().events[-1]
        assert isinstance(last, Finished), last
        return last

    @property
    def deltas(self) -> list[Delta]:
        return [event for event in self.events if isinstance(event, Delta)]

    @property
    def tokens(self) -> list[int]:
        return self.tokens_of(0)

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas if delta.index == 0)

    @property
    def reason(self) -> FinishReason:
        return self.finished.ends[0].finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        return self.finished.ends[0].stop_reason

    def tokens_of(self, index: int) -> list[int]:
        self.wait()
        return [token_id for delta in self.deltas if delta.index == index for token_id in delta.token_ids]

    def check(self) -> None:
        """It ended once, and nothing came after that."""
        self.wait()
        lasts = [isinstance(event, (Finished, Failed)) for event in self.events]
        assert lasts == [False] * (len(lasts) - 1) + [True], self.events


class House:
    """An engine on a shared runner, and all that it was asked. Greedy by default."""

    def __init__(self, base: Engine, **changes: Any):
        self.engine = engine_on(base, **changes)
        self.scheduler = self.engine._loops[0]._scheduler
        self.answers: list[Answer] = []
        self._numbers = itertools.count()

    def send(
        self,
        prompt: str | Sequence[int],
        *,
        request_id: str | None = None,
        on_events: Callable[[list[Event]], None] | None = None,
        timeout_s: float | None = None,
        **params: Any,
    ) -> Answer:
        """Submits and returns at once. Raises what `submit` raises."""
        request = replace(self.request(prompt, request_id=request_id, **params), timeout_s=timeout_s)
        answer = Answer(request.request_id, on_events)
        self.engine.submit(request, answer.sink)
        self.answers.append(answer)
        return answer

    def ask(self, prompt: str | Sequence[int], **params: Any) -> Answer:
        return self.send(prompt, **params).wait()

    def request(self, prompt: str | Sequence[int], *, request_id: str | None = None, **params: Any) -> Request:
        request_id = request_id or f"r{next(self._numbers)}"
        values: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True} | params
        field_name = "text" if isinstance(prompt, str) else "token_ids"
        return Request(request_id=request_id, params=SamplingParams(**values), **{field_name: prompt})

    def on_loop(self, function: Callable[[], Any]) -> Any:
        """The function's result, computed on the loop thread between two steps; raises what it raises."""
        results: list[Any] = []
        done = threading.Event()

        def call() -> None:
            try:
                results.append((function(), None))
            except BaseException as error:
                results.append((None, error))
            done.set()

        self.engine.call(call)
        assert done.wait(TIMEOUT), "the loop does not answer"
        value, error = results[0]
        if error is not None:
            raise error
        return value

    def pause(self) -> Callable[[], None]:
        """Holds the loop between two steps, until what is returned is called."""
        holding, go = threading.Event(), threading.Event()

        def hold() -> None:
            holding.set()
            go.wait(TIMEOUT)

        self.engine.call(hold)
        assert holding.wait(TIMEOUT)
        return go.set

    def check_idle(self) -> None:
        """All that was asked has ended, once; every page and slot is back."""
        for answer in self.answers:
            answer.check()
        if self.engine.state is EngineState.DEAD:
            return

        def books() -> tuple[int, int, int, bool]:
            self.scheduler.audit()
            pages = self.scheduler.pages
            return pages.num_free, pages.num_cached, self.scheduler.num_in_flight, self.scheduler.has_unfinished

        # A step in flight behind an end token is taken in before the loop idles.
        for _ in range(100):
            free, cached, in_flight, unfinished = self.on_loop(books)
            if not in_flight and not unfinished:
                break
        assert (in_flight, unfinished) == (0, False)
        assert free + cached == self.scheduler.config.num_pages
        for answer in self.answers:
            answer.check()  # still no second end
        assert not self.engine._live
        assert self.engine.stats().audit_breaches_total == 0
        assert (self.engine._admission.requests, self.engine._admission.tokens) == (0, 0)


class Reference:
    """Generation in its plainest form: one sequence, whole, in a new pool, by the float32 reference of attention.

    Args:
      rounded: what becomes of keys and values [T, K, H] before they are cached.
      noise: in a logit, below which two tokens are as good.
    """

    LENGTH, PAGE = 128, 4

    def __init__(
        self,
        structure: DecoderStructure,
        leaves: tuple[jax.Array, ...],
        model: ModelConfig,
        rounded: Callable[[jax.Array], jax.Array] = lambda kv: kv,
        noise: float = NOISE,
    ):
        self._leaves, self._noise = leaves, noise
        pages = self.LENGTH // self.PAGE
        shape = pool_shape(len(model.layers), pages, self.PAGE, model.num_kv_heads, model.head_dim)

        def logits_of(leaves, ids_T, length):
            """Logits of what follows each token."""
            decoder = structure.merge(leaves)
            kv_lens_S, starts_S1, num_seqs = length[None], jnp.array([0, length]), jnp.int32(1)
            table_SM = jnp.arange(pages, dtype=jnp.int32)[None]
            _, positions_T, _ = token_positions(self.LENGTH, kv_lens_S, starts_S1, num_seqs)

            def attend(q_TNH, k_TKH, v_TKH, pool, layer, window):
                step = (table_SM, kv_lens_S, starts_S1, num_seqs)
                options = {"scale": model.head_dim**-0.5, "window": window, "implementation": "reference"}
                return paged_attention(q_TNH, rounded(k_TKH), rounded(v_TKH), pool, layer, *step, **options)

            hidden_TD, _ = decoder(ids_T, positions_T, jnp.zeros(shape), attend)
            return decoder.logits(hidden_TD)

        self._logits = jax.jit(logits_of)
        self._sample = jax.jit(sample)
        self._no_rules = SlotRules(*(jnp.zeros(shape, kind) for shape, kind in rules_shapes(1, model.vocab_size)))

    def next_tokens(
        self,
        ids: Sequence[int],
        *,
        seed: int = 0,
        index: int = 0,
        prompt_len: int | None = None,
        words: Sequence[Sequence[int]] = (),
        ends: Sequence[int] = (),
        **params: Any,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The token that follows each of `ids` and all that stand before it, as sample `index` draws it; logits.

        With `prompt_len`, logits from the prompt's end on are changed as `params` say, `words` being the banned
        sequences of tokens and `ends` what ends the output.
        """
        given = SamplingParams(**({"temperature": 0.0} | params))
        own, rows = sample_seed(seed, index), self.LENGTH
        padded = np.zeros(rows, np.int32)
        padded[: len(ids)] = ids
        sampling = SamplingInputs(
            temperature_R=np.full(rows, given.temperature, np.float32),
            top_p_R=np.full(rows, given.top_p, np.float32),
            top_k_R=np.full(rows, max(given.top_k, 0), np.int32),
            min_p_R=np.full(rows, given.min_p, np.float32),
            seed_R2=np.tile(np.array([own >> 32, own & 0xFFFFFFFF], np.uint32), (rows, 1)),
            position_R=np.arange(1, rows + 1, dtype=np.int32),
            num_logprobs_R=np.full(rows, -1, np.int32),
            target_R=np.full(rows, -1, np.int32),
            rules=RuleInputs(*(np.zeros(rows, np.int32) for _ in range(3)), *(np.zeros(rows, np.float32),) * 3),
        )
        logits = np.array(self._logits(self._leaves, padded, np.int32(len(ids))))
        if prompt_len is not None:
            names = ("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids")
            rules = {name: getattr(given, name) for name in (*names, "min_tokens")} | {"words": words, "ends": ends}
            for at in range(prompt_len - 1, len(ids)):
                logits[at] = changed_logits(logits[at], ids[:prompt_len], ids[prompt_len : at + 1], **rules)
        tokens = self._sample(logits, sampling, self._no_rules).token_R
        return np.asarray(tokens)[: len(ids)], logits[: len(ids)]

    def generate(self, prompt: Sequence[int], count: int, **params: Any) -> list[int]:
        """`count` tokens, for each the whole sequence again; greedy unless there is a temperature."""
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(self.next_tokens(ids, **params)[0][-1]))
        return ids[len(prompt) :]

    def check(self, got: Sequence[int], prompt: Sequence[int], count: int, **params: Any) -> None:
        """`got` is what `generate` gives, each token given those before it: so one pass tells.

        Where the likeliest two logits are too near for float32 to tell, a greedy token may be either.
        """
        assert len(got) == count
        ids = [*prompt, *got[:-1]]
        tokens, logits = self.next_tokens(ids, prompt_len=len(prompt), **params)
        greedy = not params.get("temperature")
        for step, token in enumerate(got):
            at = len(prompt) - 1 + step
            near = greedy and logits[at].max() - logits[at, token] < self._noise
            assert token == tokens[at] or near, f"token {step} of {list(got)} should be {tokens[at]}"


def random_prompt(seed: int, length: int, vocab: int = 384) -> list[int]:
    """Any tokens but the three control tokens."""
    return np.random.default_rng(seed).integers(3, vocab, length).tolist()
