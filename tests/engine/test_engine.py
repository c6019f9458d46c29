"""What requests get from a running engine: the right tokens whatever else goes on, the right end, and one end."""

from __future__ import annotations

import asyncio
import itertools
import threading

import jax.numpy as jnp
import numpy as np
import pytest
from engine_harness import TIMEOUT, Answer, House, Reference, random_prompt

from jaxinfer.engine.engine import Engine
from jaxinfer.engine.runner import StepBuffers
from jaxinfer.errors import InvalidArgumentError, QueueFullError, RequestExistsError
from jaxinfer.kv_cache.pool import COPIES_PER_CALL
from jaxinfer.types import Delta, Finished, FinishReason, Request, SamplingParams

EOS = 2  # the tokenizer's own end token, which every engine has
STOP, LENGTH, ABORT = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT


def field(step: StepBuffers, name: str) -> np.ndarray:
    shape, packed = step.forward
    return shape._layout.view(packed, name)


@pytest.fixture
def recorded(base: Engine):
    """The inputs of every step of this test."""
    base.runners[0].recorded = steps = []
    yield steps
    base.runners[0].recorded = None


# Tokens do not depend on how they were computed.


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 90])
def test_greedy_tokens_are_the_references(house: House, reference: Reference, length: int):
    prompt = random_prompt(length, length)
    answer = house.ask(prompt, max_tokens=12)
    reference.check(answer.tokens, prompt, 12)
    assert answer.reason is LENGTH
    usage = answer.finished.usage
    assert (usage.prompt_tokens, usage.output_tokens, usage.cached_tokens) == (length, 12, 0)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 1.5, "top_k": 10},
        {"temperature": 1.0, "min_p": 0.1},
    ],
)
def test_seeded_tokens_are_the_references(house: House, reference: Reference, params: dict):
    prompt = random_prompt(3, 20)
    answer = house.ask(prompt, max_tokens=10, seed=-5, **params)
    reference.check(answer.tokens, prompt, 10, seed=-5, **params)


def test_a_prompt_in_many_chunks(open_house, reference: Reference, recorded: list):
    house = open_house(max_num_seqs=4, max_num_batched_tokens=5)
    prompts = [random_prompt(seed, length) for seed, length in enumerate([70, 3, 41])]
    answers = [house.send(prompt, max_tokens=16) for prompt in prompts]
    for prompt, answer in zip(prompts, answers, strict=True):
        reference.check(answer.wait().tokens, prompt, 16)
    mixed = 0
    for step in recorded:
        lens = np.diff(field(step, "query_starts_S1"))
        lens = lens[lens > 0]
        assert lens.sum() <= 5
        mixed += lens.min() == 1 and lens.max() > 1
    assert mixed  # some step held decodes beside a chunk


@pytest.mark.parametrize("length", [23, 24])  # a page is 4: one prompt ends in a page, one with it
def test_a_prefix_hit_changes_no_token(house: House, reference: Reference, length: int):
    prompt = random_prompt(0, length)
    first = house.ask(prompt, max_tokens=8)
    second = house.ask(prompt, max_tokens=8)
    # The last token is always computed, so a whole page is left where the prompt ends with it.
    assert first.finished.usage.cached_tokens == 0
    assert second.finished.usage.cached_tokens == 20
    reference.check(first.tokens, prompt, 8)
    reference.check(second.tokens, prompt, 8)
    # Another prompt that shares twelve tokens, three pages of them.
    other = prompt[:12] + random_prompt(1, 9)
    third = house.ask(other, max_tokens=8)
    assert third.finished.usage.cached_tokens == 12
    reference.check(third.tokens, other, 8)
    assert house.engine.stats().cached_tokens_total == 32


def test_output_of_one_turn_is_a_prefix_of_the_next(house: House, reference: Reference):
    prompt = random_prompt(5, 13)
    turn = house.ask(prompt, max_tokens=11).tokens
    longer = prompt + turn + [7, 8, 9]
    answer = house.ask(longer, max_tokens=6)
    assert answer.finished.usage.cached_tokens == 20  # of 23 whose keys and values were computed
    reference.check(answer.tokens, longer, 6)


def test_without_the_prefix_cache_nothing_is_found(open_house, reference: Reference):
    house = open_house(prefix_caching=False)
    prompt = random_prompt(0, 24)
    for _ in range(2):
        answer = house.ask(prompt, max_tokens=4)
        assert answer.finished.usage.cached_tokens == 0
        reference.check(answer.tokens, prompt, 4)
    assert house.engine.stats().cached_pages == 0


def test_a_tiny_pool_gives_the_tokens_of_a_large_one(open_house, reference: Reference):
    """tiny-pool: eight requests of 12 pages, in a pool of 24."""
    house = open_house(num_pages=24, max_num_seqs=8)
    prompts = [random_prompt(seed, 20) for seed in range(8)]
    resume = house.pause()
    answers = [house.send(prompt, max_tokens=28) for prompt in prompts]
    resume()
    for prompt, answer in zip(prompts, answers, strict=True):
        reference.check(answer.wait().tokens, prompt, 28)
        assert answer.reason is LENGTH
    assert house.engine.stats().preemptions_total > 0


def test_preempted_samples_draw_the_same_again(open_house, reference: Reference):
    house = open_house(num_pages=20, max_num_seqs=6)
    prompts = [random_prompt(seed, 18) for seed in range(6)]
    resume = house.pause()
    answers = [house.send(prompt, max_tokens=22, temperature=1.0, seed=number) for number, prompt in enumerate(prompts)]
    resume()
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        reference.check(answer.wait().tokens, prompt, 22, temperature=1.0, seed=number)
    assert house.engine.stats().preemptions_total > 0


def test_neighbours_change_nothing(house: House, reference: Reference, recorded: list):
    """neighbour: a seeded request alone, and in one batch with 31 unseeded ones of all kinds."""
    prompt, params = random_prompt(1, 21), {"max_tokens": 16, "temperature": 1.0, "top_p": 0.9, "seed": 7}
    alone = house.ask(prompt, **params)
    resume = house.pause()
    others = [
        house.send(
            random_prompt(100 + number, 1 + number % 4),
            max_tokens=60,
            temperature=(0.0, 1.0, 2.0)[number % 3],
            top_k=(0, 5)[number % 2],
            logprobs=(None, 3)[number % 2],
        )
        for number in range(31)
    ]
    again = house.send(prompt, **params)
    resume()
    assert again.wait().tokens == alone.tokens
    reference.check(again.tokens, prompt, 16, **{k: params[k] for k in ("temperature", "top_p", "seed")})
    assert max(int(field(step, "num_seqs")) for step in recorded) == 32
    for number, answer in enumerate(others):
        if number % 3 == 0:  # the greedy ones
            reference.check(answer.wait().tokens, random_prompt(100 + number, 1 + number % 4), 60)
        assert len(answer.wait().tokens) == 60


def test_unseeded_requests_differ(house: House):
    prompt = random_prompt(1, 5)
    assert (
        house.ask(prompt, temperature=2.0, max_tokens=8).tokens
        != house.ask(prompt, temperature=2.0, max_tokens=8).tokens
    )


def test_steps_are_dispatched_before_the_last_ones_tokens_are_read(house: House, reference: Reference, recorded: list):
    prompt = random_prompt(2, 6)
    answer = house.ask(prompt, max_tokens=20)
    on_device = [bool((field(step, "token_ids_T") == -1).any()) for step in recorded]
    assert on_device == [False] + [True] * 19
    reference.check(answer.tokens, prompt, 20)


@pytest.mark.parametrize(("n", "length"), [(4, 18), (20, 6)])
def test_samples_of_a_seeded_request(house: House, reference: Reference, recorded: list, n: int, length: int):
    """n-with-seed. Twenty samples fork in one step, which is more page copies than one call makes."""
    assert n < COPIES_PER_CALL or n > COPIES_PER_CALL + 1
    prompt = random_prompt(11, length)
    params = {"n": n, "seed": 7, "temperature": 1.0, "max_tokens": 8}
    first = house.ask(prompt, **params)
    for number in range(3):
        house.send(random_prompt(50 + number, 9), temperature=1.0, max_tokens=20)
    second = house.ask(prompt, **params)
    samples = [first.tokens_of(index) for index in range(n)]
    assert len({tuple(tokens) for tokens in samples}) == n
    for index in range(n):
        assert second.tokens_of(index) == samples[index]
        reference.check(samples[index], prompt, 8, seed=7, index=index, temperature=1.0)
    assert [end.index for end in first.finished.ends] == list(range(n))
    assert {end.finish_reason for end in first.finished.ends} == {LENGTH}
    assert first.finished.usage.output_tokens == 8 * n


def test_samples_share_the_prompts_pages(house: House):
    used: list[int] = []

    def look(_: list) -> None:
        used.append(house.scheduler.pages.num_in_use)

    house.ask(random_prompt(0, 42), n=8, temperature=1.0, seed=1, max_tokens=2, on_events=look)
    # Ten pages shared, and a copy of the eleventh for each of the others.
    assert max(used) <= 11 + 7 * 1 + 8  # one more each, at most, for what is generated


def test_logprobs(house: House, reference: Reference):
    prompt = random_prompt(4, 10)
    answer = house.ask(prompt, max_tokens=6, logprobs=5)
    reference.check(answer.tokens, prompt, 6)
    truth = reference.next_tokens(prompt + answer.tokens)[1][9:-1]
    positions = [position for delta in answer.deltas for position in delta.logprobs]
    assert len(positions) == 6
    for delta in answer.deltas:
        assert len(delta.logprobs) == len(delta.token_ids)
    for position, token, logits in zip(positions, answer.tokens, truth, strict=True):
        right = logits - np.log(np.exp(logits.astype(np.float64)).sum())
        order = np.argsort(-right, kind="stable")[:5]
        assert position.chosen.token_id == token
        assert position.chosen.rank == 1
        assert position.chosen.logprob == pytest.approx(right[token], abs=1e-3)
        assert [t.token_id for t in position.top] == order.tolist()
        assert [t.rank for t in position.top] == [1, 2, 3, 4, 5]
        np.testing.assert_allclose([t.logprob for t in position.top], right[order], atol=1e-3)
    # None asked, none sent; zero asked, the chosen token's alone.
    assert not any(delta.logprobs for delta in house.ask(prompt, max_tokens=2).deltas)
    [position] = house.ask(prompt, max_tokens=1, logprobs=0).deltas[0].logprobs
    assert position.chosen.token_id == answer.tokens[0]
    assert position.top == (position.chosen,)


# Closed world.


def test_nothing_compiles_after_warm_up(tiny_config, cache_dir):
    with Engine.start(tiny_config, cache_dir=cache_dir) as engine:
        rng = np.random.default_rng(0)
        answers = []
        for number in range(60):
            length = int(rng.integers(1, 100))
            params = SamplingParams(
                n=int(rng.choice([1, 1, 1, 2, 5])),
                temperature=float(rng.choice([0.0, 0.5, 1.5])),
                top_p=float(rng.choice([0.3, 1.0])),
                top_k=int(rng.choice([0, 3, 200])),
                min_p=float(rng.choice([0.0, 0.2])),
                seed=int(rng.integers(0, 1000)) if rng.random() < 0.5 else None,
                logprobs=int(rng.integers(0, 21)) if rng.random() < 0.3 else None,
                max_tokens=int(rng.integers(1, 28)),
                stop=["th"] if rng.random() < 0.3 else None,
                stop_token_ids=[int(rng.integers(0, 384))] if rng.random() < 0.3 else None,
            )
            prompt = rng.integers(3, 384, length).tolist()
            if number % 7 == 0:
                prompt = prompt[:1] * length  # the same pages within the prompt, and between these
            answer = Answer(f"r{number}")
            engine.submit(Request(request_id=answer.request_id, params=params, token_ids=prompt), answer.sink)
            answers.append(answer)
            if number % 6 == 0:
                engine.abort(f"r{int(rng.integers(0, number + 1))}")
            if number % 10 == 0:
                answers[int(rng.integers(0, number + 1))].wait()
        for answer in answers:
            answer.check()
        stats = engine.stats()
        assert stats.steps_total > 50
        assert stats.compiles_after_warmup == 0
        # The counter sees what is none of the engine's programs.
        jnp.add(jnp.ones((3, 5, 7, 11)), 1).block_until_ready()
        over = threading.Event()
        engine.call(over.set)
        assert over.wait(TIMEOUT)
        last = Answer("last")
        engine.submit(Request(request_id="last", params=SamplingParams(max_tokens=1), token_ids=[5]), last.sink)
        last.check()
        assert engine.stats().compiles_after_warmup > 0


# Ends.


def test_several_end_tokens(open_house, reference: Reference):
    """several-eos (min_tokens comes with the next version)."""
    prompt = random_prompt(6, 9)
    tokens = reference.generate(prompt, 24)
    early, late = _fresh(tokens, 4), _fresh(tokens, 9)
    house = open_house(eos=(tokens[late], tokens[early]))
    answer = house.ask(prompt, max_tokens=24, ignore_eos=False)
    assert answer.tokens == tokens[: early + 1]
    assert (answer.reason, answer.stop_reason) == (STOP, tokens[early])
    assert answer.text == house.engine.detokenize(tokens[:early])  # an end token has no text
    assert answer.finished.usage.output_tokens == early + 1
    assert house.ask(prompt, max_tokens=24, ignore_eos=True).tokens == tokens


def test_the_tokenizers_end_token_counts_too(house: House, base: Engine):
    assert base.tokenizer.eos_token_ids == (EOS,)
    assert EOS in house.scheduler._eos_token_ids


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_stop_tokens_whatever_ignore_eos_says(house: House, reference: Reference, ignore_eos: bool):
    prompt = random_prompt(6, 9)
    tokens = reference.generate(prompt, 24)
    at = _fresh(tokens, 7)
    answer = house.ask(prompt, max_tokens=24, ignore_eos=ignore_eos, stop_token_ids=[tokens[at], 383])
    assert answer.tokens == tokens[: at + 1]
    assert (answer.reason, answer.stop_reason) == (STOP, tokens[at])


def test_an_end_token_at_the_last_allowed_place_is_a_stop(house: House, reference: Reference):
    prompt = random_prompt(6, 9)
    tokens = reference.generate(prompt, 24)
    at = _fresh(tokens, 7)
    answer = house.ask(prompt, max_tokens=at + 1, stop_token_ids=[tokens[at]])
    assert (answer.reason, answer.stop_reason, len(answer.tokens)) == (STOP, tokens[at], at + 1)


def _fresh(tokens: list[int], at: int) -> int:
    """The first place from `at` on whose token did not come before it."""
    return next(i for i in range(at, len(tokens)) if tokens[i] not in tokens[:i])


def test_stop_strings_cut_the_text(house: House):
    prompt = random_prompt(8, 9)
    whole = house.ask(prompt, max_tokens=30)
    # Two characters from the middle, that both are whole and come for the first time.
    stop, cut = next(
        (whole.text[i : i + 2], i)
        for i in range(len(whole.text) // 3, len(whole.text) - 2)
        if "\ufffd" not in whole.text[i : i + 2] and whole.text.index(whole.text[i : i + 2]) == i
    )
    answer = house.ask(prompt, max_tokens=30, stop=["never this", stop])
    assert answer.text == whole.text[:cut]
    assert (answer.reason, answer.stop_reason) == (STOP, stop)
    assert answer.tokens == whole.tokens[: len(answer.tokens)]
    assert len(answer.tokens) < 30
    # What came behind it on the device is thrown away, and the next request is not harmed by it.
    assert house.ask(prompt, max_tokens=30).tokens == whole.tokens


def test_one_sample_stops_and_its_siblings_go_on(house: House):
    prompt = random_prompt(9, 12)
    params = {"n": 3, "temperature": 1.0, "seed": 3, "max_tokens": 20}
    free = house.ask(prompt, **params)
    own = next(t for t in free.tokens_of(1)[2:12] if t not in free.tokens_of(0) + free.tokens_of(2))
    at = free.tokens_of(1).index(own)
    answer = house.ask(prompt, stop_token_ids=[own], **params)
    assert answer.tokens_of(1) == free.tokens_of(1)[: at + 1]
    assert answer.tokens_of(0) == free.tokens_of(0)
    assert answer.tokens_of(2) == free.tokens_of(2)
    assert [end.finish_reason for end in answer.finished.ends] == [LENGTH, STOP, LENGTH]


@pytest.mark.parametrize("count", [1, 2, 7])
def test_max_tokens(house: House, count: int):
    answer = house.ask(random_prompt(1, 6), max_tokens=count)
    assert (len(answer.tokens), answer.reason) == (count, LENGTH)


def test_prompts_at_the_limit(open_house, reference: Reference):
    """at-the-limit: a context of 32."""
    house = open_house(max_model_len=32)
    prompt = random_prompt(1, 33)
    for length in (32, 33):
        with pytest.raises(InvalidArgumentError, match=f"{length} tokens.*at most 31 tokens: the context is 32"):
            house.send(prompt[:length])
    answer = house.ask(prompt[:31], max_tokens=5)
    reference.check(answer.tokens, prompt[:31], 1)
    assert answer.reason is LENGTH


@pytest.mark.parametrize("max_tokens", [22, 23, None])
def test_asking_for_more_than_the_context(open_house, reference: Reference, max_tokens: int | None):
    """asks-too-many: it generates up to the limit."""
    house = open_house(max_model_len=32)
    prompt = random_prompt(1, 10)
    answer = house.ask(prompt, max_tokens=max_tokens)
    reference.check(answer.tokens, prompt, 22)
    assert answer.reason is LENGTH


def test_an_empty_prompt_is_refused_alone(house: House, reference: Reference):
    """empty-prompt, among good ones."""
    good = house.send([9, 8, 7], max_tokens=8)
    for prompt, name in (("", "text"), ([], "prompt")):
        with pytest.raises(InvalidArgumentError, match=name):
            house.send(prompt)
    also_good = house.send([5, 6], max_tokens=8)
    reference.check(good.wait().tokens, [9, 8, 7], 8)
    reference.check(also_good.wait().tokens, [5, 6], 8)


@pytest.mark.parametrize("bad", [-1, 384, 2**40, True, 1.0, "3"])
def test_token_ids_out_of_range(house: House, bad):
    """ids-out-of-range."""
    with pytest.raises(InvalidArgumentError, match="token_ids = ") as caught:
        house.send([5, bad, 6])
    assert repr(bad) in str(caught.value)
    if type(bad) is int:
        assert "0 to 383" in str(caught.value)
        assert "384" in str(caught.value)
    assert house.ask([383, 0], max_tokens=1).reason is LENGTH


def test_a_prompt_that_never_fits_the_pool(open_house, reference: Reference):
    """never-fits: refused at once with the pool's size, and the queue behind it goes on."""
    house = open_house(num_pages=4)
    resume = house.pause()
    with pytest.raises(InvalidArgumentError, match=r"17 tokens.*at most 16 tokens, all that the page pool holds"):
        house.send(random_prompt(1, 17))
    behind = house.send(random_prompt(2, 5), max_tokens=4)
    resume()
    reference.check(behind.wait().tokens, random_prompt(2, 5), 4)


@pytest.mark.parametrize("length", [13, 16])
def test_output_that_fills_the_pool(open_house, reference: Reference, length: int):
    """outgrows-pool: it ends with `length`. The last token needs no place in the pool."""
    house = open_house(num_pages=4)
    prompt = random_prompt(1, length)
    answer = house.ask(prompt, max_tokens=50)
    reference.check(answer.tokens, prompt, 17 - length)
    assert answer.reason is LENGTH


def test_two_requests_of_one_id(house: House, reference: Reference):
    """same-id-twice."""
    prompt = random_prompt(1, 8)
    resume = house.pause()
    first = house.send(prompt, request_id="same", max_tokens=20)
    with pytest.raises(RequestExistsError, match="'same'"):
        house.send(prompt, request_id="same")
    resume()
    first.wait_first()
    reference.check(first.wait().tokens, prompt, 20)
    assert house.ask(prompt, request_id="same", max_tokens=1).reason is LENGTH  # ended, the id is free


def test_an_id_is_free_when_its_last_event_arrives(house: House):
    again: list[Answer] = []

    def once_more(events: list) -> None:
        if isinstance(events[-1], Finished) and not again:
            again.append(house.send([5, 6], request_id="same", max_tokens=1))

    house.ask([5, 6], request_id="same", max_tokens=1, on_events=once_more)
    again[0].check()


def test_the_queue_is_bounded(open_house):
    house = open_house(max_num_seqs=1, max_waiting=2)
    resume = house.pause()
    answers = [house.send([5 + number], max_tokens=3) for number in range(2)]
    with pytest.raises(QueueFullError, match="2 requests are waiting, the limit is 2"):
        house.send([9])
    resume()
    for answer in answers:
        assert answer.wait().reason is LENGTH
    assert house.ask([9], max_tokens=1).reason is LENGTH


def test_a_refused_request_leaves_no_trace(open_house):
    house = open_house(max_waiting=1)
    for _ in range(3):  # were one still counted as waiting, the next would be refused for another reason
        with pytest.raises(InvalidArgumentError):
            house.send([], request_id="x")
    assert house.ask([5], request_id="x", max_tokens=1).reason is LENGTH


def test_priority_goes_before_arrival(open_house):
    house = open_house(max_num_seqs=1)
    order: list[str] = []
    resume = house.pause()
    for name, priority in (("late", 1), ("soon", 0), ("first", -1)):
        request = Request(request_id=name, params=SamplingParams(max_tokens=1), token_ids=[5, 6], priority=priority)
        answer = Answer(name, lambda events, name=name: order.append(name))
        house.engine.submit(request, answer.sink)
        house.answers.append(answer)
    resume()
    for answer in house.answers:
        answer.wait()
    assert list(dict.fromkeys(order)) == ["first", "soon", "late"]


# Text in, text out.


def test_text_and_chat(house: House):
    engine = house.engine
    ids = engine.tokenize("the quick brown fox")
    by_text = house.ask("the quick brown fox", max_tokens=8)
    assert by_text.tokens == house.ask(ids, max_tokens=8).tokens
    assert by_text.text == engine.detokenize(by_text.tokens)
    messages = [{"role": "user", "content": "hello"}]
    answer = Answer("chat")
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    engine.submit(Request(request_id="chat", params=params, messages=messages), answer.sink)
    house.answers.append(answer)
    ids = engine.tokenize_chat(messages)
    assert ids[0] == 1  # <|im_start|>, as the template has it
    assert answer.wait().tokens == house.ask(ids, max_tokens=8).tokens


def test_control_strings_in_text_stay_text(house: House, caplog):
    plain = house.engine.tokenize("<|im_end|>")
    assert EOS not in plain
    answer = house.ask("<|im_end|>", max_tokens=1)
    assert answer.finished.usage.prompt_tokens == len(plain)
    assert "'<|im_end|>'" in caplog.text
    request = Request(request_id="special", params=SamplingParams(max_tokens=1), text="<|im_end|>", parse_special=True)
    answer = Answer("special")
    house.engine.submit(request, answer.sink)
    house.answers.append(answer)
    assert answer.finished.usage.prompt_tokens == 1


def test_stream_gives_the_events_in_order(house: House, reference: Reference):
    async def collect(prompt: list[int]) -> list:
        return [event async for event in house.engine.stream(house.request(prompt, max_tokens=9))]

    async def all_of_them() -> list[list]:
        return await asyncio.gather(*(collect(random_prompt(seed, 7)) for seed in range(5)))

    for seed, events in enumerate(asyncio.run(all_of_them())):
        *deltas, last = events
        assert isinstance(last, Finished)
        tokens = list(itertools.chain.from_iterable(delta.token_ids for delta in deltas))
        reference.check(tokens, random_prompt(seed, 7), 9)
        assert all(isinstance(delta, Delta) for delta in deltas)


def test_timings_and_stats(house: House):
    answer = house.ask(random_prompt(1, 40), max_tokens=5)
    timings = answer.finished.timings
    assert 0 <= timings.queue_s <= timings.first_token_s <= timings.total_s < TIMEOUT
    house.check_idle()
    stats = house.engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert (stats.prompt_tokens_total, stats.output_tokens_total) == (40, 5)
    assert stats.free_pages + stats.cached_pages == stats.total_pages == house.scheduler.config.num_pages
    assert stats.cached_pages == 11  # of 44 computed tokens
    assert stats.steps_total == 6  # two chunks of the prompt, the second with the first token
    assert stats.page_size == 4
    assert stats.host_ms_per_step > 0
    assert stats.output_tokens_per_s > 0
