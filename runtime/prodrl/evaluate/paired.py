"""The difference of two policies on the same items, with a confidence interval. Pure; called by ``run``.

Which interval, and why:

*Outcomes that are 0 or 1* (solved or not): with b items that only the candidate solves, c that only stable solves
and n items in all, the interval of Bonett and Price (2012, "Adjusted Wald confidence interval for a difference of
binomial proportions based on paired data"): add one item to each of the two discordant cells, then take the normal
interval,

    p = (b + 1) / (n + 2),  q = (c + 1) / (n + 2),  (p - q) -+ z * sqrt((p + q - (p - q)^2) / (n + 2)).

Late rounds differ on a handful of items. There a paired t interval or a bootstrap is too narrow, and with no
discordant item it is [0, 0]: certainty from silence. The two imagined items keep the width honest (1.4 z / (n + 2)
when nobody differs), and the coverage near or above its nominal value for all b and c.

*Other outcomes*: the paired t interval (:func:`scipy.stats.ttest_rel`). Where all differences are equal its width is
zero, so two imagined items that differ by plus and minus the outcomes' scale are added, as above.

The point estimate is always the plain mean difference; the interval need not be symmetric about it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from prodrl.errors import DataError


@dataclass(frozen=True)
class Difference:
    """Candidate minus stable."""

    candidate_mean: float
    stable_mean: float
    difference: float
    low: float
    high: float


def difference(candidate: Sequence[float], stable: Sequence[float], confidence: float) -> Difference:
    """Mean difference per item and its two-sided interval.

    Args:
        candidate: One outcome an item.
        stable: Outcomes of the same items in the same order.
        confidence: Share of intervals that cover the true difference, for example 0.95.

    Raises:
        DataError: There is no pair, or an outcome is not finite.
    """
    if len(candidate) != len(stable):
        raise ValueError(f"{len(candidate)} and {len(stable)} outcomes are not pairs")
    ours, theirs = np.asarray(candidate, dtype=float), np.asarray(stable, dtype=float)
    if not len(ours):
        raise DataError("Evaluation: no item was played; give the suite items")
    if not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
        raise DataError("Evaluation: an outcome is not finite; a suite must score every session with a number")
    binary = bool(np.isin(ours, (0.0, 1.0)).all() and np.isin(theirs, (0.0, 1.0)).all())
    low, high = _bonett_price(ours, theirs, confidence) if binary else _paired_t(ours, theirs, confidence)
    return Difference(
        candidate_mean=float(ours.mean()),
        stable_mean=float(theirs.mean()),
        difference=float((ours - theirs).mean()),
        low=low,
        high=high,
    )


def _bonett_price(ours: np.ndarray, theirs: np.ndarray, confidence: float) -> tuple[float, float]:
    size = len(ours) + 2
    won = (float((ours > theirs).sum()) + 1) / size
    lost = (float((ours < theirs).sum()) + 1) / size
    width = float(stats.norm.ppf((1 + confidence) / 2)) * math.sqrt((won + lost - (won - lost) ** 2) / size)
    return max(-1.0, won - lost - width), min(1.0, won - lost + width)


def _paired_t(ours: np.ndarray, theirs: np.ndarray, confidence: float) -> tuple[float, float]:
    differences = ours - theirs
    if len(differences) < 2 or np.ptp(differences) == 0.0:
        scale = max(1.0, float(np.abs(np.concatenate((ours, theirs))).max()))
        ours = np.concatenate((ours, theirs[:1] + differences[0] + scale, theirs[:1] + differences[0] - scale))
        theirs = np.concatenate((theirs, theirs[:1], theirs[:1]))
    interval = stats.ttest_rel(ours, theirs).confidence_interval(confidence)
    return float(interval.low), float(interval.high)
