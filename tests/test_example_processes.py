"""The example in several processes of this machine: its loss curve is one process's, its checkpoints anyone's.

Each process gets CPU devices of its own, and they talk through gloo. Every run has a deadline; what is still alive then
is killed, and its output shown.
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
STEPS = 4  # that the runs are compared over
BITS = 2e-4  # bits per byte: as in test_example_mesh.py
DEADLINE = 120  # seconds; a run takes about 15 on 2 cores
OPTIONS = ["--preset", "tiny", "--steps", "6", "--eval-every", "2", "--checkpoint-every", "10"]
# The preset of one layer, every loss; and where it is told to, a process that is sent SIGTERM as it prepares a step.
CHILD = """
import dataclasses, os, runpy, signal, sys
from flax_examples import data, loop, presets
interrupted = int(sys.argv[1])
tiny = presets.PRESETS["tiny"]
small = dataclasses.replace(tiny.model, layers=1)
presets.PRESETS["tiny"] = dataclasses.replace(tiny, model=small, eval_bytes=1024)
loop.LOG_EVERY = 1
batch, calls = data.Windows.batch, []
def interrupting(self, step, size):
    calls.append(step)
    if len(calls) == interrupted:
        os.kill(os.getpid(), signal.SIGTERM)
    return batch(self, step, size)
data.Windows.batch = interrupting
sys.argv[:2] = ["train"]
runpy.run_module("flax_examples.train", run_name="__main__")
"""


@pytest.fixture(scope="module", autouse=True)
def small_preset():
    with pytest.MonkeyPatch.context() as patch:
        small = dataclasses.replace(TINY, model=dataclasses.replace(TINY.model, layers=1), eval_bytes=1024)
        patch.setitem(presets.PRESETS, "tiny", small)
        patch.setattr(loop, "LOG_EVERY", 1)
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    for name in ("calendar", "copy", "csv", "glob"):
        (folder / f"{name}.py").write_bytes((library / f"{name}.py").read_bytes())
    return folder


@pytest.fixture(scope="module")
def alone(text, tmp_path_factory):
    """The folder of a run on one device of one process."""
    out = tmp_path_factory.mktemp("alone")
    assert train.main([*OPTIONS, "--data", str(text), "--out", str(out), "--stop-after", str(STEPS)]) == 0
    return out


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


def launch(count, out, *more, own=lambda number: [], interrupted=lambda number: 0, job=None):
    """(exit status, stdout, stderr) of each of `count` processes; with the number of a job, as Slurm starts them."""
    address = ["--coordinator", f"localhost:{free_port()}", "--processes", count]
    # Compiled as fast as the tests themselves, but with the devices that the options ask for.
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", ""))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    running = []
    deadline = time.monotonic() + DEADLINE
    for number in range(count):
        found = [*address, "--process-id", number] if job is None else ["--distributed"]
        arguments = [*OPTIONS, "--out", out, *more, *found, *own(number)]
        running.append(
            subprocess.Popen(
                [sys.executable, "-c", CHILD, *map(str, [interrupted(number), *arguments])],
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


def test_two_processes_have_one_devices_curve_and_their_checkpoint_goes_on_alone(alone, text, tmp_path, capfd):
    """Two devices each, heads spread within a process, the batch over both; to the end of the run on one device."""
    mesh = ["--cpu-devices", 2, "--mesh", "dp=2,tp=2", "--data", text]
    results = launch(2, tmp_path, *mesh, "--stop-after", STEPS)
    assert [code for code, _, _ in results] == [0, 0], shown(results)
    assert any("4 x cpu (cpu) in 2 processes, mesh dp=2, tp=2" in line for line in own_lines(results[0][1]))
    assert own_lines(results[0][2])[-1].startswith(f"stopped at step {STEPS} of 6, saved")
    assert not own_lines(results[1][1]) and not own_lines(results[1][2]), shown(results)
    assert_same_curve(history(tmp_path), history(alone))
    assert train.main(["--resume", "--out", str(tmp_path), "--sample-bytes", "16"]) == 0
    assert train.main(["--resume", "--out", str(alone), "--sample-bytes", "16"]) == 0
    capfd.readouterr()
    ends = [json.loads((out / "run.json").read_text())["bits_per_byte"]["after"] for out in (tmp_path, alone)]
    assert ends[0] == pytest.approx(ends[1], abs=BITS)


def test_four_processes_end_together_at_one_ones_signal(text, tmp_path, alone):
    """One device each, and rows of the parameters. Only the last process is interrupted, at the batch it makes fourth:
    at the fourth step, since it makes no other process's."""
    interrupted = lambda number: STEPS if number == 3 else 0  # noqa: E731
    results = launch(4, tmp_path, "--cpu-devices", 1, "--mesh", "dp=2,fsdp=2", "--data", text, interrupted=interrupted)
    assert [code for code, _, _ in results] == [128 + signal.SIGTERM] * 4, shown(results)
    assert own_lines(results[0][2])[-1].startswith(f"interrupted (SIGTERM) at step {STEPS} of 6, saved"), shown(results)
    assert not any(own_lines(out) or own_lines(err) for _, out, err in results[1:]), shown(results)
    found, wanted = history(tmp_path), history(alone)
    wanted = {"loss": wanted["loss"][:STEPS], "evals": [e for e in wanted["evals"] if e["step"] <= STEPS]}
    assert_same_curve(found, wanted)
    assert not (tmp_path / "run.json").exists()


def test_what_one_process_lacks_is_said_once_and_ends_all(text, tmp_path):
    """Started as by Slurm, which says what --distributed needs to know."""
    out = tmp_path / "out"
    own = lambda number: ["--data", "nowhere" if number == 1 else text]  # noqa: E731
    results = launch(2, out, "--cpu-devices", 1, own=own, job=free_port())
    assert [code for code, _, _ in results] == [2, 2], shown(results)
    wanted = "error: process 1: --data: found nothing at nowhere, wanted a folder or a file"
    assert own_lines(results[0][2]) == [wanted] and not own_lines(results[1][2]), shown(results)
    assert not out.exists()
