"""The offline API: forms of a prompt, shapes of the outputs, what is refused, and that a refusal breaks nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoints

from jaxinfer import LLM, SamplingParams
from jaxinfer.errors import EngineDeadError, InvalidArgumentError, JaxinferError, ModelNotFoundError
from jaxinfer.llm import RequestOutput

CONTEXT = 64
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": CONTEXT}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
TEXT = "hello world"
SAID = [{"role": "user", "content": "what is the capital"}]
PROMPTS = [[(7 * i + j) % 300 + 3 for j in range(1 + 4 * i % 23)] for i in range(11)]  # of 1 to 21 tokens


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llm") / "tiny"
    tiny_checkpoints.write_hf_folder(
        folder, tiny_checkpoints.Tiny(9, layers=1, config={"max_position_embeddings": CONTEXT})
    )
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path, cache_dir: Path) -> Iterator[LLM]:
    with LLM(str(folder), cache_dir=cache_dir, **OPTIONS) as llm:
        yield llm


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    """Of each prompt's first sample."""
    return [output.outputs[0].token_ids for output in outputs]


# Prompts and outputs.


def test_a_text(llm: LLM):
    (output,) = llm.generate(TEXT, GREEDY)
    assert output.prompt == TEXT
    assert output.prompt_token_ids == llm.engine.tokenize(TEXT)
    assert output.finished
    (sample,) = output.outputs
    assert (sample.index, sample.finish_reason, sample.stop_reason) == (0, "length", None)
    assert len(sample.token_ids) == 6
    assert sample.text == llm.engine.detokenize(sample.token_ids)
    assert sample.logprobs is None


def test_token_ids(llm: LLM):
    (output,) = llm.generate({"prompt_token_ids": (5, 6, 7)}, GREEDY)
    assert output.prompt is None
    assert output.prompt_token_ids == [5, 6, 7]
    assert len(output.outputs[0].token_ids) == 6


def test_all_forms_of_a_prompt_mean_the_same(llm: LLM):
    ids = llm.engine.tokenize(TEXT)
    single: list[Any] = [TEXT, {"prompt": TEXT}, {"prompt_token_ids": ids}, ids]
    answers = [tokens(llm.generate(form, GREEDY)) for form in single]
    answers += [tokens(llm.generate([form], GREEDY)) for form in single]
    assert answers == [answers[0]] * 8
    assert tokens(llm.generate(single, GREEDY)) == answers[0] * 4


def test_a_text_beside_its_token_ids_is_kept_for_the_output(llm: LLM):
    (output,) = llm.generate({"prompt": "as written", "prompt_token_ids": [5, 6, 7]}, GREEDY)
    assert (output.prompt, output.prompt_token_ids) == ("as written", [5, 6, 7])


def test_control_tokens_in_a_text_count_only_if_asked_for(llm: LLM):
    text = "<|im_start|>user"
    ids = llm.engine.tokenize(text, parse_special=True)
    assert len(ids) < len(llm.engine.tokenize(text))
    prompts: list[Any] = [{"prompt": text, "parse_special": True}, ids]
    first, second = tokens(llm.generate(prompts, GREEDY))
    assert first == second


def test_no_prompts(llm: LLM):
    assert llm.generate([], GREEDY) == []


def test_answers_are_in_the_order_of_the_prompts(llm: LLM):
    # They end in another order: more prompts than run at once, of different lengths, with different max_tokens.
    params = [SamplingParams(temperature=0.0, max_tokens=1 + 5 * i % 13, ignore_eos=True) for i in range(len(PROMPTS))]
    outputs = llm.generate(PROMPTS, params)
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    assert [len(ids) for ids in tokens(outputs)] == [each.max_tokens for each in params]
    alone = [llm.generate(prompt, each)[0] for prompt, each in zip(PROMPTS, params, strict=True)]
    assert tokens(outputs) == tokens(alone)
    assert tokens(llm.generate(PROMPTS, params)) == tokens(outputs)
    assert len({output.request_id for output in outputs + alone}) == 2 * len(PROMPTS)


def test_more_prompts_than_may_wait(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    expected = tokens(llm.generate(PROMPTS, GREEDY))
    monkeypatch.setattr(llm.engine, "scheduler_config", replace(llm.engine.scheduler_config, max_waiting=2))
    assert tokens(llm.generate(PROMPTS, GREEDY)) == expected


def test_progress(llm: LLM):
    calls: list[tuple[int, int]] = []
    llm.generate(PROMPTS[:5], GREEDY, on_progress=lambda done, total: calls.append((done, total)))
    assert calls == [(done, 5) for done in range(1, 6)]


def test_chat(llm: LLM):
    other = [{"role": "system", "content": "user"}, {"role": "user", "content": "is"}]
    ids = [llm.engine.tokenize_chat(messages) for messages in (SAID, other)]
    expected = tokens(llm.generate(ids, GREEDY))
    assert expected[0] != expected[1]
    assert tokens(llm.chat([SAID, other], GREEDY)) == expected
    assert tokens(llm.chat(SAID, GREEDY)) == expected[:1]


# Sampling parameters.


def test_samples(llm: LLM):
    params = SamplingParams(n=6, seed=1, max_tokens=5, ignore_eos=True)  # more than run at once
    (output,) = llm.generate(TEXT, params)
    assert [sample.index for sample in output.outputs] == list(range(6))
    assert {(len(sample.token_ids), sample.finish_reason) for sample in output.outputs} == {(5, "length")}
    assert len({tuple(sample.token_ids) for sample in output.outputs}) > 1
    assert llm.generate(TEXT, params)[0].outputs == output.outputs
    assert llm.generate(TEXT, replace(params, n=1))[0].outputs == output.outputs[:1]


def test_sixteen_tokens_by_default(llm: LLM):
    assert len(tokens(llm.generate(TEXT, SamplingParams(ignore_eos=True)))[0]) == 16
    assert 1 <= len(tokens(llm.generate(TEXT))[0]) <= 16


def test_the_rest_of_the_context(llm: LLM):
    (output,) = llm.generate([3] * (CONTEXT - 5), replace(GREEDY, max_tokens=None))
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (5, "length")


def test_a_stop_token(llm: LLM):
    (whole,) = tokens(llm.generate(TEXT, GREEDY))
    last = whole[3]
    (output,) = llm.generate(TEXT, replace(GREEDY, stop_token_ids=[last]))
    (sample,) = output.outputs
    assert sample.token_ids == whole[: whole.index(last) + 1]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", last)


def test_logprobs(llm: LLM):
    (sample,) = llm.generate(TEXT, replace(GREEDY, logprobs=3))[0].outputs
    assert sample.logprobs is not None
    assert [position.chosen.token_id for position in sample.logprobs] == sample.token_ids
    for position in sample.logprobs:
        assert position.chosen == position.top[0]
        assert [each.rank for each in position.top] == [1, 2, 3]
        assert 0 >= position.top[0].logprob >= position.top[1].logprob >= position.top[2].logprob
    (sample,) = llm.generate(TEXT, replace(GREEDY, logprobs=0))[0].outputs
    assert sample.logprobs is not None
    assert [position.top for position in sample.logprobs] == [(position.chosen,) for position in sample.logprobs]


def test_prompt_logprobs(llm: LLM):
    output = llm.generate(TEXT, replace(GREEDY, prompt_logprobs=2, n=2))[0]
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [each.chosen.token_id for each in output.prompt_logprobs[1:]] == output.prompt_token_ids[1:]
    assert llm.generate(TEXT, GREEDY)[0].prompt_logprobs is None


# What is refused.


@pytest.mark.parametrize(
    ("prompt", "names"),
    [
        ("", "text = ''"),
        ({"prompt_token_ids": []}, "at least one token"),
        ([5, 384], "token_ids = 384 .* 0 to 383"),
        ([5, -1], "token_ids = -1 .* 0 to 383"),
        ([5, "x"], "token_ids = 'x' .* integers"),
        ([5] * CONTEXT, "64 tokens.* at most 63 tokens"),
        ({"text": TEXT}, r"prompt = \{'text': 'hello world'\}"),
        ({"prompt": TEXT, "multi_modal_data": {}}, "multi_modal_data"),
        ({"prompt_token_ids": 5}, "prompt = .*5"),
        ({"prompt_token_ids": "abc"}, "prompt = .*abc"),
        ({"prompt": b"abc"}, "prompt = .*abc"),
        ({}, "prompt = "),
        (None, "prompts? = "),
    ],
)
def test_a_bad_prompt_is_refused_and_the_rest_goes_on(llm: LLM, prompt: Any, names: str):
    expected = tokens(llm.generate(PROMPTS, GREEDY))
    with pytest.raises(InvalidArgumentError, match=names):
        llm.generate(prompt, GREEDY)
    with pytest.raises(InvalidArgumentError, match=names):
        llm.generate([*PROMPTS, prompt], GREEDY)
    assert tokens(llm.generate(PROMPTS, GREEDY)) == expected


def test_what_a_refused_prompt_leaves_behind_does_not_fill_the_queue(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(llm.engine, "scheduler_config", replace(llm.engine.scheduler_config, max_waiting=8))
    for _ in range(5):
        with pytest.raises(InvalidArgumentError):
            llm.generate([*PROMPTS[:7], [999]], GREEDY)
        assert len(llm.generate(PROMPTS[:8], GREEDY)) == 8


def test_an_error_of_the_callers_ends_all_requests(llm: LLM):
    def broken(done: int, total: int) -> None:
        raise ValueError("not ours")

    with pytest.raises(ValueError, match="not ours"):
        llm.generate(PROMPTS, replace(GREEDY, max_tokens=None), on_progress=broken)
    assert not llm.engine._live


@pytest.mark.parametrize("params", [{"temperature": 0}, 5, [GREEDY, {"temperature": 0}]])
def test_parameters_of_another_type_are_refused(llm: LLM, params: Any):
    with pytest.raises(InvalidArgumentError, match="sampling_params = "):
        llm.generate([TEXT, "fox"], params)


@pytest.mark.parametrize("messages", [[], [[]], [{"role": "user"}], [[*SAID, {"content": "x"}]]])
def test_bad_messages_are_refused(llm: LLM, messages: Any):
    with pytest.raises(InvalidArgumentError, match="messages"):
        llm.chat(messages, GREEDY)
    assert tokens(llm.chat(SAID, GREEDY))[0]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_wrong_number_of_parameters_is_refused(llm: LLM, count: int):
    with pytest.raises(InvalidArgumentError, match=rf"sampling_params = '{count} of them' .*\(2\)"):
        llm.generate([TEXT, "fox"], [GREEDY] * count)


@pytest.mark.parametrize(
    ("options", "error", "names"),
    [
        ({"dtype": "int3"}, InvalidArgumentError, "dtype = 'int3'.*float32"),
        ({"quantize": "int3"}, InvalidArgumentError, "int8, w8a8, int4, fp8"),
        ({"mesh": "tensor=64"}, InvalidArgumentError, "tensor=64 needs 64 devices"),
        ({"mesh": "wide=1"}, InvalidArgumentError, "mesh = 'wide=1'.*tensor"),
        ({"max_model_len": CONTEXT + 1}, InvalidArgumentError, "max_model_len = 65.*64"),
        ({"max_num_seqs": 0}, InvalidArgumentError, "max_num_seqs = 0"),
        ({"max_num_seqs": "4"}, InvalidArgumentError, "max_num_seqs = '4'"),
        ({"page_size": 0}, InvalidArgumentError, "page_size = 0"),
        ({"page_size": -4}, InvalidArgumentError, "page_size = -4"),
        ({"max_model_len": 0}, InvalidArgumentError, "max_model_len = 0"),
        ({"kv_cache_dtype": "fp4"}, InvalidArgumentError, "kv_cache_dtype = 'fp4'.*one of auto, int8, fp8"),
        ({"kv_cache_bytes": 1000}, InvalidArgumentError, "kv_cache_bytes = 1000.*at least one page"),
        ({"mesh": "tensor=²"}, InvalidArgumentError, "mesh = 'tensor=²'.*positive integer"),
        ({"tensor_parallel_size": 1}, InvalidArgumentError, "tensor_parallel_size = 1.*max_num_seqs"),
        ({"model": "no-such-model"}, ModelNotFoundError, "no-such-model"),
    ],
)
def test_bad_options_are_refused(folder: Path, cache_dir: Path, options: dict, error: type[JaxinferError], names: str):
    with pytest.raises(error, match=names):
        LLM(**({"model": str(folder), "cache_dir": cache_dir} | OPTIONS | options))


def test_closed(folder: Path, cache_dir: Path):
    with LLM(str(folder), cache_dir=cache_dir, **OPTIONS) as llm:
        assert llm.generate(TEXT, GREEDY)[0].finished
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate(TEXT, GREEDY)
    with pytest.raises(EngineDeadError, match="closed"):
        llm.chat(SAID, GREEDY)
