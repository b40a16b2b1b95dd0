"""What several processes of one run have to do together: start, agree, and let one of them speak.

Every process runs the same program with the same options but for --process-id; with one process all of this is nothing.
"""

import argparse
from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
import tqdm
from jax.experimental import multihost_utils

from flax_examples.data import InputError

T = TypeVar("T")
LONGEST = 1024  # bytes of a message that processes tell each other


class TogetherError(InputError):
    """What every process raises when one has raised an InputError: one line from one process is enough."""


def start(asked: argparse.Namespace) -> None:
    """Before JAX looks for devices: how many CPU devices there shall be, and which processes there are."""
    try:
        if asked.cpu_devices is not None:
            jax.config.update("jax_num_cpu_devices", asked.cpu_devices)
            jax.config.update("jax_platforms", "cpu")
    except RuntimeError as error:
        raise InputError(f"--cpu-devices: found JAX already started, wanted {asked.cpu_devices} devices") from error
    if asked.coordinator is None and not asked.distributed:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # for processes whose devices are CPUs
    try:
        if asked.distributed:
            jax.distributed.initialize()
        else:
            jax.distributed.initialize(asked.coordinator, asked.processes, asked.process_id)
    except (RuntimeError, ValueError) as error:
        option = "--distributed" if asked.distributed else "--coordinator"
        raise InputError(f"{option}: the processes could not be brought together: {error}") from error


def several() -> bool:
    return jax.distributed.is_initialized() and jax.process_count() > 1


def leave() -> None:
    """Ends together with the others; a process that ends without it takes them down."""
    if several():
        jax.distributed.shutdown()


def first() -> bool:
    """Whether this is the process that prints and writes reports."""
    return jax.process_index() == 0


def tell(text: str) -> None:
    if first():
        tqdm.tqdm.write(text)


def together(step: Callable[[], T]) -> T:
    """What `step` gives. An InputError of one process is raised on all: none is left waiting for it."""
    if not several():
        return step()
    result, problem = None, ""
    try:
        result = step()
    except InputError as error:
        problem = str(error)
    problems = _gather(problem)
    for number, found in enumerate(problems):
        if found:
            everywhere = all(other == found for other in problems)
            raise TogetherError(found if everywhere else f"process {number}: {found}")
    return result


def same(name: str, value: str) -> None:
    """InputError unless all processes have this value."""
    if several():
        for number, other in enumerate(values := _gather(value)):
            if other != values[0]:
                raise TogetherError(
                    f"{name}: found {other} in process {number} and {values[0]} in process 0, wanted the same"
                )


def largest(value: int) -> int:
    """Of all processes' values."""
    return int(np.max(multihost_utils.process_allgather(np.int32(value)))) if several() else value


def whole(x: jax.Array) -> np.ndarray:
    """All of x, also where other processes hold parts of it."""
    return np.asarray(multihost_utils.process_allgather(x, tiled=True) if several() else x)


def _gather(text: str) -> list[str]:
    """Every process's text, cut to LONGEST bytes."""
    row = np.zeros(LONGEST, np.uint8)
    encoded = text.encode(errors="replace")[:LONGEST]
    row[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in multihost_utils.process_allgather(row)]
