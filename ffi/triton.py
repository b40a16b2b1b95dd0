"""Launches Triton kernels from JAX: one place for what differs between jax-triton 0.3.1 and 0.4, and between jaxes.

Neither triton nor jax-triton is imported before the first launch. A call is opaque to vmap, which loops over the batch
unless who launches has a rule of its own; derivatives are the ops' own. Custom calls take row-major arrays; where one
output shares an input's buffer (`Launch.aliases`), XLA copies the input first if anything else still reads it.
"""

import contextlib
import contextvars
import functools
import importlib.util
import inspect
import os

import jax
from jax_mla.ffi.varying import vary_like

_capability = contextvars.ContextVar("compute_capability", default=None)

# The names of the custom calls in lowered text, by jax-triton's version.
TARGETS = ("triton_kernel_call", "triton_kernel_call_ffi")


@contextlib.contextmanager
def compile_for(compute_capability: int):
    """Within it, programs are traced for that GPU (90 is Hopper, 100 Blackwell), whether or not there is one here: what
    lowering with `lowering_platforms=("cuda",)` on another machine needs.

    compute_capability: ten times the major plus the minor one, as an int. Raises ValueError for anything else.
    """
    if isinstance(compute_capability, bool) or not isinstance(compute_capability, int) or compute_capability < 10:
        raise ValueError(f"compute_capability: found {compute_capability!r}, wanted an int like 90, for 9.0")
    token = _capability.set(compute_capability)
    try:
        yield
    finally:
        _capability.reset(token)


def compute_capability() -> int | None:
    """Of the GPU that programs are traced for: that of `compile_for`, else the default device's; None without a GPU."""
    asked = _capability.get()
    if asked is not None or _platform() not in ("gpu", "cuda"):
        return asked
    device = jax.config.jax_default_device
    device = device if hasattr(device, "platform") else jax.devices(device)[0]
    major, _, minor = device.compute_capability.partition(".")  # "10.0"; AMD's have letters
    return int(major + minor) if (major + minor).isdecimal() else None


def unavailable() -> str | None:
    """Why Triton kernels cannot be launched here, or None."""
    absent = [name for name in ("triton", "jax_triton") if importlib.util.find_spec(name) is None]
    if absent:
        return f"needs {' and '.join(absent)} (extra `cuda`)"
    if _capability.get() is None and _platform() not in ("gpu", "cuda"):
        return f"needs an NVIDIA GPU; jax's default backend here is {_platform()}"
    return None


def _platform() -> str:
    """Where a program that says nothing else will run."""
    device = jax.config.jax_default_device  # a device, a platform's name, or None
    return getattr(device, "platform", device) or jax.default_backend()


@functools.cache
def _jax_triton():
    cache = os.environ.get("TRITON_CACHE_DIR")
    import jax_triton

    # 0.3.1 sets it to "", for every other user of triton in the process.
    if cache is None:
        os.environ.pop("TRITON_CACHE_DIR", None)
    else:
        os.environ["TRITON_CACHE_DIR"] = cache
    _repair_dce()
    return jax_triton


def _repair_dce() -> None:
    """jax 0.12 calls rules of dead code elimination with one argument more than jax-triton 0.4.1's takes: without this
    every jit of a launch fails. (Ours have no side effects: dropped if nothing reads them, else kept whole.)"""
    from jax.interpreters import partial_eval as pe
    from jax_triton import triton_lib

    primitive = triton_lib.triton_kernel_call_p
    rules = getattr(pe, "dce_rules", None)
    if rules is None or primitive not in rules:
        return

    def rule(used, equation, *_):
        return [any(used)] * len(equation.invars), equation if any(used) else None

    rules[primitive] = rule


def call(launch, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The outputs of a `kernels.launch.Launch` on these arrays, whose shapes and dtypes the launch was made for."""
    if len(arrays) != launch.inputs:
        raise ValueError(f"arrays: found {len(arrays)}, wanted the {launch.inputs} inputs of {launch.kernel.__name__}")
    capability = _capability.get()

    @jax.custom_batching.sequential_vmap
    def run(*arrays):
        return tuple(vary_like(o, *arrays) for o in _triton_call(launch, capability, arrays))

    return run(*arrays)


def _triton_call(launch, capability, arrays):
    jt = _jax_triton()
    outputs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in launch.outputs]
    options = dict(kernel=launch.kernel, grid=launch.grid, num_warps=launch.num_warps, num_stages=launch.num_stages)
    if capability is not None:
        options["compute_capability"] = capability
    if launch.aliases:
        options["input_output_aliases"] = dict(launch.aliases)
    # No fused multiply-add: results are to be the same bits whatever triton's default is.
    if "out_type" in inspect.signature(jt.triton_call).parameters:
        options |= dict(out_type=outputs, backend_options={"enable_fp_fusion": False})
        # An output that is an input's buffer has no pointer of its own there.
        options |= {launch.kernel.arg_names[launch.inputs + output]: None for _, output in launch.aliases}
    else:
        options |= dict(out_shape=outputs, enable_fp_fusion=False)
    return jt.triton_call(*arrays, **options, **dict(launch.constants))
