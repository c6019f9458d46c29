"""Bans, biases and penalties against a numpy reference, through random lives of sequences in their slots."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rule_reference import changed_logits
from test_sampler import inputs, no_rules

from jaxinfer.engine.step_inputs import EntryShape
from jaxinfer.sampling.logit_rules import RuleInputs, SlotRules, apply_rules, count_tokens, rules_shapes, set_slot
from jaxinfer.sampling.sampler import sample
from jaxinfer.types import MAX_BAD_WORD_TOKENS, SlotEntry

V, SLOTS = 37, 4  # few tokens, so that they repeat; not a multiple of 32
SHAPE = EntryShape(V)


@dataclass
class Rules:
    """What one sequence asks, and its tokens so far."""

    prompt: list[int]
    output: list[int]
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: dict[int, float] | None = None
    allowed: list[int] | None = None
    words: tuple[tuple[int, ...], ...] = ()
    ends: tuple[int, ...] = ()
    min_tokens: int = 0

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.output)

    def entry(self, slot: int) -> SlotEntry:
        array = lambda values: np.array(list(values), np.int32)
        words = [[-1] * (MAX_BAD_WORD_TOKENS - len(word)) + list(word) for word in self.words]
        bias = self.bias or {}
        return SlotEntry(
            slot=slot,
            prompt_token_ids=array(self.prompt),
            output_token_ids=array(self.output),
            end_token_ids=array(self.ends),
            bias_token_ids=array(bias),
            bias=np.array(list(bias.values()), np.float32),
            allowed_token_ids=None if self.allowed is None else array(self.allowed),
            banned_words=np.array(words, np.int32).reshape(-1, MAX_BAD_WORD_TOKENS),
        )

    def reference(self, logits: np.ndarray) -> np.ndarray:
        return changed_logits(
            logits,
            self.prompt,
            self.output,
            presence_penalty=self.presence,
            frequency_penalty=self.frequency,
            repetition_penalty=self.repetition,
            logit_bias=self.bias,
            allowed_token_ids=self.allowed,
            min_tokens=self.min_tokens,
            words=self.words,
            ends=self.ends,
        )


tokens = st.integers(0, V - 1)
rule_sets = st.builds(
    Rules,
    prompt=st.lists(tokens, min_size=1, max_size=12),
    output=st.lists(tokens, max_size=20),
    presence=st.sampled_from([0.0, 0.5, -2.0, 2.0]),
    frequency=st.sampled_from([0.0, 0.3, -2.0, 2.0]),
    repetition=st.sampled_from([1.0, 1.3, 0.5, 100.0]),
    bias=st.none() | st.dictionaries(tokens, st.floats(-100, 100, width=32), max_size=5),
    allowed=st.none() | st.lists(tokens, min_size=1, max_size=V, unique=True),
    words=st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=6).map(tuple),
    ends=st.lists(tokens, max_size=3).map(tuple),
    min_tokens=st.integers(0, 25),
)

enter = jax.jit(lambda rules, packed: set_slot(rules, *SHAPE.unpack(packed)))
apply_jitted = jax.jit(apply_rules)
count_jitted = jax.jit(count_tokens)
sample_jitted = jax.jit(sample)


def empty_rules() -> SlotRules:
    return SlotRules(*(jnp.zeros(shape, dtype) for shape, dtype in rules_shapes(SLOTS + 1, V)))


def rule_inputs(owners: list[Rules | None]) -> tuple[RuleInputs, jax.Array]:
    """Inputs of a step with a row for each slot, and the positions to be sampled; None has no rules."""
    of = lambda get, dtype: jnp.array([0 if owner is None else get(owner) for owner in owners], dtype)
    made = RuleInputs(
        jnp.arange(len(owners)),
        of(lambda owner: 1, jnp.int32),
        of(lambda owner: len(owner.prompt) + owner.min_tokens, jnp.int32),
        of(lambda owner: owner.presence, jnp.float32),
        of(lambda owner: owner.frequency, jnp.float32),
        of(lambda owner: owner.repetition, jnp.float32),
    )
    return made, of(lambda owner: owner.position, jnp.int32)


@settings(max_examples=60, deadline=None)
@given(owners=st.lists(st.none() | rule_sets, min_size=SLOTS, max_size=SLOTS), seed=st.integers(0, 2**32 - 1))
def test_logits_equal_the_reference(owners: list[Rules | None], seed: int):
    logits = np.random.default_rng(seed).normal(size=(SLOTS, V)).astype(np.float32) * 4
    rules = empty_rules()
    for slot, owner in enumerate(owners):
        if owner is not None:
            rules = enter(rules, SHAPE.pack(owner.entry(slot)))
    got = np.asarray(apply_jitted(jnp.asarray(logits), *rule_inputs(owners), rules))
    for slot, owner in enumerate(owners):
        if owner is None:
            np.testing.assert_array_equal(got[slot], logits[slot])  # bit for bit
        else:
            # A bias of 100 leaves 24 bits for the sum: 6e-6; a penalty of 100 multiplies that.
            np.testing.assert_allclose(got[slot], owner.reference(logits[slot]), rtol=1e-5, atol=1e-3)


@settings(max_examples=30, deadline=None)
@given(
    owners=st.lists(rule_sets, min_size=SLOTS, max_size=SLOTS),
    sampled=st.lists(st.lists(tokens, min_size=SLOTS, max_size=SLOTS), max_size=MAX_BAD_WORD_TOKENS + 4),
)
def test_counting_on_the_device_is_entering_again(owners: list[Rules], sampled: list[list[int]]):
    """So a sequence that was preempted, and starts again in another slot, goes on as if nothing had happened."""
    rules = empty_rules()
    for slot, owner in enumerate(owners):
        rules = enter(rules, SHAPE.pack(owner.entry(slot)))
    for step in sampled:
        rules = count_jitted(rules, jnp.arange(SLOTS), jnp.array(step, jnp.int32))
        for owner, token in zip(owners, step, strict=True):
            owner.output.append(token)
    again = empty_rules()
    for slot, owner in enumerate(owners):
        again = enter(again, SHAPE.pack(owner.entry(slot)))
    jax.tree.map(np.testing.assert_array_equal, rules, again)


@settings(max_examples=25, deadline=None)
@given(
    owner=rule_sets,
    seed=st.integers(0, 2**32 - 1),
    temperature=st.sampled_from([0.5, 1.0]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.8]),
)
def test_draws_follow_the_reference_distribution(owner: Rules, seed: int, temperature: float, top_k: int, top_p: float):
    draws = 2048
    logits = np.random.default_rng(seed).normal(size=V).astype(np.float32) * 2
    x = owner.reference(logits)
    rules = enter(empty_rules(), SHAPE.pack(owner.entry(0)))
    ruled, position = rule_inputs([owner])
    ruled = RuleInputs(*(jnp.repeat(each, draws) for each in ruled))
    rows = inputs(draws, temperature=temperature, top_k=top_k, top_p=top_p, seed=np.arange(draws))
    rows = rows._replace(position_R=jnp.repeat(position, draws), rules=ruled)
    got = np.asarray(sample_jitted(jnp.broadcast_to(jnp.asarray(logits), (draws, V)), rows, rules).token_R)
    greedy = rows._replace(temperature_R=jnp.zeros(draws))
    likeliest = np.asarray(sample_jitted(jnp.broadcast_to(jnp.asarray(logits), (draws, V)), greedy, rules).token_R)
    if not np.isfinite(x).any():
        assert (got == -1).all()
        assert (likeliest == -1).all()
        return
    assert x[likeliest[0]] >= x.max() - 1e-3
    p = np.exp((x - x.max()) / temperature)
    order = np.argsort(-p, kind="stable")
    if top_k:
        p[order[top_k:]] = 0
    p /= p.sum()
    p[order[np.concatenate([[0], np.cumsum(p[order])[:-1]]) >= top_p]] = 0
    p /= p.sum()
    frequency = np.bincount(got, minlength=V) / draws
    assert frequency[~np.isfinite(x)].sum() == 0, "a banned token"
    # Total variation of an empirical distribution is about sqrt(support / (2 pi draws)); a token at the very edge of
    # top_k or top_p may fall either way by rounding, but then it is as likely as what replaces it.
    support = int((p > 0).sum())
    edge = p[p > 0].min() if top_k or top_p < 1 else 0.0
    assert 0.5 * np.abs(frequency - p).sum() <= 3 * np.sqrt(support / (2 * np.pi * draws)) + 0.02 + edge


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_all_is_banned_no_token_is_chosen(temperature: float):
    owner = Rules([1], [2], allowed=[5], words=((2, 5),))
    rules = enter(empty_rules(), SHAPE.pack(owner.entry(0)))
    ruled, position = rule_inputs([owner, None])
    rows = inputs(2, temperature=temperature)._replace(rules=ruled, position_R=position)
    got = sample_jitted(jnp.zeros((2, V)).at[:, 9].set(50.0), rows, rules).token_R
    assert got.tolist() == [-1, 9]


def test_stale_entries_are_not_read():
    rules = jax.tree.map(lambda each: each.at[...].set(jnp.nan if each.dtype == jnp.float32 else 3), no_rules(V))
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, V)).astype(np.float32))
    ruled, position = rule_inputs([None, None])
    got = apply_jitted(logits, ruled._replace(slots_R=jnp.zeros(2, jnp.int32)), position, rules)
    np.testing.assert_array_equal(got, logits)


def test_logprobs_are_of_the_model_s_own_distribution():
    owner = Rules([1], [], allowed=[5], bias={5: 30.0})
    rules = enter(empty_rules(), SHAPE.pack(owner.entry(0)))
    ruled, position = rule_inputs([owner])
    rows = inputs(1, temperature=0.0, num_logprobs=3)._replace(rules=ruled, position_R=position)
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(1, V)).astype(np.float32))
    out = sample_jitted(logits, rows, rules)
    assert out.token_R.tolist() == [5]
    np.testing.assert_allclose(out.logprob_R[0], jax.nn.log_softmax(logits)[0, 5], rtol=1e-6)
    np.testing.assert_allclose(out.top_logprobs_RX[0, 0], jax.nn.log_softmax(logits).max(), rtol=1e-6)
