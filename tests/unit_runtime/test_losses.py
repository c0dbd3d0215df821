"""Properties of the losses that hold for any numbers, and inputs that must not make NaN."""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from prodrl.config import CorrectionConfig
from prodrl.train import losses
from prodrl.train.losses import Tokens, Weighting

VOCABULARY = 7
WEIGHTINGS = [Weighting(), Weighting("TIS", 1.3), Weighting("MIS", low=0.6, high=2.0)]


def tokens_for_every_action(seed: int, support: int | None, advantage: list[float]) -> tuple[Tensor, Tensor, Tokens]:
    """(logits, q, one loss token an action): mu is full, or filtered to its first ``support`` ids."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64).requires_grad_()
    raw = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64) + z.detach()
    raw[VOCABULARY if support is None else support :] = -torch.inf
    log_q = torch.log_softmax(raw, -1)
    width = VOCABULARY if support is None else support
    logp = torch.log_softmax(z, -1)
    actions = range(width)
    tokens = Tokens(
        logp_N=torch.stack([logp[a] for a in actions]),
        logp_head_NK=logp[:width].expand(width, -1),
        log_mu_N=log_q[:width],
        log_mu_head_NK=log_q[:width].expand(width, -1),
        head_mask_NK=torch.ones(width, width, dtype=torch.bool),
        complete_N=torch.ones(width, dtype=torch.bool),
        advantage_N=torch.tensor(advantage[:width], dtype=torch.float64),
        start_logp_N=logp.detach()[:width],
        start_log_mass_N=torch.zeros(width, dtype=torch.float64),
    )
    return z, log_q[:width].exp(), tokens


def expected_gradient(seed: int, weighting: Weighting, support: int | None, advantage: list[float]) -> Tensor:
    z, q, tokens = tokens_for_every_action(seed, support, advantage)
    return torch.autograd.grad((q * losses.score_centering(tokens, weighting)).sum(), z)[0]


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(st.integers(0, 10_000), st.sampled_from(WEIGHTINGS), st.sampled_from([None, 2, 4]))
def test_constant_reward_has_no_expected_gradient(seed: int, weighting: Weighting, support: int | None) -> None:
    found = expected_gradient(seed, weighting, support, [1.0] * VOCABULARY)
    torch.testing.assert_close(found, torch.zeros_like(found), rtol=0, atol=1e-12)


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(st.integers(0, 10_000), st.sampled_from(WEIGHTINGS), st.floats(-3, 3))
def test_the_expected_gradient_is_blind_to_the_baseline(seed: int, weighting: Weighting, baseline: float) -> None:
    values = [0.3, -1.0, 2.0, 0.0, 0.5, -0.2, 1.0]
    shifted = expected_gradient(seed, weighting, 5, [value - baseline for value in values])
    torch.testing.assert_close(shifted, expected_gradient(seed, weighting, 5, values), rtol=0, atol=1e-11)


def test_on_policy_it_is_reinforce_in_expectation() -> None:
    values = [0.3, -1.0, 2.0, 0.0, 0.5, -0.2, 1.0]
    z = torch.randn(VOCABULARY, dtype=torch.float64).requires_grad_()
    logp = torch.log_softmax(z, -1)
    still = logp.detach()
    eye = {"head_mask_NK": torch.ones(7, 7, dtype=torch.bool), "complete_N": torch.zeros(7, dtype=torch.bool)}
    tokens = Tokens(
        logp_N=logp, logp_head_NK=logp.expand(7, -1), log_mu_N=still, log_mu_head_NK=still.expand(7, -1),
        advantage_N=torch.tensor(values, dtype=torch.float64), start_logp_N=still,
        start_log_mass_N=torch.zeros(7), **eye,
    )  # fmt: skip
    gradients = [
        torch.autograd.grad((still.exp() * loss).sum(), z, retain_graph=True)[0]
        for loss in (
            losses.score_centering(tokens, Weighting()),
            losses.reinforce(logp, tokens.advantage_N),
            losses.policy_gradient(tokens, CorrectionConfig(type="ImportanceSampling")),
        )
    ]
    torch.testing.assert_close(gradients[0], gradients[1])
    torch.testing.assert_close(gradients[2], gradients[1])
    head_only = dataclasses.replace(tokens, logp_head_NK=logp[:3].expand(7, -1), log_mu_head_NK=still[:3].expand(7, -1),
                                    head_mask_NK=eye["head_mask_NK"][:, :3])  # fmt: skip
    c, rho = losses.centering_coefficients(head_only, Weighting())
    assert c.abs().max() < 1e-12
    assert rho.tolist() == pytest.approx([1.0] * 7)


def test_a_top_k_head_that_leaves_one_token_is_exact() -> None:
    z = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    log_q = torch.log_softmax(torch.tensor([0.1, 0.4, -0.3], dtype=torch.float64), -1)
    logp = torch.log_softmax(z, -1)
    for weighting in (Weighting(), Weighting("TIS", 1.05)):
        found = []
        for width, complete in ((3, True), (2, False)):
            tokens = Tokens(
                logp[2:], logp[None, :width], log_q[2:], log_q[None, :width], torch.ones(1, width, dtype=torch.bool),
                torch.tensor([complete]), torch.ones(1), logp.detach()[2:], torch.zeros(1),
            )  # fmt: skip
            loss = losses.score_centering(tokens, weighting).sum()
            found.append(torch.autograd.grad(loss, z, retain_graph=True)[0])
        torch.testing.assert_close(found[0], found[1])


def rough_tokens(**changes: Any) -> Tokens:
    """Padding of -inf, a head whose mass rounds above 1, and logprobs far apart."""
    logp = torch.tensor([-0.1, -80.0], requires_grad=True)
    head = torch.tensor([[-0.1, -3.0], [-0.5, 0.0]], requires_grad=True)
    settings: dict[str, Any] = {
        "logp_N": logp, "logp_head_NK": head, "log_mu_N": torch.tensor([-70.0, -0.01]),
        "log_mu_head_NK": torch.tensor([[-1e-7, -1e-7], [-0.6, -torch.inf]]),
        "head_mask_NK": torch.tensor([[True, True], [True, False]]), "complete_N": torch.tensor([False, False]),
        "advantage_N": torch.tensor([1.0, -1.0]), "start_logp_N": torch.tensor([-90.0, -0.1]),
        "start_log_mass_N": torch.zeros(2), "reference_logp_N": torch.tensor([-50.0, -50.0]),
    }  # fmt: skip
    return Tokens(**(settings | changes))


@pytest.mark.parametrize("complete", [[False, False], [True, False], [True, True]])
@pytest.mark.parametrize("weighting", ["None", "TIS", "MIS"])
@pytest.mark.parametrize("kind", ["ScoreCentering", "ImportanceSampling", "ReferenceModel", "None"])
def test_extreme_inputs_stay_finite(kind: Any, weighting: Any, complete: list[bool]) -> None:
    tokens = rough_tokens(complete_N=torch.tensor(complete))
    loss = losses.policy_gradient(tokens, CorrectionConfig(type=kind, weighting=weighting))
    loss = loss + losses.reverse_kl(tokens.logp_N, tokens.start_logp_N, tokens.log_mu_N, 5.0)
    gradients = torch.autograd.grad(loss.sum(), (tokens.logp_N, tokens.logp_head_NK), allow_unused=True)
    assert torch.isfinite(loss).all()
    assert all(torch.isfinite(gradient).all() for gradient in gradients if gradient is not None)


def test_the_expectation_is_subtracted_where_the_sampled_weight_is_zero() -> None:
    z = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    logp, log_q = torch.log_softmax(z, -1), torch.tensor([0.95, 0.05], dtype=torch.float64).log()
    tokens = Tokens(
        logp[1:], logp[None], log_q[1:], log_q[None], torch.ones(1, 2, dtype=torch.bool), torch.tensor([True]),
        torch.ones(1), logp.detach()[1:], torch.zeros(1),
    )  # fmt: skip
    weighting = Weighting("MIS", low=0.5, high=5.0)  # p/q = 10 for the sampled token, .526 for the other
    assert float(weighting.weight((tokens.logp_N - tokens.log_mu_N).detach())) == 0.0
    gradient = torch.autograd.grad(losses.score_centering(tokens, weighting).sum(), z)[0]
    torch.testing.assert_close(gradient, torch.tensor([0.25, -0.25], dtype=torch.float64))


def test_reference_model_takes_its_denominator_from_the_reference() -> None:
    tokens = rough_tokens(start_logp_N=torch.tensor([-0.2, -1.0]), reference_logp_N=torch.tensor([-0.5, -3.0]),
                          logp_N=torch.tensor([-0.2, -1.0]))  # fmt: skip
    found = losses.policy_gradient(tokens, CorrectionConfig(type="ReferenceModel", cap=2.0))
    assert found.tolist() == pytest.approx([-1.3498588, 2.0])
