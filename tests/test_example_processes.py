"""The example in several processes of this machine: its loss curve is one process's, its checkpoints anyone's.

Each process gets CPU devices of its own, and they talk through gloo. They have a deadline; what is still alive then is
killed, and its output shown.
"""

import dataclasses
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import time

import numpy as np
import pytest

from flax_examples import checkpoint, loop, presets, train

ROOT = pathlib.Path(__file__).resolve().parent.parent
TINY = presets.PRESETS["tiny"]
SMALL = dataclasses.replace(TINY, model=dataclasses.replace(TINY.model, layers=1), eval_bytes=1024, steps=8)
STEPS = 6  # that the runs are compared over
BITS = 2e-4  # bits per byte: as in test_example_mesh.py
DEADLINE = 120  # seconds; a run takes about 15 on 2 cores
OPTIONS = ["--preset", "tiny", "--eval-every", "2", "--checkpoint-every", "10"]
# Runs of one process, one after another, as far as it is concerned: what comes between is that the processes stay
# together. The last one is sent SIGTERM as it prepares the batch of that number, if any, counted over all of them.
CHILD = """
import dataclasses, json, os, runpy, signal, sys
from flax_examples import data, loop, presets, processes, train
interrupted, *runs = json.loads(sys.argv[1])
tiny = presets.PRESETS["tiny"]
small = dataclasses.replace(tiny.model, layers=1)
presets.PRESETS["tiny"] = dataclasses.replace(tiny, model=small, eval_bytes=1024, steps=8)
loop.LOG_EVERY = 1
batch, calls = data.Windows.batch, []
def interrupting(self, step, size):
    calls.append(step)
    if len(calls) == interrupted:
        os.kill(os.getpid(), signal.SIGTERM)
    return batch(self, step, size)
data.Windows.batch = interrupting
leave = processes.leave
for run in runs[:-1]:
    processes.leave = lambda: None
    status = train.main(run)
    if status:
        sys.exit(status)
    processes.start = lambda asked: None
processes.leave = leave
sys.argv = ["train", *runs[-1]]
runpy.run_module("flax_examples.train", run_name="__main__")
"""


@pytest.fixture(scope="module", autouse=True)
def small_preset():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(presets.PRESETS, "tiny", SMALL)
        patch.setattr(loop, "LOG_EVERY", 1)
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    for name in ("calendar", "copy", "csv", "glob"):
        (folder / f"{name}.py").write_bytes((library / f"{name}.py").read_bytes())
    return folder


def history(out):
    checkpoints = checkpoint.Checkpoints(out / "checkpoints")
    return checkpoints.read_run(checkpoints.latest())["history"]


def assert_same_curve(found, wanted):
    assert [step for step, _ in found["loss"]] == list(range(1, STEPS + 1))
    np.testing.assert_allclose(found["loss"], wanted["loss"], rtol=0, atol=BITS)
    bits = [[entry["bits_per_byte"] for entry in run["evals"]] for run in (found, wanted)]
    np.testing.assert_allclose(*bits, rtol=0, atol=BITS)
    assert abs(found["loss"][0][1] - found["loss"][-1][1]) > 100 * BITS  # it has moved


def free_port():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def slurm(number, count, job):
    """What Slurm tells a process of a job on this machine: JAX listens at a port made of the job's number."""
    values = dict(JOB_ID=job, STEP_NODELIST="localhost", NTASKS=count, PROCID=number, LOCALID=number, STEP_NUM_NODES=1)
    return {f"SLURM_{name}": str(value) for name, value in values.items()}


def launch(count, *runs, own=lambda number: [], interrupted=lambda number: 0, job=None):
    """(exit status, stdout, stderr) of each of `count` processes, which are given the options of these runs; with the
    number of a job, as Slurm starts them."""
    address = ["--coordinator", f"localhost:{free_port()}", "--processes", count]
    # Compiled as fast as the tests themselves, but with the devices that the options ask for.
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", ""))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    running = []
    deadline = time.monotonic() + DEADLINE
    for number in range(count):
        found = [*address, "--process-id", number] if job is None else ["--distributed"]
        given = [[str(option) for option in (*OPTIONS, *run, *found, *own(number))] for run in runs]
        running.append(
            subprocess.Popen(
                [sys.executable, "-c", CHILD, json.dumps([interrupted(number), *given])],
                env=environment | ({} if job is None else slurm(number, count, job)),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    results, late = [], False
    for process in running:  # what they print fits in their pipes
        try:
            output = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            late = True
            for other in running:
                other.kill()
            output = process.communicate()
        results.append((process.returncode, *output))
    assert not late, f"not done in {DEADLINE} seconds; what they had said:\n" + shown(results)
    return results


def shown(results):
    return "\n".join(f"process {i}, status {code}:\n{out}\n{err}" for i, (code, out, err) in enumerate(results))


def own_lines(text):
    """What the example has said, of all that JAX says on the same stream."""
    return [line for line in text.splitlines() if re.match(r"error|stopped|interrupted|step +\d|tiny, ", line)]


def test_two_processes_have_one_devices_curve_and_their_checkpoint_goes_on_alone(text, tmp_path):
    """Two devices each, heads spread within a process. First rows of parameters and the batch are over both; then the
    tokens of every row are, until the last process is interrupted at the batch it makes fourth: at the fourth step, as
    it makes its own part alone. At last on one device, which also ran it all."""
    common = ["--cpu-devices", 2, "--data", text, "--out", tmp_path / "out"]
    first = [*common, "--mesh", "fsdp=2,tp=2", "--stop-after", 2]
    second = [*common, "--mesh", "cp=2,tp=2", "--resume"]
    results = launch(2, first, second, interrupted=lambda number: 4 if number == 1 else 0)
    assert [code for code, _, _ in results] == [128 + signal.SIGTERM] * 2, shown(results)
    for sizes in ("fsdp=2, tp=2", "cp=2, tp=2"):
        assert any(f"4 x cpu (cpu) in 2 processes, mesh {sizes}" in line for line in own_lines(results[0][1])), sizes
    stopped, interrupted = own_lines(results[0][2])
    assert stopped.startswith("stopped at step 2 of 8, saved")
    assert interrupted.startswith("interrupted (SIGTERM) at step 4 of 8, saved")
    assert not own_lines(results[1][1]) and not own_lines(results[1][2]), shown(results)
    assert not (tmp_path / "out" / "run.json").exists()
    # Written by two, one process reads it.
    alone = [*OPTIONS, "--data", str(text), "--stop-after", str(STEPS), "--out"]
    assert train.main([*alone, str(tmp_path / "alone")]) == 0
    assert train.main([*alone, str(tmp_path / "out"), "--resume"]) == 0
    assert_same_curve(*(history(tmp_path / out) for out in ("out", "alone")))


def test_what_one_process_lacks_is_said_once_and_ends_all(text, tmp_path):
    """Four, started as by Slurm, which says what --distributed needs to know."""
    out = tmp_path / "out"
    own = lambda number: ["--data", "nowhere" if number == 2 else text]  # noqa: E731
    results = launch(4, ["--cpu-devices", 1, "--out", out], own=own, job=free_port())
    assert [code for code, _, _ in results] == [2] * 4, shown(results)
    wanted = "error: process 2: --data: found nothing at nowhere, wanted a folder or a file"
    said = [own_lines(err) for _, _, err in results]
    assert said == [[wanted], [], [], []], shown(results)
    assert not out.exists()
