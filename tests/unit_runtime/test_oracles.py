"""The formulas against numbers computed outside the code (plain Python floats, 10 digits)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from prodrl.config import CorrectionConfig
from prodrl.train import advantages, batch, diagnostics, fsdp, losses
from prodrl.train.losses import Tokens, Weighting

PB, QB = [0.4, 0.3, 0.2, 0.1], [0.5, 0.2, 0.2, 0.1]
PC, QC = [0.40, 0.25, 0.20, 0.10, 0.05], [0.50, 0.20, 0.12, 0.12, 0.06]


def logits(p: list[float], shift: float = 0.0) -> Tensor:
    return (torch.tensor(p, dtype=torch.float64).log() + shift).requires_grad_()


def tokens(
    z: Tensor, a: int, q: list[float], head: list[int] | None = None, *, complete: bool = True, advantage: float = 1.0,
    q_a: float | None = None, p0: list[float] | None = None, temperature: float = 1.0,
) -> Tokens:  # fmt: skip
    """One loss token with the sampled id ``a``; the head defaults to everything of q."""
    head = list(range(len(q))) if head is None else head
    logp = torch.log_softmax(z / temperature, dim=-1)
    double = {"dtype": torch.float64}
    p0 = p0 or [1.0] * len(q)
    support = torch.tensor([p0[v] for v in head], **double).sum().log() if complete else torch.tensor(0.0, **double)
    return Tokens(
        logp_N=logp[a : a + 1],
        logp_head_NK=logp[head][None],
        log_mu_N=torch.tensor([q_a or q[a]], **double).log(),
        log_mu_head_NK=torch.tensor([[q[v] for v in head]], **double).log(),
        head_mask_NK=torch.ones(1, len(head), dtype=torch.bool),
        complete_N=torch.tensor([complete]),
        advantage_N=torch.tensor([advantage], **double),
        start_logp_N=torch.tensor([p0[a]], **double).log(),
        start_log_mass_N=support[None],
    )


def gradient(loss: Tensor, z: Tensor) -> list[float]:
    (found,) = torch.autograd.grad(loss.sum(), z, retain_graph=True)
    return found.tolist()


def close(expected: Any, tolerance: float = 1e-9) -> Any:
    return pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize(
    ("mu", "p0", "p", "advantage", "objective", "coefficient"),
    [
        (0.20, 0.25, 0.28, 1.0, 1.4, 1.4), (0.10, 0.30, 0.33, 1.0, 2.2, 2.2), (0.20, 0.20, 0.30, 1.0, 1.2, 0.0),
        (0.20, 0.20, 0.30, -1.0, -1.5, -1.5), (0.40, 0.40, 0.20, -1.0, -0.8, 0.0), (0.40, 0.40, 0.20, 1.0, 0.5, 0.5),
        (0.05, 0.40, 0.38, -0.5, -0.95, -0.95), (0.50, 0.25, 0.26, 1.0, 0.52, 0.52),
        (0.20, 0.50, 0.52, 1.0, 2.08, 2.08),  # oracle O: asynchronous, rho 2.5 is capped and r 1.04 is not clipped
    ],
)  # fmt: skip
def test_a_and_o_tis_with_ppo_clip(
    mu: float, p0: float, p: float, advantage: float, objective: float, coefficient: float
) -> None:
    logp = torch.tensor([p], dtype=torch.float64).log().requires_grad_()
    fixed = [torch.tensor([value], dtype=torch.float64).log() for value in (p0, mu)]
    loss = losses.tis_ppo_clip(logp, *fixed, torch.tensor([advantage], dtype=torch.float64), CorrectionConfig())
    assert -float(loss) == close(objective)
    assert gradient(-loss, logp) == close([coefficient])


def test_b_score_centering_over_all_of_mu() -> None:
    z = logits(PB)
    loss = losses.score_centering(tokens(z, 1, QB, advantage=0.5), Weighting())
    assert float(loss) == close(-0.0235566071)
    assert gradient(loss, z) == close([0.25, -0.4, 0.1, 0.05])
    for a in range(4):
        centred = gradient(-losses.score_centering(tokens(z, a, QB), Weighting()), z)
        assert centred == close([float(v == a) - QB[v] for v in range(4)])


def expected_ascent(values: list[float], loss_of: Any) -> list[float]:
    z = logits(PB)
    total = sum(QB[a] * -loss_of(tokens(z, a, QB, advantage=values[a])) for a in range(4))
    return gradient(total, z)


def importance_sampled(cap: float) -> Any:
    weighting = Weighting("TIS", cap)
    return lambda t: losses.reinforce(t.logp_N, t.advantage_N) * weighting.weight((t.logp_N - t.log_mu_N).detach())


@pytest.mark.parametrize(
    ("loss_of", "expected", "constant"),
    [
        (lambda t: losses.reinforce(t.logp_N, t.advantage_N), [0.32, -0.085, -0.09, -0.145], [0.1, -0.1, 0, 0]),
        (lambda t: losses.score_centering(t, Weighting()), [0.275, -0.04, -0.09, -0.145], [0] * 4),
        (importance_sampled(1e6), [0.25, -0.0375, -0.075, -0.1375], [0] * 4),
        (importance_sampled(1.2), [0.256, -0.048, -0.072, -0.136], [0.024, -0.042, 0.012, 0.006]),
        (lambda t: losses.score_centering(t, Weighting("TIS", 1.2)), [0.2452, -0.0291, -0.0774, -0.1387], [0] * 4),
    ],
    ids=["plain", "centred", "is", "tis", "tis and centred"],
)
def test_b_expected_gradients(loss_of: Any, expected: list[float], constant: list[float]) -> None:
    assert expected_ascent([1, 0.25, 0, -1], loss_of) == close(expected)
    assert expected_ascent([1.0] * 4, loss_of) == close(constant)


@pytest.mark.parametrize("shift", [0.0, 3.0], ids=["", "shifted logits"])
@pytest.mark.parametrize(
    ("a", "value", "expected"),
    [
        (0, 0.7921063935, [-0.5, 0.2, 0.1714285714, 0.0857142857, 0.0428571429]),
        (2, 1.485253574, [0.5, 0.2, -0.8285714286, 0.0857142857, 0.0428571429]),
    ],
)
def test_c_head_with_tail_model(a: int, value: float, expected: list[float], shift: float) -> None:
    z = logits(PC, shift)
    seen = tokens(z, a, QC, [0, 1], complete=False)
    c, rho = losses.centering_coefficients(seen, Weighting())
    assert c[0].tolist() == close([0.1571428571, -0.0142857143])
    assert float(rho) == close(0.8571428571)
    loss = losses.score_centering(seen, Weighting())
    assert float(loss) == close(value)
    assert gradient(loss, z) == close(expected)


def residual_drift(estimate: Any) -> list[float]:
    z = logits(PC)
    return gradient(sum(QC[a] * estimate(z, a) for a in range(5)), z)


def test_c_the_tail_model_leaves_less_drift_than_the_wrong_variants() -> None:
    def centred(head: Any, q: list[float] = QC, **kind: Any) -> Any:
        return lambda z, a: -losses.score_centering(tokens(z, a, q, head(a), q_a=QC[a], **kind), Weighting())

    drift = residual_drift(centred(lambda a: [0, 1], complete=False))
    assert drift == close([0, 0, -0.0514285714, 0.0342857143, 0.0171428571])
    assert sum(map(abs, drift)) == close(0.1028571429)
    renormalised = [QC[0] / 0.7, QC[1] / 0.7, 0, 0, 0]
    wrong = residual_drift(centred(lambda a: [0, 1], renormalised))
    assert sum(map(abs, wrong)) == close(0.6)
    appended = residual_drift(centred(lambda a: sorted({0, 1, a}), complete=False))
    assert sum(map(abs, appended)) == close(0.08256, 1e-5)
    plain = residual_drift(lambda z, a: torch.log_softmax(z, -1)[a])
    assert sum(map(abs, plain)) == close(0.26)


@pytest.mark.parametrize(
    ("a", "value", "expected"),
    [
        (0, 0.7468955291, [-0.476, 0.1925, 0.162, 0.081, 0.0405]),
        (1, 1.677416177, [0.484, -0.9075, 0.242, 0.121, 0.0605]),
        (2, 1.9451884385, [0.484, 0.2925, -0.958, 0.121, 0.0605]),
    ],
)
def test_d_truncated_weights_with_a_head(a: int, value: float, expected: list[float]) -> None:
    z = logits(PC)
    loss = losses.score_centering(tokens(z, a, QC, [0, 1], complete=False), Weighting("TIS", 1.2))
    assert float(loss) == close(value)
    assert gradient(loss, z) == close(expected)


def test_d_coefficients() -> None:
    seen = tokens(logits(PC), 0, QC, [0, 1], complete=False)
    assert losses.centering_coefficients(seen, Weighting("TIS", 1.2))[0][0].tolist() == close([0, -0.01])
    assert losses.centering_coefficients(seen, Weighting("MIS", low=0.9, high=1.3))[0][0].tolist() == close([-0.4, 0])
    assert losses.centering_coefficients(seen, Weighting("TIS", 1e9))[0][0].tolist() == close([0, 0])


MU_E = [0.6428571428571429, 0.35714285714285715, 0, 0, 0]


@pytest.mark.parametrize(("a", "ratio"), [(0, 0.9572649573), (1, 1.0769230769)])
def test_e_importance_weights_see_p_renormalised_over_the_support(a: int, ratio: float) -> None:
    z = logits(PC)
    seen = tokens(z, a, MU_E, [0, 1], p0=PC)
    loss = losses.policy_gradient(seen, CorrectionConfig(type="ImportanceSampling"))
    assert -float(loss) == close(ratio)
    score = gradient(-loss, z)
    p_tilde = [0.6153846154, 0.3846153846, 0, 0, 0]
    assert score == close([ratio * (float(v == a) - p_tilde[v]) for v in range(5)])


def test_e_the_centred_score_needs_no_renormalisation() -> None:
    z = logits(PC)
    assert gradient(-losses.score_centering(tokens(z, 1, MU_E, [0, 1]), Weighting()), z) == close(
        [-0.6428571429, 0.6428571429, 0, 0, 0]
    )


def test_e_log_mass() -> None:
    seen = tokens(logits(PC), 1, MU_E, [0, 1])
    assert float(seen.logp_N - losses.log_support_mass(seen)) == close(-0.955511445)
    assert float(seen.log_mu_N) == close(-1.0296194172)


def test_f_exact_centering_has_the_least_variance() -> None:
    z = logits(PB)
    scores = [torch.tensor(gradient(-losses.score_centering(tokens(z, a, QB), Weighting()), z)) for a in range(4)]
    mean = sum(QB[a] * scores[a] for a in range(4))
    assert sum(QB[a] * float((scores[a] - mean).square().sum()) for a in range(4)) == close(0.66, 1e-6)


def kl(z: Tensor, a: int, p0: list[float], mu: list[float] = QB, cap: float = 1e9) -> Tensor:
    double = {"dtype": torch.float64}
    fixed = (torch.tensor([p0[a]], **double).log(), torch.tensor([mu[a]], **double).log())
    return losses.reverse_kl(torch.log_softmax(z, -1)[a : a + 1], *fixed, cap)


P0_G, P0_G2 = [0.45, 0.25, 0.2, 0.1], [0.42, 0.25, 0.18, 0.15]


def test_g_reverse_kl() -> None:
    z = logits(PB)
    assert float(kl(z, 0, P0_G)) == close(0.0057735715)
    assert float(kl(z, 1, P0_G)) == close(0.0234823352)
    assert sum(QB[a] * float(kl(z, a, P0_G)) for a in range(4)) == close(0.0075832528)
    expected = gradient(sum(QB[a] * kl(z, a, P0_G) for a in range(4)), z)
    assert expected == close([-0.0501465154, 0.0524214912, -0.0015166506, -0.0007583253])


def test_g_the_gradient_is_that_of_an_undetached_weight() -> None:
    z = logits(PB)
    for a in range(4):
        logp = torch.log_softmax(z, -1)[a]
        log_ratio = logp - torch.tensor(P0_G[a], dtype=torch.float64).log()
        undetached = logp.exp() / QB[a] * (torch.exp(-log_ratio) - 1 + log_ratio)
        assert gradient(kl(z, a, P0_G), z) == close(gradient(undetached, z))


def test_g_the_capped_weight_keeps_the_reverse_kl_gradient() -> None:
    z = logits(PB)
    found = gradient(sum(QB[a] * kl(z, a, P0_G, cap=1.2) for a in range(4)), z)
    assert found == close([-0.045770798, 0.0447639858, 0.0006712081, 0.0003356041])


def test_g_is_exactly_zero_at_the_start_of_a_round() -> None:
    z = logits(PB)
    logp = torch.log_softmax(z, -1)[1:2]
    loss = losses.reverse_kl(logp, logp.detach().clone(), torch.tensor([-3.0], dtype=torch.float64), 5.0)
    assert float(loss) == 0.0
    assert gradient(loss, z) == [0.0] * 4


def test_g2_values_and_filtered_sampler() -> None:
    z = logits(PB)
    assert [float(kl(z, a, P0_G2)) for a in range(4)] == close([0.0009678687, 0.0234823352, 0.0053605157, 0.0945348919])
    assert sum(QB[a] * float(kl(z, a, P0_G2)) for a in range(4)) == close(0.0157059937)
    found = gradient(sum(QB[a] * kl(z, a, P0_G2) for a in range(4)), z)
    assert found == close([-0.0257984631, 0.0499846689, 0.0179309044, -0.0421171102])
    filtered = [5 / 7, 2 / 7, 1, 1]
    terms = [filtered[a] * kl(z, a, P0_G2, filtered) for a in (0, 1)]
    assert float(sum(terms)) == close(0.0051804014)
    assert gradient(sum(terms), z) == close([-0.0335882262, 0.0441423466, -0.0070360803, -0.0035180401])


def test_h_advantages() -> None:
    rewards = torch.tensor([1.0, 0, 0, 1, 1, 0, 0, 0], dtype=torch.float64)
    assert advantages.minibatch_mean(rewards)[:2].tolist() == close([0.625, -0.375])
    assert advantages.leave_one_out(rewards)[:2].tolist() == close([0.7142857143, -0.4285714286])


def test_l_temperature() -> None:
    z = torch.tensor(PB, dtype=torch.float64).log().requires_grad_()
    seen = tokens(z, 1, QB, temperature=0.7)
    assert seen.logp_head_NK.exp()[0].tolist() == close([0.4602962975, 0.3051782457, 0.1709994174, 0.0635260394])
    loss = losses.reinforce(seen.logp_N, seen.advantage_N)
    assert gradient(-loss, z) == close([-0.6575661393, 0.9926025062, -0.2442848819, -0.0907514849])


def test_k_diagnostics() -> None:
    mu, p = torch.tensor([0.5, 0.2, 0.9, 0.05]).log(), torch.tensor([0.45, 0.25, 0.9, 0.10]).log()
    no, one = torch.zeros(4, dtype=torch.bool), torch.ones(4)
    empty = {"log_mu_head_NK": torch.full((4, 1), -torch.inf), "head_mask_NK": no[:, None]}
    fixed = {"start_logp_N": p, "start_log_mass_N": torch.zeros(4), "advantage_N": one, "complete_N": no}
    seen = Tokens(logp_N=p, logp_head_NK=torch.zeros(4, 1), log_mu_N=mu, **fixed, **empty)
    index = torch.zeros(4, dtype=torch.long)
    micro = batch.MicroBatch(
        ids_RL=index[None], scored_from_N=index, ids_N1K=index[:, None], log_mu_N=mu, temperature_N=one, complete_N=no,
        outside_N=no, weight_N=one / 4, trajectory_N=index, flat_N=index, **empty,
    )  # fmt: skip
    correction = CorrectionConfig(type="ImportanceSampling", cap=1.9)
    collector = diagnostics.Collector()
    collector.add(micro, diagnostics.token_figures(seen, one, micro, correction, kl_cap=5.0), {"loss": one * 3})
    found = collector.reduce(fsdp.Ranks(0, 1, 0, 0, torch.device("cpu")))
    expected = {
        "net_mismatch": 0.2554128119, "engine_mismatch": 0.2554128119, "net_mismatch_trajectory": 0.2554128119,
        "staleness": 0.0, "k1": -0.2027325541, "k3": 0.0847674459, "ratio_mean": 1.2875, "chi2": 0.843125,
        "ess": 0.8993726687, "cap_fraction": 0.25, "net_mismatch_max": 0.6931471806, "loss": 3.0, "tokens": 4.0,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-6)


P_M = [[0.4, 0.3, 0.2, 0.1], [0.25] * 4, [0.1, 0.2, 0.3, 0.4]]
MU_M = [[0.5, 0.2, 0.2, 0.1], [0.3, 0.3, 0.2, 0.2], [0.1, 0.1, 0.4, 0.4]]
P0_M = [[0.42, 0.28, 0.2, 0.1], [0.25] * 4, [0.1, 0.22, 0.28, 0.4]]
WEIGHT_M, A_M = [0.25, 0.25, 0.5], [0.5, 0.5, -0.5]


def end_to_end(loss_of: Any) -> tuple[float, list[list[float]]]:
    zs = [logits(p) for p in P_M]
    seen = [tokens(zs[i], a, MU_M[i], advantage=A_M[i], p0=P0_M[i]) for i, a in enumerate([1, 0, 2])]
    total = sum(WEIGHT_M[i] * loss_of(seen[i]) for i in range(3))
    return float(total), [gradient(total, z) for z in zs]


def beta_kl(t: Tokens) -> Tensor:
    return 0.1 * losses.reverse_kl(t.logp_N, t.start_logp_N, t.log_mu_N, 5.0)


@pytest.mark.parametrize(
    ("loss_of", "value", "gradients"),
    [
        (
            lambda t: losses.policy_gradient(t, CorrectionConfig()),
            0.0029445759,
            [[0.0625, -0.1, 0.025, 0.0125], [-0.0875, 0.0375, 0.025, 0.025], [-0.025, -0.025, 0.15, -0.1]],
        ),
        (
            lambda t: losses.policy_gradient(t, CorrectionConfig(type="ImportanceSampling")),
            -0.1041666667,
            [
                [0.075, -0.13125, 0.0375, 0.01875],
                [-0.078125, 0.0260416667, 0.0260416667, 0.0260416667],
                [-0.01875, -0.0375, 0.13125, -0.075],
            ],
        ),
        (
            beta_kl,
            0.0001744654,
            [
                [-0.0010348931, 0.0018110629, -0.0005174465, -0.0002587233],
                [0, 0, 0, 0],
                [-0.0002587233, -0.0005174465, 0.0018110629, -0.0010348931],
            ],
        ),
    ],
    ids=["score centering", "tis and clip", "kl"],
)
def test_m_end_to_end(loss_of: Any, value: float, gradients: list[list[float]]) -> None:
    found, found_gradients = end_to_end(loss_of)
    assert found == close(value)
    for one, expected in zip(found_gradients, gradients, strict=True):
        assert one == close(expected)


def test_m_gradient_norms() -> None:
    def norm(loss_of: Any) -> float:
        return float(torch.tensor(end_to_end(loss_of)[1]).norm())

    assert norm(lambda t: losses.policy_gradient(t, CorrectionConfig())) == close(0.2423839929, 1e-7)
    both = norm(lambda t: losses.policy_gradient(t, CorrectionConfig()) + beta_kl(t))
    assert both == close(0.2429497121, 1e-7)


def bandit(bias: list[float], values: list[float], steps: int, loss_of: Any) -> list[float]:
    """Expected-gradient softmax bandit whose sampler is softmax(z + bias), refreshed at every step."""
    z = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    for _ in range(steps):
        q = torch.softmax(z.detach() + torch.tensor(bias, dtype=torch.float64), -1).tolist()
        total = sum(q[a] * -loss_of(tokens(z, a, q, advantage=values[a])) for a in range(3))
        z = (z + torch.tensor(gradient(total, z), dtype=torch.float64)).detach().requires_grad_()
    return torch.softmax(z, -1).tolist()


def plain(t: Tokens) -> Tensor:
    return losses.reinforce(t.logp_N, t.advantage_N)


def centred(t: Tokens) -> Tensor:
    return losses.score_centering(t, Weighting())


@pytest.mark.parametrize(
    ("advantage", "loss_of", "expected"),
    [
        (1.0, plain, [0.9766855261, 0.0148344672, 0.0084800067]),
        (1.0, centred, [1 / 3] * 3),
        (1.0, importance_sampled(2.0), [1 / 3] * 3),
        (1.0, importance_sampled(1.1), [0.9236867357, 0.0621242877, 0.0141889767]),
        (-1.0, plain, [0.0048494908, 0.0115005954, 0.9836499138]),
        (-1.0, importance_sampled(1.1), [0.0981402248, 0.0981402248, 0.8037195503]),
    ],
)
def test_n2_constant_reward_drifts_unless_centred(advantage: float, loss_of: Any, expected: list[float]) -> None:
    assert bandit([0.3, 0, -0.3], [advantage] * 3, 100, loss_of) == close(expected)


@pytest.mark.parametrize(
    ("baseline", "loss_of", "expected"),
    [
        *[(b0, centred, [0.0004565291, 0.0026597546, 0.9968837163]) for b0 in (0.0, 0.5, -0.5)],
        *[(b0, importance_sampled(1e6), [0.0061933564, 0.0077985434, 0.9860081002]) for b0 in (0.0, 0.5, -0.5)],
        (0.0, plain, [0.0597710207, 0.317937177, 0.6222918023]),
        (0.5, plain, [0.0006464843, 0.0038488356, 0.9955046801]),
        (-0.5, plain, [0.9683022431, 0.0175672202, 0.0141305367]),
    ],
)
def test_n3_only_centring_is_blind_to_the_baseline(baseline: float, loss_of: Any, expected: list[float]) -> None:
    assert bandit([1.5, 0, -1.5], [q - baseline for q in (0, 0.2, 1)], 60, loss_of) == close(expected)
