"""The trained network as one module: tokens in, log probabilities at the loss positions out.

Built by ``weights``, wrapped by ``fsdp``, called by ``loop``. The Hugging Face model knows nothing of the loss, of the
chunked head, or of sharding: the head runs inside this module's forward, where FSDP has gathered its weight.
"""

# ruff: noqa: N803, N806  # tensors carry their shape in their name
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from prodrl.errors import UsageError
from prodrl.train import head


class Policy(nn.Module):  # type: ignore[misc]  # mypy does not follow torch
    """A causal language model with the chunked head."""

    def __init__(self, model: Any, chunk: int, autocast: torch.dtype | None = None) -> None:
        super().__init__()
        self.model = model
        self._chunk = chunk
        self._autocast = autocast
        """Computation type of the body where FSDP does not cast the weights; None computes in theirs."""

    @property
    def body(self) -> Any:
        """The transformer without its head: last_hidden_state is what the head reads."""
        return self.model.base_model

    @property
    def vocabulary(self) -> int:
        """Rows of the output embedding."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    def forward(self, ids_RL: Tensor, scored_from_N: Tensor, ids_N1K: Tensor, temperature_N: Tensor) -> head.HeadOutput:
        """Log probabilities of ``ids_N1K``, scored from the flat positions ``scored_from_N``.

        No attention mask: attention is causal and padding lies behind every row's tokens.
        """
        device = ids_RL.device.type
        with torch.autocast(device, dtype=self._autocast or torch.bfloat16, enabled=self._autocast is not None):
            hidden_RLH = self.body(input_ids=ids_RL, use_cache=False).last_hidden_state
        output = self.model.get_output_embeddings()
        hidden_NH = hidden_RLH.reshape(-1, hidden_RLH.shape[-1])[scored_from_N]
        with torch.autocast(device, enabled=False):
            return head.gather_logprobs(
                hidden_NH, output.weight, getattr(output, "bias", None), ids_N1K, temperature_N, self._chunk
            )

    @torch.no_grad()
    def check_head(self, name: str) -> None:
        """Refuse a model whose logits are more than output embedding times hidden state (soft caps, scales).

        Raises:
            UsageError: The chunked head would compute other numbers than the model does.
        """
        ids_RL = torch.arange(8, device=next(self.parameters()).device)[None] % self.vocabulary
        logits = self.model(input_ids=ids_RL, use_cache=False).logits[0].float()
        ids_N1K = torch.arange(min(16, self.vocabulary), device=ids_RL.device).expand(8, -1)
        positions_N = torch.arange(8, device=ids_RL.device)
        found = self.forward(ids_RL, positions_N, ids_N1K, torch.ones(8, device=ids_RL.device))
        expected = torch.log_softmax(logits, dim=-1)[:, : ids_N1K.shape[1]]
        worst = (torch.cat([found.logp_N[:, None], found.logp_head_NK], dim=1) - expected).abs().max()
        if not worst < 0.1:
            raise UsageError(
                f"Model {name}: its logits are not hidden state times output embedding, differ by {float(worst):.3g}; "
                "models with soft-capped or scaled logits cannot be trained here"
            )
