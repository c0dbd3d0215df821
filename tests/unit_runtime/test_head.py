"""The chunked head against ordinary autograd over all logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from prodrl.config import CorrectionConfig
from prodrl.errors import UsageError
from prodrl.train import head, losses
from prodrl.train.policy import Policy
from tests.support.training import VOCABULARY, tiny_model


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    torch.manual_seed(3)
    hidden = torch.randn(11, 16, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCABULARY, 16, dtype=dtype, requires_grad=True)
    bias = torch.randn(VOCABULARY, dtype=dtype, requires_grad=True)
    ids = torch.stack([torch.randperm(VOCABULARY)[:5] for _ in range(11)])
    ids[:, 4] = ids[:, 0]  # the sampled token is in the head, too
    return hidden, weight, bias, ids, torch.linspace(0.5, 1.5, 11)


def direct(hidden: Tensor, weight: Tensor, bias: Tensor, ids: Tensor, temperature: Tensor) -> Tensor:
    logits = (hidden.double() @ weight.double().t() + bias.double()) / temperature.double()[:, None]
    return torch.log_softmax(logits, dim=-1).gather(1, ids)


@pytest.mark.parametrize("chunk", [1, 4, 11, 1000])
def test_values_and_gradients_equal_full_logits(chunk: int) -> None:
    hidden, weight, bias, ids, temperature = inputs()
    factors = torch.randn(11, 5)
    found = head.gather_logprobs(hidden, weight, bias, ids, temperature, chunk)
    picked = torch.cat([found.logp_N[:, None], found.logp_head_NK], dim=1)
    expected = direct(hidden, weight, bias, ids, temperature)
    torch.testing.assert_close(picked.double(), expected, rtol=0, atol=1e-5)
    gradients = torch.autograd.grad((picked * factors).sum(), (hidden, weight, bias))
    references = torch.autograd.grad((expected * factors).sum(), (hidden, weight, bias))
    for gradient, reference in zip(gradients, references, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-4, atol=1e-5)


def test_entropy_is_that_of_the_whole_vocabulary() -> None:
    hidden, weight, bias, ids, temperature = inputs()
    found = head.gather_logprobs(hidden, weight, bias, ids, temperature, 3)
    logits = (hidden @ weight.t() + bias) / temperature[:, None]
    torch.testing.assert_close(found.entropy_N, torch.distributions.Categorical(logits=logits).entropy())
    assert not found.entropy_N.requires_grad


def test_low_precision_inputs_are_reduced_in_float32() -> None:
    hidden, weight, bias, ids, temperature = inputs(torch.bfloat16)
    found = head.gather_logprobs(hidden, weight, bias, ids, temperature, 4)
    expected = direct(hidden, weight, bias, ids, temperature)
    torch.testing.assert_close(found.logp_N.double(), expected[:, 0], rtol=0, atol=1e-4)


def test_gradients_are_the_same_bits_whatever_else_is_in_memory() -> None:
    def gradient() -> Tensor:
        hidden, weight, bias, ids, temperature = inputs()
        found = head.gather_logprobs(hidden, weight, bias, ids, temperature, 4)
        return torch.autograd.grad(found.logp_head_NK.sum(), weight)[0]

    assert torch.equal(gradient(), gradient())


@pytest.mark.parametrize("tied", [True, False])
def test_the_policy_equals_the_model_with_full_logits(tied: bool) -> None:
    model = tiny_model(tied=tied)
    policy = Policy(model, chunk=3)
    ids = torch.randint(0, VOCABULARY, (2, 9))
    positions = torch.tensor([3, 5, 9 + 6])  # scores tokens 4 and 6 of row 0, token 7 of row 1
    wanted = torch.stack([torch.randperm(VOCABULARY)[:4] for _ in range(3)])
    temperature = torch.tensor([0.7, 1.0, 1.3])

    def loss(logp: Tensor, logp_head: Tensor) -> Tensor:
        tokens = losses.Tokens(
            logp, logp_head, torch.full((3,), -1.0), torch.full((3, 3), 0.3).log(), torch.ones(3, 3, dtype=torch.bool),
            torch.zeros(3, dtype=torch.bool), torch.tensor([1.0, -0.5, 2.0]), logp.detach(), torch.zeros(3),
        )  # fmt: skip
        return losses.policy_gradient(tokens, CorrectionConfig(weighting="TIS")).sum()

    found = policy(ids, positions, wanted, temperature)
    chunked = loss(found.logp_N, found.logp_head_NK)
    logits = model(ids).logits.reshape(-1, VOCABULARY)[positions] / temperature[:, None]
    reference = torch.log_softmax(logits, -1).gather(1, wanted)
    full = loss(reference[:, 0], reference[:, 1:])
    torch.testing.assert_close(chunked, full, rtol=1e-5, atol=1e-6)
    parameters = list(model.parameters())
    for one, other in zip(torch.autograd.grad(chunked, parameters), torch.autograd.grad(full, parameters), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=2e-6)


def test_prompt_tokens_get_no_gradient_at_the_logits() -> None:
    hidden = torch.randn(6, 16, requires_grad=True)
    scored = hidden[torch.tensor([3, 4])]
    found = head.gather_logprobs(
        scored, torch.randn(9, 16), None, torch.zeros(2, 1, dtype=torch.long), torch.ones(2), 1
    )
    (gradient,) = torch.autograd.grad(found.logp_N.sum(), hidden)
    assert gradient.abs().sum(-1).bool().tolist() == [False, False, False, True, True, False]


def test_models_with_changed_logits_are_refused(tmp_path: Path) -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    settings = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "final_logit_softcapping": 0.5}
    model = Gemma2ForCausalLM(Gemma2Config(**settings, **heads, initializer_range=1.0, pad_token_id=0))
    with pytest.raises(UsageError, match="soft-capped"):
        Policy(model, chunk=4).check_head("m")
