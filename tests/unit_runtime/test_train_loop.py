"""Whole rounds of a tiny model on the CPU: continuity over rounds, KL, skipped steps, what is published."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from prodrl.errors import DataError, NumericsError, UsageError
from prodrl.records import Sample
from prodrl.store import layout
from prodrl.store.folders import read_manifest, write_folder
from prodrl.train import batch, losses
from tests.support.training import Lab, loaded, make_samples, tiny_model, write_model
from tests.unit_runtime.test_train_data import dataset


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return make_samples(8, model=tiny_model(), turns=2)


def tensors(lab: Lab, key: str) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in (lab.folder / "store" / key).glob("*.safetensors"):
        found |= load_file(path)
    return found


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def part(samples: list[Sample], trajectories: list[int]) -> list[Sample]:
    order = {at: position for position, at in enumerate(trajectories)}
    return [s.model_copy(update={"order": order[s.order]}) for s in samples if s.order in order]


def two_rounds(lab: Lab, samples: list[Sample], **changes: Any) -> dict[str, torch.Tensor]:
    """The two minibatches that one round would make, as a round of one step each."""
    plan = batch.minibatches(dataset(samples), 2, 4, seed=7, round_number=1)
    warm = changes.pop("warm", True)
    first = lab.config(part(samples, plan[0]), 1, steps=1, **changes)
    result = lab.train(first)
    lineage = {"init_checkpoint_key": result.checkpoint_key if warm else None, "init_weights_key": result.weights_key}
    second = lab.train(lab.config(part(samples, plan[1]), 2, steps=1, **lineage, **changes))
    assert second.global_step == (2 if warm else 1)
    return tensors(lab, second.checkpoint_key)


def test_two_rounds_of_one_step_are_one_round_of_two(tmp_path: Path, samples: list[Sample]) -> None:
    one = Lab(tmp_path / "one")
    straight = tensors(one, one.train(one.config(samples)).checkpoint_key)
    assert same_bits(straight, two_rounds(Lab(tmp_path / "two"), samples))
    assert not same_bits(straight, two_rounds(Lab(tmp_path / "cold"), samples, warm=False))


def test_with_kl_the_reference_moves_at_each_round(tmp_path: Path, samples: list[Sample]) -> None:
    kl = {"kl": {"coefficient": 1.0}}
    one = Lab(tmp_path / "one")
    straight = tensors(one, one.train(one.config(samples, **kl)).checkpoint_key)
    assert not same_bits(straight, two_rounds(Lab(tmp_path / "two"), samples, **kl))


@pytest.mark.parametrize("kind", ["ScoreCentering", "ImportanceSampling", "None"])
def test_the_first_step_has_no_kl_and_no_staleness(tmp_path: Path, samples: list[Sample], kind: str) -> None:
    lab = Lab(tmp_path)
    lab.train(lab.config(samples, kl={"coefficient": 1.0}, correction={"type": kind}))
    first, second = lab.figures()
    assert first["kl"] == first["staleness"] == 0.0
    assert first["engine_mismatch"] == first["net_mismatch"] > 0.05
    assert second["kl"] > 0 < second["staleness"]


def test_equal_inputs_give_equal_bits(tmp_path: Path, samples: list[Sample]) -> None:
    digests = []
    for name in ("a", "b"):
        lab = Lab(tmp_path / name)
        lab.train(lab.config(samples, kl={"coefficient": 0.5}).model_copy())
        digests.append(lab.digests())
    assert digests[0] == digests[1]


@pytest.mark.parametrize("kind", ["ScoreCentering", "ImportanceSampling"])
def test_packing_changes_no_meaning(tmp_path: Path, samples: list[Sample], kind: str) -> None:
    figures = []
    for name, budget, chunk, reverse in (("a", 1, 1, False), ("b", 10_000, 64, False), ("c", 33, 7, True)):
        lab = Lab(tmp_path / name)
        rows = list(reversed(samples)) if reverse else samples
        cut = {"micro_batch_tokens": budget, "head_chunk_tokens": chunk}
        lab.train(lab.config(rows, steps=1, batch_size=8, correction={"type": kind}, **cut))
        figures.append(lab.figures()[0])
    for other in figures[1:]:
        for name in ("loss", "grad_norm", "entropy", "tokens", "net_mismatch"):
            assert other[name] == pytest.approx(figures[0][name], rel=2e-6, abs=1e-6), name


def test_the_gradient_is_that_of_full_logits_and_plain_loops(tmp_path: Path, samples: list[Sample]) -> None:
    """One step's loss and gradient norm, recomputed token by token without batches, chunks or the loop."""
    lab = Lab(tmp_path)
    lab.train(lab.config(samples, steps=1, batch_size=8))
    model = tiny_model()
    rewards = {s.order: s.reward for s in samples}
    mean = sum(rewards.values()) / len(rewards)
    total = torch.zeros(())
    for s in samples:
        logits = model(torch.tensor([s.ids])).logits[0]
        for at, position in enumerate(s.loss_positions):
            logp = torch.log_softmax(logits[position - 1] / s.temperatures[at], -1)
            own = slice(s.head_offsets[at], s.head_offsets[at + 1])
            q = torch.tensor(s.head_logprobs[own]).exp()
            centred = logp[s.ids[position]] - (q * logp[s.head_ids[own]]).sum()
            total = total - (s.reward - mean) * centred / (8 * s.trajectory_tokens)
    total.backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None))
    (found,) = lab.figures()
    assert found["loss"] == pytest.approx(total.item(), rel=1e-4, abs=1e-7)
    assert found["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_a_harmful_trainer_descends_the_reward(tmp_path: Path, samples: list[Sample]) -> None:
    losses_of = []
    for name, maximise in (("good", True), ("bad", False)):
        lab = Lab(tmp_path / name)
        lab.train(lab.config(samples, optimizer={"learning_rate": 1e-2, "maximise": maximise}))
        losses_of.append(lab.figures()[0]["pg_loss"])
    assert losses_of[0] == -losses_of[1] != 0


def break_gradients(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    made: Callable[..., torch.Tensor] = losses.policy_gradient
    seen: list[float] = []

    def broken(tokens: losses.Tokens, correction: Any) -> torch.Tensor:
        loss = made(tokens, correction)
        key = float(tokens.advantage_N.abs().sum())
        seen.append(key)
        return loss * torch.nan if len(seen) in steps else loss

    monkeypatch.setattr(losses, "policy_gradient", broken)


def test_a_gradient_that_is_not_finite_is_skipped_and_counted(
    tmp_path: Path, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab(tmp_path)
    break_gradients(monkeypatch, {1})
    result = lab.train(lab.config(samples, micro_batch_tokens=10_000))
    assert (result.steps, result.skipped_steps, result.global_step) == (1, 1, 1)
    first, second = lab.figures()
    assert first["skipped"] == 1.0
    assert first["grad_norm"] is None  # JSON has no NaN
    assert second["skipped"] == 0.0
    assert second["staleness"] == 0.0  # nothing had moved
    assert all(torch.isfinite(value).all() for value in tensors(lab, layout.checkpoint(1)).values())


def test_too_many_skipped_steps_fail_the_round(
    tmp_path: Path, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab(tmp_path)
    break_gradients(monkeypatch, set(range(100)))
    with pytest.raises(NumericsError, match="step 2"):
        lab.train(lab.config(samples, max_skipped_steps=1))
    assert len(lab.figures()) == 2
    assert not lab.store.exists(layout.manifest_of(layout.checkpoint(1)))


@pytest.mark.parametrize("tied", [True, False])
def test_published_weights_are_plain_hugging_face(tmp_path: Path, samples: list[Sample], tied: bool) -> None:
    lab = Lab(tmp_path, tiny_model(tied=tied))
    result = lab.train(lab.config(samples))
    folder = tmp_path / "store" / result.weights_key
    assert read_manifest(lab.store, result.weights_key).digest() == result.weights_digest
    for name in ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (folder / name).read_bytes() == (tmp_path / "base" / name).read_bytes(), name
    assert ("lm_head.weight" in load_file(folder / "model.safetensors")) != tied
    served = loaded(folder)
    trained = tensors(lab, result.checkpoint_key)
    for name, value in served.named_parameters():
        assert torch.equal(value, trained[f"weight/model.{name}"]), name
    assert not torch.equal(served.model.norm.weight, lab.model.model.norm.weight)


def test_weights_keep_the_base_models_type_and_masters_stay_float32(tmp_path: Path, samples: list[Sample]) -> None:
    lab = Lab(tmp_path, tiny_model().to(torch.bfloat16))
    result = lab.train(lab.config(samples, dtype="bfloat16", kl={"coefficient": 1.0}))
    published = load_file(tmp_path / "store" / result.weights_key / "model.safetensors")
    assert {value.dtype for value in published.values()} == {torch.bfloat16}
    assert {value.dtype for value in tensors(lab, result.checkpoint_key).values()} == {torch.float32}
    first, second = lab.figures()
    assert first["kl"] == 0.0 < second["kl"]


def test_the_ema_baseline_goes_on_over_rounds(tmp_path: Path, samples: list[Sample]) -> None:
    lab = Lab(tmp_path)
    result = lab.train(lab.config(samples, baseline="EMA"))
    state = json.loads((tmp_path / "store" / result.checkpoint_key / "trainer.json").read_text())
    means = [figures["reward_mean"] for figures in lab.figures()]
    assert state["ema"] == pytest.approx(0.8 * means[0] + 0.2 * means[1])
    assert (state["step"], state["global_step"]) == (2, 2)
    assert set(state["adam_steps"].values()) == {2}


@pytest.mark.parametrize("weighting", ["None", "TIS", "MIS"])
def test_a_recorded_head_trains_too(tmp_path: Path, weighting: str) -> None:
    lab = Lab(tmp_path)
    rows = make_samples(8, model=lab.model, top_k=None)
    lab.train(lab.config(rows, correction={"weighting": weighting}))
    figures = lab.figures()[-1]
    assert 0.1 < figures["head_mass_sampler"] < 1.0
    assert 0.0 < figures["tail_ratio"] <= figures["tail_ratio_max"]
    assert figures["outside_support_fraction"] == 0.0


def test_score_centering_refuses_records_without_a_head(tmp_path: Path, samples: list[Sample]) -> None:
    lab = Lab(tmp_path)
    bare = [
        s.model_copy(
            update={
                "head_ids": [], "head_logprobs": [], "support_complete": False,
                "head_offsets": [0] * len(s.head_offsets),
            }
        )
        for s in samples
    ]  # fmt: skip
    config = lab.config(bare)
    with pytest.raises(DataError, match="without a recorded head"):
        lab.train(config)
    result = lab.train(config.model_copy(update={"correction": config.correction.model_copy(update={"type": "None"})}))
    assert result.steps == 2


def test_reference_model_uses_the_deployed_weights(tmp_path: Path, samples: list[Sample]) -> None:
    lab = Lab(tmp_path)
    write_model(lab.store, tmp_path / "deployed", tiny_model(seed=5), "rounds/0000/policy")
    with pytest.raises(UsageError, match="reference_weights_key"):
        lab.train(lab.config(samples, correction={"type": "ReferenceModel"}))
    config = lab.config(samples, 2, correction={"type": "ReferenceModel"}, reference_weights_key="rounds/0000/policy")
    lab.train(config)
    own = lab.config(samples, 3, correction={"type": "ReferenceModel"}, reference_weights_key=config.init_weights_key)
    lab.train(own)
    assert lab.figures(2)[0]["pg_loss"] != lab.figures(3)[0]["pg_loss"]
    assert lab.figures(3)[0]["cap_fraction"] == 0.0  # p0 / p0


def test_missing_tensors_are_refused(tmp_path: Path, samples: list[Sample]) -> None:
    lab = Lab(tmp_path)
    from safetensors.torch import save_file

    folder = tmp_path / "holes"
    lab.model.save_pretrained(folder)
    kept = load_file(folder / "model.safetensors")
    kept.pop("model.norm.weight")
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    write_folder(lab.store, "holes", folder, "model", {})
    with pytest.raises(DataError, match=r"missing_keys.*model\.norm\.weight"):
        lab.train(lab.config(samples, init_weights_key="holes"))


def test_weights_without_a_manifest_are_refused(tmp_path: Path, samples: list[Sample]) -> None:
    lab = Lab(tmp_path)
    with pytest.raises(DataError, match="no manifest"):
        lab.train(lab.config(samples, init_weights_key="rounds/0009/weights"))


def test_tensorboard_reads_the_events(tmp_path: Path, samples: list[Sample]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    lab = Lab(tmp_path)
    lab.train(lab.config(samples))
    events = EventAccumulator(str((tmp_path / "store" / layout.train_events(1)).parent)).Reload()
    assert [point.step for point in events.Scalars("train/loss")] == [1, 2]
    found = [point.value for point in events.Scalars("train/engine_mismatch")]
    assert found == pytest.approx([row["engine_mismatch"] for row in lab.figures()], rel=1e-6)
