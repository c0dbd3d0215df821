"""The step ``prodrl evaluate``: a candidate against its own weights and against stable. Called by ``prodrl.cli``.

Agreement first, since it is cheap and finds broken exports; then every suite on both policies. In round 0 there is no
stable policy: agreement and one smoke completion are all. The outcomes of every item go to the round's
``evaluation.json``; the result carries the figures that the operator judges. A figure that cannot be measured is an
error, never a zero.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import httpx

from prodrl.config import AgreementFigures, EvaluateConfig, EvaluateResult, EvaluationConfig, PairedFigures
from prodrl.errors import DataError, UsageError, from_os_error
from prodrl.evaluate import agreement, paired, play, suites
from prodrl.evaluate.chat import ChatClient
from prodrl.evaluate.reference import Reference
from prodrl.progress import Progress
from prodrl.store import layout, open_store
from prodrl.store.folders import fetch_folder
from prodrl.store.port import Store

TIMEOUT_SECONDS = httpx.Timeout(600.0, connect=10.0)
"""A long completion on a loaded server takes minutes."""


@dataclasses.dataclass(frozen=True)
class _Bench:
    """What every measurement needs."""

    config: EvaluateConfig
    store: Store
    work: Path
    progress: Progress
    candidate: ChatClient
    stable: ChatClient | None


def run(config: EvaluateConfig, progress: Progress) -> EvaluateResult:
    """Measure.

    Raises:
        UsageError: The configuration names half of a stable policy, or a suite that cannot be loaded.
        DataError: A figure is missing or not finite.
        UnavailableError: A server does not answer.
    """
    compares = [config.stable is not None, config.stable_url is not None, config.stable_weights_key is not None]
    if len(set(compares)) > 1:
        raise UsageError("Evaluate configuration: stable, stable_url and stable_weights_key belong together; set all")
    if config.evaluations and config.stable is None:
        raise UsageError("Evaluate configuration: evaluations compare with stable, which is not set; leave them out")
    progress.set(0, total=_total(config), unit="measurements")
    try:
        with tempfile.TemporaryDirectory(prefix="prodrl-evaluate-") as folder:
            return asyncio.run(_measure(config, progress, Path(folder)))
    except OSError as exc:
        raise from_os_error(exc, f"Evaluation of round {config.round}") from exc


def _total(config: EvaluateConfig) -> int:
    return 2 + sum(item.max_items for item in config.evaluations)


async def _measure(config: EvaluateConfig, progress: Progress, work: Path) -> EvaluateResult:
    limits = httpx.Limits(max_connections=2 * config.concurrency)
    async with httpx.AsyncClient(timeout=TIMEOUT_SECONDS, limits=limits, trust_env=False) as http:
        bench = _Bench(
            config=config,
            store=open_store(config.store),
            work=work,
            progress=progress,
            candidate=ChatClient(http=http, base_url=config.candidate_url, model=config.served_name),
            stable=ChatClient(http=http, base_url=config.stable_url, model=config.served_name)
            if config.stable_url
            else None,
        )
        agreed = await _agreement(bench)
        figures, outcomes = [], {}
        for evaluation in config.evaluations:
            measured, outcomes[evaluation.name] = await _evaluation(bench, evaluation)
            figures.append(measured)
    result = EvaluateResult(agreement=agreed, evaluations=tuple(figures))
    _write_outcomes(bench, result, outcomes)
    progress.set(_total(config), message="measured")
    return result


async def _agreement(bench: _Bench) -> AgreementFigures:
    """The candidate's figure and, where there is a stable policy, the same figure of it on the same samples."""
    config = bench.config
    bench.progress.set(bench.progress.done, message="agreement of the candidate")
    reference = _reference(bench, config.weights_key, "candidate-weights")
    probes = await _probes(bench, reference)
    ours = await _compared(bench, bench.candidate, reference, probes)
    await _smoke(bench.candidate, probes[0])
    bench.progress.advance()
    del reference  # both do not fit beside each other
    theirs = None
    if bench.stable is not None and config.stable_weights_key is not None:
        bench.progress.set(bench.progress.done, message="agreement of stable")
        reference = _reference(bench, config.stable_weights_key, "stable-weights")
        theirs = await _compared(bench, bench.stable, reference, probes)
    bench.progress.advance()
    return AgreementFigures(
        samples=len(probes),
        tokens=ours.tokens,
        mean_abs=ours.mean_abs,
        p99_abs=ours.p99_abs,
        stable_mean_abs=theirs.mean_abs if theirs else None,
    )


def _reference(bench: _Bench, key: str, name: str) -> Reference:
    fetch_folder(bench.store, key, bench.work / name)
    return Reference(bench.work / name, key)


async def _probes(bench: _Bench, reference: Reference) -> list[agreement.Probe]:
    """The samples to score, each a token shorter than either server takes: one token is generated, and ignored."""
    config = bench.config
    lengths = [await client.max_model_len() for client in (bench.candidate, bench.stable) if client is not None]
    longest = min((length - 1 for length in lengths if length is not None), default=None)
    if config.dataset_key is None:
        length = min(agreement.GENERATED_TOKENS, longest or agreement.GENERATED_TOKENS)
        return agreement.generated_probes(reference.generate(config.agreement_samples, length, config.seed))
    fetch_folder(bench.store, config.dataset_key, bench.work / "dataset")
    return agreement.recorded_probes(bench.work / "dataset", config.agreement_samples, longest, config.seed)


async def _compared(
    bench: _Bench, client: ChatClient, reference: Reference, probes: list[agreement.Probe]
) -> agreement.Figures:
    scored = await agreement.engine_logprobs(client, probes, bench.config.concurrency)
    expected = [reference.logprobs(probe.ids, probe.positions) for probe in probes]
    return agreement.compare(scored, expected, client.base_url)


async def _smoke(client: ChatClient, probe: agreement.Probe) -> None:
    """The candidate writes something; scoring a prompt does not prove that it can."""
    reply = await client.complete(probe.ids[: probe.positions[0]], max_tokens=4, temperature=1.0)
    if reply.finish_reason not in ("stop", "length"):
        raise DataError(
            f"Server {client.base_url}: smoke completion ended with {reply.finish_reason!r}; look at its log"
        )


async def _evaluation(bench: _Bench, evaluation: EvaluationConfig) -> tuple[PairedFigures, list[dict[str, Any]]]:
    config, name = bench.config, evaluation.name
    assert bench.stable is not None, "run() refuses evaluations without a stable policy"
    bench.progress.set(bench.progress.done, message=f"evaluation {name}")
    folder = bench.work / f"suite-{name}"
    if evaluation.suite_key is not None:
        fetch_folder(bench.store, evaluation.suite_key, folder)
    else:
        folder.mkdir()
    suite = suites.load(evaluation.suite, folder, {})
    items = play.choose_items(suite, name, evaluation.max_items, config.seed)
    pairs = await play.play_pairs(
        suite,
        [(item, play.item_seed(config.seed, name, item)) for item in items],
        candidate=bench.candidate,
        stable=bench.stable,
        concurrency=config.concurrency,
        on_pair=bench.progress.advance,
    )
    ours, theirs = play.outcomes(pairs, name, evaluation.metric)
    measured = paired.difference(ours, theirs, evaluation.confidence)
    figures = PairedFigures(
        name=name,
        metric=evaluation.metric,
        items=len(pairs),
        **dataclasses.asdict(measured),
        candidate_failures=sum(bool(pair.candidate.error) for pair in pairs),
        stable_failures=sum(bool(pair.stable.error) for pair in pairs),
    )
    return figures, [dataclasses.asdict(pair) for pair in pairs]


def _write_outcomes(bench: _Bench, result: EvaluateResult, outcomes: dict[str, list[dict[str, Any]]]) -> None:
    """What an engineer reads when a verdict surprises: every item, both sides, errors included."""
    document = {
        "candidate": bench.config.candidate.digest,
        "stable": bench.config.stable.digest if bench.config.stable else None,
        "result": result.model_dump(),
        "items": outcomes,
    }
    text = json.dumps(document, sort_keys=True, indent=1, allow_nan=False)
    bench.store.put(layout.evaluation(bench.config.round), text.encode())
