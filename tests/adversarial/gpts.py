"""GPTs as people publish them, each shortened, that are given token ids alone; see ``test_counting.py``."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.adversarial.harness import HEADS, VOCAB, WIDTH

BLOCK, DIM = 64, WIDTH // HEADS
Tensor = torch.Tensor


class RotaryAttention(nn.Module):
    """llama2.c's, by F.sdpa or written out."""

    def __init__(self, flash: bool) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.flash = flash
        self.register_buffer("mask", torch.full((1, 1, BLOCK, BLOCK), float("-inf")).triu(1))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        bsz, seqlen, _ = x.shape
        q, k, v = (w(x).view(bsz, seqlen, HEADS, DIM) for w in (self.wq, self.wk, self.wv))
        q, k, v = (t.transpose(1, 2) for t in (self.rotated(q, cos, sin), self.rotated(k, cos, sin), v))
        if self.flash:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=True)
        else:
            scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(DIM) + self.mask[:, :, :seqlen, :seqlen]
            out = torch.matmul(F.softmax(scores.float(), dim=-1).type_as(q), v)
        return self.wo(out.transpose(1, 2).contiguous().view(bsz, seqlen, -1))

    def rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        real, imaginary = x.float().reshape(x.shape[:-1] + (-1, 2)).unbind(-1)
        assert cos.shape == (x.shape[1], x.shape[-1] // 2)
        cos, sin = (t.view(1, cos.shape[0], 1, cos.shape[1]) for t in (cos, sin))
        return torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1).flatten(3).type_as(x)


class Llama2C(nn.Module):
    last_loss: Tensor | None

    def __init__(self, flash: bool = True) -> None:
        super().__init__()
        self.tok_embeddings, self.output = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.layers = nn.ModuleList([RotaryAttention(flash) for _ in range(2)])
        angles = torch.outer(torch.arange(BLOCK), 1.0 / (10000.0 ** (torch.arange(0, DIM, 2).float() / DIM)))
        self.register_buffer("freqs_cos", angles.cos(), persistent=False)
        self.register_buffer("freqs_sin", angles.sin(), persistent=False)
        self.last_loss = None

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        _, seqlen = tokens.shape
        h, freqs_cos, freqs_sin = self.tok_embeddings(tokens), self.freqs_cos[:seqlen], self.freqs_sin[:seqlen]
        for layer in self.layers:
            h = h + layer(h, freqs_cos, freqs_sin)
        if targets is not None:
            logits = self.output(h)
            self.last_loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        else:
            logits = self.output(h[:, [-1], :])
            self.last_loss = None
        return logits


class Head(nn.Module):
    """One head of a lecture's model."""

    def __init__(self, head_size: int) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(WIDTH, head_size, bias=False) for _ in range(3))
        self.register_buffer("tril", torch.tril(torch.ones(BLOCK, BLOCK)))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        _, T, _ = x.shape
        k, q = self.key(x), self.query(x)
        wei = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))
        return self.dropout(F.softmax(wei, dim=-1)) @ self.value(x)


class Lecture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.blocks = nn.ModuleList([nn.ModuleList([Head(DIM) for _ in range(HEADS)]) for _ in range(2)])
        self.lm_head = nn.Linear(WIDTH, VOCAB)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        B, T = idx.shape
        x = self.tokens(idx) + self.positions(torch.arange(T, device=idx.device))
        for heads in self.blocks:
            x = x + torch.cat([h(x) for h in heads], dim=-1)
        logits = self.lm_head(x)
        return logits, None if targets is None else F.cross_entropy(logits.view(B * T, VOCAB), targets.view(B * T))


class NanoChat(nn.Module):
    """Rotary tables longer than any sequence, cut at a place that a cache would give."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.lm_head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.c_q, self.c_k, self.c_v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH, WIDTH // 2)
        angles = torch.outer(torch.arange(BLOCK * 10).float(), 1.0 / (10000 ** (torch.arange(0, DIM, 2).float() / DIM)))
        self.register_buffer("cos", angles.cos()[None, :, None, :], persistent=False)
        self.register_buffer("sin", angles.sin()[None, :, None, :], persistent=False)

    def forward(self, idx: Tensor, targets: Tensor | None = None, kv_cache: Any = None, loss_reduction: str = "mean") -> Tensor:
        B, T = idx.size()
        assert T <= self.cos.size(1), f"Sequence length grew beyond the rotary embeddings cache: {T} > {self.cos.size(1)}"
        T0 = 0 if kv_cache is None else kv_cache.get_pos()
        cos, sin = self.cos[:, T0 : T0 + T], self.sin[:, T0 : T0 + T]
        x = self.norm(self.wte(idx))
        q, k, v = self.c_q(x).view(B, T, HEADS, DIM), self.c_k(x).view(B, T, -1, DIM), self.c_v(x).view(B, T, -1, DIM)
        q, k = self.norm(self.rotated(q, cos, sin)), self.norm(self.rotated(k, cos, sin))
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, enable_gqa=True)
        logits = self.lm_head(self.norm(x + y.transpose(1, 2).contiguous().view(B, T, -1)))
        logits = 15 * torch.tanh(logits / 15)
        return logits if targets is None else F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1))

    @staticmethod
    def norm(x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.size(-1),))

    @staticmethod
    def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x1, x2 = x.chunk(2, -1)
        return torch.cat([x1 * cos + x2 * sin, x1 * -sin + x2 * cos], 3)


class Tutorial(nn.Module):
    """In the style of PyTorch's tutorial on language models: sinusoids in a buffer, added with the tokens in front, and
    ``nn.TransformerEncoder``."""

    def __init__(self) -> None:
        super().__init__()
        position, rate = torch.arange(BLOCK)[:, None], torch.exp(torch.arange(0, WIDTH, 2) * (-math.log(10000.0) / WIDTH))
        pe = torch.zeros(BLOCK, 1, WIDTH)
        pe[:, 0, 0::2], pe[:, 0, 1::2] = torch.sin(position * rate), torch.cos(position * rate)
        self.register_buffer("pe", pe)
        self.embedding, self.linear = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 24, 0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, src: Tensor) -> Tensor:
        x = self.embedding(src.T) * math.sqrt(WIDTH)
        x = (x + self.pe[: x.size(0)]).transpose(0, 1)
        return self.linear(self.encoder(x, nn.Transformer.generate_square_subsequent_mask(src.size(1)).to(src.device)))


GPTS = {"llama2.c": Llama2C, "llama2.c, written out": lambda: Llama2C(False), "a lecture": Lecture, "nanochat": NanoChat,
        "a tutorial": Tutorial}
