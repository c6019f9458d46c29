"""Keys of configs: every one is used, known to change nothing, refused, or warned of."""

from __future__ import annotations

import logging

import pytest
from test_llama_config import gguf_config, tiny_config
from transformers import LlamaConfig

from jaxinfer.errors import UnsupportedError
from jaxinfer.models.config_keys import KeyTable
from jaxinfer.models.llama import config_from_hf

TABLE = KeyTable(
    used=frozenset({"size"}),
    harmless=("_*", "attn_implementation"),
    neutral={"logit_scale": (1,), "experts": ()},
    unused={"window": "no token is so far away"},
)


def test_what_becomes_of_each_key(caplog):
    TABLE.check({"size": 3, "_scale": 2, "attn_implementation": "eager", "logit_scale": 1.0, "experts": None})
    assert not caplog.records
    with pytest.raises(UnsupportedError, match=r"here\.logit_scale 2 is not supported; known: null, 1$"):
        TABLE.check({"logit_scale": 2}, "here.")
    with pytest.raises(UnsupportedError, match=r"experts 0 is not supported; known: null$"):
        TABLE.check({"experts": 0})
    TABLE.check({"window": 5}, "here.")
    assert caplog.messages == ["here.window = 5 is not used: no token is so far away"]


@pytest.mark.parametrize(
    "key",
    [
        *(
            "rope_dim",
            "rotary_pct",
            "attention_sinks",
            "attn_scale",
            "scale_depth",
            "mup_width",
            "logits_cap",
            "qk_norm",
        ),
        *(
            "llama.rope.new",
            "llama.attention.new",
            "x.final_logit_softcap",
            "residual_alpha",
            "expert_count",
            "use_alibi",
        ),
    ],
)
def test_unknown_keys_that_sound_as_if_they_counted_are_warned_of_once(caplog, key):
    TABLE.check({key: 4})
    assert caplog.messages == [f"{key} = 4 is not known and not used: if the model needs it, its output is wrong"]


def test_other_unknown_keys_are_listed(caplog):
    with caplog.at_level(logging.INFO):
        TABLE.check({"note": 1, "made_by": "me", "upscaled": True})
    assert caplog.messages == ["keys that are not known and not used: note, made_by, upscaled"]


def test_nothing_that_transformers_writes_for_a_llama_is_unknown(caplog):
    with caplog.at_level(logging.INFO):
        config_from_hf(LlamaConfig(architectures=["LlamaForCausalLM"], dtype="bfloat16").to_dict())
        older = {"pretraining_tp": 4, "rope_interleaved": False, "is_llama_config": True, "attention_dropout": 0.0}
        older |= {"max_sequence_length": 2048, "pad_token_id": -1, "torch_dtype": "float16", "rope_scaling": None}
        config_from_hf(tiny_config(**older, use_cache=True, initializer_range=0.02, hidden_act="swish"))
    assert not caplog.records


def test_keys_that_a_family_cannot_know_are_warned_of(caplog):
    config_from_hf(
        tiny_config(sliding_window=16, attention_sinks=4, rope_scaling={"type": "linear", "factor": 2.0, "beta": 1})
    )
    gguf_config(**{"llama.attention.sliding_window": 16, "llama.rope.unheard_of": 2.0})
    assert [message.split(" = ")[0] for message in caplog.messages] == [
        *("sliding_window", "attention_sinks", "rope_scaling.beta"),
        *("llama.attention.sliding_window", "llama.rope.unheard_of"),
    ]
