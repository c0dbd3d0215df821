"""Watches ``AsyncLLM.generate``: asks the engine for log probabilities, notes them, hands on what the client asked for.

Installed by ``plugin``; gives what it saw to ``sink``. Relies on internals of vLLM, which is why ``plugin`` refuses a
version that was not tested. Two rules: a client's bytes are the same as without us, and a fault of ours costs a
record, never a request.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import logging
import operator
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

from prodrl.recorder import identity, sampling
from prodrl.recorder.active import Recorder
from prodrl.recorder.record import PROCESSED, Entries, Facts, Observation
from prodrl.records import Reason

logger = logging.getLogger("prodrl.recorder")

_Generate = Callable[..., AsyncGenerator[Any, None]]

_is_quiet: ContextVar[bool] = ContextVar("prodrl_quiet", default=False)
"""True while a request is handed to the engine whose client did not ask for log probabilities: their text is not
needed, and turning K + 1 ids a token into text would cost more than everything else here."""


def install(
    engine_class: Any, processor_class: Any, recorder: Recorder, client_errors: tuple[type[Exception], ...]
) -> None:
    """Wrap the engine's ``generate`` and the making of its log probability processors, once."""
    original: _Generate = engine_class.generate
    if getattr(original, "prodrl_wrapped", False):
        return

    @functools.wraps(original)
    def generate(engine: Any, prompt: Any, sampling_params: Any, request_id: str, **options: Any) -> Any:
        watch = _begin(recorder, engine, prompt, sampling_params, request_id, options)
        if watch is None:
            return original(engine, prompt, sampling_params, request_id, **options)
        return _watched(original(engine, prompt, watch.params, request_id, **options), watch, client_errors)

    generate.prodrl_wrapped = True  # type: ignore[attr-defined]
    engine_class.generate = generate
    _skip_text(processor_class)


def _skip_text(processor_class: Any) -> None:
    make = processor_class.from_new_request.__func__

    @functools.wraps(make)
    def from_new_request(cls: Any, tokenizer: Any, request: Any) -> Any:
        return make(cls, tokenizer=None if _is_quiet.get() else tokenizer, request=request)

    processor_class.from_new_request = classmethod(from_new_request)


async def _watched(
    outputs: AsyncGenerator[Any, None], watch: _Watch, client_errors: tuple[type[Exception], ...]
) -> AsyncGenerator[Any, None]:
    _is_quiet.set(watch.is_quiet)
    try:
        async with aclosing(outputs):
            async for output in outputs:
                _is_quiet.set(False)
                watch.see(output)
                yield output
    except (asyncio.CancelledError, GeneratorExit):
        watch.failure = "aborted"
        raise
    except client_errors:
        watch.is_refused = True
        raise
    except BaseException:
        watch.failure = "error"
        raise
    finally:
        _is_quiet.set(False)
        watch.end()


def _begin(
    recorder: Recorder, engine: Any, prompt: Any, params: Any, request_id: str, options: dict[str, Any]
) -> _Watch | None:
    """What watches this request; None when it is not to be recorded."""
    try:
        whose = identity.of_call(request_id)
        if whose is None:
            recorder.counters.not_traffic += 1
            return None
        if not isinstance(prompt, dict) or "-beam-" in request_id:
            recorder.counters.unsupported += 1
            return None
        reasons: tuple[Reason, ...] = (Reason.LORA,) if options.get("lora_request") is not None else ()
        if prompt.get("type") not in (None, "token"):
            reasons += (Reason.MULTIMODAL,)
        seen = Observation(
            request_id=whose[0],
            ordinal=whose[1],
            index=0,
            sampling=sampling.describe(params, recorder.config.sampling_policy),
            facts=recorder.facts_of(engine),
            started_ms=_now_ms(),
            prompt_ids=prompt.get("prompt_token_ids") or (),
            reasons=reasons,
        )
        return _Watch(recorder, seen, params)
    except Exception:  # the edge between our faults and a user's request
        recorder.count_fault("Request %s: cannot be watched", request_id)
        return None


class _Watch:
    """One engine call, from its parameters to its records."""

    def __init__(self, recorder: Recorder, seen: Observation, asked: Any) -> None:
        self.failure = ""
        self.is_refused = False
        self.is_quiet = asked.num_logprobs is None and asked.prompt_logprobs is None
        self._recorder = recorder
        self._seen = seen
        self._asked = asked
        self._choices: dict[int, _Choice] = {}
        self._is_delta = asked.output_kind.name == "DELTA"
        self._is_faulty = False
        self.params = _with_head(asked, seen.facts.head_for(seen.sampling.top_k))

    def see(self, output: Any) -> None:
        """Note what the output says, then take from it what the client did not ask for."""
        noted = [completion.logprobs for completion in output.outputs]
        if self.params is not self._asked:
            _restore(output, self._asked)
        if self._is_faulty:
            return
        try:
            self._seen.finished_ms = _now_ms()
            self._seen.prompt_ids = output.prompt_token_ids or self._seen.prompt_ids
            self._seen.num_cached_tokens = output.num_cached_tokens or 0
            for completion, logprobs in zip(output.outputs, noted, strict=True):
                choice = self._choices.setdefault(completion.index, _Choice())
                choice.add(completion, logprobs, is_delta=self._is_delta)
        except Exception:  # the edge between our faults and a user's request
            self._is_faulty = True
            self._recorder.count_fault("Request %s: cannot be read", self._seen.request_id)

    def end(self) -> None:
        """Hand every choice to the writer."""
        if self._is_faulty:
            return
        if self.is_refused:
            self._recorder.counters.refused += 1
            return
        try:
            self._seen.finished_ms = self._seen.finished_ms or _now_ms()
            for index in self._choices or (0,):
                self._recorder.sink.offer(self._finish(index))
        except Exception:  # the edge between our faults and a user's request
            self._recorder.count_fault("Request %s: cannot be recorded", self._seen.request_id)

    def _finish(self, index: int) -> Observation:
        seen = copy.copy(self._seen)
        seen.index = index
        seen.failure = self.failure
        choice = self._choices.get(index)
        if choice is not None:
            choice.fill(seen)
        return seen


class _Choice:
    """What was seen of one of the ``n`` answers."""

    def __init__(self) -> None:
        self._output_ids: Any = []
        self._entries = Entries()
        self._latest: Any = None
        """Outputs that are not deltas repeat everything: the last one says it all."""
        self._finish_reason = ""
        self._stop_reason = ""

    def add(self, completion: Any, logprobs: Any, *, is_delta: bool) -> None:
        """Note one output of the engine."""
        if is_delta:
            self._output_ids.extend(completion.token_ids)
            _extend(self._entries, logprobs)
        else:
            self._output_ids, self._latest = completion.token_ids, logprobs
        if completion.finish_reason is not None:
            self._finish_reason = str(completion.finish_reason)
            self._stop_reason = "" if completion.stop_reason is None else str(completion.stop_reason)

    def fill(self, seen: Observation) -> None:
        """Complete the observation."""
        _extend(self._entries, self._latest)
        seen.output_ids = list(self._output_ids)
        seen.entries = self._entries
        seen.finish_reason, seen.stop_reason = self._finish_reason, self._stop_reason


def engine_facts(engine: Any, head_size: int, name: str) -> Facts:
    """What the engine's configuration says about all its completions."""
    model, config = engine.model_config, engine.vllm_config
    vocab_size = int(model.get_vocab_size())
    allowed = vocab_size if model.max_logprobs == -1 else min(model.max_logprobs, vocab_size)
    if head_size > allowed:
        logger.warning("Recorder: the head has %d entries, not %d; raise --max-logprobs", allowed, head_size)
    reasons: tuple[Reason, ...] = ()
    if getattr(config, "speculative_config", None) is not None:
        reasons += (Reason.SPECULATIVE,)
    if getattr(model, "logits_processors", None):
        reasons += (Reason.PENALTIES,)
    mode = str(getattr(model.logprobs_mode, "value", model.logprobs_mode))
    if mode != PROCESSED:
        logger.warning("Recorder: --logprobs-mode is %s; nothing can be trained on without %s", mode, PROCESSED)
    return Facts(name, mode, vocab_size, min(head_size, allowed), reasons, max_logprobs=allowed)


def _with_head(asked: Any, head_size: int) -> Any:
    """A copy of the parameters that asks for the head too; the parameters themselves where that is impossible."""
    if asked.logprob_token_ids:
        return asked  # these replace the head; the record will say that it has none
    params = copy.copy(asked)
    if asked.logprobs != -1:
        params.logprobs = max(head_size, asked.logprobs or 0)
    params.flat_logprobs = True
    return params


def _restore(output: Any, asked: Any) -> None:
    """Make the output what it would have been with the client's own parameters."""
    if output.prompt_logprobs is not None and not asked.flat_logprobs:
        output.prompt_logprobs = [position or None for position in output.prompt_logprobs]
    for completion in output.outputs:
        if asked.logprobs is None:
            completion.logprobs = completion.cumulative_logprob = None
        elif completion.logprobs is not None:
            completion.logprobs = _shortened(completion.logprobs, asked)


def _shortened(flat: Any, asked: Any) -> Any:
    """The first ``asked.logprobs`` of each position's most likely tokens, the sampled one always."""
    limit = len(flat.logprobs) if asked.logprobs == -1 else asked.logprobs
    shortened = type(flat)() if asked.flat_logprobs else []
    for position in flat:
        sampled = next(iter(position), None)
        shortened.append({token: value for token, value in position.items() if token == sampled or value.rank <= limit})
    return shortened


def _extend(entries: Entries, logprobs: Any) -> None:
    if logprobs is None:
        return
    if hasattr(logprobs, "start_indices"):
        entries.ids.extend(logprobs.token_ids)
        entries.logprobs.extend(logprobs.logprobs)
        entries.ranks.extend(logprobs.ranks)
        entries.counts.extend(map(operator.sub, logprobs.end_indices, logprobs.start_indices))
        return
    for position in logprobs:  # the client's own form, where we could not ask for ours
        entries.ids.extend(position)
        entries.logprobs.extend(value.logprob for value in position.values())
        entries.ranks.extend(value.rank for value in position.values())
        entries.counts.append(len(position))


def _now_ms() -> int:
    return int(time.time() * 1000)
