"""slattn inside Hugging Face transformers, on its own model classes at a tiny size, by the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slattn
from framework_models import assert_agree, assert_equal, gradients, losses, randomise
from slattn.frameworks import transformers as adapter

transformers = pytest.importorskip("transformers.models.deepseek_v4", reason="transformers is not installed")

TOKENS = 24
DSA: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 48, "intermediate_size": 64, "moe_intermediate_size": 32, "pad_token_id": 0},
    **{"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 4},
    **{"num_local_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    **{"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24},
    **{"index_topk": 8, "index_n_heads": 2, "index_head_dim": 16, "max_position_embeddings": 128},
}
V4: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 48, "moe_intermediate_size": 32, "pad_token_id": 0, "hc_mult": 2},
    **{"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 1, "n_routed_experts": 4},
    **{"num_local_experts": 4, "num_experts_per_tok": 2, "q_lora_rank": 32, "head_dim": 32, "o_groups": 2},
    **{"o_lora_rank": 16, "index_topk": 2, "index_n_heads": 2, "index_head_dim": 16, "sliding_window": 6},
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    **{"mlp_layer_types": ["moe"] * 3, "max_position_embeddings": 128, "partial_rotary_factor": 0.25},
}


def config_of(kind: str, **changes: Any) -> Any:
    from transformers.models import deepseek_v4, deepseek_v32, glm_moe_dsa

    if kind == "deepseek_v4":
        return deepseek_v4.DeepseekV4Config(**{**V4, **changes})
    if kind == "deepseek_v32":
        return deepseek_v32.DeepseekV32Config(**{**DSA, **changes})
    shared = {"indexer_types": ["full", "shared", "full"]}
    return glm_moe_dsa.GlmMoeDsaConfig(**{**DSA, **shared, **changes})


def model_of(kind: str, **changes: Any) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config_of(kind, **changes)).train()
    randomise(model)
    return model


KINDS = ("deepseek_v4", "deepseek_v32", "glm_moe_dsa")


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest) -> Any:
    return model_of(request.param)


def step_on(ids: Tensor, **arguments: Any) -> Any:
    def step(model: nn.Module) -> tuple[Tensor, Tensor]:
        result = model(input_ids=ids, labels=ids, use_cache=False, **arguments)
        return result.logits, result.loss

    return step


@pytest.fixture
def step() -> Any:
    return step_on(torch.randint(1, 64, (2, TOKENS)))


def test_output_and_gradients_agree_and_come_back(model: Any, step: Any, calls: list[str]) -> None:
    own, implementation = gradients(model, step), model.config._attn_implementation
    with adapter.patch(model) as patch:
        assert model.config._attn_implementation == "slattn"
        ours = gradients(model, step)
        assert len(patch.replaced) == 5
    assert len(calls) == model.config.num_hidden_layers
    assert_agree(ours, own, 2e-5)
    assert model.config._attn_implementation == implementation
    assert_equal(gradients(model, step), own)


def test_five_steps_have_the_same_losses(model: Any, step: Any) -> None:
    own = losses(model, step)
    with adapter.patch(model):
        ours = losses(model, step)
    assert ours == pytest.approx(own, rel=1e-4)
    assert len(set(own)) == 5


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_an_attn_implementation(kind: str, step: Any, calls: list[str]) -> None:
    from transformers import AutoModelForCausalLM

    model = model_of(kind)
    with adapter.patch():
        named = AutoModelForCausalLM.from_config(config_of(kind), attn_implementation="slattn")
        named.load_state_dict(model.state_dict())
        ours = gradients(named, step)
        own = gradients(model, step)  # a model that was not told keeps its own
    assert len(calls) == 3
    assert_agree(ours, own, 2e-5)


def test_padding_is_not_seen(model: Any) -> None:
    """Three rows of a batch padded on the left: the tokens that are there get what they get in the model's own."""
    ids, mask = torch.randint(1, 64, (3, TOKENS)), torch.ones(3, TOKENS, dtype=torch.long)
    mask[1, :5], mask[2, :11] = 0, 0

    def step(model: nn.Module) -> tuple[Tensor, Tensor]:
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
        return logits, logits.square().mean()

    own = gradients(model, step)
    with adapter.patch(model):
        ours = gradients(model, step)
    assert_agree(ours, own, 5e-5)


def test_a_cache_gives_what_the_whole_text_gives(model: Any) -> None:
    ids = torch.randint(1, 64, (2, TOKENS))
    model.eval()
    with adapter.patch(model), torch.no_grad():
        ours = model.generate(input_ids=ids, max_new_tokens=6, do_sample=False)
    with torch.no_grad():
        own = model.generate(input_ids=ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(ours, own)


def test_activation_checkpointing(model: Any, step: Any) -> None:
    own = gradients(model, step)
    model.gradient_checkpointing_enable()
    with adapter.patch(model):
        assert_agree(gradients(model, step), own, 2e-5)


def test_what_cannot_be_absorbed_is_refused(step: Any) -> None:
    class Lora(nn.Linear):
        pass

    model = model_of("deepseek_v32")
    for layer in model.model.layers:
        old = layer.self_attn.kv_b_proj
        layer.self_attn.kv_b_proj = Lora(old.in_features, old.out_features, bias=False)
    with adapter.patch(model), pytest.raises(ValueError, match=r"plain nn\.Linear to be absorbed; got Lora"):
        step(model)


def test_dropout_is_refused(step: Any) -> None:
    model = model_of("deepseek_v4", attention_dropout=0.5)
    with adapter.patch(model), pytest.raises(ValueError, match="no attention dropout"):
        step(model)


def test_other_models_are_refused() -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=2)
    with pytest.raises(TypeError, match=r"a transformers model of deepseek_v4, .*; got LlamaForCausalLM"):
        adapter.patch(AutoModelForCausalLM.from_config(config))
    with pytest.raises(TypeError, match="; got str"):
        adapter.patch("deepseek_v4")
    with adapter.patch():
        model = AutoModelForCausalLM.from_config(config, attn_implementation="slattn")
        with pytest.raises(ValueError, match="for DeepSeek-V4 and DSA models; got LlamaAttention"):
            model(input_ids=torch.ones(1, 4, dtype=torch.long))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is noted for each call of slattn.sparse_attention: the backend."""
    noted: list[str] = []
    real = slattn.sparse_attention

    def counted(*arguments: Any, **named: Any) -> Any:
        noted.append(str(named.get("backend", "auto")))
        return real(*arguments, **named)

    monkeypatch.setattr(slattn, "sparse_attention", counted)
    return noted
