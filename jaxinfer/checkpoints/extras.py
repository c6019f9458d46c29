"""What a checkpoint carries beyond what its config says: used where it counts, ignored where it cannot change a number.

What is neither stays unknown, and loading refuses it by name.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from jaxinfer.checkpoints.reader import TensorInfo, TensorReader, shown
from jaxinfer.config import ModelConfig
from jaxinfer.errors import CheckpointError
from jaxinfer.models.family import NameMap

logger = logging.getLogger(__name__)

# Names of tensors that change no number, and why not.
HARMLESS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), why)
    for pattern, why in (
        (r"(.*\.)?rotary_emb\.\w+|(.*\.)?attn_rot_embd\.weight", "the config implies them"),
        (r"(.*\.)?(causal_mask|masked_bias)|.*attn\.bias", "attention is causal without them"),
        (
            r".*attn\.(\w+_proj\.|attn\.)?(q|k|v|kv|qkv|prob)_(scale|zero_point)|.*\.[qkv]_proj\.output_scale",
            "pages of 8 bits have a scale for each token and head, which is made when they are written",
        ),
        (
            r".*\.(input|output|activation)_(scale|zero_point|global_scale|amax)|.*\.activation_scale_ub",
            "activations are not rounded by scales from a file",
        ),
    )
)
type NamesOf = Callable[[ModelConfig], NameMap]

# Of `LayerSpec`: which projections add a bias.
_BIASES = ("attention_bias", "output_bias", "mlp_bias")
_COMPARED = 1 << 20  # numbers at a time


def fitted(
    config: ModelConfig, names_of: NamesOf, reader: TensorReader, *, says_biases: bool
) -> tuple[ModelConfig, NameMap]:
    """The config that the tensors bear out, and their names: a head and biases are there if they are in the file and
    change something, whatever the config says of them.

    Reads small vectors, and a head and an embedding that are said to be one. What is ignored is logged.

    Args:
      says_biases: whether a config of this format says which biases there are, so that others are warned of.
    """
    config = _with_own_head(config, names_of, reader)
    config, zeros = _with_biases(config, names_of, reader, says_biases)
    names = names_of(config)
    modules = {name.removesuffix(".weight") for name in names_of(replace(config, tie_embeddings=False)).targets}
    ignored: dict[str, list[str]] = defaultdict(list)
    for name, info in reader.tensors.items():
        if name in names.targets or name in names.ignored:
            continue
        if not _has_values(info):
            ignored["they hold nothing"].append(name)
        elif why := next((why for pattern, why in HARMLESS if pattern.fullmatch(name)), None):
            ignored[why].append(name)
        elif name.endswith(".bias") and name.removesuffix(".bias") in modules and _is_zero(reader, name):
            ignored["they are all zeros"].append(name)
        elif name.endswith(".weight") and name.removesuffix(".weight") in modules:
            ignored["they are the embedding once more"].append(name)
    for why, each in ignored.items():
        logger.info("%s: %d tensors are not used, as %s: %s", reader.path, len(each), why, shown(", ".join(each)))
    unused = frozenset(name for each in ignored.values() for name in each)
    return config, replace(names, ignored=names.ignored | unused, zeros=zeros)


def _with_own_head(config: ModelConfig, names_of: NamesOf, reader: TensorReader) -> ModelConfig:
    """The config, with a head of its own if there is one and it is not the embedding."""
    untied = replace(config, tie_embeddings=False)
    name = {target.path: name for name, target in names_of(untied).targets.items()}
    head = reader.tensors.get(name["head"])
    if not config.tie_embeddings or head is None or not _has_values(head) or _same(reader, name["head"], name["embed"]):
        return config
    logger.warning("%s differs from the embedding and is used, though tie_word_embeddings is true", name["head"])
    return untied


def _with_biases(
    config: ModelConfig, names_of: NamesOf, reader: TensorReader, says_biases: bool
) -> tuple[ModelConfig, frozenset[str]]:
    """The config, with those biases besides that change something, and the names of those that count as zeros: layers
    alike can run as one loop."""
    zeros: set[str] = set()
    for kind in _BIASES:
        has: dict[str, Any] = {kind: True}
        biased = replace(config, layers=tuple(replace(layer, **has) for layer in config.layers))
        added = names_of(biased).targets.keys() - names_of(config).targets.keys()
        found = sorted(added & reader.tensors.keys())
        counts = next((name for name in found if not _is_zero(reader, name)), None)
        if counts is not None:
            if says_biases:
                logger.warning("%s is not zero and is added, though the config says nothing of biases", counts)
            config = biased
            zeros |= added - reader.tensors.keys()
    of_any_layer = set(map(_kind, reader.tensors))
    absent = sorted(
        name
        for name in names_of(config).targets.keys() - reader.tensors.keys() - zeros
        if name.endswith(".bias") and _kind(name) not in of_any_layer
    )
    if absent:
        logger.warning("%s is in no layer and counts as zeros, though the config says that there are biases", absent[0])
    return config, frozenset(zeros.union(absent))


def unwrapped(tensors: Mapping[str, TensorInfo], names: NameMap, *, tied: bool) -> dict[str, str]:
    """New names for tensors whose names are the model's but for a prefix, which a wrapper around the model put there,
    or which a model that was saved without its head lacks; empty if all is as it should be.

    Args:
      tied: whether one matrix is embedding and head; it may have either name.

    Raises:
      CheckpointError: two tensors would have one name.
    """
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    if embedding not in names.targets:
        return {}
    prefixes = {match[1] for name in tensors if (match := re.match(r"((?:.*?\.)??)layers\.0\.", name))}
    prefix = prefixes.pop() if len(prefixes) == 1 else "model."
    around = prefix.removesuffix("model.") if prefix.endswith(".model.") else prefix

    def inner(name: str) -> str:
        if name.startswith(prefix) and not name.startswith(f"{prefix}lm_head."):
            return f"model.{name.removeprefix(prefix)}"
        return name.removeprefix(around)

    renamed = {} if prefix == "model." else {name: inner(name) for name in tensors}
    if renamed:
        logger.info("tensors are named %slayers and so on, which is read as model.layers", shown(prefix))
    if len(set(renamed.values())) < len(renamed):
        raise CheckpointError(f"tensors are there twice, with the prefix {shown(prefix)} and without it")
    after = {renamed.get(name, name): name for name in tensors}
    if tied and embedding not in after and head in after:
        renamed[after[head]] = embedding
    return renamed


def _kind(name: str) -> str:
    """The name without its layer's number."""
    return re.sub(r"\.\d+\.", ".*.", name, count=1)


def _has_values(info: TensorInfo) -> bool:
    return 0 not in info.shape


def _is_zero(reader: TensorReader, name: str) -> bool:
    """Whether it is a vector that is read here and holds nothing but zeros."""
    info = reader.tensors[name]
    return len(info.shape) == 1 and info.dtype in reader.dtypes and not np.any(reader.read(name) != 0)


def _same(reader: TensorReader, name: str, other: str) -> bool:
    """Whether two matrices hold the same numbers, bit for bit if they have one dtype.

    All of both is read if they do; if they do not, the first rows differ as a rule.
    """
    ours, theirs = reader.tensors[name], reader.tensors.get(other)
    if (
        theirs is None
        or ours.shape != theirs.shape
        or len(ours.shape) != 2
        or not {ours.dtype, theirs.dtype} <= reader.dtypes
    ):
        return False
    step = max(1, _COMPARED // ours.shape[1])
    for start in range(0, ours.shape[0], step):
        a, b = (reader.read(each, (slice(start, start + step),)) for each in (name, other))
        if not (a.tobytes() == b.tobytes() if a.dtype == b.dtype else np.array_equal(a, b)):
            return False
    reader.release(name)
    return True
