"""Losses per token: pure functions of tensors, to be minimised. Called by ``loop`` (through :func:`token_losses`).

Each returns one value a loss token; the weights 1/(B*T_i) are ``batch``'s. Only log p of the trainer carries a
gradient; everything else is detached here, so that a caller cannot forget it. Ratios live in log space and are clamped
to +-20 before they are exponentiated.

Shape legend: N = loss tokens, K = recorded head entries (padded). Symbols as in the papers: p = trainer now, p0 =
trainer at the start of the round (theta_k), mu or q = what really sampled, A = advantage, S = recorded support.
"""

# ruff: noqa: N803, N806, N815  # tensors carry their shape in their name
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from prodrl.config import CorrectionConfig

MAX_LOG_RATIO = 20.0
"""exp(20) = 4.9e8: far beyond any ratio that is still a correction, far below overflow."""
MASS_FLOOR = 1e-6
"""Least tail mass of sampler and trainer; 1 - sum in float32 may be negative (Marek & Ryabinin clamp alike)."""


@dataclass(frozen=True)
class Weighting:
    """f of score centering: the detached pointwise weight of p/q."""

    kind: Literal["None", "TIS", "MIS"] = "None"
    cap: float = 2.0
    """TIS: min(ratio, cap)."""
    low: float = 0.5
    high: float = 5.0
    """MIS: the ratio itself inside [low, high], else 0."""

    def weight(self, log_ratio: Tensor) -> Tensor:
        """f(r), for the sampled token; the raw log ratio decides about band and cap."""
        if self.kind == "None":
            return torch.ones_like(log_ratio)
        ratio = torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
        if self.kind == "TIS":
            return ratio.clamp(max=self.cap)
        return torch.where(self.inside(log_ratio), ratio, 0.0)

    def mass(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """q*f(p/q), written so that no ratio is exponentiated: min(p, C q) for TIS, p inside the band for MIS."""
        if self.kind == "None":
            return torch.exp(log_q)
        if self.kind == "TIS":
            return torch.minimum(torch.exp(log_p), self.cap * torch.exp(log_q))
        return torch.where(self.inside(log_p - log_q), torch.exp(log_p), 0.0)

    def tail(self, log_rho: Tensor) -> Tensor:
        """Alpha = rho*f(1/rho): what one unit of the trainer's tail mass weighs."""
        rho = torch.exp(log_rho)
        if self.kind == "None":
            return rho
        if self.kind == "TIS":
            return (self.cap * rho).clamp(max=1.0)
        return self.inside(-log_rho).to(rho.dtype)

    def inside(self, log_ratio: Tensor) -> Tensor:
        """Whether MIS keeps the ratio."""
        ratio = torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
        return (ratio >= self.low) & (ratio <= self.high)


@dataclass(frozen=True)
class Tokens:
    """What the losses need to know of N loss tokens.

    Example:
        One token of a two-entry support: ``Tokens(logp_N=[-1.4], logp_head_NK=[[-0.9, -1.4]], log_mu_N=[-1.0], ...)``
    """

    logp_N: Tensor
    """log p of the sampled token over the whole vocabulary, at the serving temperature; carries the gradient."""
    logp_head_NK: Tensor
    """log p of the recorded head; carries the gradient. Padding may hold anything finite."""
    log_mu_N: Tensor
    log_mu_head_NK: Tensor
    """Padding holds -inf."""
    head_mask_NK: Tensor
    """True where the head has an entry."""
    complete_N: Tensor
    """True where the head is the whole support of mu."""
    advantage_N: Tensor
    start_logp_N: Tensor
    """log p0, frozen at the round's start."""
    start_log_mass_N: Tensor
    """log p0(S), 0 where the support is not complete."""
    reference_logp_N: Tensor | None = None
    """log p of the upcast deployed weights, for ReferenceModel."""


def masked_logsumexp(logp_NK: Tensor, mask_NK: Tensor) -> Tensor:
    """Log of the masked mass; padding is replaced before anything is computed, so that 0 * inf cannot arise."""
    return torch.logsumexp(torch.where(mask_NK, logp_NK, -torch.inf), dim=-1)


def log_support_mass(tokens: Tokens) -> Tensor:
    """Log p(S) where the support is complete, else 0: what turns p into p~."""
    mass_N = masked_logsumexp(tokens.logp_head_NK, _mask_or_first(tokens))
    return torch.where(tokens.complete_N, mass_N, 0.0)


def _mask_or_first(tokens: Tokens) -> Tensor:
    """A row without head entries would give -inf, and its gradient NaN: let it look at its first (unused) entry."""
    if tokens.head_mask_NK.shape[1] == 0:
        return tokens.head_mask_NK
    mask_NK = tokens.head_mask_NK.clone()
    mask_NK[:, 0] |= ~tokens.complete_N
    return mask_NK


def reinforce(logp_N: Tensor, advantage_N: Tensor) -> Tensor:
    """-A log p(a): no correction (the recipe's R1 with w = 1)."""
    return -advantage_N * logp_N


def tis_ppo_clip(
    logp_N: Tensor, start_logp_N: Tensor, log_mu_N: Tensor, advantage_N: Tensor, correction: CorrectionConfig
) -> Tensor:
    """-min(p0/mu, C) * min(r A, clip(r, 1-eps, 1+eps) A), r = p/p0 (the recipe's R3; decoupled PPO, arXiv 2110.00641).

    Over a filtered sampler the caller passes p~, p0~ and mu~. Ties take the branch that is not clipped. No dual clip.
    """
    rho_N = torch.exp((start_logp_N - log_mu_N).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    ratio_N = torch.exp((logp_N - start_logp_N.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    free_N = ratio_N * advantage_N
    clipped_N = ratio_N.clamp(1 - correction.clip_low, 1 + correction.clip_high) * advantage_N
    return -rho_N.clamp(max=correction.cap) * torch.where(free_N <= clipped_N, free_N, clipped_N)


def centering_coefficients(tokens: Tokens, weighting: Weighting) -> tuple[Tensor, Tensor]:
    """c_v on the head, and the tail ratio rho (0 where the support is complete: there is no tail).

    c_v = q_v f(p_v/q_v) - alpha p_v with alpha = rho f(1/rho) and rho = (1-Q_H)/(1-P_H), both floored at 1e-6: the
    sampler's tail is modelled as rho*p (arXiv 2609.20807, eq. 7-12). Over a complete support alpha is 0 and p is
    renormalised over it, since f must see p~/mu~.
    """
    mask_NK, complete_N1 = tokens.head_mask_NK, tokens.complete_N[:, None]
    log_q_NK = torch.where(mask_NK, tokens.log_mu_head_NK, -MAX_LOG_RATIO)
    log_p_NK = torch.where(mask_NK, tokens.logp_head_NK.detach(), -MAX_LOG_RATIO)
    q_mass_N = torch.where(mask_NK, log_q_NK.exp(), 0.0).sum(-1)
    p_mass_N = torch.where(mask_NK, log_p_NK.exp(), 0.0).sum(-1)
    log_rho_N = (1 - q_mass_N).clamp(min=MASS_FLOOR).log() - (1 - p_mass_N).clamp(min=MASS_FLOOR).log()
    alpha_N = torch.where(tokens.complete_N, 0.0, weighting.tail(log_rho_N))
    seen_NK = torch.where(complete_N1, log_p_NK - log_support_mass(tokens).detach()[:, None], log_p_NK)
    c_NK = weighting.mass(seen_NK, log_q_NK) - alpha_N[:, None] * log_p_NK.exp()
    return torch.where(mask_NK, c_NK, 0.0), torch.where(tokens.complete_N, 0.0, log_rho_N.exp())


def score_centering(tokens: Tokens, weighting: Weighting) -> Tensor:
    """-A * ( sg(f(p_a/q_a)) log p(a) - sum_H sg(c_v) log p(v) )  (arXiv 2609.20807, eq. 9 and 14).

    With f = 1 the gradient at the logits is -A (e_a - q^): the trainer's p cancels, and so does any renormalisation
    over the support. With f != 1 both the weights and log p are those of p~ where the support is complete. The
    expectation is subtracted also where f gives the sampled token the weight 0.
    """
    c_NK, _ = centering_coefficients(tokens, weighting)
    logp_N, logp_head_NK = tokens.logp_N, tokens.logp_head_NK
    if weighting.kind != "None":
        mass_N = log_support_mass(tokens)
        logp_N, logp_head_NK = logp_N - mass_N, logp_head_NK - mass_N[:, None]
    weight_N = weighting.weight((logp_N - tokens.log_mu_N).detach())
    head_NK = torch.where(tokens.head_mask_NK, logp_head_NK, 0.0)
    return -tokens.advantage_N * (weight_N * logp_N - (c_NK * head_NK).sum(-1))


def reverse_kl(logp_N: Tensor, start_logp_N: Tensor, log_mu_N: Tensor, weight_cap: float) -> Tensor:
    """min(w, C) k3 with w = p/mu, k3 = p0/p - 1 + log(p/p0); its gradient is min(w, C) log(p/p0) * score.

    Below the cap that is what autograd makes of w*k3 with w not detached (arXiv 2506.09477); detaching w would give the
    gradient of the forward KL. At the cap autograd would fall back to just that, so the score form
    ``sg(min(w, C) l) log p`` carries the gradient everywhere. Over a filtered sampler w = p/mu~, which is the part of
    the KL that lies on the support.
    """
    log_w_N, l_N = (logp_N - log_mu_N).detach(), (logp_N - start_logp_N).detach()
    w_N = log_w_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=weight_cap)
    l_N = l_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    value_N = w_N * (torch.expm1(-l_N) + l_N)
    return value_N + w_N * l_N * (logp_N - logp_N.detach())


def policy_gradient(tokens: Tokens, correction: CorrectionConfig) -> Tensor:
    """The loss of the configured correction, one value a token."""
    if correction.type == "None":
        return reinforce(tokens.logp_N, tokens.advantage_N)
    if correction.type == "ScoreCentering":
        weighting = Weighting(correction.weighting, correction.cap, correction.band_low, correction.band_high)
        return score_centering(tokens, weighting)
    if correction.type == "ReferenceModel":
        assert tokens.reference_logp_N is not None
        return tis_ppo_clip(tokens.logp_N, tokens.start_logp_N, tokens.reference_logp_N, tokens.advantage_N, correction)
    logp_N = tokens.logp_N - log_support_mass(tokens)
    start_N = tokens.start_logp_N - tokens.start_log_mass_N
    return tis_ppo_clip(logp_N, start_N, tokens.log_mu_N, tokens.advantage_N, correction)
