"""What every test runs under: 8 fake CPU devices, exact matmuls, and markers that skip with a reason."""

import importlib.metadata
import importlib.util
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Tests run from a checkout: flax_examples and benchmarks are not installed. The root comes last, so that its folder
# kernels/ does not hide the published package of that name, which transformers imports.
sys.path[:] = [
    str(ROOT / "tests"),
    *(entry for entry in sys.path if Path(entry).resolve() != ROOT),
    str(ROOT),
]
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # For this run of the suite: its workers and the processes that tests start compile much that another has compiled.
    _compiled = tempfile.TemporaryDirectory(prefix="jax_mla-tests-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled.name
    os.environ |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    # Most of the suite's time is compiling: what LLVM makes faster buys nothing at these sizes.
    os.environ["XLA_FLAGS"] = " ".join(
        [
            os.environ.get("XLA_FLAGS", ""),
            "--xla_force_host_platform_device_count=8",
            "--xla_llvm_disable_expensive_passes=true",
            "--xla_backend_optimization_level=0",
            # A module in 32 parts is for machines with more cores than tests run at once.
            "--xla_cpu_parallel_codegen_split_count=1",
        ]
    )
    if importlib.metadata.version("jaxlib").startswith("0.10."):  # 0.11.2 ends at a flag that it does not know
        # The older emitters of loops give LLVM half as much to compile; XLA_FLAGS with a device count keeps XLA's own.
        os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_default_matmul_precision", "highest")


def pytest_configure(config):
    # Meshes here are of CPU devices, and compiled text is the CPU's: only `-m gpu` looks for a GPU.
    if config.option.markexpr != "gpu":
        jax.config.update("jax_platforms", "cpu")


def pytest_collection_modifyitems(items):
    gpus = [d for d in jax.devices() if d.platform == "gpu"]
    absent = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    for item in items:
        if "gpu" in item.keywords and not gpus:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU (`tests/run -m gpu`); jax sees none"))
        if "golden" in item.keywords and absent:
            item.add_marker(pytest.mark.skip(reason=f"needs {' and '.join(absent)} (extra `golden`)"))


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield
