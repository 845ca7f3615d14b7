"""The old device, open. It replaces all that contract 1.0 had: memory and layout of the cache, operations, the step."""

import torch

from anycore.contract.backend import Backend, Memory
from anycore.contract.ops import Ops
from anycore.errors import PluginError

NEVER = float("-inf")


class OldMemory(Memory):
    """The cache lies head by head: [blocks, kv_heads, block_size, head_dim] for K, and for V."""

    def total(self):
        return 8 * 2**30

    def free(self):
        return 4 * 2**30

    def block_bytes(self, kv):
        return kv.bytes_per_token * kv.block_size

    def allocate_kv(self, kv, blocks):
        shape, dtype = (blocks, kv.kv_heads, kv.block_size, kv.head_dim), getattr(torch, kv.dtype)
        return [(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)) for _ in range(kv.layers)]

    def upload(self, host):
        return host.clone()


class OldOps(Ops):
    def __init__(self):
        self.planned = 0

    def plan(self, batch):
        self.planned += 1
        return {"starts": batch.query_starts, "lens": batch.seq_lens}

    def attention(self, q, k, v, cache, batch, scale, window=None, softcap=None):
        if cache is not None:
            block, place = batch.slots // batch.block_size, batch.slots % batch.block_size
            cache[0][block, :, place] = k
            cache[1][block, :, place] = v
        out = torch.empty_like(q)
        for i, (start, end) in enumerate(zip(batch.query_starts, batch.query_starts[1:], strict=False)):
            if cache is None:
                keys, values = k[start:end], v[start:end]
            else:
                table = batch.block_tables[i, : -(-batch.seq_lens[i] // batch.block_size)].long()
                keys, values = (part[table].transpose(1, 2).flatten(0, 1)[: batch.seq_lens[i]] for part in cache)
            out[start:end] = attend(
                q[start:end], keys, values, batch.positions[start:end], batch.causal, scale, window, softcap
            )
        return out

    def pack(self, weight):
        return weight.data.t().contiguous()

    def linear(self, x, handle, bias=None):
        out = x @ handle
        return out if bias is None else (out + bias).to(x.dtype)

    def rms_norm(self, x, weight, eps, residual=None):
        if residual is not None:
            x = x + residual
        wide = x.double()
        return (wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight).to(x.dtype), x

    def rotary(self, q, k, cos, sin):
        return turned(q, cos, sin), turned(k, cos, sin)

    def gated(self, x, kind):
        half = x.shape[-1] // 2
        return self.activation(x[..., :half], kind) * x[..., half:]


class OldBackend(Backend):
    name = "old"

    def __init__(self, index):
        if index != 0:
            raise PluginError(f"the old device is alone: 0, not {index}")
        super().__init__(torch.device("cpu"), OldMemory(torch.device("cpu")), OldOps())
        self.steps = 0

    def optimize(self, step, limits):
        def counted(batch, sampling):
            assert sum(batch.query_lens) <= max(limits.max_num_batched_tokens, limits.max_num_seqs)
            self.steps += 1
            return step(batch, sampling)

        return counted


def attend(q, k, v, positions, causal, scale, window, softcap):
    """q [R, Hq, D]; k, v [L, Hkv, D] of one request."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("rhd,lhd->hrl", q.float(), keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    distance = positions[:, None] - torch.arange(len(k))
    hidden = distance < 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
    if window is not None:
        hidden = hidden | (distance.abs() >= window)
    weights = scores.masked_fill(hidden, NEVER).softmax(-1)
    return torch.einsum("hrl,lhd->rhd", weights, values).to(q.dtype)


def turned(x, cos, sin):
    half = x.shape[-1] // 2
    first, second = x[..., :half].float(), x[..., half:].float()
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
