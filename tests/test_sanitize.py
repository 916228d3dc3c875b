"""The smallest calls that reach every kernel, for compute-sanitizer: `make sanitize` runs what is named sanitize here.

Without a tool they still say that nothing raises. Values are not compared: the oracle under a tool takes minutes, and
`slattn check` compares the same cases.
"""

from __future__ import annotations

import pytest
import torch

import slattn
from slattn import testing
from slattn.backends import tilelang

# Both key sizes and a short one, one head tile and several, a last tile that is not full, slots and keys that fill no
# tile, every kind of index, lengths, sinks, a gradient of lse, the batched layout, no keys at all.
CASES = (
    "H8-D128-T16-N20-K16",
    "H2-D576-T62-N300-K65",
    "H80-D512-T3-N100-K1",
    "indices-fillers",
    "indices-empty-rows-no-sink-576",
    "length-mixed",
    "sink-mixed-576",
    "batch-3-lengths",
    "keys-0",
)


@pytest.fixture(autouse=True)
def _poison() -> None:
    """None here: initcheck has to see fresh memory as it comes."""


def test_the_cases_exist() -> None:
    assert set(CASES) <= {case.name for case in testing.CASES}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_sanitize(name: str) -> None:
    case = next(case for case in testing.CASES if case.name == name)
    inputs = testing.make_inputs(case, "cuda")
    results = testing.run(inputs, "tilelang")
    testing.run(inputs, "tilelang", deterministic=True)
    options = {"scale": inputs.scale, "topk_length": inputs.topk_length, "attn_sink": inputs.attn_sink}
    slattn.attention_slot_probs(inputs.q, inputs.kv, inputs.indices, results.lse, backend="tilelang", **options)
    torch.cuda.synchronize()
    assert results.dkv.shape[-1] == case.head_dim


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [512, 576])
def test_sanitize_rows_of_one_multiprocessor(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So few rows have a multiprocessor each; here Hopper's own kernels take one row after another."""
    monkeypatch.setattr(tilelang, "_multiprocessors", lambda device: 2)
    case = testing.Case(
        "stream", heads=64, head_dim=head_dim, queries=12, keys=300, slots=300, indices="holes", lengths="random"
    )
    testing.run(testing.make_inputs(case, "cuda"), "tilelang")
    torch.cuda.synchronize()
