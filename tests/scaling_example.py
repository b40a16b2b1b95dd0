"""Compiles the example's training step, in DeepSeek-V3's dims, for GPUs that are not there, as `benchmarks.scaling`
does the layer: `python tests/scaling_example.py --card h200 --json PATH`. In tests because benchmarks do not import
the example. A process of its own: XLA reads its flags once.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import scaling, scaling_programs
from benchmarks.scaling_model import TOKENS, Plan

PLANS = (Plan(fsdp=8), Plan(fsdp=4, tp=2), Plan(fsdp=64), Plan(dp=32, fsdp=8))
DEPTH, WIDTH = 4, 18432  # blocks, which are not in a scan; DeepSeek-V3's dense MLP


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--card", choices=sorted(scaling_programs.CARDS), default="h200")
    parser.add_argument("--gpus", type=int, nargs="+", default=sorted({plan.gpus for plan in PLANS}))
    parser.add_argument("--json", metavar="PATH")
    args = parser.parse_args()
    reason = scaling_programs.missing()
    if reason is not None:
        parser.error(reason)
    report = scaling.header(args.card, DEPTH) | {"ffn_dim": WIDTH, "implementation": None}
    report |= {"command": f"python tests/scaling_example.py --card {args.card}", "rows": []}
    with scaling_programs.Compiler() as compiler:
        for plan in PLANS:
            if plan.gpus in args.gpus:
                row = {"gpus": plan.gpus, "mesh": plan.axes, "step": scaling.described(step(compiler, args.card, plan))}
                report["rows"].append(row)
                print(json.dumps(row), flush=True)
    if args.json:
        scaling.write(args.json, report)


def step(compiler, card: str, plan: Plan):
    """The example's own `train_step`, AdamW and clipping in it, one window of tokens a GPU."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import AxisType, Mesh

    from flax_examples import loop, mesh, options
    from flax_examples.model import ModelConfig
    from jax_mla import MLAConfig, compile_for

    devices = np.reshape(compiler.devices(card, plan.gpus), [plan.axes.get(axis, 1) for axis in mesh.AXES])
    layout = mesh.Layout(Mesh(devices, tuple(mesh.AXES), axis_types=(AxisType.Auto,) * devices.ndim))
    settings = options.Settings(
        about="",
        model=ModelConfig(MLAConfig.deepseek_v3(), layers=DEPTH, ffn_dim=WIDTH),
        window=TOKENS,
        batch=plan.gpus,
        steps=100,
        learning_rate=1e-4,
        dtype="bfloat16",
    )
    with compile_for(scaling_programs.CAPABILITY[card]):
        programs = loop.programs(settings, layout)
        windows = jax.ShapeDtypeStruct((plan.gpus, TOKENS + 1), jnp.uint8, sharding=layout.sharding("batch", None))
        lowered = programs.train_step.trace(*programs.wanted, windows).lower(lowering_platforms=("cuda",))
        return lowered.compile()


if __name__ == "__main__":
    main()
