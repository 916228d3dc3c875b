"""Trainable sparse latent attention: DeepSeek-V4's sparse MQA and the DSA sparse MLA of DeepSeek-V3.2 and GLM-5."""

from slattn.backends import BackendRefusal
from slattn.ops import select_backend, sparse_attention, sparse_attention_backward

__version__ = "0.1.0"
__all__ = ["BackendRefusal", "select_backend", "sparse_attention", "sparse_attention_backward"]
