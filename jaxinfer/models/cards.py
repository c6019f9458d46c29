"""Models by name, without a checkpoint: what their published configurations say, for plans and compilers."""

from __future__ import annotations

from jaxinfer.config import LayerSpec, ModelConfig, RopeConfig


def _card(family: str, V: int, D: int, F: int, L: int, N: int, K: int, H: int, **options) -> ModelConfig:
    layer = LayerSpec(
        rope=RopeConfig(theta=options.pop("theta")),
        window=options.pop("window", None),
        attention_bias=options.pop("attention_bias", False),
    )
    return ModelConfig(
        family=family,
        vocab_size=V,
        hidden_size=D,
        intermediate_size=F,
        layers=(layer,) * L,
        num_heads=N,
        num_kv_heads=K,
        head_dim=H,
        **{"rms_norm_eps": 1e-5, "tie_embeddings": False, **options},
    )


_QWEN2 = {"theta": 1e6, "rms_norm_eps": 1e-6, "attention_bias": True, "max_position": 32768}

# Each from the config.json that its makers publish on the Hugging Face hub.
CARDS = {
    "llama-3-8b": _card("llama", 128256, 4096, 14336, 32, 32, 8, 128, theta=5e5, max_position=8192),
    "llama-3-70b": _card("llama", 128256, 8192, 28672, 80, 64, 8, 128, theta=5e5, max_position=8192),
    "mistral-7b": _card("mistral", 32000, 4096, 14336, 32, 32, 8, 128, theta=1e4, max_position=32768, window=4096),
    "qwen2-7b": _card("qwen2", 152064, 3584, 18944, 28, 28, 4, 128, **_QWEN2),
    "qwen2-72b": _card("qwen2", 152064, 8192, 29568, 80, 64, 8, 128, **_QWEN2),
    # Rotates half of each head, which RopeConfig cannot say yet: this is its sizes, and not a model to run.
    "chatglm3-6b": _card(
        "chatglm", 65024, 4096, 13696, 28, 32, 2, 128, theta=1e4, attention_bias=True, max_position=8192
    ),
    "smollm2-135m-instruct": _card(
        "llama", 49152, 576, 1536, 30, 9, 3, 64, theta=1e5, max_position=8192, tie_embeddings=True
    ),
}
