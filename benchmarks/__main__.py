"""Times ops against what JAX users write, side by side in one run, and checks each timed result."""

import argparse
import dataclasses
import datetime
import functools
import importlib.metadata
import json
import os
import platform
import shlex
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jax_mla
from benchmarks import ops, peers, timing
from jax_mla import MLAConfig


@dataclasses.dataclass(frozen=True)
class Preset:
    config: MLAConfig
    batch: int
    tokens: int  # a batch row
    dtype: str


PRESETS = {
    "small-cpu": Preset(MLAConfig(512, 8, 256, 128, 64, 32, 64), 1, 1024, "float32"),
    "deepseek_v3": Preset(dataclasses.replace(MLAConfig.deepseek_v3(), rope=jax_mla.RopeConfig()), 2, 4096, "bfloat16"),
}


def layer(preset: Preset, tokens: int, repeats: int, seed: int, recipe: str | None = None) -> list[dict]:
    """The whole layer: output alone, and output with all gradients (parameters' and input's)."""
    config, dtype = preset.config, jnp.dtype(preset.dtype)
    keys = jax.random.split(jax.random.key(seed), 3)
    params = jax.jit(lambda key: jax_mla.init(key, config))(keys[0])
    x = jax.random.normal(keys[1], (preset.batch, tokens, config.hidden_size), dtype)
    dy = jax.random.normal(keys[2], x.shape, dtype)

    def gradients(function):
        def step(params, x, dy):
            y, vjp = jax.vjp(lambda params, x: function(params, x, config), params, x)
            return y, vjp(dy)

        return step

    def exact(params, x, dy):
        """The usual layer in float32, a batch row at a time: all its logits at once would not fit beside the rest."""
        with jax.default_matmul_precision("highest"):
            row = jax.jit(gradients(peers.jnp_usual_layer))
            wide = jax.device_get((x, dy))
            rows = [
                jax.device_get(row(params, *(jnp.asarray(a[i : i + 1], jnp.float32) for a in wide)))
                for i in range(len(x))
            ]
        ys, grads = zip(*rows, strict=True)
        dparams, dxs = zip(*grads, strict=True)
        return np.concatenate(ys), (jax.tree.map(lambda *leaves: sum(leaves), *dparams), np.concatenate(dxs))

    ours = {n: functools.partial(jax_mla.mla, recipe=recipe, implementation=(n, "xla")) for n in ops.names()}
    implementations = ours | {"jnp_usual": peers.jnp_usual_layer}
    rows = []
    for direction in ("fwd", "fwd_bwd"):
        compiled = {}
        for name, function in implementations.items():
            step = gradients(function) if direction == "fwd_bwd" else lambda p, x, dy, f=function: f(p, x, config)
            compiled[name] = jax.jit(step).lower(params, x, dy).compile()
        wanted = exact(params, x, dy)
        if direction == "fwd":
            wanted = wanted[0]
        times = timing.side_by_side({n: lambda c=c: c(params, x, dy) for n, c in compiled.items()}, repeats)
        for name, executable in compiled.items():
            ms, spread = times[name]
            row = dict(op="layer", direction=direction, implementation=name)
            row |= dict(ms=ms, spread=spread, error=timing.worst_error(executable(params, x, dy), wanted))
            row |= dict(peak_bytes=executable.memory_analysis().temp_size_in_bytes)
            rows.append(row)
    return rows


def op_rows(name: str, preset: Preset, tokens: int, repeats: int, seed: int) -> list[dict]:
    """An op of `benchmarks.ops`: every pass of it, every implementation that can run, side by side."""
    rows = []
    dispatches = 20 if jax.default_backend() == "gpu" else 1
    for case in ops.OPS[name](ops.Inputs(preset, tokens, seed)):
        donated = (0,) if case.donate else ()
        functions = dict(case.candidates)
        if case.before is not None:
            functions["producer"] = case.before
        compiled = {n: jax.jit(f, donate_argnums=donated).lower(*case.args).compile() for n, f in functions.items()}
        fresh = lambda args: jax.tree.map(lambda a: a + 0, args[:1]) + args[1:] if case.donate else args  # noqa: B023, E731
        found = {n: executable(*fresh(case.args)) for n, executable in compiled.items() if n != "producer"}
        with jax.default_matmul_precision("highest"):
            wanted = found["xla"] if case.reference is None else jax.jit(case.reference)(*case.args)
        errors = {n: ops.error(result, wanted) for n, result in found.items()}
        del wanted
        del found

        def runner(executable, args):
            state = list(args)

            def run():
                result = executable(*state)
                if case.donate:  # noqa: B023  the result is the next call's argument
                    state[0] = result
                return result

            return run

        times = timing.side_by_side(
            {n: runner(executable, fresh(case.args)) for n, executable in compiled.items()}, repeats, dispatches
        )
        off = times["producer"][0] if case.before is not None else 0.0
        for n in case.candidates:
            ms = times[n][0] - off
            row = dict(op=name, direction=case.direction, implementation=n, ms=ms, spread=times[n][1], error=errors[n])
            row |= dict(tflops=case.flops / ms / 1e9 if case.flops else None)
            row |= dict(gbps=case.bytes / ms / 1e6 if case.bytes else None)
            rows.append(row | dict(peak_bytes=compiled[n].memory_analysis().temp_size_in_bytes))
    return rows


def layer_mxfp8(preset: Preset, tokens: int, repeats: int, seed: int) -> list[dict]:
    return [row | dict(op="layer_mxfp8") for row in layer(preset, tokens, repeats, seed, recipe="mxfp8")]


OPS = {"layer": layer, "layer_mxfp8": layer_mxfp8}
OPS |= {name: functools.partial(op_rows, name) for name in ops.OPS}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("ops", nargs="+", choices=sorted(OPS), metavar="OP", help=f"of {', '.join(sorted(OPS))}")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="small-cpu")
    parser.add_argument("--tokens", type=_positive, nargs="+", help="tokens a batch row, by default the preset's")
    parser.add_argument("--repeats", type=_positive, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="PATH", help="write the results there")
    args = parser.parse_args(argv)
    if args.json:
        try:  # before the work, not after it
            open(args.json + ".partial", "w").close()
        except OSError as error:
            parser.error(f"--json: cannot write {args.json}: {error.strerror}")
    preset = PRESETS[args.preset]
    rows = []
    print(f"{'op':15}{'pass':15}{'by':12}{'tokens':>8}{'ms':>10}{'spread':>9}{'error':>10}{'temporaries':>14}")
    for op in args.ops:
        for tokens in args.tokens or [preset.tokens]:
            for row in OPS[op](preset, tokens, args.repeats, args.seed):
                row = {"op": row.pop("op"), "pass": row.pop("direction"), **row}
                row = {"tflops": None, "gbps": None} | row | {"preset": args.preset, "tokens": preset.batch * tokens}
                rows.append(row)
                print(
                    f"{row['op']:15}{row['pass']:15}{row['implementation']:12}{row['tokens']:8}{row['ms']:10.3f}"
                    f"{row['spread']:9.3f}{row['error']:10.1e}{row['peak_bytes'] / 2**20:10.1f} MiB"
                )
    if args.json:
        report = {
            "device": _device(),
            "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy")}
            | {"python": platform.python_version(), "jax_mla": jax_mla.__version__},
            "command": _command(sys.argv[1:] if argv is None else argv),
            "date": datetime.date.today().isoformat(),
            "rows": rows,
        }
        temporary = args.json + ".partial"
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)
            file.write("\n")
        os.replace(temporary, args.json)
    return 0


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, wanted a whole number of at least 1")
    return value


def _command(argv: list[str]) -> str:
    """The command that makes these rows again, wherever they are then written."""
    after = [False] + [argument == "--json" for argument in argv]
    kept = [a for a, is_path in zip(argv, after, strict=False) if not is_path and a.partition("=")[0] != "--json"]
    return shlex.join(["python", "-m", "benchmarks", *kept])


def _device() -> str:
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            model = next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


if __name__ == "__main__":
    sys.exit(main())
