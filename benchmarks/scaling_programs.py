"""Compiles training steps of MLA, with the kernels in them, for GPUs that this machine does not have."""

import importlib.util
import os
import sys
import tempfile
from pathlib import Path

from benchmarks.scaling_model import A_MACHINE, BY_HEADS, TOKENS, Plan, policy

# What XLA asks about a GPU, as its own descriptions say.
_GPU = """
gpu_device_info {{
  cuda_compute_capability {{ {capability} }}
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  core_count: {cores}
  fpus_per_core: 128
  clock_rate_ghz: {clock}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  l2_cache_size: {l2}
  memory_bandwidth: {bandwidth}
  device_memory_size: {memory}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 19 }}
runtime_version {{ major: 12 minor: 8 }}
device_description_str: "{name}"
"""
CARDS = {
    "h200": dict(
        name="NVIDIA H200 141GB HBM3e",
        capability="major: 9",
        cores=132,
        clock=1.98,
        l2=52428800,
        bandwidth=4800000000000,
        memory=151397597184,
    ),
    "b200": dict(
        name="NVIDIA B200",
        capability="major: 10 feature_extension: ACCELERATED_FEATURES",
        cores=148,
        clock=1.965,
        l2=132644864,
        bandwidth=7672320000000,
        memory=191514411008,
    ),
}
CAPABILITY = {"h200": 90, "b200": 100}

# In order of preference, as `None` takes them on such a GPU: Blackwell refuses the fused up-projections, Hopper's.
IMPLEMENTATION = ("cudnn", "mosaic", "triton", "xla")

# Custom calls that are not XLA's own: Triton's, by jax-triton's version, Pallas Mosaic GPU's, cuDNN's.
TARGETS = ("triton_kernel_call", "triton_kernel_call_ffi", "mosaic_gpu_v2", "CuteDSLRT_NvJaxCutlassCall_v2")
TARGETS += ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward")

# MaxText's logical axes, over which mesh axis each; tokens, of which the batch has rows.
RULES = {"embed": "fsdp", "q_lora": "fsdp", "kv_lora": "fsdp", "q_heads": "tp", "kv_heads": "tp", "heads": "tp"}
BATCH, TOKEN_AXIS = ("dp", "fsdp"), None

# There is nothing to time GEMMs on: they are cuBLAS's, and programs are lists of launches that can be read.
XLA_FLAGS = (
    "--xla_gpu_enable_command_buffer= --xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"  # as in tests
)


def missing() -> str | None:
    """Why nothing can be compiled here, or None. Finds the PJRT library where `tests/run` puts it."""
    apart = Path(sys.prefix) / "pjrt"
    if apart.is_dir() and str(apart) not in sys.path:
        sys.path.append(str(apart))
    wanted = {
        "triton": "triton",
        "jax_triton": "jax-triton",
        "jax_cuda13_plugin": "jax-cuda13-plugin",
        "jax_plugins.xla_cuda13": "jax-cuda13-pjrt",
    }
    absent = [package for module, package in wanted.items() if not _importable(module)]
    if not absent:
        return None
    return f"found no {', '.join(absent)}, wanted what extra `cuda` installs (or `bash tests/run`, into .venv)"


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package
        return False


class Compiler:
    """`with Compiler() as compiler`: of a process's own, whose XLA reads flags once."""

    def __enter__(self) -> "Compiler":
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        # Triton's own ptxas and libdevice, laid out as XLA looks for them.
        nvidia = Path(importlib.util.find_spec("triton").origin).parent / "backends" / "nvidia"
        (folder / "bin").mkdir()
        (folder / "nvvm").mkdir()
        ptxas = max((nvidia / "bin").glob("ptxas*"), key=lambda path: path.name == "ptxas-blackwell")  # the newest
        (folder / "bin" / "ptxas").symlink_to(ptxas)
        (folder / "nvvm" / "libdevice").symlink_to(nvidia / "lib")
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["PATH"] = os.pathsep.join([str(folder / "bin"), os.environ.get("PATH", "")])
        os.environ["XLA_FLAGS"] = f"--xla_gpu_cuda_data_dir={folder} {XLA_FLAGS}"
        return self

    def __exit__(self, *_) -> None:
        self._folder.cleanup()

    def layer(self, card: str, plan: Plan):
        """One layer, forward and backward: y and all gradients from float32 parameters, x and y's cotangent."""
        import jax

        from jax_mla import mla

        mesh, config, params, x = self._arguments(card, plan)

        def step(params, x, dy):
            y, pullback = jax.vjp(lambda p, x: mla(p, x, config, implementation=IMPLEMENTATION), params, x)
            return y, pullback(dy)

        return self._compile(card, mesh, step, (x, (params, x)), (params, x, x))

    def stack(self, card: str, plan: Plan, layers: int, stack: str):
        """A step of Adam through as many layers, one after another in a scan, each added to its input."""
        import jax
        import jax.numpy as jnp

        from jax_mla import mla

        mesh, config, params, x = self._arguments(card, plan, layers, stack == BY_HEADS)

        def loss(params, x):
            def block(x, p):
                return x + mla(p, x, config, remat=policy(stack), implementation=IMPLEMENTATION), None

            y, _ = jax.lax.scan(block, x, params)
            return jnp.mean(jnp.square(y.astype(jnp.float32)))

        def step(params, mean, square, x):
            gradients = jax.grad(loss)(params, x)
            mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, gradients)
            square = jax.tree.map(lambda s, g: 0.95 * s + 0.05 * g * g, square, gradients)
            new = jax.tree.map(lambda p, m, s: p - 1e-4 * m / (jnp.sqrt(s) + 1e-8), params, mean, square)
            return new, mean, square

        return self._compile(card, mesh, step, (params,) * 3, (*(params,) * 3, x), donate=(0, 1, 2))

    def _arguments(self, card: str, plan: Plan, layers: int = 0, by_heads: bool = False):
        """The mesh, DeepSeek-V3's config, and the shapes and shardings of float32 parameters (of as many layers,
        stacked, or of one) and of x. by_heads: fsdp cuts wo by heads, like tp."""
        import jax
        import jax.numpy as jnp
        import numpy as np
        from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

        from jax_mla import MLAConfig, init, logical_axes

        # A machine's GPUs are neighbours along the last axes.
        devices = np.reshape(self.devices(card, plan.gpus), list(plan.axes.values()))
        mesh = Mesh(devices, tuple(plan.axes), axis_types=(AxisType.Auto,) * len(plan.axes))
        config = MLAConfig.deepseek_v3()

        def array(shape, dtype, spec):
            return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

        axes = logical_axes(config)
        shapes = jax.eval_shape(lambda: init(jax.random.key(0), config))
        stacked = [layers] if layers else []
        specs = {name: [RULES.get(axis) for axis in axes[name]] for name in shapes}
        if by_heads:
            specs["wo"] = [("tp", "fsdp")]
        params = {
            name: array((*stacked, *a.shape), a.dtype, [None] * len(stacked) + specs[name])
            for name, a in shapes.items()
        }
        x = array((plan.gpus, TOKENS, config.hidden_size), jnp.bfloat16, [BATCH, TOKEN_AXIS])
        return mesh, config, params, x

    def devices(self, card: str, count: int):
        from jax.experimental import topologies

        topology = f"{max(1, count // A_MACHINE)}x1x{min(count, A_MACHINE)}"
        config = _GPU.format(**CARDS[card])
        found = topologies.get_topology_desc("", "cuda", target_config=config, topology=topology).devices
        if len(found) != count:
            raise ValueError(f"gpus: found {count}, wanted at most {A_MACHINE} or whole machines of {A_MACHINE}")
        return found

    def _compile(self, card: str, mesh, step, outputs, arguments, donate=()):
        import jax

        from jax_mla import compile_for

        shardings = jax.tree.map(lambda a: a.sharding, outputs)
        with compile_for(CAPABILITY[card]), jax.set_mesh(mesh):
            traced = jax.jit(step, out_shardings=shardings, donate_argnums=donate).trace(*arguments)
            return traced.lower(lowering_platforms=("cuda",)).compile()
