"""Yours: the model. Plain torch.nn: nothing here knows how many processes train it.

Shapes: B samples, T positions, W features of each (the width), H heads of W / H features.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from .settings import ModelConfig

NUM_BYTES = 256


class Block(nn.Module):
    """Attention to the positions up to each one, then an MLP; norms stand before both."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.width
        self.heads, self.dropout = config.heads, config.dropout
        self.norm_attention = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Features (B, T, W) of features (B, T, W)."""
        x = x + self.drop(self.attend(self.norm_attention(x)))
        hidden = nn.functional.gelu(self.mlp_in(self.norm_mlp(x)))
        result: Tensor = x + self.drop(self.mlp_out(hidden))
        return result

    def attend(self, x: Tensor) -> Tensor:
        """What each position reads from itself and those before it (B, T, W)."""
        heads = self.queries_keys_values(x).unflatten(-1, (3, self.heads, -1))
        queries, keys, values = heads.permute(2, 0, 3, 1, 4)  # (B, H, T, W / H) each
        read = scaled_dot_product_attention(
            rotate(queries),
            rotate(keys),
            values,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
        )
        result: Tensor = self.attention_out(read.transpose(1, 2).flatten(2))
        return result


def rotate(heads: Tensor) -> Tensor:
    """Turn pairs of features (B, H, T, F) by angles that grow with the position.

    So scores depend on distances alone: Su et al., RoFormer, Enhanced Transformer with Rotary
    Position Embedding.
    """
    length, features = heads.shape[-2:]
    pairs = torch.arange(features // 2, device=heads.device)
    places = torch.arange(length, device=heads.device)
    angles = torch.outer(places, 10000.0 ** (-2 * pairs / features))  # (T, F / 2)
    cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
    one, other = heads.chunk(2, dim=-1)
    return torch.cat((one * cos - other * sin, one * sin + other * cos), dim=-1)


class ByteGPT(nn.Module):
    """A GPT over bytes: Radford et al., Language Models are Unsupervised Multitask Learners.

    The head is the embedding (Press and Wolf, Using the Output Embedding to Improve Language
    Models): one parameter under two names.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_BYTES, config.width)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, NUM_BYTES, bias=False)
        self.head.weight = self.embedding.weight
        self.init_weights(config.layers)

    def init_weights(self, layers: int) -> None:
        """As GPT-2: what is added to the stream is small, the more so the more layers add."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for block in self.blocks:
            assert isinstance(block, Block)
            for added in (block.attention_out, block.mlp_out):
                nn.init.normal_(added.weight, std=0.02 / math.sqrt(2 * layers))

    def forward(self, inputs: Tensor) -> Tensor:
        """Scores (B, T, 256) of the byte after each position, of bytes (B, T)."""
        x = self.drop(self.embedding(inputs))
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


def build_model(config: ModelConfig) -> nn.Module:
    """The model that is trained. Every rank builds it under the same seed."""
    return ByteGPT(config)
