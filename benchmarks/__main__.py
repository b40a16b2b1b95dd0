"""Times ops against what JAX users write, side by side in one run, and checks each timed result."""

import argparse
import contextlib
import dataclasses
import datetime
import functools
import importlib.metadata
import itertools
import json
import os
import platform
import shlex
import sys

import jax

import jax_mla
from benchmarks import layers, ops, timing
from benchmarks.cases import Case, Inputs
from jax_mla import MLAConfig


@dataclasses.dataclass(frozen=True)
class Preset:
    config: MLAConfig
    batch: int
    tokens: int  # a batch row
    dtype: str


def _plain(config: MLAConfig) -> MLAConfig:
    """Without YaRN, which changes tables and a factor alone."""
    return dataclasses.replace(config, rope=jax_mla.RopeConfig())


PRESETS = {
    "small-cpu": Preset(MLAConfig(512, 8, 256, 128, 64, 32, 64), 1, 1024, "float32"),
    "deepseek_v3": Preset(_plain(MLAConfig.deepseek_v3()), 2, 4096, "bfloat16"),
    "deepseek_v2_lite": Preset(_plain(MLAConfig.deepseek_v2_lite()), 2, 4096, "bfloat16"),
}


def op_rows(name: str, preset: Preset, tokens: int, repeats: int, seed: int) -> list[dict]:
    """An op of `benchmarks.ops`: every pass of it, every implementation that can run, side by side."""
    return [row for case in ops.OPS[name](Inputs(preset, tokens, seed)) for row in _case_rows(name, case, repeats)]


def _case_rows(op: str, case: Case, repeats: int) -> list[dict]:
    with jax.default_matmul_precision("highest"):
        wanted = jax.jit(lambda *args: case.read(case.reference(*args)))(*case.args)
    errors, peaks, timed, sets = {}, {}, {}, [case.args]
    functions = case.candidates | ({} if case.before is None else {"producer": case.before})
    for name, function in functions.items():
        try:
            compiled = jax.jit(function, donate_argnums=(0,) if case.donate else ()).lower(*case.args).compile()
            if name != "producer":
                errors[name] = case.error(jax.jit(case.read)(compiled(*timing.fresh(case.args, case.donate))), wanted)
                peaks[name] = compiled.memory_analysis().temp_size_in_bytes
            timed[name] = timing.prepare(function, compiled, sets, case.donate)
        except Exception as reason:  # a peer may be too large for the memory, or refuse these shapes; ours says so
            if not name.startswith("jnp_") and not isinstance(reason, NotImplementedError):
                raise
            first = str(reason).partition("\n")[0]
            print(f"left out: {op} {case.direction} by {name}: {type(reason).__name__}: {first}", file=sys.stderr)
    del wanted
    times = timing.side_by_side(timed, repeats)
    off = times.pop("producer")[0] if case.before is not None else 0.0
    rows = []
    for name, (ms, spread) in times.items():
        ms -= off
        row = dict(op=op, direction=case.direction, variant=case.variant, implementation=name)
        row |= dict(ms=ms, spread=spread, error=errors[name], peak_bytes=peaks[name])
        row |= dict(tflops=case.flops and case.flops / ms / 1e9, gbps=case.bytes and case.bytes / ms / 1e6)
        rows.append(row)
    return rows


OPS = {"layer": layers.layer, "layer_mxfp8": functools.partial(layers.layer, recipe="mxfp8")}
OPS["layer_fp8"] = layers.layer_fp8
OPS |= {name: functools.partial(op_rows, name) for name in ops.OPS}
CEILINGS = {"copy": "gbps", "gemm": "tflops"}  # by the rate that each is one of
UNKNOWN = {"variant": None, "tflops": None, "gbps": None}  # what not every op's rows have


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("ops", nargs="+", choices=sorted(OPS), metavar="OP", help=f"of {', '.join(sorted(OPS))}")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="small-cpu")
    parser.add_argument("--tokens", type=_positive, nargs="+", help="tokens a batch row, by default the preset's")
    parser.add_argument("--repeats", type=_positive, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="PATH", help="write the results there")
    args = parser.parse_args(argv)
    if args.json is not None:
        _check_writable(parser, args.json)
    preset = PRESETS[args.preset]
    for op, tokens in itertools.product(args.ops, args.tokens or [preset.tokens]):
        multiple = 32 if "mxfp8" in op or op == "dequantize" else 8 if op == "attention_packed" else 1
        if tokens % multiple:
            parser.error(f"--tokens: found {tokens}, wanted a multiple of {multiple} for {op}")
    report = {
        "device": _device(),
        "versions": _versions(),
        "command": _command(sys.argv[1:] if argv is None else argv),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "date": datetime.date.today().isoformat(),
        "rows": [],
    }
    rows = report["rows"]
    print(
        f"{'op':17}{'pass':8}{'variant':11}{'by':10}{'tokens':>7}{'ms':>10}{'spread':>8}{'TFLOP/s':>9}{'GB/s':>9}"
        f"{'of':>11}{'error':>9}{'temporaries':>13}"
    )
    for op in _with_ceilings(args.ops):
        for tokens in args.tokens or [preset.tokens]:
            common = {"preset": args.preset, "tokens": preset.batch * tokens}
            found = OPS[op](preset, tokens, args.repeats, args.seed)
            found = [{"op": r.pop("op"), "pass": r.pop("direction"), **common, **UNKNOWN, **r} for r in found]
            rows += found
            for row in found:
                row["ceiling"], row["fraction"] = _ceiling(row, rows)
                print(_line(row), flush=True)
            if args.json:  # so far: a later op may fail
                with open(args.json + ".partial", "w", encoding="utf-8") as file:
                    json.dump(report, file, indent=1)
                    file.write("\n")
    if args.json:
        os.replace(args.json + ".partial", args.json)
    return 0


def _with_ceilings(asked: list[str]) -> list[str]:
    """The ops in order, the ceilings first, which on a GPU are always measured."""
    wanted = [op for op in CEILINGS if op in asked or jax.default_backend() == "gpu"]
    return wanted + [op for op in asked if op not in CEILINGS]


def _ceiling(row: dict, rows: list[dict]) -> tuple[str | None, float | None]:
    """Which ceiling a row comes nearest to, hence what the op is bound by, and what fraction of it; None where the run
    did not measure one that counts."""
    fractions = {}
    for op, rate in CEILINGS.items():
        if row[rate] is not None:
            measured = [r[rate] for r in rows if (r["op"], r["tokens"]) == (op, row["tokens"])]
            if not measured:
                return None, None
            fractions[op] = row[rate] / max(measured)
    nearest = max(fractions, key=fractions.get, default=None)
    return nearest, fractions.get(nearest)


def _line(row: dict) -> str:
    rates = ("" if row[name] is None else f"{row[name]:.{0 if row[name] > 99 else 1}f}" for name in ("tflops", "gbps"))
    ceiling = "" if row["ceiling"] is None else f"{row['ceiling']} {row['fraction']:.2f}"
    return (
        f"{row['op']:17}{row['pass']:8}{row['variant'] or '':11}{row['implementation']:10}{row['tokens']:7}"
        f"{row['ms']:10.4f}{row['spread']:8.4f}" + "".join(f"{rate:>9}" for rate in rates) + f"{ceiling:>11}"
        f"{row['error']:9.1e}{row['peak_bytes'] / 2**20:9.1f} MiB"
    )


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "jax_mla": jax_mla.__version__}
    for name in ("jax", "jaxlib", "numpy", "triton", "jax-triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _check_writable(parser: argparse.ArgumentParser, path: str) -> None:
    """Before the work, not after it."""
    try:
        if os.path.isdir(path) or not path:
            raise IsADirectoryError(0, "found a folder or no name, wanted a file")
        with open(path + ".partial", "w"):
            pass
        os.remove(path + ".partial")
    except OSError as error:
        parser.error(f"--json: cannot write {path!r}: {error.strerror}")


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
