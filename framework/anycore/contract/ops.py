"""The operations a model is made of. Each has a plain-torch default, which is the meaning of "correct".

T rows in the step, H hidden size, Hq/Hkv query and KV heads, D head size, V vocabulary, R output rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anycore.contract import reference, sampling
from anycore.contract.batch import Batch, Samples, Sampling
from anycore.contract.collective import ALONE, Collective
from anycore.contract.formats import Format
from anycore.contract.weights import QuantisedWeight, Weight

if TYPE_CHECKING:
    from anycore.contract.mixed import Renewable

HeadNorms = tuple[Tensor, Tensor, float]
"""Weights [D] of the norms of query and key heads, and their epsilon."""


class Ops:
    """Default operations for any torch device. A backend overrides what it can do faster."""

    draw_dtype = torch.float64  # of `Sampling.uniforms` and of sums of probabilities; float32 where that is the widest
    group: Collective = ALONE  # the ranks of the model, where several compute it: see `Backend.join`

    def plan(self, batch: Batch) -> Any:
        """Prepare masks, workspaces or split counts once a step, before the forward; kept in `batch.plan`."""
        return None

    def renewable(self, batch: Batch, decoding: int, prompts: int) -> Renewable | None:
        """Plan a step that is captured and has prompts: any batch of as many rows and requests can be put into it.

        At most `decoding` requests have one row and a history, and fewer than `prompts` others have rows; the last
        request of `batch` never has. What launches depend on has to be of these sizes, not of the batch's lengths,
        which change on the device. None: such steps are not captured here.
        """
        return None

    def shares(self, batch: Batch) -> bool:
        """Whether a decode step of this batch is another one because of its `shared_tokens`.

        If so, `plan` and `attention` take how many they are from the device only: they change in a captured step.
        """
        return False

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: Any,
        batch: Batch,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Store each k, v row at `batch.slots`, then let row t of request i attend.

        It attends to that request's tokens 0 … position(t) if `batch.causal`, otherwise to all of its rows in this
        batch. With `window` W, only the last W of those positions count (itself included). If `cache` is None there
        is no history and nothing is stored. A rounded cache rounds each row when it is stored (`contract.rounded`),
        and all is read as it was stored, this step's own rows too: results do not hang on how a prompt was split.

        Shapes: q and result [T, Hq, D]; k, v [T, Hkv, D]. Scores are `scale * q·k`, with `softcap` c bounded to
        `c * tanh(score / c)`; softmax in float32.
        """
        if cache is None:
            return reference.packed_attention(q, k, v, batch, scale, window, softcap)
        reference.store(k, v, cache, batch)
        return reference.paged_attention(q, cache, batch, scale, window, softcap)

    def self_attention(
        self,
        qkv: Tensor,
        heads: int,
        kv_heads: int,
        norms: HeadNorms | None,
        angles: tuple[Tensor, Tensor] | None,
        cache: Any,
        batch: Batch,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """What stands between the projection to qkv [T, Hq + 2 Hkv, D], which may be overwritten, and the way back.

        The norms of q's and k's heads, their rotation by angles (cos, sin), then `attention`: one call, so that a
        backend may do it in few passes over memory.
        """
        q, k, v = qkv.split_with_sizes((heads, kv_heads, kv_heads), dim=1)
        if norms is not None:
            q, k = self.rms_norm(q, norms[0], norms[2])[0], self.rms_norm(k, norms[1], norms[2])[0]
        if angles is not None:
            q, k = self.rotary(q, k, *angles)
        return self.attention(q, k, v, cache, batch, scale, window, softcap)

    def quantise(self, weight: Tensor, wanted: Format) -> QuantisedWeight | None:
        """Round a dense matrix [O, I] to the nearest numbers of a format, by groups of columns, as a model is loaded.

        The default leaves that to the loader, whose torch operations pass over memory again and again. A backend that
        rounds in one pass gives the same numbers and scales as these, to the last bit.
        """
        return None

    def pack(self, weight: Weight) -> Any:
        """Turn a weight [O, I] into the handle `linear` takes. Called once at load; `weight` may then be freed.

        The default makes a quantised weight dense: right, not small.
        """
        return weight.dense()

    def linear(self, x: Tensor, handle: Any, bias: Tensor | None = None) -> Tensor:
        """[.., I] → [.., O]."""
        return F.linear(x, handle, bias)

    def linear_for_norm(self, x: Tensor, handle: Any) -> Any:
        """`linear`, for nothing but the next `rms_norm` or `norm_linear`, which take it as their x.

        So a backend whose programs have summed parts of it may leave it to these to finish: another type then.
        """
        return self.linear(x, handle)

    def logits(self, x: Tensor, handle: Any) -> Tensor:
        """[R, H] times the packed head [V, H] → [R, V] float32."""
        return self.linear(x, handle).float()

    def embedding(self, ids: Tensor, table: Any) -> Tensor:
        """[T] int64, [V, H] → [T, H].

        A quantised table is what `pack` made of it, where `BackendSpec.tables` says so: a tied head is the same one.
        """
        return F.embedding(ids, table)

    def embedding_sum(self, parts: Sequence[tuple[Tensor | None, Any]], scale: float = 1.0) -> Tensor:
        """The sum of `embedding(ids, table)` of several parts, times `scale`. Ids of None: the first row for all."""
        total: Tensor | None = None
        for ids, table in parts:
            rows = table[0] if ids is None else self.embedding(ids, table)
            total = rows if total is None else total + rows
        assert total is not None
        return total if scale == 1.0 else total * scale

    def angles(self, positions: Tensor, frequencies: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """[T] int64, [D/2] float32 → `scale` times cos and sin of their products [T, D/2] float32."""
        angles = positions[:, None] * frequencies  # times float32 they are float32: one pass
        if scale == 1.0:
            return angles.cos(), angles.sin()
        return angles.cos() * scale, angles.sin() * scale

    def wanted(self, x: Tensor, batch: Batch) -> Tensor:
        """[T, H] → [R, H]: the rows of `batch.output_rows`."""
        return batch.wanted(x)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (norm(x + residual) * weight, x + residual). `weight` [H] is float32, the mean is taken in float32.

        Root mean square layer normalisation: Zhang and Sennrich, 2019.
        """
        if residual is not None:
            x = x + residual
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return (normed * weight).to(x.dtype), x

    def norm_linear(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
        handle: Any,
        bias: Tensor | None = None,
        gate: str | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`rms_norm`, then `linear`, then `gated` if `gate` names an activation: [T, H] → [T, O], and x + residual.

        One call, so that a backend may keep what lies between in registers. O is half of the matrix's rows if gated.
        """
        normed, total = self.rms_norm(x, weight, eps, residual)
        out = self.linear(normed, handle, bias)
        return (out if gate is None else self.gated(out, gate)), total

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (layer_norm(x + residual), x + residual). `weight` and `bias` [H] are float32."""
        if residual is not None:
            x = x + residual
        return F.layer_norm(x.float(), weight.shape, weight, bias, eps).to(x.dtype), x

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate q [T, Hq, D] and k [T, Hkv, D] by cos, sin [T, D/2] float32; halves are paired, as in Hugging Face."""
        return reference.rotate(q, cos, sin), reference.rotate(k, cos, sin)

    def gated(self, x: Tensor, kind: str) -> Tensor:
        """act(first half) * second half: [.., 2I] → [.., I]. `kind` is one of `activation`'s."""
        gate, up = x.chunk(2, dim=-1)
        return self.activation(gate, kind) * up

    def activation(self, x: Tensor, kind: str) -> Tensor:
        """Elementwise: "silu", "relu", "gelu" (exact) or "gelu_tanh"."""
        if kind == "silu":
            return F.silu(x)
        if kind == "gelu":
            return F.gelu(x)
        if kind == "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        if kind == "relu":
            return F.relu(x)
        raise ValueError(f"activation {kind!r} is not one of silu, gelu, gelu_tanh, relu")

    def pool(self, rows: Tensor, batch: Batch, kind: str) -> Tensor:
        """Reduce all rows [T, H] of a batch to one float32 row a request [B, H]: "mean" or "max"."""
        return reference.pool(rows, batch.query_lens, kind)

    def sample(self, logits: Tensor, params: Sampling) -> Samples:
        """Choose one id a row from logits [R, V] float32, which may be overwritten."""
        return sampling.sample(logits, params)

    def report(self, raw: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Log-probabilities and ranks of ids [R] by logits [R, V] float32; the `count` most likely ids, with theirs."""
        return sampling.report(raw, ids, count)

    def logprobs(self, raw: Tensor, ids: Tensor) -> Tensor:
        """Log-probabilities of ids [R, N] by logits [R, V] float32."""
        return raw.gather(1, ids) - raw.logsumexp(-1, keepdim=True)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks, perhaps in place; identity when alone. Each rank gets the same numbers."""
        return self.group.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenate the last dimension over ranks; identity when alone."""
        return self.group.all_gather(x)
