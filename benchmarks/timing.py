"""Timing that survives a noisy machine: candidates take turns in one run, and medians are reported.

What is timed: on a GPU a program that holds the op `count` times, each on its own inputs, started `calls` times in a
row and waited for once, over count * calls: the GPU's work, and hardly this process's, which needs longer to start a
small op than the GPU to run it. Elsewhere a single call of the op.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

PROGRAM_MS, SAMPLE_MS, MOST = 2.0, 10.0, 20  # how long a program and a sample are to last, and the most of either
PROGRAM_BYTES = 12e9  # the most that a program's inputs and results may take


@dataclasses.dataclass(frozen=True)
class Timed:
    """`run` starts a program and returns what to wait for."""

    run: Callable[[], object]
    count: int = 1  # how often the program runs the op
    calls: int = 1  # how often a sample starts the program


def side_by_side(candidates: dict[str, Timed], repeats: int) -> dict[str, tuple[float, float]]:
    """Median and spread (interquartile range) of each candidate in milliseconds an op. They take turns, so that a slow
    minute of the machine falls on all of them alike; the first call of each is not counted."""
    for timed in candidates.values():
        jax.block_until_ready(timed.run())
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repeats):
        for name, timed in candidates.items():
            times[name].append(sample(timed))
    results = {}
    for name, values in times.items():
        low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
        results[name] = statistics.median(values), high - low
    return results


def sample(timed: Timed) -> float:
    start = time.perf_counter()
    for _ in range(timed.calls):
        result = None  # frees the last call's results for this one's
        result = timed.run()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) * 1e3 / (timed.calls * timed.count)


def repeated(function: Callable) -> Callable:
    """A function of input sets (argument tuples) that runs `function` on each, one after another.

    An optimization barrier holds a turn's inputs back until the last one's results are there, so that XLA neither fuses
    nor reorders turns; no two turns have the same inputs, which could be merged once the barriers are gone, and which
    the GPU might still have in its cache. All results are returned: what only a barrier reads is dropped as dead code.
    """
    function = jax.jit(function)  # traced and lowered once

    def program(*sets):
        results = [function(*sets[0])]
        for args in sets[1:]:
            args, results[-1] = jax.lax.optimization_barrier((args, results[-1]))
            results.append(function(*args))
        return results

    return program


def chained(function: Callable, count: int) -> Callable:
    """`function`, `count` times, the first argument each time the last turn's result, which is returned."""
    function = jax.jit(function)

    def program(state, *rest):
        for _ in range(count):
            state = jax.lax.optimization_barrier(function(state, *rest))
        return state

    return program


def prepare(function: Callable, compiled: Callable, sets: list[tuple], donate: bool) -> Timed:
    """How to time `function`, whose program for `sets[0]` is `compiled`. Further sets are added as they are needed."""
    args = sets[0]
    single = Timed(_runner(compiled, fresh(args, donate), donate))
    if not repeats_in_program():
        return single
    turn_bytes = size(single.run()) + size(args)
    count, calls = plan(min(sample(single) for _ in range(3)), 0 if donate else turn_bytes)
    if count == 1:
        return dataclasses.replace(single, calls=calls)
    if donate:
        program, inputs = jax.jit(chained(function, count), donate_argnums=0), fresh(args, donate)
    else:
        sets += [jax.tree.map(jnp.copy, args) for _ in range(count - len(sets))]
        program, inputs = jax.jit(repeated(function)), sets[:count]
    return Timed(_runner(program.lower(*inputs).compile(), inputs, donate), count, calls)


def repeats_in_program() -> bool:
    return jax.default_backend() == "gpu"


def plan(ms: float, turn_bytes: int) -> tuple[int, int]:
    """How often a program holds an op that takes about `ms`, and how often a sample starts it."""
    count = min(max(math.ceil(PROGRAM_MS / ms), 1), MOST, max(int(PROGRAM_BYTES // max(turn_bytes, 1)), 1))
    return count, min(max(math.ceil(SAMPLE_MS / (ms * count)), 1), MOST)


def fresh(args: tuple, donate: bool) -> tuple:
    """The arguments, the first as a copy where it is given up."""
    return (*jax.tree.map(jnp.copy, args[:1]), *args[1:]) if donate else args


def size(arrays) -> int:
    """Bytes of a pytree's arrays."""
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(arrays))


def _runner(compiled: Callable, args: tuple, donate: bool) -> Callable[[], object]:
    state = list(args)

    def run():
        result = compiled(*state)
        if donate:  # its buffer was the first argument's, and is the next call's
            state[0] = result
        return result

    return run


def shown(error: float) -> float:
    """An error that is NaN, as of a result that is, as the largest number: JSON has no NaN."""
    return float(np.nan_to_num(error, nan=np.finfo(np.float32).max, posinf=np.finfo(np.float32).max))
