"""Turns of a trajectory as training samples, by exact id prefix; nothing is ever tokenised again. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from prodrl.records import CompletionRecord, Sample


@dataclass
class Open:
    """A sample that a next turn may extend."""

    ids: list[int]
    positions: list[int] = field(default_factory=list)
    records: list[CompletionRecord] = field(default_factory=list)

    def extends(self, record: CompletionRecord) -> bool:
        """Whether the record's prompt begins with all that this sample holds.

        A completion cut by ``length`` has no stop token: the next prompt would add one that was never sampled.
        """
        if self.records and self.records[-1].finish_reason == "length":
            return False
        return len(record.prompt_ids) >= len(self.ids) and record.prompt_ids[: len(self.ids)] == self.ids

    def add(self, record: CompletionRecord) -> None:
        """Append what the prompt adds, then the sampled tokens."""
        self.ids = list(record.prompt_ids)
        self.positions += range(len(self.ids), len(self.ids) + len(record.output_ids))
        self.ids += record.output_ids
        self.records.append(record)


def in_order(records: Sequence[CompletionRecord]) -> list[CompletionRecord]:
    """Turns as the engine took them; equal times by prompt length, then id."""
    return sorted(records, key=lambda r: (r.started_ms, len(r.prompt_ids), r.record_id))


def stitch(records: Sequence[CompletionRecord]) -> list[Open]:
    """The trajectory's samples: a turn joins the newest sample that its prompt extends, else it begins another.

    Looking at all samples, not only the last, keeps side conversations (a sub-agent between two turns) apart.
    """
    samples: list[Open] = []
    for record in in_order(records):
        for sample in reversed(samples):
            if sample.extends(record):
                sample.add(record)
                break
        else:
            fresh = Open(ids=[])
            fresh.add(record)
            samples.append(fresh)
    return samples


def _heads(records: Sequence[CompletionRecord]) -> tuple[list[int], list[float], list[int]]:
    ids: list[int] = []
    logprobs: list[float] = []
    offsets = [0]
    for record in records:
        base = len(ids)
        ids += record.head_ids
        logprobs += record.head_logprobs
        offsets += [base + offset for offset in record.head_offsets[1:]]
    return ids, logprobs, offsets


def to_samples(records: Sequence[CompletionRecord], *, order: int, reward: float) -> list[Sample]:
    """The rows of one trajectory; all share T_i = the model-generated tokens of the whole trajectory."""
    stitched = stitch(records)
    tokens = sum(len(record.output_ids) for record in records)
    rows = []
    for index, sample in enumerate(stitched):
        head_ids, head_logprobs, head_offsets = _heads(sample.records)
        rows.append(
            Sample(
                trajectory_id=records[0].trajectory_id,
                index=index,
                num_samples=len(stitched),
                order=order,
                reward=reward,
                trajectory_tokens=tokens,
                policy_digest=records[0].policy_digest,
                ids=sample.ids,
                loss_positions=sample.positions,
                logprobs=[value for record in sample.records for value in record.logprobs],
                head_ids=head_ids,
                head_logprobs=head_logprobs,
                head_offsets=head_offsets,
                support_complete=all(record.support_complete for record in sample.records),
                temperatures=[record.temperature for record in sample.records for _ in record.output_ids],
                record_ids=[record.record_id for record in sample.records],
            )
        )
    return rows
