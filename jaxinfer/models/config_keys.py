"""Keys of checkpoints' configs: what each of them means here, so that none is dropped in silence, and look-ups that
check what they find."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from jaxinfer.errors import CheckpointError, UnsupportedError

logger = logging.getLogger(__name__)

# A key with one of these words may well change what a model computes, so one that nobody here knows is warned of.
_TELLING = re.compile(
    r"(?:^|[^a-z0-9])(?:rope|rotary|yarn|ntk|alibi|mup|attn|attention|qk|qkv|kv|head|window|sliding|chunked|scal|logit|"
    r"softcap|multiplier|norm|eps|epsilon|bias|residual|act|activation|gelu|clamp|clip|cap|temperature|sink|expert|moe|"
    r"router|tie)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyTable:
    """What is made of every key that a config may have.

    Attributes:
      used: keys that some code here reads.
      harmless: patterns, as `fnmatch` has them, of keys that change nothing of what the decoder computes.
      neutral: keys that would change it, each with the values that do not, null besides: others are refused.
      unused: keys that the format's own library does not heed in this family either, and why: they are warned of.
    """

    used: frozenset[str]
    harmless: tuple[str, ...] = ()
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    unused: Mapping[str, str] = field(default_factory=dict)

    def check(self, config: Mapping[str, Any], within: str = "") -> None:
        """Goes through a config: logs what is not used, refuses what would have to be.

        Args:
          within: what the keys lie in, for messages, as "rope_scaling.".

        Raises:
          UnsupportedError: a key has a value that changes what the decoder cannot change.
        """
        unknown = []
        for key, value in config.items():
            if key in self.used or value is None:
                continue
            if key in self.neutral:
                if not any(value == allowed for allowed in self.neutral[key]):
                    known = ", ".join(["null", *map(str, self.neutral[key])])
                    raise UnsupportedError(f"{within}{key} {value!r:.200} is not supported; known: {known}")
            elif key in self.unused:
                logger.warning("%s%s = %.200r is not used: %s", within, key, value, self.unused[key])
            elif any(fnmatchcase(key, pattern) for pattern in self.harmless):
                continue
            elif _TELLING.search(key.lower()):
                logger.warning(
                    "%s%.200s = %.200r is not known and not used: if the model needs it, its output is wrong",
                    *(within, key, value),
                )
            else:
                unknown.append(key)
        if unknown:
            logger.info("keys that are not known and not used: %s", ", ".join(f"{within}{key}" for key in unknown))


# What transformers' own classes of configs write whatever the model is, for training, generation or other tasks.
HF_HARMLESS = (
    *("_name_or_path", "name_or_path", "transformers_version", "transformers.js_config", "auto_map", "*unsloth*"),
    *("torch_dtype", "dtype", "torchscript", "use_bfloat16", "tf_legacy_loss", "pruned_heads", "use_cache"),
    *("return_dict", "return_dict_in_generate", "output_*", "chunk_size_feed_forward", "tie_encoder_decoder"),
    *("is_decoder", "cross_attention_hidden_size", "finetuning_task", "id2label", "label2id", "num_labels"),
    *("problem_type", "task_specific_params", "tokenizer_class", "tokenizer_*", "prefix", "model_max_length"),
    *("*_token_id", "*_token_ids", "suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "max_length"),
    *("min_length", "max_new_tokens", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "temperature"),
    *("top_k", "top_p", "typical_p", "repetition_penalty", "diversity_penalty", "length_penalty"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "num_return_sequences", "remove_invalid_values"),
    *("exponential_decay_length_penalty", "initializer_range", "*_dropout", "*dropout*", "*_pdrop", "gradient_*"),
    *("attn_implementation", "_attn_implementation*", "_flash_attn_2_enabled", "use_flash_attn*", "flash_attn*"),
)
# Of every GGUF file: what people are told, what was done to it, and what its tokenizer is made from.
GGUF_HARMLESS = ("general.*", "tokenizer.*", "quantize.*", "imatrix.*", "split.no", "split.tensors.count")
GGUF_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "general.type": ("model",),
    "general.quantization_version": (0, 1, 2),
}


def count(
    config: Mapping[str, Any], key: str, default: int | None = None, *, most: int = 1 << 31, nullable: bool = False
) -> int:
    """A size. Raises CheckpointError if there is none, UnsupportedError if it differs between layers.

    Args:
      default: if the key is not there; with `nullable`, if it is null as well.
    """
    value = config.get(key, default)
    if value is None and nullable:
        value = default
    if value is None:
        raise CheckpointError(f"the model's config has no {key}")
    # A GGUF may give one value a layer; a decoder whose layers differ in it is not built here.
    if isinstance(value, list) and len(set(value)) == 1:
        value = value[0]
    if isinstance(value, list):
        raise UnsupportedError(f"{key} differs between layers, which is not supported")
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise CheckpointError(f"the model's config has {key} = {value!r}, expected an integer from 1 to {most}")
    return value


def number(
    config: Mapping[str, Any], key: str, default: float | None = None, *, nullable: bool = False, within: str = ""
) -> float:
    """A number above 0. Raises CheckpointError; arguments are those of `count` and `KeyTable.check`."""
    value = config.get(key, default)
    if value is None and nullable:
        value = default
    if value is None:
        raise CheckpointError(f"the model's config has no {within}{key}")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise CheckpointError(f"the model's config has {within}{key} = {value!r:.200}, expected a positive number")
    return float(value)


def flag(config: Mapping[str, Any], key: str) -> bool:
    """True or false, which it is if it is null or not there. Raises CheckpointError for anything else."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"the model's config has {key} = {value!r:.200}, expected true or false")
    return bool(value)


def mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object, empty if it is null or not there. Raises CheckpointError for anything else."""
    value = config.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise CheckpointError(f"the model's config has {key} = {value!r:.200}, expected an object")
    return value or {}


def token_ids(values: Iterable[Any]) -> tuple[int, ...]:
    """Those that are not null, each once. Raises CheckpointError for what is no integer."""
    ids = tuple(dict.fromkeys(value for value in values if value is not None))
    for value in ids:
        if isinstance(value, bool) or not isinstance(value, int):
            raise CheckpointError(f"the model's config has {value!r:.200} for a token id")
    return ids
