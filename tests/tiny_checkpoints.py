"""Tiny random Llama checkpoints, made from a seed: Hugging Face folders, and GGUF files with the same weights.

Needs numpy, tokenizers and gguf alone, so that scripts/make_model_goldens.py can make the same folders where torch
and transformers are installed and jax is not. Names of GGUF tensors come from the gguf package, not from jaxinfer.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize, quantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BOS_ID, EOS_ID = 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_WORDS = (
    "the",
    "quick",
    "brown",
    "fox",
    "what",
    "is",
    "capital",
    "of",
    "France",
    "hello",
    "world",
    "user",
    "assistant",
)
_WORDS += ("jumps", "over", "lazy", "dog", "system", "Paris")
VOCAB_SIZE = 384

K_TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")  # which the gguf package can read, but not make
# Bytes of the float16 scales in a block of 256.
_K_SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


@dataclass(frozen=True)
class Tiny:
    """A variant: D hidden, N heads, K KV heads, H head dim, F feed-forward, and what else config.json says."""

    seed: int
    hidden: int = 48
    heads: int = 4
    kv_heads: int = 2
    head_dim: int | None = None  # written to config.json only if given
    intermediate: int = 80
    layers: int = 2
    tied: bool = False
    dtype: str = "F32"
    shards: int = 1
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def H(self) -> int:
        return self.head_dim or self.hidden // self.heads


VARIANTS = {
    "llama2": Tiny(1, kv_heads=4, config={"rope_theta": 10_000.0}),
    "llama3": Tiny(
        2,
        dtype="BF16",
        config={
            "rope_theta": 500_000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "smollm2": Tiny(3, hidden=192, heads=3, kv_heads=1, tied=True, config={"rope_theta": 100_000.0}),
    "wide_heads": Tiny(4, heads=3, kv_heads=1, head_dim=20, layers=3),  # N * H is not D
    "biases": Tiny(5, config={"attention_bias": True, "mlp_bias": True}),
    "linear_rope": Tiny(6, config={"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}}),
    "sharded": Tiny(7, shards=3, layers=3),
    # Rows of whole blocks of 256, for the K types of GGUF.
    "blocks": Tiny(8, hidden=256, heads=4, kv_heads=2, intermediate=512, layers=1),
}


def make_weights(tiny: Tiny) -> dict[str, np.ndarray]:
    """Float32 weights by their Hugging Face names; of a BF16 variant, values that bfloat16 holds exactly."""
    rng = np.random.default_rng(tiny.seed)
    D, N, K, H, F = tiny.hidden, tiny.heads, tiny.kv_heads, tiny.H, tiny.intermediate
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (VOCAB_SIZE, D)}
    for i in range(tiny.layers):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm": (D,),
            f"{layer}.self_attn.q_proj": (N * H, D),
            f"{layer}.self_attn.k_proj": (K * H, D),
            f"{layer}.self_attn.v_proj": (K * H, D),
            f"{layer}.self_attn.o_proj": (D, N * H),
            f"{layer}.post_attention_layernorm": (D,),
            f"{layer}.mlp.gate_proj": (F, D),
            f"{layer}.mlp.up_proj": (F, D),
            f"{layer}.mlp.down_proj": (D, F),
        }
    shapes["model.norm"] = (D,)
    if not tiny.tied:
        shapes["lm_head"] = (VOCAB_SIZE, D)
    weights = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            weights[f"{name}.weight"] = 1 + 0.1 * rng.standard_normal(shape, np.float32)
        else:
            # Wide enough that attention is not flat and the likeliest token changes along a sequence.
            weights[f"{name}.weight"] = rng.standard_normal(shape, np.float32) * np.float32(1.5 / math.sqrt(shape[1]))
        if tiny.config.get("attention_bias" if "self_attn" in name else "mlp_bias") and name.endswith("_proj"):
            weights[f"{name}.bias"] = 0.2 * rng.standard_normal(shape[0], np.float32)
    if tiny.dtype == "BF16":
        weights = {name: _from_bf16(_to_bf16(value)) for name, value in weights.items()}
    return weights


def _to_bf16(value: np.ndarray) -> np.ndarray:
    bits = value.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)  # to nearest, ties to even


def _from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def write_hf_folder(folder: Path, tiny: Tiny) -> dict[str, np.ndarray]:
    """Writes config, weights and tokenizer as the hub has them; returns the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = make_weights(tiny)
    (folder / "config.json").write_text(json.dumps(hf_config(tiny), indent=2))
    if tiny.shards == 1:
        write_safetensors(folder / "model.safetensors", weights, tiny.dtype)
    else:
        names, weight_map = list(weights), {}
        for n in range(tiny.shards):
            shard = f"model-{n + 1:05}-of-{tiny.shards:05}.safetensors"
            mine = names[n :: tiny.shards]
            write_safetensors(folder / shard, {name: weights[name] for name in mine}, tiny.dtype)
            weight_map |= dict.fromkeys(mine, shard)
        total = sum(value.nbytes for value in weights.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    write_tokenizer(folder)
    return weights


def hf_config(tiny: Tiny) -> dict[str, Any]:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": tiny.hidden,
        "intermediate_size": tiny.intermediate,
        "num_attention_heads": tiny.heads,
        "num_key_value_heads": tiny.kv_heads,
        "num_hidden_layers": tiny.layers,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCAB_SIZE,
        "tie_word_embeddings": tiny.tied,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "torch_dtype": {"F32": "float32", "BF16": "bfloat16"}[tiny.dtype],
        "transformers_version": "4.46.0",
        **tiny.config,
    }
    return config | ({"head_dim": tiny.head_dim} if tiny.head_dim else {})


def write_safetensors(path: Path, weights: dict[str, np.ndarray], dtype: str = "F32") -> None:
    """By hand, since the safetensors package has no bfloat16 without more packages."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data, offset = [], 0
    for name, value in weights.items():
        raw = (_to_bf16(value) if dtype == "BF16" else value).tobytes()
        header[name] = {"dtype": dtype, "shape": list(value.shape), "data_offsets": [offset, offset + len(raw)]}
        data.append(raw)
        offset += len(raw)
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    path.write_bytes(len(head).to_bytes(8, "little") + head + b"".join(data))


# ---- Tokenizer: byte-level BPE with a few words


def _vocabulary() -> tuple[list[str], list[str]]:
    """Tokens by id, and merges."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    tokens = [*SPECIAL_TOKENS, *(characters[byte] for byte in range(256))]
    merges = []
    for word in _WORDS:
        for text in (word, f"Ġ{word}"):  # Ġ is byte-level BPE's space
            for end in range(2, len(text) + 1):
                if len(tokens) < VOCAB_SIZE and text[:end] not in tokens:
                    tokens.append(text[:end])
                    merges.append(f"{text[: end - 1]} {text[end - 1]}")
    assert len(tokens) == VOCAB_SIZE
    return tokens, merges


def write_tokenizer(folder: Path) -> None:
    tokens, merges = _vocabulary()
    pairs: list[Any] = [tuple(merge.split(" ")) for merge in merges]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[BOS_ID],
        "eos_token": SPECIAL_TOKENS[EOS_ID],
        "unk_token": SPECIAL_TOKENS[0],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


# ---- GGUF


def write_gguf(
    path: Path,
    tiny: Tiny,
    dtype: str = "F32",
    metadata: dict[str, float | int | str | bool] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Writes the variant as llama.cpp's converter would, its matrices in the given type, and `metadata` and `tensors`
    besides.

    Returns what the file holds, in float32, by Hugging Face names and in Hugging Face's order of rows: the weights,
    rounded as the type does. Of the K types, which the gguf package cannot make, the blocks are random.
    """
    rng = np.random.default_rng(tiny.seed)
    writer = gguf.GGUFWriter(path, "llama")
    _write_metadata(writer, tiny)
    for key, value in (metadata or {}).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](key, value)
    kind = gguf.GGMLQuantizationType[dtype]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, tiny.layers)
    held = {}
    for name, value in make_weights(tiny).items():
        heads = tiny.heads if "q_proj" in name else tiny.kv_heads if "k_proj" in name else None
        stored = _permute(value, heads) if heads else value
        its_kind = kind if value.ndim == 2 else gguf.GGMLQuantizationType.F32
        raw = _random_blocks(rng, stored.shape, dtype) if value.ndim == 2 and dtype in K_TYPES else None
        raw = quantize(stored, its_kind) if raw is None else raw
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), raw, raw_dtype=its_kind)
        values = dequantize(raw, its_kind).reshape(value.shape)
        held[name] = _unpermute(values, heads) if heads else values
    factors = _rope_factors(tiny)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    for name, value in (tensors or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def _write_metadata(writer: gguf.GGUFWriter, tiny: Tiny) -> None:
    config = hf_config(tiny)
    rope = config.get("rope_parameters", {})
    writer.add_block_count(tiny.layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(tiny.hidden)
    writer.add_feed_forward_length(tiny.intermediate)
    writer.add_head_count(tiny.heads)
    writer.add_head_count_kv(tiny.kv_heads)
    if tiny.head_dim:
        writer.add_key_length(tiny.head_dim)
        writer.add_value_length(tiny.head_dim)
    writer.add_rope_dimension_count(tiny.H)
    writer.add_rope_freq_base(rope.get("rope_theta", config.get("rope_theta", 10_000.0)))
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(VOCAB_SIZE)
    tokens, merges = _vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(BOS_ID)
    writer.add_eos_token_id(EOS_ID)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _permute(value: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from rotate-half order to interleaved pairs, as llama.cpp's converter does."""
    half = value.shape[0] // heads // 2
    order = np.arange(value.shape[0]).reshape(heads, 2, half).transpose(0, 2, 1).ravel()
    return value[order]


def _unpermute(value: np.ndarray, heads: int) -> np.ndarray:
    result = np.empty_like(value)
    result[_permute(np.arange(value.shape[0]), heads)] = value
    return result


def _random_blocks(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[dtype]]
    blocks = rng.integers(0, 256, (shape[0], shape[1] // elements, size), np.uint8)
    for offset in _K_SCALES[dtype]:
        scales = rng.uniform(1e-4, 1e-3, blocks.shape[:2]).astype(np.float16)
        blocks[..., offset : offset + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(shape[0], -1)


def _rope_factors(tiny: Tiny) -> np.ndarray | None:
    """Llama 3's scaling, as llama.cpp's converter writes it down."""
    scaling = tiny.config.get("rope_scaling", {})
    if scaling.get("rope_type") != "llama3":
        return None
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    context = scaling["original_max_position_embeddings"]
    factors = []
    for frequency in tiny.config["rope_theta"] ** -(np.arange(0, tiny.H, 2) / tiny.H):
        wavelength = 2 * math.pi / frequency
        if wavelength < context / high:
            factors.append(1.0)
        elif wavelength > context / low:
            factors.append(factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)
