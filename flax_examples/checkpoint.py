"""Checkpoints of a run: parameters, optimiser state and how the run came to them, through orbax.

A checkpoint holds `state` = {"params", "optimizer"} (arrays; the same tree for linen and nnx) and `run`, a JSON object
with the settings, the data's fingerprint and the history so far, which train.py writes and reads.
"""

import contextlib
import pathlib
import re
import shutil
import sys
import time
from collections.abc import Iterator

import jax
import orbax.checkpoint as ocp

from flax_examples.data import InputError

KEEP = 2  # the newest; an older one goes only when a newer one is safely there


class SaveError(Exception):
    """Nothing could be written; whatever was saved before is as it was."""


class Checkpoints:
    """The checkpoints under `folder`, one a step. Nothing is created before the first save."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder.absolute()
        self._opened = None

    @property
    def _manager(self) -> ocp.CheckpointManager:
        if self._opened is None:
            # Synchronous, so that a write that fails is reported by the save it belongs to.
            options = ocp.CheckpointManagerOptions(max_to_keep=KEEP, enable_async_checkpointing=False)
            self._opened = ocp.CheckpointManager(self.folder, options=options)
        return self._opened

    def latest(self) -> int | None:
        """The newest step saved; None without any."""
        return self._manager.latest_step() if self.folder.is_dir() else None

    def save(self, step: int, params: dict, optimizer: tuple, run: dict) -> None:
        """Raises SaveError, and leaves earlier checkpoints alone, when the disk is full or not writable."""
        if step == self.latest():
            return
        args = ocp.args.Composite(
            state=ocp.args.StandardSave({"params": params, "optimizer": optimizer}), run=ocp.args.JsonSave(run)
        )
        try:
            with _one_report():
                self._manager.save(step, args=args, force=True)
        except (OSError, ValueError, RuntimeError) as error:  # tensorstore reports what the disk said as ValueError
            self._clean_up(step)
            kept = self.latest()
            raise SaveError(
                f"the checkpoint of step {step} could not be written to {self.folder}: {_reason(error)};"
                f" {'there was none before' if kept is None else f'the checkpoint of step {kept} is intact'}"
            ) from error

    def _clean_up(self, step: int) -> None:
        """Removes what a failed save has left: until there has been nothing for a while, since arrays that were still
        under way when the first one failed make their folders again."""
        quiet, deadline = 0, time.monotonic() + 5
        while quiet < 4 and time.monotonic() < deadline:
            leftovers = list(self.folder.glob(f"{step}.orbax-checkpoint-tmp*"))
            for leftover in leftovers:
                shutil.rmtree(leftover, ignore_errors=True)
            quiet = 0 if leftovers else quiet + 1
            time.sleep(0.05)

    def read_run(self, step: int) -> dict:
        return self._restore(step, run=ocp.args.JsonRestore()).run

    def restore(self, step: int, params: dict, optimizer: tuple) -> tuple[dict, tuple]:
        """The saved values; `params` and `optimizer` hold the shapes wanted, and the shardings: without, the default
        device's. Whatever devices they were saved from, each process reads what its own hold."""
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        wanted = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or here),
            {"params": params, "optimizer": optimizer},
        )
        state = self._restore(step, state=ocp.args.StandardRestore(wanted)).state
        return state["params"], state["optimizer"]

    def _restore(self, step: int, **items):
        try:
            with _one_report():
                return self._manager.restore(step, args=ocp.args.Composite(**items))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"--resume: cannot read checkpoint {self.folder / str(step)}: {_reason(error)}") from error


@contextlib.contextmanager
def _one_report() -> Iterator[None]:
    """At the first array that fails orbax raises and closes its event loop. Others still under way, failing too, then
    find it closed, and Python would print a traceback for each."""
    previous = sys.unraisablehook

    def report(trouble):
        if not (isinstance(trouble.exc_value, RuntimeError) and "Event loop is closed" in str(trouble.exc_value)):
            previous(trouble)

    sys.unraisablehook = report
    yield
    sys.unraisablehook = previous  # not after a failure: the others may come in later


def _reason(error: BaseException) -> str:
    """What the operating system said, which tensorstore puts at the end of a long line; else the message's start."""
    said = re.search(r": ([^:]+) \[os_error_code", str(error))
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return said[1] if said else getattr(error, "strerror", None) or lines[0][:160]
