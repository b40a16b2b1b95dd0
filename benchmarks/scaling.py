"""What a training step of DeepSeek-V3's attention holds and says on each of many GPUs, from programs that XLA compiles
for them on a CPU: `python -m benchmarks.scaling --gpus 8 64 256 --card h200 --json PATH`. Compiled, not run.

For every mesh of `scaling_model.PLANS`: one layer, forward and backward, and a step of Adam through `--layers` of them
by remat policy. Parameters are float32 and sharded by FSDP, computing is in bfloat16, a GPU has one row of tokens.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import sys

from benchmarks import scaling_hlo, scaling_programs
from benchmarks.scaling_model import KINDS, LAYERS, PLANS, TOKENS, sent, stacks, total
from benchmarks.scaling_table import peak


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    counts = sorted({plan.gpus for plan in PLANS})
    parser.add_argument("--gpus", type=int, nargs="+", choices=counts, default=counts, help="by default all")
    parser.add_argument("--card", choices=sorted(scaling_programs.CARDS), default="h200")
    parser.add_argument("--layers", type=_positive, default=LAYERS, help=f"of attention in the stack, {LAYERS}")
    parser.add_argument("--json", metavar="PATH", help="write the results there")
    args = parser.parse_args(argv)
    reason = scaling_programs.missing()
    if reason is not None:
        parser.error(reason)
    report = header(args.card, args.layers) | {"command": _command(args), "rows": []}
    with scaling_programs.Compiler() as compiler:
        for plan in PLANS:
            if plan.gpus not in args.gpus:
                continue
            row = {"gpus": plan.gpus, "mesh": plan.axes, "layer": described(compiler.layer(args.card, plan))}
            row["stack"] = {s: described(compiler.stack(args.card, plan, args.layers, s)) for s in stacks(plan)}
            report["rows"].append(row)
            print("\n".join(_lines(plan, row, report["memory_bytes"])), flush=True)
    if args.json:
        write(args.json, report)
    return 0


def header(card: str, layers: int) -> dict:
    """What results say of themselves but for the command."""
    return {
        "card": card,
        "device": scaling_programs.CARDS[card]["name"],
        "memory_bytes": scaling_programs.CARDS[card]["memory"],
        "compiled": "for GPUs that are not there, and not run",
        "layers": layers,
        "tokens_a_gpu": TOKENS,
        "implementation": list(scaling_programs.IMPLEMENTATION),
        "versions": _versions(),
        "xla_flags": scaling_programs.XLA_FLAGS,
        "date": datetime.date.today().isoformat(),
    }


def write(path: str, report: dict) -> None:
    with open(path + ".partial", "w", encoding="utf-8") as file:
        json.dump(report, file, indent=1)
        file.write("\n")
    os.replace(path + ".partial", path)


def described(compiled) -> dict:
    """Of a compiled program, on each GPU: bytes of what it is given, gives and holds besides; what it says to others;
    how often it calls which of our kernels, and cuDNN's attention."""
    memory, text = compiled.memory_analysis(), compiled.as_text()
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "aliased_bytes": memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "collectives": scaling_hlo.collectives(text),
        "custom_calls": scaling_hlo.custom_calls(text, scaling_programs.TARGETS),
    }


def _lines(plan, row: dict, memory: int):
    layer, gib = row["layer"], 2**30
    yield (
        f"{row['gpus']:4} GPUs, {plan}: a layer's arguments {layer['argument_bytes'] / gib:.2f} GiB, temporaries"
        f" {layer['temporary_bytes'] / gib:.2f} GiB; kernels {layer['custom_calls']}"
    )
    for kind in KINDS:
        arrays = layer["collectives"].get(kind)
        if arrays:
            yield f"     {kind}: {total(arrays) / 1e6:,.1f} MB, of which a GPU sends {sent(kind, arrays) / 1e6:,.1f}"
    for name, program in row["stack"].items():
        fits = "fits" if peak(program) <= memory else "does not fit"
        yield f"     the stack, {name}: {peak(program) / gib:.1f} GiB of {memory / gib:.1f}: {fits}"


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("jax", "jaxlib", "jax-cuda13-pjrt", "triton", "jax-triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _command(args) -> str:
    """The command that makes these results again, wherever they are then written."""
    asked = ["--gpus", *map(str, args.gpus), "--card", args.card]
    asked += ["--layers", str(args.layers)] * (args.layers != LAYERS)
    return shlex.join(["python", "-m", "benchmarks.scaling", *asked])


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, wanted a whole number of at least 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
