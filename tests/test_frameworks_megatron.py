"""slattn inside megatron-core: a GPTModel with DSA at a tiny size, on whichever release is installed, by the reference.

Megatron's DSA asks for a GPU in four places that have nothing to do with attention; here each is told otherwise.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slattn
from framework_models import assert_agree, assert_equal, gradients, losses, randomise
from slattn.frameworks import megatron as adapter
from slattn.frameworks import megatron_absorb

pytest.importorskip("megatron.core.models.gpt.gpt_model", reason="megatron-core is not installed")

VARIANT = "megatron.core.transformer.experimental_attention_variant"
TOKENS = 24


def module(name: str) -> Any:
    return importlib.import_module(name)


def has_hooks() -> bool:
    return importlib.util.find_spec(f"{VARIANT}.dsa_kernels") is not None


needs_hooks = pytest.mark.skipif("not has_hooks()", reason="this megatron-core has no kernel backends")


class Linear(nn.Linear):
    """In the place of Transformer Engine's, which needs a GPU; returns a bias too, as Megatron's layers do."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False, **_: Any) -> None:
        super().__init__(inputs, outputs, bias=bias)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(x), None


@pytest.fixture(scope="module")
def _one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with one_process(tmp_path_factory.mktemp("megatron") / "store"):
        yield


@contextmanager
def one_process(store: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    state = module("megatron.core.parallel_state")
    state.initialize_model_parallel(1, 1)
    yield
    state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch, _one_process: None) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")  # the indexer's rotary table
    without_extensions(monkeypatch)


def without_extensions(monkeypatch: pytest.MonkeyPatch) -> None:
    dsa = module(f"{VARIANT}.dsa")
    monkeypatch.setattr(dsa, "rotate_activation", lambda x: x)  # a rotation of q and k, which leaves their products
    monkeypatch.setattr(dsa.DSAIndexerLossLoggingHelper, "save_loss_to_tracker", lambda *_, **__: None)
    monkeypatch.setattr(module("megatron.core.transformer.multi_latent_attention"), "TELinear", Linear)
    if has_hooks():
        monkeypatch.setattr(module(f"{VARIANT}.absorbed_mla"), "TELinear", Linear)


def model_of(**changes: Any) -> nn.Module:
    config = module("megatron.core.transformer.transformer_config").MLATransformerConfig(
        **{
            **{"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "multi_latent_attention": True},
            **{"q_lora_rank": 32, "kv_lora_rank": 32, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 24},
            **{"experimental_attention_variant": "dsa", "dsa_indexer_n_heads": 2, "dsa_indexer_head_dim": 16},
            **{"dsa_indexer_topk": 8, "dsa_indexer_loss_coeff": 0.0, "dsa_indexer_use_sparse_loss": True},
            **{"use_cpu_initialization": True, "rope_type": "rope", "normalization": "RMSNorm"},
            **{"add_bias_linear": False, "bias_dropout_fusion": False, "hidden_dropout": 0.0, "attention_dropout": 0.0},
            **{"apply_rope_fusion": False, "masked_softmax_fusion": False, "persist_layer_norm": False},
            **changes,
        }
    )

    class Provider(module("megatron.core.models.backends").LocalSpecProvider):  # type: ignore[misc]
        def linear(self) -> type:
            return Linear

    specs = module("megatron.core.models.gpt.experimental_attention_variant_module_specs")
    layer = module("megatron.core.models.gpt.gpt_layer_specs").get_gpt_layer_local_spec(multi_latent_attention=True)
    layer.submodules.self_attention = specs.get_dsa_module_spec_for_backend(config, backend=Provider())
    model = module("megatron.core.models.gpt.gpt_model").GPTModel(
        config, layer, vocab_size=64, max_sequence_length=64, position_embedding_type="rope"
    )
    randomise(model)
    return model


def choose(model: Any, kernels: str) -> None:
    """`dsa_kernel_backend`, after the configuration has been checked: the check wants a GPU."""
    if has_hooks():
        model.config.dsa_kernel_backend = kernels


@pytest.fixture
def step() -> Any:
    return step_on(torch.randint(0, 64, (2, TOKENS)))


def step_on(ids: Tensor) -> Any:
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)

    def step(model: nn.Module) -> tuple[Tensor, Tensor]:
        out = model(ids, positions, None, labels=ids).float()
        return out, out.mean()

    return step


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shape of q in each call of slattn.sparse_attention."""
    noted: list[tuple[int, ...]] = []
    real = slattn.sparse_attention

    def counted(q: Tensor, *arguments: Any, **named: Any) -> Any:
        noted.append(tuple(q.shape))
        return real(q, *arguments, **named)

    monkeypatch.setattr(slattn, "sparse_attention", counted)
    return noted


@pytest.mark.parametrize("coefficient", [0.0, 0.5], ids=["without-indexer-loss", "with-indexer-loss"])
def test_a_whole_model_agrees_and_comes_back(step: Any, calls: list[Any], coefficient: float) -> None:
    model = model_of(dsa_indexer_loss_coeff=coefficient)
    own, own_losses = gradients(model, step), losses(model, step)
    choose(model, "tilelang")
    with adapter.patch():
        ours = gradients(model, step)
        layers_and_targets = len(calls)
        assert losses(model, step) == pytest.approx(own_losses, rel=1e-4)
    choose(model, "none")
    assert layers_and_targets == (4 if coefficient and has_hooks() else 2)
    assert set(calls) == {(2, TOKENS, 4, 40)}  # absorbed: 32 latents and 8 rotary columns
    assert_agree(ours, own, 1e-4)
    assert_equal(gradients(model, step), own)


def test_whole_layers_recomputed(step: Any) -> None:
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    model, plain = model_of(**recompute), model_of()
    plain.load_state_dict(model.state_dict())
    own = gradients(plain, step)
    choose(model, "tilelang")
    with adapter.patch(), pytest.MonkeyPatch.context() as context:
        for name in ("get_rng_state", "set_rng_state"):
            context.setattr(torch.cuda, name, lambda *_, **__: torch.empty(0))
        context.setattr(module("megatron.core.tensor_parallel.random"), "_get_cuda_rng_state", lambda *_, **__: None)
        context.setattr(module("megatron.core.tensor_parallel.random"), "_set_cuda_rng_state", lambda *_, **__: None)
        assert_agree(gradients(model, step), own, 1e-4)


@needs_hooks
def test_indices_shared_by_layers(step: Any, calls: list[Any]) -> None:
    model = model_of(num_layers=4, dsa_indexer_topk_freq=2, dsa_indexer_skip_topk_offset=0)
    own = gradients(model, step)
    choose(model, "tilelang")
    with adapter.patch():
        assert_agree(gradients(model, step), own, 1e-4)
    assert len(calls) == 4


@needs_hooks
def test_packed_texts(calls: list[Any]) -> None:
    ends = torch.tensor([0, 10, TOKENS], dtype=torch.int32)
    ids = torch.randint(0, 64, (1, TOKENS))
    packed = module("megatron.core.packed_seq_params").PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=14, max_seqlen_kv=14
    )

    def step(model: nn.Module) -> tuple[Tensor, Tensor]:
        out = model(ids, torch.arange(TOKENS)[None], None, labels=ids, packed_seq_params=packed)
        return out, out.mean()

    model = model_of()
    own = gradients(model, step)
    choose(model, "tilelang")
    with adapter.patch():
        assert_agree(gradients(model, step), own, 1e-4)
    assert len(calls) == 2


@needs_hooks
def test_the_other_backends_stay() -> None:
    names = module(f"{VARIANT}.dsa_kernels")._BACKEND_MODULE_NAME_BY_BACKEND
    own = dict(names)
    with adapter.patch():
        assert names == {**own, "tilelang": "slattn.frameworks.megatron_hooks"}
    assert names == own


@pytest.mark.skipif("has_hooks()", reason="this megatron-core absorbs by itself")
class TestAbsorbed:
    @pytest.mark.parametrize(
        ("name", "value", "words"),
        [
            ("tensor_model_parallel_size", 2, "without tensor parallelism"),
            ("gradient_accumulation_fusion", True, "gradient_accumulation_fusion loses"),
        ],
    )
    def test_what_it_cannot_absorb_it_refuses(self, name: str, value: Any, words: str) -> None:
        model: Any = model_of()
        key = torch.randn(4, 1, 4, 24)
        key.__dict__[megatron_absorb._LATENTS] = (model.decoder.layers[0].self_attention, None)
        setattr(model.config, name, value)
        with pytest.raises(RuntimeError, match=words):
            megatron_absorb.absorbed_dsa(key, key, key, torch.zeros(1, 4, 2, dtype=torch.long), 1.0)

    def test_keys_from_elsewhere_are_refused(self) -> None:
        key = torch.randn(4, 1, 4, 24)
        with adapter.patch(), pytest.raises(RuntimeError, match="needs the latents of these keys"):
            module(f"{VARIANT}.dsa").unfused_dsa_fn(key, key, key, torch.zeros(1, 4, 2, dtype=torch.long), 1.0)

    def test_a_norm_inside_the_projection_comes_first(self) -> None:
        """Transformer Engine's layer-norm-linear, as it would be handed over: its names, without its kernels."""
        latents, gain = torch.randn(5, 2, 32), torch.randn(32)
        up = nn.Module()
        up.layer_norm_weight, up.normalization, up.zero_centered_gamma, up.eps = gain, "RMSNorm", True, 1e-5  # type: ignore[assignment]
        want = latents / (latents.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (gain + 1)
        torch.testing.assert_close(megatron_absorb._normalised(up, latents), want)
        up.normalization = "LayerNorm"  # type: ignore[assignment]
        with pytest.raises(RuntimeError, match="RMSNorm or none; got LayerNorm"):
            megatron_absorb._normalised(up, latents)
