"""The text: Python's own documentation of the language, which ships with it as `pydoc_data.topics`.

It is 465,000 characters of English with examples. Topics quote one another at length (`with` stands in `compound`
too), so a paragraph counts only where it stands first: the held-out part then holds none that was trained on.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

HELD_OUT = 0.1  # the last tenth of the text


@dataclass(frozen=True)
class Corpus:
    """A text as numbers: each character is its place in `characters`, the sorted ones that occur."""

    characters: str
    train: Tensor  # [n] int64
    held_out: Tensor  # [m] int64
    fingerprint: str  # tells texts apart: the documentation differs between versions of Python

    def decode(self, tokens: Tensor) -> str:
        """Tokens `[n]` as text."""
        return "".join(self.characters[token] for token in tokens.tolist())

    def unigram_entropy(self) -> float:
        """Nats a character of the held-out part for one who only knows how frequent each character is in training."""
        counts = torch.bincount(self.train, minlength=len(self.characters)).double()
        share = (counts + 1) / (counts + 1).sum()  # a character that only the held-out part has is not impossible
        return -share.log()[self.held_out].mean().item()

    def batch(self, size: int, length: int, *, seed: int, step: int) -> tuple[Tensor, Tensor]:
        """Tokens and their successors, `[size, length]` each, from random places of the training part.

        The places are a function of seed and step alone, so that a resumed run sees what the interrupted one would.
        """
        # Torch's generator on a CPU hears only the low 32 bits of a seed; the factor keeps runs of any length apart.
        generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**32)
        start = torch.randint(len(self.train) - length, (size, 1), generator=generator)
        window = self.train[start + torch.arange(length + 1)]
        return window[:, :-1], window[:, 1:]

    def held_out_windows(self, length: int, most: int) -> tuple[Tensor, Tensor]:
        """Tokens and their successors, `[n, length]` each: up to `most` windows, evenly spread, the same every time."""
        windows = self.held_out[:-1].unfold(0, length, length), self.held_out[1:].unfold(0, length, length)
        keep = torch.linspace(0, len(windows[0]) - 1, min(most, len(windows[0]))).round().long()
        return windows[0][keep], windows[1][keep]


def load() -> Corpus:
    """Python's documentation, without repeated paragraphs."""
    from pydoc_data.topics import topics

    return split("\n\n".join(distinct_paragraphs("\n\n".join(topics.values()))))


def distinct_paragraphs(text: str) -> list[str]:
    """The paragraphs of a text, each where it stands first; indentation and line breaks do not tell two apart."""
    first: dict[str, str] = {}
    for paragraph in text.split("\n\n"):
        first.setdefault(" ".join(paragraph.split()), paragraph)
    return list(first.values())


def split(text: str) -> Corpus:
    """A text as a `Corpus`: its first nine tenths to train on, its last to measure on."""
    characters = "".join(sorted(set(text)))
    number = {character: n for n, character in enumerate(characters)}
    tokens = torch.tensor([number[character] for character in text])
    border = len(tokens) - math.ceil(len(tokens) * HELD_OUT)
    return Corpus(characters, tokens[:border], tokens[border:], hashlib.sha256(text.encode()).hexdigest()[:16])
