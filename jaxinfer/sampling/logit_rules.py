"""What requests ask of logits before a token is chosen: bans, biases and penalties. R sampled rows, V vocabulary.

Most requests ask for nothing. What the others ask lives on the device, a row for each slot, from the moment the
slot's sequence starts: a step then sends a flag and a few numbers. Counts of tokens are kept there too, since the
newest token is not known to the host when the next step is dispatched. Where the vocabulary is split over devices, each
has its own columns of what is kept by token.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.sampling.vocabulary import Vocabulary
from jaxinfer.types import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS

# A word is banned as it stands and with a space before it, where that is another token.
BAD_WORD_ROWS = 2 * MAX_BAD_WORDS


class SlotRules(NamedTuple):
    """Rules and counts of all slots, [max_num_seqs + 1, ...]; the last slot is nobody's.

    Attributes:
      counts_SV: int32, how often each token is in the slot's output.
      prompt_SW, ends_SW: uint32, the tokens of the prompt, and those that end the output; 32 a word, least significant
        bit first.
      bias_SV: float32, added to the logits; -inf bans a token.
      words_SBL: int32, banned sequences of tokens, padded with -1 in front; all of an unused one is -1.
      recent_SL: int32, the newest MAX_BAD_WORD_TOKENS - 1 output tokens, padded with -1 in front.
    """

    counts_SV: jax.Array
    prompt_SW: jax.Array
    ends_SW: jax.Array
    bias_SV: jax.Array
    words_SBL: jax.Array
    recent_SL: jax.Array


# Logical axes of the fields.
RULES_AXES = SlotRules(
    *((None, "vocab"), (None, "vocab"), (None, "vocab"), (None, "vocab"), (None, None, None), (None, None))  # type: ignore[arg-type]
)


class RuleInputs(NamedTuple):
    """What a step says of its rows.

    Attributes:
      slots_R: int32, whose rules hold.
      ruled_R: int32, 0 where there are none: that slot's entries are then stale and not read.
      min_position_R: int32, before which nothing may end the output.
    """

    slots_R: jax.Array
    ruled_R: jax.Array
    min_position_R: jax.Array
    presence_penalty_R: jax.Array
    frequency_penalty_R: jax.Array
    repetition_penalty_R: jax.Array


def rules_shapes(num_slots: int, vocab_size: int) -> list[tuple[tuple[int, ...], type]]:
    """Shapes and dtypes of the fields, in order, for so many slots, nobody's included."""
    S, V, W, L = num_slots, vocab_size, -(-vocab_size // 32), MAX_BAD_WORD_TOKENS
    words, bits = (S, BAD_WORD_ROWS, L), (S, W)
    return [
        ((S, V), np.int32),
        (bits, np.uint32),
        (bits, np.uint32),
        ((S, V), np.float32),
        (words, np.int32),
        ((S, L - 1), np.int32),
    ]


def rules_bytes(num_slots: int, vocab_size: int) -> int:
    """Bytes they take on the device."""
    return sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in rules_shapes(num_slots, vocab_size))


def set_slot(rules: SlotRules, slot: jax.Array, entry: SlotRules) -> SlotRules:
    """`entry`, without the slot axis, takes the place of what the slot had."""
    return jax.tree.map(lambda all_slots, one: all_slots.at[slot].set(one), rules, entry)


def count_tokens(
    rules: SlotRules, slots_R: jax.Array, tokens_R: jax.Array, vocabulary: Vocabulary | None = None
) -> SlotRules:
    """Takes in the tokens that were sampled."""
    local = rules.counts_SV.shape[1]
    columns_R = (vocabulary or Vocabulary(local, local)).columns(tokens_R)
    recent_RL = jnp.concatenate([rules.recent_SL[slots_R, 1:], tokens_R[:, None]], axis=1)
    return rules._replace(
        counts_SV=rules.counts_SV.at[slots_R, columns_R].add(1, mode="drop"),
        recent_SL=rules.recent_SL.at[slots_R].set(recent_RL),
    )


def apply_rules(
    logits_RV: jax.Array,
    inputs: RuleInputs,
    position_R: jax.Array,
    rules: SlotRules,
    vocabulary: Vocabulary | None = None,
) -> jax.Array:
    """Logits by the rules of the rows that have some; the others' come back bit for bit.

    The order is vLLM's: bans, bias, then penalties for repetition (Keskar et al., arXiv:1909.05858), frequency and
    presence. Repetition counts prompt and output, the other two the output alone.
    """
    V = logits_RV.shape[1]
    vocabulary = vocabulary or Vocabulary(V, V)
    counts_RV = rules.counts_SV[inputs.slots_R]
    seen_RV = (counts_RV > 0) | unpack_bits(rules.prompt_SW[inputs.slots_R], V)
    x_RV = logits_RV + rules.bias_SV[inputs.slots_R]
    too_early_R = position_R < inputs.min_position_R
    x_RV = jnp.where(too_early_R[:, None] & unpack_bits(rules.ends_SW[inputs.slots_R], V), -jnp.inf, x_RV)
    x_RV = _ban_words(x_RV, rules.words_SBL[inputs.slots_R], rules.recent_SL[inputs.slots_R], vocabulary)
    repetition_R1 = inputs.repetition_penalty_R[:, None]
    x_RV = jnp.where(seen_RV, jnp.where(x_RV > 0, x_RV / repetition_R1, x_RV * repetition_R1), x_RV)
    x_RV -= inputs.frequency_penalty_R[:, None] * counts_RV
    x_RV -= inputs.presence_penalty_R[:, None] * (counts_RV > 0)
    return jnp.where(inputs.ruled_R[:, None] != 0, x_RV, logits_RV)


def _ban_words(logits_RV: jax.Array, words_RBL: jax.Array, recent_RL: jax.Array, vocabulary: Vocabulary) -> jax.Array:
    before_RBL, last_RB = words_RBL[:, :, :-1], words_RBL[:, :, -1]
    complete_RB = jnp.all((before_RBL < 0) | (before_RBL == recent_RL[:, None, :]), axis=-1) & (last_RB >= 0)
    banned_RB = jnp.where(complete_RB, vocabulary.columns(last_RB), logits_RV.shape[1])
    return logits_RV.at[jnp.arange(logits_RV.shape[0])[:, None], banned_RB].set(-jnp.inf, mode="drop")


def unpack_bits(bits_RW: jax.Array, vocab_size: int) -> jax.Array:
    """[R, W] uint32, 32 flags a word, least significant bit first, as [R, vocab_size] bool."""
    bits_RWB = (bits_RW[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bits_RWB.reshape(bits_RW.shape[0], -1)[:, :vocab_size].astype(bool)
