"""Timing that survives a noisy machine: candidates take turns in one run, and medians are reported."""

import statistics
import time
from collections.abc import Callable

import jax
import numpy as np


def side_by_side(
    candidates: dict[str, Callable[[], object]], repeats: int, dispatches: int = 1
) -> dict[str, tuple[float, float]]:
    """Median and spread (interquartile range) of each candidate in milliseconds. They take turns, so that a slow
    minute of the machine falls on all of them alike; the first call of each is not counted. A sample is `dispatches`
    calls one after another, over their number: a GPU runs them without waiting for this process."""
    for run in candidates.values():
        jax.block_until_ready(run())
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repeats):
        for name, run in candidates.items():
            start = time.perf_counter()
            for _ in range(dispatches):
                result = run()
            jax.block_until_ready(result)
            times[name].append((time.perf_counter() - start) * 1e3 / dispatches)
    results = {}
    for name, values in times.items():
        low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
        results[name] = statistics.median(values), high - low
    return results


def worst_error(found, wanted) -> float:
    """The largest error over all arrays of a pytree, each relative to the largest entry of the wanted array."""
    errors = []
    for f, w in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        f, w = np.asarray(f, np.float64), np.asarray(w, np.float64)
        errors.append(np.max(np.abs(f - w)) / max(np.max(np.abs(w)), np.finfo(np.float32).tiny))
    return float(max(errors))
