"""A transformer layer under the assumptions of Korthikanti et al. 2023, "Reducing Activation
Recomputation in Large Transformer Models": half precision, dropout, GELU, 4 h wide MLP, s x b x h."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)
        self.scale = 1 / math.sqrt(width // heads)

    def forward(self, x: Tensor) -> Tensor:
        length, batch, width = x.shape
        each = width // self.heads
        q, k, v = self.qkv(x).view(length, batch * self.heads, 3, each).unbind(2)
        if self.fused:
            split = (length, batch, self.heads, each)
            q, k, v = (t.view(split).permute(1, 2, 0, 3) for t in (q, k, v))
            y = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1).permute(2, 0, 1, 3)
        else:
            none = torch.empty((), dtype=x.dtype)
            queries, keys = q.transpose(0, 1), k.permute(1, 2, 0)
            scores = torch.baddbmm(none, queries, keys, beta=0, alpha=self.scale)
            weights = self.drop(torch.softmax(scores, -1))
            y = torch.bmm(weights, v.transpose(0, 1)).transpose(0, 1)
        result: Tensor = self.out(y.reshape(length, batch, width))
        return result


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads, fused)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.ln1(x)))
        y: Tensor = x + self.drop(self.down(functional.gelu(self.up(self.ln2(x)))))
        return y


class Stack(nn.Module):
    def __init__(self, width: int, heads: int, layers: int, fused: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, heads, fused) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x
