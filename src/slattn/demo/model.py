"""A small DeepSeek-V4-style decoder whose attention is `slattn.sparse_attention`.

Read `Attention.forward`: it is how a model calls this library. A layer sees two kinds of keys, one latent row each,
shared by all heads:

    raw      one row a token; a query sees the last `window` of them, itself included
    pooled   one row a block of `block` tokens (V4's compressed keys); a query sees the `topk` of the completed
             blocks that the indexer scores highest

Raw and pooled rows stand one after the other in `kv`; `indices` names both kinds, -1 where there is nothing. Whatever
is causal is in those indices: a block is pooled from its own tokens alone and named only once it is complete.

The sizes are the kernels' (heads of 64) and small enough to train on two CPU cores in under two minutes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

import slattn

if TYPE_CHECKING:
    from slattn.demo.parallel import Part

# Of each layer: the keys that its queries chose, `[B, S, window + topk]`, and their probabilities, the same shape.
Trace = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Config:
    """Sizes of the model. `head_dim` must be one that the kernels take: 64, 128, 256, 512 or 576."""

    vocabulary: int
    sequence: int = 256
    layers: int = 4
    width: int = 128
    hidden: int = 384  # of the SwiGLU
    heads: int = 4
    head_dim: int = 64
    rotary_dim: int = 32  # the last columns of a head carry the position
    query_rank: int = 96
    window: int = 32
    block: int = 8  # tokens a pooled key
    topk: int = 8
    index_heads: int = 2
    index_dim: int = 32


class Linear(nn.Linear):
    """A product without bias that computes in its input's dtype; the weight stays float32 for the optimizer.

    `zero` starts it at zero: so start the products that are added to the stream, and a new layer changes nothing.
    """

    def __init__(self, inputs: int, outputs: int, *, zero: bool = False) -> None:
        super().__init__(inputs, outputs, bias=False)
        nn.init.normal_(self.weight, std=0.0 if zero else inputs**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """Root mean square normalisation of the last dimension, with a learned gain."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.gain.to(x.dtype), eps=1e-6)


class Rotary(nn.Module):
    """Rotary position embedding of the last `dim` columns ("partial": the columns before them pass unchanged).

    A base of 100 makes the slowest turn last 470 characters, and learns faster on these short texts than the 10,000 of
    large models, which leaves half of the columns nearly still (held-out loss after 150 steps: 2.09 against 2.13).
    """

    angle: Tensor

    def __init__(self, dim: int, positions: int, base: float = 100.0) -> None:
        super().__init__()
        self.dim = dim
        angle = torch.outer(torch.arange(positions).float(), base ** (-torch.arange(0, dim, 2).float() / dim))
        self.register_buffer("angle", angle, persistent=False)
        self.tables: dict[tuple[object, ...], tuple[Tensor, Tensor, Tensor]] = {}  # by what they depend on

    def table(self, x: Tensor, every: int) -> tuple[Tensor, Tensor, Tensor]:
        """cos, sin and -sin for the rows of x, of its dtype, in a shape that broadcasts; made once for each length."""
        key = (x.shape[1], x.dim(), every, x.dtype, x.device)
        if key not in self.tables:
            shape = (x.shape[1], *(1,) * (x.dim() - 3), self.dim // 2)
            angle = self.angle[: x.shape[1] * every : every].view(shape)
            sin = angle.sin().to(x.dtype)
            self.tables[key] = angle.cos().to(x.dtype), sin, -sin
        return self.tables[key]

    def forward(self, x: Tensor, *, every: int = 1, inverse: bool = False) -> Tensor:
        """x `[B, S, ..., D]`, row s turned by the angle of position `s * every`, or back by it."""
        cos, sin, back = self.table(x, every)
        if inverse:
            sin, back = back, sin
        plain, a, b = x.split((x.shape[-1] - self.dim, self.dim // 2, self.dim // 2), -1)
        return torch.cat((plain, torch.addcmul(a * cos, b, back), torch.addcmul(b * cos, a, sin)), -1)


class Pool(nn.Module):
    """One key for each complete block of tokens: V4's compressor, a weighted mean with learned weights.

    Each of the block's tokens proposes a value and a weight for every column; the weights, plus a bias by the place
    in the block, go through a softmax over the block.
    """

    def __init__(self, width: int, dim: int, block: int) -> None:
        super().__init__()
        self.block = block
        self.value, self.weight = Linear(width, dim), Linear(width, dim)
        self.place = nn.Parameter(torch.zeros(block, dim))
        self.norm = RMSNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        """x `[B, S, width]` to pooled keys `[B, S // block, dim]`; an incomplete last block gives none."""
        blocks = x.shape[1] // self.block
        x = x[:, : blocks * self.block].unflatten(1, (blocks, self.block))
        share = (self.weight(x) + self.place.to(x.dtype)).softmax(2)
        return self.norm((self.value(x) * share).sum(2))


def products(q: Tensor, keys: Tensor) -> Tensor:
    """q `[B, S, H, D]` with each of the keys `[B, P, D]`: `[B, S, H, P]`."""
    return (q.flatten(1, 2) @ keys.mT).unflatten(1, q.shape[1:3])


class Indexer(nn.Module):
    """The lightning indexer: a cheap score for each query and pooled key, by which the top-k is chosen.

    `score[t, j] = sum_i weight[t, i] * relu(<query[t, i], key[j]>)` over a few small heads i, with pooled keys of its
    own. A top-k passes no gradient back, so the scores are trained by `Attention.index_loss`, and the indexer's
    inputs are detached: it follows the attention and never disturbs it.
    """

    part: Part | None = None  # as `Attention.part`

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.dim = config.index_heads, config.index_dim
        self.query = Linear(config.query_rank, self.heads * self.dim)
        self.weight = Linear(config.width, self.heads)
        self.pool = Pool(config.width, self.dim, config.block)
        self.rotary = Rotary(self.dim // 2, config.sequence)
        self.block = config.block

    def forward(self, x: Tensor, latent: Tensor) -> Tensor:
        """x `[B, S, width]` and the query latent `[B, S, query_rank]` to scores `[B, S, S // block]`."""
        x, latent = x.detach(), latent.detach()
        q = self.rotary(self.query(latent).unflatten(-1, (self.heads, self.dim)))
        k = self.rotary(self.pool(x), every=self.block)
        if self.part is not None:
            k = self.part.gather(k)
        match = products(q, k).relu()
        return (self.weight(x).unsqueeze(2) @ match).squeeze(2) * self.dim**-0.5


class Attention(nn.Module):
    """Latent queries and keys, window and top-k pooled keys, a sink per head, and the op of this library."""

    slots: Tensor
    incomplete: Tensor
    part: Part | None = None  # set by `parallel.split`: x has some positions of each text, other processes the others

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        heads, dim = config.heads, config.head_dim
        self.query_down, self.query_norm = Linear(config.width, config.query_rank), RMSNorm(config.query_rank)
        self.query_up = Linear(config.query_rank, heads * dim)
        self.key, self.key_norm = Linear(config.width, dim), RMSNorm(dim)
        self.pool = Pool(config.width, dim, config.block)
        self.indexer = Indexer(config)
        self.sink = nn.Parameter(torch.zeros(heads))
        self.out = Linear(heads * dim, config.width, zero=True)
        self.rotary = Rotary(config.rotary_dim, config.sequence)
        token = torch.arange(config.sequence)
        slots = token[:, None] - torch.arange(config.window)  # [S, window]; below 0 before the text begins
        incomplete = torch.arange(config.sequence // config.block) >= (token[:, None] + 1) // config.block  # [S, P]
        self.register_buffer("slots", slots.clamp_min(-1).int(), persistent=False)
        self.register_buffer("incomplete", incomplete, persistent=False)

    def forward(self, x: Tensor, backend: str, trace: Trace | None = None) -> tuple[Tensor, Tensor | None]:
        """x `[B, S, width]` to the attention's output, the same shape, and in training the indexer's loss.

        Args:
            backend: as `slattn.sparse_attention` takes it.
            trace: a list to which the layer's choice is appended, for the map.
        """
        config, length = self.config, x.shape[1]
        raw = self.rotary(self.key_norm(self.key(x)))  # [B, S, D]
        pooled = self.rotary(self.pool(x), every=config.block)  # [B, P, D]
        kv = torch.cat((raw, pooled), 1)
        keys = None if self.part is None else self.part.gather_keys(kv)  # on their way while the rest is made
        latent = self.query_norm(self.query_down(x))
        q = self.query_up(latent).unflatten(-1, (config.heads, config.head_dim))
        q = self.rotary(F.rms_norm(q, q.shape[-1:], eps=1e-6))  # [B, S, H, D]
        scores = self.indexer(x, latent)  # [B, S, P]
        indices = self.choose(scores)
        if self.part is None or keys is None:
            out, lse = slattn.sparse_attention(q, kv, indices, attn_sink=self.sink, return_lse=True, backend=backend)
        else:
            out, lse = self.part.attend(q, keys, indices, attn_sink=self.sink, backend=backend)
        if trace is not None:
            probs = slattn.attention_slot_probs(q, kv, indices, lse, attn_sink=self.sink, backend=backend)
            trace.append((indices, probs / config.heads))
        # A value is its key's row, turned by the key's position: turning the output back by the query's leaves the
        # distance between the two, which is what V4 does.
        out = self.out(self.rotary(out, inverse=True).flatten(2))
        if not self.training or length < config.block:
            return out, None
        pooled = pooled.detach() if self.part is None else self.part.gather(pooled.detach())
        return out, self.index_loss(scores, q, pooled, lse, backend)

    def choose(self, scores: Tensor) -> Tensor:
        """The keys of each query, `[B, S, window + topk]` int32: its window, then its best completed blocks.

        Pooled key j is key S + j, behind the S raw ones. There are always `window + topk` slots, so that one compiled
        kernel serves every length.
        """
        batch, length, blocks = scores.shape
        raw = length if self.part is None else self.part.sequence
        hidden = scores.masked_fill(self.incomplete[:length, :blocks], -torch.inf)
        best = hidden.topk(min(self.config.topk, blocks), -1)
        chosen = (best.indices + raw).int().masked_fill(best.values == -torch.inf, -1)
        if blocks < self.config.topk:
            chosen = F.pad(chosen, (0, self.config.topk - blocks), value=-1)
        return torch.cat((self.slots[:length].expand(batch, -1, -1), chosen), -1)

    def index_loss(self, scores: Tensor, q: Tensor, pooled: Tensor, lse: Tensor, backend: str) -> Tensor:
        """How far the indexer is from the attention it serves: `slattn.indexer_loss`, in nats a query.

        The target is the attention's own probability of each completed block, had it been chosen: `exp(s - Lz)` with
        the layer's logits s and normaliser Lz (docs/contract.md), summed over the heads and normalised over the
        blocks. It looks at every completed block and not only at the chosen ones, so that a block wrongly left out is
        noticed; with few blocks that costs little. Over many, name the chosen slots alone, as DeepSeek-V3.2's sparse
        stage does.

        Args:
            scores: of the indexer, `[B, S, P]`; the only argument that gets a gradient.
            q: `[B, S, H, D]`.
            pooled: `[B, P, D]`.
            lse: `[B, S, H]`, as the op returned it.
        """
        batch, length, blocks = scores.shape
        complete = ~self.incomplete[:length, :blocks]
        named = torch.where(complete, torch.arange(blocks, device=q.device), -1).int().expand(batch, -1, -1)
        probs = slattn.attention_slot_probs(q, pooled, named, lse, attn_sink=self.sink, backend=backend)
        # Not the mean over the rows that are not empty: over processes, those are not shared evenly.
        total = slattn.indexer_loss(scores, probs, valid=complete.expand_as(probs), reduction="sum")
        return total / (batch * length)


class SwiGLU(nn.Module):
    """The feed-forward half of a layer."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = Linear(width, 2 * hidden), Linear(hidden, width, zero=True)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * value)


class Layer(nn.Module):
    """Attention and SwiGLU, each behind an RMSNorm and added to the stream."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(config.width), Attention(config)
        self.swiglu_norm, self.swiglu = RMSNorm(config.width), SwiGLU(config.width, config.hidden)

    def forward(self, x: Tensor, backend: str, trace: Trace | None) -> tuple[Tensor, Tensor | None]:
        attended, index_loss = self.attention(self.attention_norm(x), backend, trace)
        x = x + attended
        return x + self.swiglu(self.swiglu_norm(x)), index_loss


class Decoder(nn.Module):
    """The language model: tokens to the logits of the next token.

    Computes in bfloat16 on a GPU, where the kernels want it, and in float32 elsewhere; the weights are float32.
    """

    def __init__(self, config: Config, backend: str = "auto") -> None:
        super().__init__()
        self.config, self.backend = config, backend
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width)
        self.head = Linear(config.width, config.vocabulary, zero=True)
        nn.init.normal_(self.embedding.weight, std=1.0)

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        return torch.bfloat16 if self.embedding.weight.is_cuda else torch.float32

    def forward(self, tokens: Tensor, trace: Trace | None = None) -> tuple[Tensor, Tensor]:
        """Tokens `[B, S]`, S up to `config.sequence`, to float32 logits `[B, S, vocabulary]` and the indexers' loss.

        Args:
            trace: a list that receives, for each layer, what its queries chose.
        """
        x = self.embedding(tokens).to(self.dtype)
        index_loss = x.new_zeros((), dtype=torch.float32)
        for layer in self.layers:
            x, loss = layer(x, self.backend, trace)
            index_loss = index_loss if loss is None else index_loss + loss
        return self.head(self.norm(x)).float(), index_loss

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int, *, seed: int, temperature: float = 0.6) -> Tensor:
        """`count` tokens that continue `tokens` `[n]`, drawn one by one; each sees the last `config.sequence`."""
        generator = torch.Generator().manual_seed(seed)  # on the CPU: the draws do not depend on the device
        text, device = tokens.tolist(), self.embedding.weight.device
        for _ in range(count):
            seen = torch.tensor([text[-self.config.sequence :]], device=device)
            logits = self(seen)[0][0, -1].cpu() / temperature
            text.append(int(torch.multinomial(logits.softmax(-1), 1, generator=generator)))
        return torch.tensor(text[len(tokens) :])
