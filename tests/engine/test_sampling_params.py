"""Every sampling parameter through a running engine, against the reference, and through preemption."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from engine_harness import Answer, House, Reference, random_prompt

from jaxinfer.errors import InvalidArgumentError, RequestFailedError
from jaxinfer.types import FinishReason, PromptLogprobs

EOS = 2
PROMPT = random_prompt(40, 20)
RULES = [
    {"presence_penalty": 1.5},
    {"frequency_penalty": 2.0},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.7, "frequency_penalty": -1.0},
    {"logit_bias": {5: 8.0, 77: -100.0, 200: 7.5}},
    {"allowed_token_ids": list(range(10, 40))},
    {"min_tokens": 8, "stop_token_ids": [11]},
    {"allowed_token_ids": [11, 12, 13], "min_tokens": 8, "stop_token_ids": [11], "presence_penalty": 2.0},
]


def ends_of(params: dict) -> list[int]:
    return params.get("stop_token_ids", [])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("params", RULES, ids=str)
def test_rules_give_the_references_tokens(house: House, reference: Reference, params: dict, temperature: float):
    params = params | {"temperature": temperature, "seed": 3}
    answer = house.ask(PROMPT, max_tokens=20, **params)
    count = len(answer.tokens)
    assert count >= params.get("min_tokens", 20) + 1 or count == 20
    reference.check(answer.tokens, PROMPT, count, ends=ends_of(params), **params)


def test_rules_do_not_reach_the_next_of_their_slot(open_house: Callable[..., House], reference: Reference):
    house = open_house(max_num_seqs=1)
    house.ask(PROMPT, max_tokens=4, allowed_token_ids=[9], logit_bias={7: 100.0})
    reference.check(house.ask(PROMPT, max_tokens=6).tokens, PROMPT, 6)
    for _ in range(2):  # counts of the first are not those of the second
        tokens = house.ask(PROMPT, max_tokens=10, frequency_penalty=2.0).tokens
        reference.check(tokens, PROMPT, 10, frequency_penalty=2.0)


def test_preemption_changes_no_token_of_any_rule(open_house: Callable[..., House], reference: Reference):
    """A pool that holds two of them; all the rules at once beside plain ones."""
    house = open_house(num_pages=26, max_num_seqs=8)
    prompts = [random_prompt(50 + i, 20) for i in range(8)]
    answers = [
        house.send(prompt, max_tokens=24, temperature=0.8, seed=i, **RULES[i]) for i, prompt in enumerate(prompts)
    ]
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        rules = RULES[i] | {"temperature": 0.8, "seed": i}
        reference.check(answer.wait().tokens, prompt, len(answer.tokens), ends=ends_of(rules), **rules)
    assert house.scheduler.num_preemptions > 0


def test_samples_of_one_request_are_penalized_apart(house: House, reference: Reference):
    params = {"temperature": 1.0, "seed": 9, "frequency_penalty": 2.0, "repetition_penalty": 1.5}
    answer = house.ask(PROMPT, n=4, max_tokens=16, **params)
    for index in range(4):
        reference.check(answer.tokens_of(index), PROMPT, 16, index=index, **params)
    assert len({tuple(answer.tokens_of(index)) for index in range(4)}) == 4


def test_bad_words(house: House, reference: Reference):
    """The last token of a word never follows those before it, at an output's start and behind a space alike."""
    for word in ("a", "ab", "b c"):
        tokens = house.engine.tokenizer.encode(word, add_bos=False)
        behind = house.engine.tokenizer.encode(f" {word}", add_bos=False)
        words = [tokens] + ([behind] if len(behind) == len(tokens) and behind[0] != tokens[0] else [])
        letters = sorted({*tokens, *behind})
        bias = dict.fromkeys(letters, 30.0)  # so that the words would be written all the time
        got = house.ask(PROMPT, max_tokens=20, bad_words=[word], logit_bias=bias).tokens
        reference.check(got, PROMPT, 20, words=words, logit_bias=bias)


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_min_tokens_holds_every_end_token_back(open_house: Callable[..., House], ignore_eos: bool):
    house = open_house(eos=(7, 8))
    bias = {EOS: 60.0, 7: 80.0, 8: 70.0}  # the end tokens come as soon as they may
    answer = house.ask(PROMPT, max_tokens=30, min_tokens=20, logit_bias=bias, ignore_eos=ignore_eos)
    if ignore_eos:
        assert answer.tokens == [7] * 30
        assert answer.reason is FinishReason.LENGTH
    else:
        assert not {EOS, 7, 8} & set(answer.tokens[:20])
        assert answer.tokens[20:] == [7]
        assert answer.reason is FinishReason.STOP
        assert answer.stop_reason == 7


def test_where_nothing_may_be_chosen_the_request_fails_alone(house: House, reference: Reference):
    other = house.send(random_prompt(1, 9), max_tokens=30)
    answer = house.send(PROMPT, n=2, max_tokens=30, allowed_token_ids=[9], logit_bias={9: 1.0}, bad_words=["x"])
    word = house.engine.tokenizer.decode([70])
    ids = house.engine.tokenizer.encode(word, add_bos=False)
    failed = house.send(PROMPT, n=2, max_tokens=30, allowed_token_ids=ids[:1], bad_words=[word])
    assert len(ids) == 1
    assert isinstance(failed.error, RequestFailedError)
    assert "no token can be chosen" in str(failed.error)
    assert answer.wait().tokens == [9] * 30
    reference.check(other.wait().tokens, random_prompt(1, 9), 30)


def prompt_logprobs(answer: Answer) -> PromptLogprobs:
    answer.wait()
    assert [isinstance(event, PromptLogprobs) for event in answer.events].count(True) == 1
    first = answer.events[0]
    assert isinstance(first, PromptLogprobs), "before any delta"
    return first


@pytest.mark.parametrize("length", [1, 2, 33, 90])
def test_prompt_logprobs(house: House, reference: Reference, length: int):
    prompt = random_prompt(60, length)
    answer = house.ask(prompt, max_tokens=4, prompt_logprobs=3)
    reference.check(answer.tokens, prompt, 4)
    positions = prompt_logprobs(answer).positions
    assert [position.chosen.token_id for position in positions] == prompt[1:]
    logits = reference.next_tokens(prompt)[1].astype(np.float64)
    truth = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for at, position in enumerate(positions):
        chosen = position.chosen
        assert chosen.logprob == pytest.approx(truth[at, chosen.token_id], abs=1e-3)
        values = [each.logprob for each in position.top]
        assert values == sorted(values, reverse=True)
        np.testing.assert_allclose(values[:3], np.sort(truth[at])[::-1][:3], atol=1e-3)
        assert chosen in position.top
        assert len(position.top) == (3 if chosen.rank <= 3 else 4)
        assert chosen.rank == pytest.approx(1 + (truth[at] > truth[at, chosen.token_id]).sum(), abs=1)


def test_the_same_prompt_s_logprobs_twice(house: House):
    """The second time its pages are known, and would hide the answer."""
    prompt = random_prompt(61, 33)
    house.ask(prompt, max_tokens=2)
    first, second = (house.ask(prompt, max_tokens=2, prompt_logprobs=2) for _ in range(2))
    assert len(prompt_logprobs(first).positions) == 32
    assert prompt_logprobs(first) == prompt_logprobs(second)
    assert second.finished.usage.cached_tokens == 0


def test_prompt_logprobs_beside_others_and_through_preemption(open_house: Callable[..., House], reference: Reference):
    house = open_house(num_pages=26, max_num_seqs=8)
    prompts = [random_prompt(70 + i, 30) for i in range(8)]
    answers = [
        house.send(prompt, max_tokens=20, n=1 + i % 2, **({"prompt_logprobs": 1} if i % 3 else {}))
        for i, prompt in enumerate(prompts)
    ]
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        reference.check(answer.wait().tokens, prompt, 20)
        if i % 3:
            assert [each.chosen.token_id for each in prompt_logprobs(answer).positions] == prompt[1:]
    assert house.scheduler.num_preemptions > 0


def test_a_chosen_token_that_is_likeliest_has_one_float(house: House):
    answer = house.ask(PROMPT, max_tokens=20, temperature=0.7, seed=2, logprobs=5, prompt_logprobs=5)
    positions = [each for delta in answer.deltas for each in delta.logprobs] + list(prompt_logprobs(answer).positions)
    same = [(p.chosen, top) for p in positions for top in p.top if top.token_id == p.chosen.token_id]
    assert len(same) == len(positions)
    assert all(chosen == top for chosen, top in same)


# Text.


def test_include_stop_str(house: House):
    plain = house.ask(PROMPT, max_tokens=12)
    stop = next(text for at in range(2, len(plain.text)) if "\ufffd" not in (text := plain.text[at : at + 2]))
    cut, kept = (
        house.ask(PROMPT, max_tokens=12, stop=stop, include_stop_str_in_output=include) for include in (False, True)
    )
    assert kept.text == cut.text + stop
    assert plain.text.startswith(kept.text)
    assert cut.stop_reason == kept.stop_reason == stop


def test_include_stop_token_s_text(house: House):
    plain = house.ask(PROMPT, max_tokens=8).tokens
    end = plain[4]
    at = plain.index(end)
    cut, kept = (
        house.ask(PROMPT, max_tokens=8, stop_token_ids=[end], include_stop_str_in_output=include)
        for include in (False, True)
    )
    assert cut.tokens == kept.tokens == plain[: at + 1]
    decode = house.engine.tokenizer.decode
    assert kept.text == decode(plain[: at + 1])
    assert cut.text == decode(plain[:at])


def test_stop_strings_wait_for_min_tokens(house: House):
    """Each token is `a`; the sixth is the first whose text may end the output."""
    letter = house.engine.tokenizer.encode("a", add_bos=False)
    answer = house.ask(PROMPT, max_tokens=12, allowed_token_ids=letter, stop="aa", min_tokens=5)
    assert answer.tokens == letter * 6
    assert answer.text == "aaaa"
    assert answer.stop_reason == "aa"


def test_detokenize_false_gives_tokens_alone(house: House):
    plain = house.ask(PROMPT, max_tokens=9)
    bare = house.ask(PROMPT, max_tokens=9, detokenize=False, logprobs=1)
    assert bare.tokens == plain.tokens
    assert bare.text == ""
    assert [len(delta.token_ids) for delta in bare.deltas] == [1] * 9
    assert all(len(delta.logprobs) == 1 for delta in bare.deltas)


@pytest.mark.parametrize(
    ("params", "field", "value"),
    [
        ({"logit_bias": {384: 1.0}}, "logit_bias", "384"),
        ({"allowed_token_ids": [3, 500]}, "allowed_token_ids", "500"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids", "1000000"),
        ({"bad_words": ["  "]}, "bad_words", "'  '"),
        ({"bad_words": ["xyzzy " * 20]}, "bad_words", "16 tokens"),
        ({"allowed_token_ids": [9], "stop_token_ids": [9], "min_tokens": 2}, "allowed_token_ids", "[9]"),
    ],
)
def test_what_the_model_cannot_do_is_refused(house: House, params: dict, field: str, value: str):
    with pytest.raises(InvalidArgumentError) as raised:
        house.ask(PROMPT, **params)
    assert raised.value.field == field
    assert value in str(raised.value)
    assert house.engine._admission.tokens == 0
