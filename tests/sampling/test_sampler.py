"""Sampling against a numpy reference of its distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.sampling.logit_rules import RuleInputs, SlotRules, rules_shapes
from jaxinfer.sampling.sampler import SampledTokens, SamplingInputs, sample

DRAWS = 4096
sample_jitted = jax.jit(sample)


def jitted(logits: jax.Array, rows: SamplingInputs) -> SampledTokens:
    return sample_jitted(logits, rows, no_rules(logits.shape[1]))


def no_rules(vocab: int) -> SlotRules:
    """One slot, whose entry would show at once if it were read."""
    return SlotRules(*(jnp.full(shape, 7, dtype) for shape, dtype in rules_shapes(1, vocab)))


def inputs(
    rows: int, *, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, seed=1, position=0, num_logprobs=-1, target=-1
):
    fill = lambda value, dtype: jnp.broadcast_to(jnp.asarray(value, dtype), (rows,))
    seeds = np.zeros((rows, 2), np.uint32)
    seeds[:, 0] = seed
    return SamplingInputs(
        fill(temperature, jnp.float32),
        fill(top_p, jnp.float32),
        fill(top_k, jnp.int32),
        fill(min_p, jnp.float32),
        jnp.asarray(seeds),
        fill(position, jnp.int32),
        fill(num_logprobs, jnp.int32),
        fill(target, jnp.int32),
        RuleInputs(*(fill(0, jnp.int32) for _ in range(3)), *(fill(0, jnp.float32) for _ in range(3))),
    )


def distribution(logits: np.ndarray, temperature: float, top_p: float, top_k: int, min_p: float) -> np.ndarray:
    """The distribution that vLLM documents: temperature, min_p, top_k, then top_p of what is left."""
    scaled = logits.astype(np.float64) / temperature
    p = np.exp(scaled - scaled.max())
    p[p < min_p * p.max()] = 0
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    if top_k > 0:
        p[order[top_k:]] = 0
        p /= p.sum()
    before = np.concatenate([[0], np.cumsum(p[order])[:-1]])
    p[order[before >= top_p]] = 0
    return p / p.sum()


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocab=st.sampled_from([7, 300, 1000]),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
    top_k=st.sampled_from([0, 1, 5, 64, 65, 200]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
)
def test_draws_follow_the_reference_distribution(seed, vocab, temperature, top_p, top_k, min_p):
    logits = np.random.default_rng(seed).standard_normal(vocab).astype(np.float32) * 2
    want = distribution(logits, temperature, top_p, top_k, min_p)
    rows = inputs(
        DRAWS,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        position=np.arange(DRAWS),
    )
    tokens = np.asarray(jitted(jnp.broadcast_to(jnp.asarray(logits), (DRAWS, vocab)), rows).token_R)
    got = np.bincount(tokens, minlength=vocab) / DRAWS
    # A token at the very edge of top_p or min_p may fall either way by float32 rounding.
    edge = want[want > 0].min() if (want > 0).any() else 0
    assert got[want == 0].sum() <= edge + 1e-9
    # Total variation of an empirical distribution: about sqrt(support / (2 pi DRAWS)); three times that never happens.
    support = int((want > 0).sum())
    assert 0.5 * np.abs(got - want).sum() <= 3 * np.sqrt(support / (2 * np.pi * DRAWS)) + 0.02


def test_zero_temperature_is_argmax():
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((5, 1000)), jnp.float32)
    assert (jitted(logits, inputs(5, temperature=0.0)).token_R == jnp.argmax(logits, -1)).all()


@pytest.mark.parametrize("others", [{}, {"top_p": 0.3}, {"top_k": 900}, {"temperature": 0.0}, {"num_logprobs": 5}])
def test_a_row_does_not_depend_on_its_neighbours(others):
    rng = np.random.default_rng(3)
    logits = jnp.asarray(rng.standard_normal((8, 5000)), jnp.float32)
    for mine in ({}, {"top_p": 0.9}, {"top_k": 3}, {"top_k": 700, "top_p": 0.99}, {"min_p": 0.1}):
        alone = jitted(logits, inputs(8, seed=7, position=np.arange(8), **mine)).token_R
        row, rest = inputs(8, seed=7, position=np.arange(8), **mine), inputs(8, seed=9, **others)
        mixed = jax.tree.map(lambda a, b: jnp.concatenate([a[:4], b[4:]]), row, rest)
        assert (jitted(logits, mixed).token_R[:4] == alone[:4]).all()


def test_same_seed_and_position_same_token_and_others_differ():
    logits = jnp.zeros((64, 4096))
    a = jitted(logits, inputs(64, seed=5, position=np.arange(64))).token_R
    assert (jitted(logits, inputs(64, seed=5, position=np.arange(64))).token_R == a).all()
    assert (jitted(logits, inputs(64, seed=6, position=np.arange(64))).token_R != a).sum() > 60
    assert len(set(np.asarray(a).tolist())) > 55


def test_tiny_temperature_does_not_overflow():
    logits = jnp.asarray([[1000.0, 999.0, -1000.0]])
    assert int(jitted(logits, inputs(1, temperature=1e-6)).token_R[0]) == 0


def test_logprobs_are_of_the_plain_distribution_and_sorted():
    logits = np.random.default_rng(1).standard_normal((3, 500)).astype(np.float32)
    out = jitted(jnp.asarray(logits), inputs(3, temperature=0.0, num_logprobs=5))
    want = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    np.testing.assert_allclose(np.asarray(out.top_logprobs_RX), -np.sort(-want, axis=-1)[:, :20], rtol=1e-5)
    # The chosen token is the top one: the same float.
    assert (out.logprob_R == out.top_logprobs_RX[:, 0]).all()
    assert (out.rank_R == 1).all()


def test_a_target_is_taken_and_its_logprob_told():
    logits = np.random.default_rng(2).standard_normal((4, 300)).astype(np.float32)
    targets = np.array([7, -1, 299, 0])
    out = jitted(jnp.asarray(logits), inputs(4, temperature=0.0, target=targets, num_logprobs=2))
    chosen = np.where(targets >= 0, targets, logits.argmax(-1))
    assert out.token_R.tolist() == chosen.tolist()
    want = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    np.testing.assert_allclose(out.logprob_R, np.take_along_axis(want, chosen[:, None], 1)[:, 0], rtol=1e-5)
    assert out.rank_R.tolist() == [1 + int((row > row[i]).sum()) for row, i in zip(want, chosen, strict=True)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_no_numbers_give_no_token_to_their_row_alone(temperature, bad):
    logits = np.random.default_rng(4).standard_normal((3, 1000)).astype(np.float32)
    broken = logits.copy()
    broken[1, 500] = bad
    rows = inputs(3, temperature=temperature, position=np.arange(3))
    right, got = (jitted(jnp.asarray(each), rows).token_R.tolist() for each in (logits, broken))
    assert got == [right[0], -1, right[2]]


def test_a_greedy_step_does_not_pay_for_sampling():
    text = sample_jitted.lower(jnp.zeros((4, 5000)), inputs(4), no_rules(5000)).as_text()
    head = text[: text.index("stablehlo.case")] if "stablehlo.case" in text else text[: text.index("stablehlo.if")]
    for op in ("sort", "top_k", "exponential", "shift_right", "scatter"):
        assert op not in head
