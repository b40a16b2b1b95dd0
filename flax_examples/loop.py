"""The training loop: steps, evaluations, checkpoints and a clean stop."""

import contextlib
import dataclasses
import functools
import math
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np
import optax
import tqdm

from flax_examples import data, model, packing
from flax_examples.checkpoint import Checkpoints
from flax_examples.options import Settings

EVAL_BATCH = 32  # windows
LOG_EVERY = 10  # steps between two looks at the loss, each of which waits for the device


class TrainingError(Exception):
    """Training went wrong; what was saved before is intact."""


class Stopped(Exception):
    """The run ended early, as asked, and is saved. `code` is the exit status."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


@dataclasses.dataclass(frozen=True)
class Programs:
    """The compiled parts of a run."""

    apply: model.Model
    optimizer: optax.GradientTransformation
    train_step: Callable  # params, optimiser state, batch -> params, state, (loss, gradient norm); a batch is
    # windows [B, T + 1], or packing.Rows with --pack
    losses: Callable  # params, windows [EVAL_BATCH, T + 1] -> mean nats per byte of each window, [EVAL_BATCH]


@functools.cache
def programs(settings: Settings) -> Programs:
    apply = model.MODULES[settings.module](settings.model, settings.dtype)
    warmup = min(math.ceil(settings.warmup * settings.steps), settings.steps - 1)
    schedule = optax.warmup_cosine_decay_schedule(0.0, settings.learning_rate, warmup, settings.steps)
    optimizer = optax.chain(
        optax.clip_by_global_norm(settings.clip),
        optax.adamw(
            schedule,
            *settings.betas,
            weight_decay=settings.weight_decay,
            mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),  # the norms' scales do not decay
        ),
    )

    def mean_loss(params, batch):
        return model.packed_loss(apply, params, batch) if settings.pack else model.losses(apply, params, batch).mean()

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, state, batch):
        loss, gradient = jax.value_and_grad(mean_loss)(params, batch)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, (loss, optax.tree.norm(gradient))

    @jax.jit
    def losses(params, windows):
        return model.losses(apply, params, windows).mean(-1)

    return Programs(apply, optimizer, train_step, losses)


class Heldout:
    """The held-out bytes that every figure is over: the model's before and after, and the order-2 models'."""

    def __init__(self, text: np.ndarray, settings: Settings):
        starts = data.heldout_starts(text, settings.window, settings.eval_bytes)
        self.text, self.windows = text, data.gather(text, starts, settings.window)
        self.positions = (starts[:, None] + np.arange(1, settings.window + 1)).ravel()

    def bits_per_byte(self, losses: Callable, params: dict) -> float:
        total = 0.0
        for first in range(0, len(self.windows), EVAL_BATCH):
            part = self.windows[first : first + EVAL_BATCH]
            full = np.resize(part, (EVAL_BATCH, part.shape[1]))  # repeats fill the last batch: one shape is compiled
            total += float(np.asarray(losses(params, full), np.float64)[: len(part)].sum())
        return total / len(self.windows) / math.log(2)


@dataclasses.dataclass
class Trainer:
    """A run under way: `params` and `state` after `step` steps, and the `history` that its checkpoints carry along."""

    settings: Settings
    compiled: Programs
    source: data.Windows | packing.PackedRows
    heldout: Heldout
    checkpoints: Checkpoints
    out: pathlib.Path
    data_summary: dict
    threshold: float  # bits per byte whose passing is told: the order-2 model's, fitted on the whole training split
    params: dict
    state: tuple
    step: int
    history: dict
    began: float  # time.perf_counter() at the run's start, less the seconds spent on it before a resume

    def __post_init__(self):
        self._pending, self._first = [], True
        self._tokens = 0
        self._restart_clock()

    def train(self, *, last: int, eval_every: int, checkpoint_every: int) -> None:
        """Steps up to `last`. Raises Stopped at an interrupt, and at `last` if that is not the run's end."""
        if not self.history["evals"]:
            self.evaluate()
            self.save()  # so that a disk that takes no checkpoint is found out now
        bar = tqdm.tqdm(total=self.settings.steps, initial=self.step, unit="step", disable=None, dynamic_ncols=True)
        with bar, _signals() as caught:
            while self.step < last and not caught:
                self._train_step()
                bar.update()
                evaluate = self.step % eval_every == 0 or self.step == self.settings.steps
                save = self.step % checkpoint_every == 0 or self.step == last
                if self.step % LOG_EVERY == 0 or evaluate or save:
                    self._look(bar)
                if evaluate:
                    self.evaluate()
                if save:
                    self.save()
            if caught:
                self._look(bar)
                self.save()
        if caught or self.step < self.settings.steps:
            name = f"interrupted ({caught[0].name})" if caught else "stopped"
            raise Stopped(
                f"{name} at step {self.step} of {self.settings.steps}, saved; continue with --resume --out {self.out}",
                128 + caught[0] if caught else 0,
            )
        if self.history["evals"][-1]["step"] != self.step:
            self.evaluate()

    def _train_step(self) -> None:
        batch = self.source.batch(self.step, self.settings.batch)
        self.params, self.state, numbers = self.compiled.train_step(self.params, self.state, batch)
        self.step += 1
        self._pending.append(numbers)
        self._tokens += int(np.count_nonzero(batch.segment_ids)) if self.settings.pack else batch[:, 1:].size
        if self._first:  # compiling is no part of the speed
            jax.block_until_ready(numbers)
            self._first = False
            self._restart_clock()

    def _look(self, bar) -> None:
        """Waits for the steps so far, checks and records their loss, and counts their time."""
        if not self._pending:
            return
        loss, norm = (np.asarray(numbers, np.float64) for numbers in zip(*jax.device_get(self._pending), strict=True))
        if not (np.isfinite(loss).all() and np.isfinite(norm).all()):
            bad = self.step - len(loss) + 1 + int(np.argmin(np.isfinite(loss) & np.isfinite(norm)))
            kept = self.checkpoints.latest()
            raise TrainingError(
                f"the loss or its gradient is not finite at step {bad}; try another --learning-rate than"
                f" {self.settings.learning_rate:g} (the checkpoint of step {kept} is intact)"
            )
        self._pending = []
        bits = float(loss.mean()) / math.log(2)
        self.history["loss"].append([self.step, round(bits, 5)])
        seconds = time.perf_counter() - self._mark
        self.history["timed_seconds"] += seconds
        self.history["timed_tokens"] += self._tokens
        if self._tokens:
            bar.set_postfix_str(f"{bits:.3f} bits/byte, {self._tokens / seconds:,.0f} tokens/s", refresh=False)
        self._restart_clock()

    def _restart_clock(self) -> None:
        self._mark, self._tokens = time.perf_counter(), 0

    def evaluate(self) -> None:
        bits = self.heldout.bits_per_byte(self.compiled.losses, self.params)
        if not math.isfinite(bits):
            raise TrainingError(f"the held-out loss is {bits} at step {self.step}; try another --learning-rate")
        seconds = time.perf_counter() - self.began
        passed = bits < self.threshold and not any(e["bits_per_byte"] < self.threshold for e in self.history["evals"])
        self.history["evals"].append({"step": self.step, "seconds": round(seconds, 1), "bits_per_byte": round(bits, 5)})
        tqdm.tqdm.write(
            f"step {self.step:5} after {seconds / 60:4.1f} min: {bits:.3f} bits per held-out byte"
            + f" (passes order-2 fitted on the whole training split, {self.threshold:.3f})" * passed
        )
        self._restart_clock()

    def save(self) -> None:
        self.history["seconds"] = round(time.perf_counter() - self.began, 1)
        run = {"settings": self.settings.to_json(), "data": self.data_summary, "history": self.history}
        self.checkpoints.save(self.step, self.params, self.state, run)
        self._restart_clock()


@contextlib.contextmanager
def _signals() -> Iterator[list[signal.Signals]]:
    """Collects SIGINT and SIGTERM instead of dying of them, so that a step ends and is saved; a second one kills."""
    caught: list[signal.Signals] = []
    if threading.current_thread() is not threading.main_thread():  # Python lets no other thread handle signals
        yield caught
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore():
        for number, handler in previous.items():
            signal.signal(number, handler)

    def catch(number, frame):
        caught.append(signal.Signals(number))
        restore()

    for number in previous:
        signal.signal(number, catch)
    try:
        yield caught
    finally:
        restore()
