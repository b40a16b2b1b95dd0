"""Every process lowers the layer to one text: nothing is chosen by what a process measures, finds cached or hashes."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
NEEDS = ("triton", "jax_triton", "jax_cuda13_plugin")  # to lower for CUDA
# By program, what is printed: the hash of its text, and its custom calls of our kernels and of cuDNN's attention.
CHILD = """
import hashlib, json, re, sys
sys.path.insert(0, sys.argv[1])
import jax, jax.numpy as jnp, lowering
from jax_mla import mla

PROGRAMS = {"cpu": ("cpu", "xla"), "cuda, Triton": ("cuda", ("triton", "xla")), "cuda, what None takes": ("cuda", None)}
found = {}
params, x = lowering.PARAMS, lowering.array(lowering.B, lowering.T, lowering.CONFIG.hidden_size)
for name in sys.argv[2:]:
    platform, implementation = PROGRAMS[name]

    def loss(params, x):
        y = mla(params, x, lowering.CONFIG, implementation=implementation)
        return jnp.sum(y.astype(jnp.float32))

    step = jax.jit(jax.value_and_grad(loss, (0, 1)))
    with lowering.compile_for(90):
        text = step.trace(params, x).lower(lowering_platforms=(platform,)).as_text()
    calls = re.findall(r"custom_call @([\\w$]+)", text)
    counts = [sum(c in targets for c in calls) for targets in (lowering.TARGETS, lowering.cudnn_attention.TARGETS)]
    found[name] = hashlib.sha256(text.encode()).hexdigest(), *counts
print(json.dumps(found))
"""


def test_processes_lower_the_layer_to_one_text(tmp_path):
    """Case 45 of public reports. The second process orders sets otherwise, and finds no kernel compiled before."""
    programs = ["cpu"]
    if all(importlib.util.find_spec(module) for module in NEEDS):
        programs += ["cuda, Triton", "cuda, what None takes"]
    same = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "XLA_FLAGS")}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, str(TESTS), *programs],
            env=same | own,
            cwd=TESTS.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for own in ({"PYTHONHASHSEED": "1"}, {"PYTHONHASHSEED": "2", "TRITON_CACHE_DIR": str(tmp_path)})
    ]
    outputs = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0, 0], [error[-3000:] for _, error in outputs]
    first, second = (json.loads(output.splitlines()[-1]) for output, _ in outputs)
    assert first == second
    # They are the programs that they are called.
    kernels = {name: (ours > 0, cudnn > 0) for name, (_, ours, cudnn) in first.items()}
    chosen = {"cpu": (False, False), "cuda, Triton": (True, False), "cuda, what None takes": (True, True)}
    assert kernels == {name: chosen[name] for name in programs}
