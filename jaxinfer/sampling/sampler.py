"""Logits to tokens and log-probabilities, on the device. R sampled rows, V vocabulary.

A row's result depends on that row alone: its logits, its parameters, its seed and its position. Work that only some
rows need (rules, sampling at all, sorting, log-probabilities) runs under `cond` and is skipped when no row asks for it;
what it yields for a row never depends on which rows asked.

Where the vocabulary is split over devices these run inside `shard_map`, each device with its columns of the logits.
They exchange a few numbers a row; only the exact fallback for top_k and top_p, which is rare, gathers all columns.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.sampling.logit_rules import RuleInputs, SlotRules, apply_rules
from jaxinfer.sampling.vocabulary import Vocabulary, last_positive
from jaxinfer.types import MAX_LOGPROBS

CANDIDATES = 64  # likeliest tokens looked at first for top_k and top_p; a full sort is the exact fallback
BLOCK = 256  # vocabulary entries a block of the two-level cumulative sum


class SamplingInputs(NamedTuple):
    """Parameters by row; `types.SamplingParams` tells their meaning.

    Where `target_R` is not negative, that token is taken, whatever the rest says: its log-probability is what is asked
    for.
    """

    temperature_R: jax.Array
    top_p_R: jax.Array
    top_k_R: jax.Array
    min_p_R: jax.Array
    seed_R2: jax.Array  # uint32
    position_R: jax.Array  # of the token to be sampled
    num_logprobs_R: jax.Array  # -1 asks for none
    target_R: jax.Array  # -1 samples
    rules: RuleInputs


class SampledTokens(NamedTuple):
    """What was sampled; the log-probabilities are of the unmodified distribution and 0 where no row asked.

    A token of -1 says that none could be chosen: all are banned, or the logits are not numbers. `rank_R` is 1 for the
    likeliest token; `top_ids_RX` and `top_logprobs_RX` hold the MAX_LOGPROBS likeliest.
    """

    token_R: jax.Array
    logprob_R: jax.Array
    rank_R: jax.Array
    top_ids_RX: jax.Array
    top_logprobs_RX: jax.Array


def sampled_shapes(num_rows: int, vocab_size: int) -> SampledTokens:
    """Shapes and dtypes of what `sample` gives."""
    spec = jax.ShapeDtypeStruct
    R, RX = (num_rows,), (num_rows, min(MAX_LOGPROBS, vocab_size))
    fields = (R, jnp.int32), (R, jnp.float32), (R, jnp.int32), (RX, jnp.int32), (RX, jnp.float32)
    return SampledTokens(*(spec(*field) for field in fields))  # type: ignore[arg-type]


def sample(
    logits_RV: jax.Array, inputs: SamplingInputs, rules: SlotRules, vocabulary: Vocabulary | None = None
) -> SampledTokens:
    """Samples a token for each row from float32 logits, of which `vocabulary` says which columns they are."""
    vocabulary = vocabulary or Vocabulary(logits_RV.shape[1], logits_RV.shape[1])
    logits_RV = vocabulary.mask_padding(logits_RV)
    plain = (inputs.rules.ruled_R == 0) & (inputs.temperature_R == 0)
    token_R = lax.cond(
        jnp.all(plain),
        lambda: _likeliest(logits_RV, vocabulary),
        lambda: _choose(logits_RV, inputs, rules, vocabulary),
    )
    token_R = jnp.where(inputs.target_R >= 0, inputs.target_R, token_R)
    return SampledTokens(token_R, *_logprobs(logits_RV, token_R, jnp.any(inputs.num_logprobs_R >= 0), vocabulary))


def _likeliest(logits_RV: jax.Array, vocabulary: Vocabulary) -> jax.Array:
    best_R, greedy_R = vocabulary.likeliest(logits_RV)
    return jnp.where(jnp.isfinite(best_R), greedy_R, -1)


def _choose(logits_RV: jax.Array, inputs: SamplingInputs, rules: SlotRules, vocabulary: Vocabulary) -> jax.Array:
    logits_RV = lax.cond(
        jnp.any(inputs.rules.ruled_R != 0),
        lambda: apply_rules(logits_RV, inputs.rules, inputs.position_R, rules, vocabulary),
        lambda: logits_RV,
    )
    greedy_R = _likeliest(logits_RV, vocabulary)
    random_R = (inputs.temperature_R > 0) & (greedy_R >= 0)
    return lax.cond(
        jnp.any(random_R),
        lambda: jnp.where(random_R, _sample_random(logits_RV, inputs, vocabulary), greedy_R),
        lambda: greedy_R,
    )


def uniform(seed_R2: jax.Array, position_R: jax.Array) -> jax.Array:
    """One number in [0, 1) for each (seed, position): the same wherever and with whomever it is drawn."""

    def draw(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, position))

    return jax.vmap(draw)(seed_R2, position_R)


def _sample_random(logits_RV: jax.Array, inputs: SamplingInputs, vocabulary: Vocabulary) -> jax.Array:
    temperature_R = jnp.where(inputs.temperature_R > 0, inputs.temperature_R, 1.0)
    # The largest is taken off first: a tiny temperature must not overflow.
    scaled_RV = (logits_RV - vocabulary.largest(logits_RV)) / temperature_R[:, None]
    u_R = uniform(inputs.seed_R2, inputs.position_R)
    weights_RV = jnp.exp(scaled_RV)
    weights_RV = jnp.where(weights_RV >= inputs.min_p_R[:, None], weights_RV, 0.0)
    sorts_R = ((inputs.top_k_R > 0) | (inputs.top_p_R < 1.0)) & (inputs.temperature_R > 0)
    whole_R = _invert(weights_RV, u_R, vocabulary)
    return lax.cond(
        jnp.any(sorts_R),
        lambda: jnp.where(sorts_R, _sample_truncated(weights_RV, u_R, sorts_R, inputs, vocabulary), whole_R),
        lambda: whole_R,
    )


def _invert(weights_RV: jax.Array, u_R: jax.Array, vocabulary: Vocabulary) -> jax.Array:
    """The token at which the running sum of weights, in order of id, passes u times their total."""
    R, V = weights_RV.shape
    blocks_RCB = jnp.pad(weights_RV, ((0, 0), (0, -V % BLOCK))).reshape(R, -1, BLOCK)
    ends_RC = jnp.cumsum(blocks_RCB.sum(-1), axis=-1)
    here_R, target_R = vocabulary.locate(ends_RC[:, -1], u_R)
    block_R = jnp.minimum(jnp.sum(ends_RC <= target_R[:, None], axis=-1), last_positive(blocks_RCB.sum(-1)))
    before_R = jnp.where(block_R > 0, jnp.take_along_axis(ends_RC, block_R[:, None] - 1, axis=1)[:, 0], 0.0)
    block_RB = jnp.take_along_axis(blocks_RCB, block_R[:, None, None], axis=1)[:, 0]
    index_R = jnp.sum(jnp.cumsum(block_RB, axis=-1) <= (target_R - before_R)[:, None], axis=-1)
    # Rounding may carry past the last token with any weight.
    column_R = block_R * BLOCK + jnp.minimum(index_R, last_positive(block_RB))
    return vocabulary.total(jnp.where(here_R, vocabulary.first + column_R, 0)).astype(jnp.int32)


def _sample_truncated(
    weights_RV: jax.Array, u_R: jax.Array, sorts_R: jax.Array, inputs: SamplingInputs, vocabulary: Vocabulary
) -> jax.Array:
    """Samples from each row's likeliest tokens: top_k first, then top_p of what top_k left."""
    V = vocabulary.size
    total_R = vocabulary.total(weights_RV.sum(-1))
    k_R = jnp.where((inputs.top_k_R > 0) & (inputs.top_k_R < V), inputs.top_k_R, V)
    top_RX, ids_RX = vocabulary.top_k(weights_RV, min(CANDIDATES, V))
    all_in_R = (k_R <= top_RX.shape[1]) | (top_RX[:, -1] <= 0)
    # Without a small top_k the candidates do if they hold top_p of the whole.
    enough_R = all_in_R | ((k_R == V) & (jnp.cumsum(top_RX, axis=-1)[:, -1] >= inputs.top_p_R * total_R))
    denominator_R = jnp.where(all_in_R, -1.0, total_R)
    few_R = _invert_sorted(top_RX, ids_RX, k_R, inputs.top_p_R, denominator_R, u_R)

    def exact() -> jax.Array:
        all_RV = vocabulary.gathered(weights_RV)
        order_RV = jnp.argsort(-all_RV, axis=-1, stable=True)
        sorted_RV = jnp.take_along_axis(all_RV, order_RV, axis=1)
        return _invert_sorted(sorted_RV, order_RV, k_R, inputs.top_p_R, jnp.full_like(total_R, -1.0), u_R)

    return lax.cond(jnp.any(sorts_R & ~enough_R), lambda: jnp.where(enough_R, few_R, exact()), lambda: few_R)


def _invert_sorted(sorted_RX, ids_RX, k_R, top_p_R, denominator_R, u_R) -> jax.Array:
    """Samples from descending weights; a negative denominator means: the sum of the first k."""
    in_k_RX = jnp.arange(sorted_RX.shape[1]) < k_R[:, None]
    sums_RX = jnp.cumsum(jnp.where(in_k_RX, sorted_RX, 0.0), axis=-1)
    whole_R = jnp.where(denominator_R < 0, sums_RX[:, -1], denominator_R)
    # A token stays while those before it hold less than top_p; the first always stays.
    before_RX = jnp.pad(sums_RX, ((0, 0), (1, 0)))[:, :-1]
    kept_RX = in_k_RX & (before_RX < (top_p_R * whole_R)[:, None]) & (sorted_RX > 0)
    kept_RX = kept_RX.at[:, 0].set(True)
    last_R = jnp.sum(kept_RX, axis=-1) - 1
    mass_R = jnp.take_along_axis(sums_RX, last_R[:, None], axis=1)[:, 0]
    index_R = jnp.minimum(jnp.sum(sums_RX <= (u_R * mass_R)[:, None], axis=-1), last_R)
    return jnp.take_along_axis(ids_RX, index_R[:, None], axis=1)[:, 0].astype(jnp.int32)


def _logprobs(
    logits_RV: jax.Array, token_R: jax.Array, wanted: jax.Array, vocabulary: Vocabulary
) -> tuple[jax.Array, ...]:
    R, X = logits_RV.shape[0], min(MAX_LOGPROBS, vocabulary.size)

    def compute() -> tuple[jax.Array, ...]:
        # Chosen and top come from one array, so that the same token has the same float.
        shifted_RV = logits_RV - vocabulary.largest(logits_RV)
        logprobs_RV = shifted_RV - jnp.log(vocabulary.total(jnp.exp(shifted_RV).sum(-1)))[:, None]
        chosen_R = vocabulary.at(logprobs_RV, token_R)
        rank_R = 1 + vocabulary.total(jnp.sum(logprobs_RV > chosen_R[:, None], axis=-1))
        top_RX, ids_RX = vocabulary.top_k(logprobs_RV, X)
        return chosen_R, rank_R.astype(jnp.int32), ids_RX, top_RX

    def skip() -> tuple[jax.Array, ...]:
        zeros = lambda *shape: jnp.zeros(shape, jnp.float32)
        return zeros(R), jnp.zeros(R, jnp.int32), jnp.zeros((R, X), jnp.int32), zeros(R, X)

    return lax.cond(wanted, compute, skip)
