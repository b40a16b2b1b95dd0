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

from flax_examples import data, mesh, model, packing, processes
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

    layout: mesh.Layout
    apply: model.Model
    optimizer: optax.GradientTransformation
    init: Callable  # key -> params, optimiser state, where they belong
    wanted: tuple  # their shapes, dtypes and shardings
    train_step: Callable  # params, optimiser state, batch -> params, state, (loss, gradient norm); a batch is
    # windows [B, T + 1], or packing.Rows with --pack
    losses: Callable  # params, windows [E, T + 1] -> mean nats per byte of each window, [E], on every device


@functools.cache
def programs(settings: Settings, layout: mesh.Layout | None = None) -> Programs:
    """Without a layout, for one device. InputError if the settings cannot be cut as it says, or follow the recipe."""
    layout = layout or mesh.make(None)
    apply = model.MODULES[settings.module](settings.model, settings.dtype, layout, settings.recipe)
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

    def init(key):
        params = model.init_params(key, settings.model)
        return params, optimizer.init(params)

    params, state = jax.eval_shape(init, jax.random.key(0))
    axes, everywhere = model.logical_axes(settings.model), layout.sharding()
    if settings.recipe is not None:
        model.check_recipe(settings.model.attention, settings.recipe, settings.window)
    layout.check(settings.batch, settings.window, settings.block, jax.tree.map(lambda leaf: leaf.shape, params), axes)
    spread = mesh.shardings(layout, axes)
    # What the optimiser keeps of a parameter lies as the parameter does.
    spread_state = optax.tree_map_params(
        optimizer, lambda _, sharding: sharding, state, spread, transform_non_params=lambda _: everywhere
    )
    placed = spread, spread_state
    wanted = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), (params, state), placed
    )

    @functools.partial(jax.jit, donate_argnums=(0, 1), out_shardings=(*placed, everywhere))
    def train_step(params, state, batch):
        loss, gradient = jax.value_and_grad(mean_loss)(params, batch)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, (loss, optax.tree.norm(gradient))

    @functools.partial(jax.jit, out_shardings=everywhere)
    def losses(params, windows):
        return model.losses(apply, params, windows).mean(-1)

    return Programs(layout, apply, optimizer, jax.jit(init, out_shardings=placed), wanted, train_step, losses)


class Heldout:
    """The held-out bytes that every figure is over: the model's before and after, and the order-2 models'."""

    def __init__(self, text: np.ndarray, settings: Settings):
        starts = data.heldout_starts(text, settings.window, settings.eval_bytes)
        self.text, self.windows = text, data.gather(text, starts, settings.window)
        self.positions = (starts[:, None] + np.arange(1, settings.window + 1)).ravel()

    def bits_per_byte(self, compiled: Programs, params: dict) -> float:
        total, layout = 0.0, compiled.layout
        size = -(-EVAL_BATCH // layout.parts)  # of a part
        for first in range(0, len(self.windows), size * layout.parts):
            some = self.windows[first : first + size * layout.parts]
            # Repeats fill the last batch: one shape is compiled.
            parts = np.resize(some, (layout.parts, size, some.shape[1]))
            losses = compiled.losses(params, layout.batch(lambda part, parts=parts: parts[part]))
            total += float(np.asarray(losses, np.float64)[: len(some)].sum())
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
        silent = None if processes.first() else True  # None: where there is no terminal
        bar = tqdm.tqdm(total=self.settings.steps, initial=self.step, unit="step", disable=silent, dynamic_ncols=True)
        number = 0  # of the signal that ends the run
        with bar, _signals() as caught:
            while self.step < last and not number:
                self._train_step()
                bar.update()
                evaluate = self.step % eval_every == 0 or self.step == self.settings.steps
                save = self.step % checkpoint_every == 0 or self.step == last
                look = self.step % LOG_EVERY == 0 or evaluate or save
                if look:
                    self._look(bar)
                if evaluate:
                    self.evaluate()
                if save:
                    self.save()
                if look or not processes.several():  # all of them must end after the same step
                    number = processes.largest(caught[0] if caught else 0)
            if number:
                self._look(bar)
                self.save()
        if number or self.step < self.settings.steps:
            name = f"interrupted ({signal.Signals(number).name})" if number else "stopped"
            raise Stopped(
                f"{name} at step {self.step} of {self.settings.steps}, saved; continue with --resume --out {self.out}",
                128 + number if number else 0,
            )
        if self.history["evals"][-1]["step"] != self.step:
            self.evaluate()

    def _train_step(self) -> None:
        parts, size = self.compiled.layout.parts, self.settings.batch // self.compiled.layout.parts
        own = []

        def make(part):  # the parts of a step's batch are the batches of as many smaller steps
            own.append(self.source.batch(self.step * parts + part, size))
            return own[-1]

        batch = self.compiled.layout.batch(make)
        self.params, self.state, numbers = self.compiled.train_step(self.params, self.state, batch)
        self.step += 1
        self._pending.append(numbers)
        tokens = sum(np.count_nonzero(rows.segment_ids) if self.settings.pack else rows[:, 1:].size for rows in own)
        self._tokens += int(tokens) * parts // len(own)  # other processes' parts count as as full as these
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
        bits = self.heldout.bits_per_byte(self.compiled, self.params)
        if not math.isfinite(bits):
            raise TrainingError(f"the held-out loss is {bits} at step {self.step}; try another --learning-rate")
        seconds = time.perf_counter() - self.began
        passed = bits < self.threshold and not any(e["bits_per_byte"] < self.threshold for e in self.history["evals"])
        self.history["evals"].append({"step": self.step, "seconds": round(seconds, 1), "bits_per_byte": round(bits, 5)})
        processes.tell(
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
    # None: a handler that is not Python's, as jax.distributed has one.
    previous = {number: signal.SIG_DFL if handler is None else handler for number, handler in previous.items()}

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
