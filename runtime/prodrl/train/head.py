"""The chunked head: hidden states -> log p at the loss positions, without ever holding all logits.

Called by ``policy``. The forward pass computes float32 logits for a chunk of tokens at a time, keeps the log-sum-exp,
and gathers log p of the sampled token and of the recorded head; the backward pass computes each chunk's logits again.
Memory is chunk * V instead of N * V, twice over.

Shape legend: N = loss tokens, C = tokens of a chunk, H = hidden size, V = vocabulary, K = head entries (padded).
"""

# ruff: noqa: N803, N806, N815  # tensors carry their shape in their name
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class HeadOutput(NamedTuple):
    """A NamedTuple, not a dataclass: FSDP looks for the outputs' gradients in pytrees."""

    logp_N: Tensor
    """log p(a) over the whole vocabulary at the token's temperature."""
    logp_head_NK: Tensor
    entropy_N: Tensor
    """Entropy of p over the whole vocabulary; no gradient."""


class _Gather(torch.autograd.Function):  # type: ignore[misc]  # mypy does not follow torch
    """log_softmax(h W^T / T) at few ids; grad_logits = (sum of gradients at the ids - p * their total) / T."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, *rest: Any
    ) -> tuple[Tensor, ...]:
        """See :func:`gather_logprobs`."""
        ids_N1K, temperature_N, chunk = rest
        picked, lses, entropies = [], [], []
        weight32_VH = weight_VH.float()
        for rows in _chunks(hidden_NH.shape[0], chunk):
            logits_CV = _logits(hidden_NH[rows], weight32_VH, bias_V, temperature_N[rows])
            lse_C = torch.logsumexp(logits_CV, dim=-1)
            picked.append(logits_CV.gather(1, ids_N1K[rows]) - lse_C[:, None])
            entropies.append(lse_C - (torch.softmax(logits_CV, dim=-1) * logits_CV).sum(-1))
            lses.append(lse_C)
        ctx.chunk = chunk
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, ids_N1K, temperature_N, torch.cat(lses))
        entropy_N = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy_N)
        picked_N1K = torch.cat(picked)
        return picked_N1K[:, 0].clone(), picked_N1K[:, 1:].clone(), entropy_N  # FSDP wants no views

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Recompute each chunk's logits; chunks are added in order, so that the sum is always the same."""
        hidden_NH, weight_VH, bias_V, ids_N1K, temperature_N, lse_N = ctx.saved_tensors
        grad_N1K = torch.cat([grads[0][:, None], grads[1]], dim=1)
        weight32_VH = weight_VH.float()
        grad_weight_VH, grad_hidden = torch.zeros_like(weight32_VH), []
        grad_bias_V = None if bias_V is None else torch.zeros_like(bias_V, dtype=torch.float32)
        for rows in _chunks(hidden_NH.shape[0], ctx.chunk):
            logits_CV = _logits(hidden_NH[rows], weight32_VH, bias_V, temperature_N[rows])
            grad_CV = torch.exp(logits_CV - lse_N[rows, None]) * -grad_N1K[rows].sum(-1, keepdim=True)
            _add_at(grad_CV, ids_N1K[rows], grad_N1K[rows])
            grad_CV /= temperature_N[rows, None]
            grad_hidden.append((grad_CV @ weight32_VH).to(hidden_NH.dtype))
            grad_weight_VH.addmm_(grad_CV.t(), hidden_NH[rows].float())
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(0)
        bias_grad = None if grad_bias_V is None else grad_bias_V.to(bias_V.dtype)
        return torch.cat(grad_hidden), grad_weight_VH.to(weight_VH.dtype), bias_grad, None, None, None


def gather_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    ids_N1K: Tensor,
    temperature_N: Tensor,
    chunk: int,
) -> HeadOutput:
    """Log probabilities of chosen ids under softmax((h W^T + b) / T).

    Args:
        hidden_NH: Hidden states that score the loss tokens (position t-1 scores token t).
        weight_VH: The output embedding, any floating type; products and reductions are float32.
        bias_V: Its bias, if it has one.
        ids_N1K: The sampled token's id, then the head's ids; padding is any valid id.
        temperature_N: The serving temperature of each token.
        chunk: Tokens whose logits exist at once.
    """
    return HeadOutput(*_Gather.apply(hidden_NH, weight_VH, bias_V, ids_N1K, temperature_N, chunk))


def _chunks(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _logits(hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, temperature_C: Tensor) -> Tensor:
    logits_CV = hidden_CH.float() @ weight_VH.t()
    if bias_V is not None:
        logits_CV += bias_V.float()
    return logits_CV.div_(temperature_C[:, None])


def _add_at(grad_CV: Tensor, ids_C1K: Tensor, values_C1K: Tensor) -> None:
    """Deterministic on every device: ``index_put_`` sorts, ``scatter_add_`` would use atomics on CUDA."""
    row_C1 = torch.arange(grad_CV.shape[0], device=grad_CV.device)[:, None].expand_as(ids_C1K)
    grad_CV.index_put_((row_C1, ids_C1K), values_C1K, accumulate=True)
