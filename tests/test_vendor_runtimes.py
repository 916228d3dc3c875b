"""Finding FlashMLA and cuDNN, asking them what they are like, refusing what cannot run: all with stand-ins."""

from __future__ import annotations

import dataclasses
import math
import sys
import types

import pytest
import torch

from slattn.backends import flashmla_cudnn, vendor_runtimes
from vendor_stand_ins import CudnnDsa, FlashMla, forget, problem_with


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    forget()
    yield
    monkeypatch.undo()  # a stand-in for a cached function cannot be cleared
    forget()


# What a FlashMLA is asked.


@pytest.mark.parametrize("base", [math.e, 2.0])
@pytest.mark.parametrize("clears", [True, False])
@pytest.mark.parametrize("leaks", [True, False])
def test_the_dialect_is_found_by_asking_once(base, clears, leaks):
    flash_mla = FlashMla(base=base, clears=clears, leaks=leaks)
    dialect = vendor_runtimes.ask(flash_mla.function, torch.device("cpu"))
    assert dialect.nats == pytest.approx(math.log(base))
    assert dialect.clears_empty_rows is (clears and not leaks)
    calls = len(flash_mla.calls)
    vendor_runtimes.ask(flash_mla.function, torch.device("cpu"))
    assert len(flash_mla.calls) == calls == 1


@pytest.mark.parametrize("answer", [7.0, math.nan])
def test_any_other_answer_counts_as_natural(answer):
    def strange(q, kv, indices, sm_scale, d_v, attn_sink, topk_length):
        lse = torch.full(q.shape[:2], answer)
        return q[..., :d_v].clone(), lse, lse

    assert vendor_runtimes.ask(strange, torch.device("cpu")) == vendor_runtimes.Dialect(1.0, False)


def test_a_function_that_takes_one_shape_alone_counts_as_natural():
    def picky(q, *arguments, **keywords):
        raise AssertionError(q.shape)

    assert vendor_runtimes.ask(picky, torch.device("cpu")) == vendor_runtimes.Dialect(1.0, False)


def test_a_function_that_cannot_be_hashed_is_asked_each_time():
    @dataclasses.dataclass
    class StandIn:
        flash_mla: FlashMla

        def __call__(self, q, kv, indices, sm_scale, d_v, attn_sink, topk_length):
            return self.flash_mla.function(q, kv, indices, sm_scale, d_v, attn_sink, topk_length)

    for _ in range(2):
        assert vendor_runtimes.ask(StandIn(FlashMla(base=2.0)), torch.device("cpu")).nats == math.log(2.0)


def test_running_out_of_memory_is_no_answer():
    def full(*arguments, **keywords):
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        vendor_runtimes.ask(full, torch.device("cpu"))


# Refusals.


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"device": torch.device("cpu")}, "on NVIDIA GPUs; the tensors are on cpu"),
        ({"dtype": torch.float16}, "take bfloat16; got torch.float16"),
        ({"head_dim": 256, "value_dim": 256}, "D = 512 or 576 with d_v = 512; got D = 256, d_v = 256"),
        ({"head_dim": 576, "value_dim": 576}, "got D = 576, d_v = 576"),
        ({"scale": -1.0}, "positive scale; got -1.0"),
        ({"deterministic": True}, "float32 atomics"),
        ({"batch": 2, "keys": 2**30}, "int32 over the whole batch; got 2 x 1073741824 keys"),
    ],
)
def test_refusals(changes, sentence, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert sentence in flashmla_cudnn.refusal(problem_with(**changes))


def test_refuses_an_older_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert "this GPU has 8.0" in flashmla_cudnn.refusal(problem_with())


class _Broken(types.ModuleType):
    def __getattr__(self, name):
        raise SystemExit(f"no driver for {self.__name__}.{name}")


def _modules(monkeypatch, **modules):
    for name in ("flash_mla", "sgl_kernel", "sgl_kernel.flash_mla", "cudnn"):
        monkeypatch.setitem(sys.modules, name, modules.get(name.replace(".", "_")))


def test_whatever_an_import_raises_is_quoted_with_the_command_that_mends_it(monkeypatch):
    late = types.ModuleType("sgl_kernel.flash_mla")
    late._flashmla_import_error = OSError("libcudart.so.13: cannot open\nmore")
    _modules(monkeypatch, flash_mla=_Broken("flash_mla"), sgl_kernel_flash_mla=late, cudnn=_Broken("cudnn"))
    flash_mla, dsa = vendor_runtimes.flash_mla(), vendor_runtimes.cudnn_dsa()
    assert flash_mla.found is None
    assert "import of flash_mla raised SystemExit (no driver for flash_mla" in flash_mla.missing
    assert "import of sgl_kernel.flash_mla raised OSError (libcudart.so.13: cannot open)" in flash_mla.missing
    assert "pip install sglang-kernel" in flash_mla.missing
    assert dsa.found is None
    assert "import of cudnn raised SystemExit" in dsa.missing
    assert "pip install nvidia-cudnn-frontend" in dsa.missing
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert flashmla_cudnn.refusal(problem_with()) == flash_mla.missing


def test_a_flashmla_of_2025_counts_as_missing(monkeypatch):
    old = types.ModuleType("flash_mla")
    old.flash_mla_sparse_fwd = lambda q, kv, indices, sm_scale, d_v=512: None
    _modules(monkeypatch, flash_mla=old)
    assert "takes no attn_sink and topk_length" in vendor_runtimes.flash_mla().missing


def test_sglang_kernel_serves_where_flash_mla_is_missing(monkeypatch):
    module = types.ModuleType("sgl_kernel.flash_mla")
    module.flash_mla_sparse_fwd = FlashMla().function
    _modules(monkeypatch, sgl_kernel_flash_mla=module)
    assert vendor_runtimes.flash_mla() == vendor_runtimes.Runtime(module.flash_mla_sparse_fwd)


def test_forward_inside_a_capture_says_what_to_do_first(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="once before capturing"):
        vendor_runtimes.ask(FlashMla().function, torch.device("cuda"))


# The self-test.


def _self_test(flash_mla, dsa, **changes):
    def forward(*arguments):
        return flashmla_cudnn.forward(*arguments, sparse_fwd=flash_mla.function)

    def backward(*arguments, **keywords):
        return flashmla_cudnn.backward(*arguments, **keywords, sparse_bwd=dsa.sparse_attention_backward_wrapper)

    return vendor_runtimes.self_test(problem_with(device=torch.device("cpu"), **changes), forward, backward)


@pytest.mark.parametrize("changes", [{}, {"heads": 8, "head_dim": 576, "slots": 1}, {"heads": 192, "slots": 160}])
def test_the_self_test_passes_what_is_right(changes):
    assert _self_test(FlashMla(), CudnnDsa(), **changes) is None


def test_the_self_test_refuses_wrong_numbers_and_errors():
    class Wrong(CudnnDsa):
        def sparse_attention_backward_wrapper(self, *arguments, **keywords):
            result = super().sparse_attention_backward_wrapper(*arguments, **keywords)
            return {**result, "dkv": result["dkv"] * 1.5}

    class Fails(CudnnDsa):
        def sparse_attention_backward_wrapper(self, *arguments, **keywords):
            raise RuntimeError("no kernel image")

    assert "dkv at D = 512 is off by 0.5" in _self_test(FlashMla(), Wrong())
    assert "raised RuntimeError: no kernel image" in _self_test(FlashMla(), Fails())
    assert "out at D = 512 is off by inf" in _self_test(FlashMla(leaks=True), CudnnDsa())


def test_the_self_test_runs_once_per_head_dimension(monkeypatch):
    flash_mla, dsa = FlashMla(), CudnnDsa()
    monkeypatch.setattr(vendor_runtimes, "flash_mla", lambda: vendor_runtimes.Runtime(flash_mla.function))
    monkeypatch.setattr(vendor_runtimes, "cudnn_dsa", lambda: vendor_runtimes.Runtime(dsa))
    for head_dim in (512, 576, 512):
        problem = problem_with(device=torch.device("cpu"), head_dim=head_dim, slots=1)
        assert vendor_runtimes.self_test_failure(problem, flashmla_cudnn.forward, flashmla_cudnn.backward) is None
    assert len(dsa.calls) == 2


def test_a_failed_self_test_is_overridden_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    for name in ("flash_mla", "cudnn_dsa"):
        monkeypatch.setattr(vendor_runtimes, name, lambda: vendor_runtimes.Runtime(object()))
    monkeypatch.setattr(vendor_runtimes, "self_test_failure", lambda *arguments: "dkv is off by 1e11")
    said = flashmla_cudnn.refusal(problem_with())
    assert said == "dkv is off by 1e11; SLATTN_TRUST=flashmla_cudnn in the environment runs it all the same"
    monkeypatch.setenv("SLATTN_TRUST", "flashmla_cudnn")
    assert flashmla_cudnn.refusal(problem_with()) is None
