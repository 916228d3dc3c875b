"""Trainable sparse latent attention: DeepSeek-V4's sparse MQA and the DSA sparse MLA of DeepSeek-V3.2 and GLM-5."""

from slattn.backends import BackendRefusal
from slattn.indexer import attention_slot_probs, indexer_loss
from slattn.ops import sparse_attention, sparse_attention_backward
from slattn.selection import select_backend, select_kernels

__version__ = "0.1.0"
__all__ = [
    "BackendRefusal",
    "attention_slot_probs",
    "indexer_loss",
    "select_backend",
    "select_kernels",
    "sparse_attention",
    "sparse_attention_backward",
]
