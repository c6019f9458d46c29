"""Offline generation, with the names vLLM's users know."""

from __future__ import annotations

import itertools
import os
import queue
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from jaxinfer._shadowing import check_top_level_packages
from jaxinfer.checkpoints.source import default_cache_dir
from jaxinfer.config import EngineConfig
from jaxinfer.engine.engine import Engine, Progress
from jaxinfer.errors import InvalidArgumentError
from jaxinfer.types import Delta, Event, Failed, Finished, PositionLogprobs, PromptLogprobs, Request, SamplingParams


@dataclass
class CompletionOutput:
    """One sample of a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass
class RequestOutput:
    """All samples of a prompt, with what it cost."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[PositionLogprobs | None] | None = None  # None at the first position: nothing predicts it
    num_cached_tokens: int = 0
    finished: bool = False


ABORT_SECONDS = 10.0  # most to wait for the end of an aborted request: it takes a step

type Prompt = str | Sequence[int] | Mapping[str, Any]


class LLM:
    """A model to generate with, in this process.

    >>> llm = LLM("smollm2-135m-instruct")
    >>> llm.generate(["The capital of France is"], SamplingParams(temperature=0))[0].outputs[0].text

    Args:
      model: a Hugging Face folder, a .gguf file, a hub id or an alias.
      dtype, mesh, quantize, and further options, such as kv_cache_dtype: see `jaxinfer.config.EngineConfig`.
      cache_dir: for downloads and compiled programs; None is ~/.cache/jaxinfer, or what JAXINFER_CACHE says.

    Raises: as `Engine.start`.
    """

    def __init__(
        self,
        model: str = EngineConfig().model,
        *,
        dtype: str = "auto",
        mesh: str | None = None,
        quantize: str | None = None,
        cache_dir: Path | None = None,
        progress: Progress | None = None,
        **options: Any,
    ):
        check_top_level_packages("sharding", "pallas_kernels")
        unknown = set(options) - set(EngineConfig.__dataclass_fields__)
        if unknown:
            known = ", ".join(sorted(EngineConfig.__dataclass_fields__))
            raise InvalidArgumentError(sorted(unknown)[0], options[sorted(unknown)[0]], f"the options are {known}")
        config = EngineConfig(model=model, dtype=dtype, mesh=mesh, quantize=quantize, **options)
        self.engine = Engine.start(config, cache_dir=cache_dir or default_cache_dir(os.environ), progress=progress)
        self._numbers = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[RequestOutput]:
        """Generates for each prompt; results are in the order of the prompts.

        Args:
          prompts: a text, `{"prompt": text}` (with `"parse_special": True` if control tokens are written out in
            it), `{"prompt_token_ids": [...]}`, or a list of these. A bare list of ints is one tokenized prompt.
          sampling_params: one for all prompts, or one for each; by default vLLM's (16 tokens, temperature 1).
          on_progress: called with (prompts done, prompts in all).

        Raises:
          JaxinferError: a prompt is refused or fails; the others are aborted.
        """
        single = isinstance(prompts, (str, Mapping)) or _is_token_ids(prompts)
        many: Any = [prompts] if single else prompts
        if not isinstance(many, Sequence) or isinstance(prompts, bytes):
            raise InvalidArgumentError("prompts", prompts, "a prompt or a list of prompts")
        fields = [_prompt_fields(prompt) for prompt in many]
        return self._run(fields, self._params(sampling_params, len(many)), on_progress)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[RequestOutput]:
        """Generates replies to one conversation, or to each of several, by the model's chat template."""
        if not messages:
            raise InvalidArgumentError("messages", messages, "at least one message")
        many: Sequence[Any] = [messages] if isinstance(messages[0], Mapping) else messages
        fields: list[Any] = [(None, {"messages": conversation}) for conversation in many]
        return self._run(fields, self._params(sampling_params, len(many)), on_progress)

    def _params(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * count
        if not isinstance(params, Sequence) or not all(isinstance(each, SamplingParams) for each in params):
            raise InvalidArgumentError("sampling_params", params, "a SamplingParams, or a list of them")
        if len(params) != count:
            raise InvalidArgumentError("sampling_params", f"{len(params)} of them", f"one, or one a prompt ({count})")
        return list(params)

    def _run(
        self,
        prompts: list[tuple[str | None, dict[str, Any]]],
        params: list[SamplingParams],
        on_progress: Callable[[int, int], None] | None,
    ) -> list[RequestOutput]:
        events: queue.SimpleQueue[tuple[str, list[Event]]] = queue.SimpleQueue()
        outputs: dict[str, RequestOutput] = {}
        todo = list(zip(prompts, params, strict=True))[::-1]
        live: set[str] = set()
        done, limit = 0, self.engine.scheduler_config.max_waiting
        try:
            while todo or live:
                # The engine's queue is bounded; ours need not be.
                while todo and len(live) < limit:
                    (prompt, fields), param = todo.pop()
                    request_id = f"offline-{next(self._numbers)}"
                    request = Request(request_id=request_id, params=param, **fields)
                    token_ids = self.engine.submit(request, partial(_post, events, request_id))
                    live.add(request_id)
                    outputs[request_id] = RequestOutput(
                        request_id,
                        prompt,
                        list(token_ids),
                        [
                            CompletionOutput(index, logprobs=None if param.logprobs is None else [])
                            for index in range(param.n)
                        ],
                    )
                request_id, batch = events.get()
                for event in batch:
                    if isinstance(event, Failed):
                        live.remove(request_id)
                        raise event.error
                    if _take(outputs[request_id], event):
                        live.remove(request_id)
                        done += 1
                        if on_progress is not None:
                            on_progress(done, len(prompts))
        except BaseException:
            for request_id in live:
                self.engine.abort(request_id)
            with suppress(queue.Empty):
                while live:  # until they are gone, they count among those that wait
                    request_id, batch = events.get(timeout=ABORT_SECONDS)
                    if isinstance(batch[-1], (Finished, Failed)):
                        live.discard(request_id)
            raise
        return list(outputs.values())

    def reshard(self, mesh: str, *, progress: Progress | None = None) -> None:
        """Moves the weights to another mesh, such as "tensor=4", without reading the checkpoint again.

        Raises: as `Engine.reshard`.
        """
        self.engine.reshard(mesh, progress=progress)

    def close(self) -> None:
        """Stops the engine."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        self.close()


def _post(events: queue.SimpleQueue[tuple[str, list[Event]]], request_id: str, batch: list[Event]) -> None:
    events.put((request_id, batch))


def _take(output: RequestOutput, event: Event) -> bool:
    """Adds an event to the output; True if it was the last."""
    if isinstance(event, PromptLogprobs):
        output.prompt_logprobs = [None, *event.positions]
        return False
    if isinstance(event, Delta):
        sample = output.outputs[event.index]
        sample.text += event.text
        sample.token_ids += event.token_ids
        if sample.logprobs is not None:
            sample.logprobs += event.logprobs
        return False
    assert isinstance(event, Finished)
    for end in event.ends:
        sample = output.outputs[end.index]
        sample.finish_reason, sample.stop_reason = end.finish_reason.value, end.stop_reason
    output.num_cached_tokens, output.finished = event.usage.cached_tokens, True
    return True


def _is_token_ids(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], int)


def _prompt_fields(prompt: Any) -> tuple[str | None, dict[str, Any]]:
    """(the prompt's text, the `Request`'s fields)."""
    text, token_ids, parse_special = None, None, False
    if isinstance(prompt, str):
        text = prompt
    elif isinstance(prompt, Mapping):
        unknown = set(prompt) - {"prompt", "prompt_token_ids", "parse_special"}
        if unknown:
            raise InvalidArgumentError("prompt", prompt, "a mapping with prompt or prompt_token_ids, and parse_special")
        text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        parse_special = bool(prompt.get("parse_special", False))
    else:
        token_ids = prompt
    if isinstance(token_ids, (Sequence, np.ndarray)) and not isinstance(token_ids, (str, bytes)):
        if text is None or isinstance(text, str):  # a text beside its token ids is kept for the output alone
            return text, {"token_ids": list(token_ids)}
    elif token_ids is None and isinstance(text, str):
        return text, {"text": text, "parse_special": parse_special}
    raise InvalidArgumentError("prompt", prompt, "a text, token ids, or a mapping with prompt or prompt_token_ids")
