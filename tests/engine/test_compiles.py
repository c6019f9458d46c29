"""The world is closed: after warm-up nothing compiles, whatever is asked for."""

from __future__ import annotations

import random

import jax.numpy as jnp
from engine_harness import House

from jaxinfer.engine.executables import compile_count


def test_random_requests_compile_nothing(house: House):
    rng = random.Random(0)
    before = compile_count()
    answers = []
    for number in range(40):
        prompt = [rng.randrange(3, 300) for _ in range(rng.randint(1, 90))]
        params = {"max_tokens": rng.randint(1, 20), "n": rng.choice([1, 1, 3]), "temperature": rng.choice([0.0, 0.8])}
        params |= {"top_k": rng.choice([0, 5, 200]), "top_p": rng.choice([1.0, 0.7]), "seed": number}
        answers.append(house.send(prompt, **params, logprobs=rng.choice([None, 0, 5])))
        if rng.random() < 0.2:
            house.engine.abort(answers[-1].request_id)
    for answer in answers:
        answer.wait()
    assert compile_count() == before


def test_the_counter_sees_a_stray_operation():
    before = compile_count()
    jnp.zeros((7, 11, 13)).sum(axis=1).block_until_ready()
    assert compile_count() > before
