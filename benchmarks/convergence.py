"""How the example's model learns under each recipe, the same text in the same order, from the same initial values:
`python -m benchmarks.convergence --json PATH --picture PATH` (minutes a run on two CPU cores). `--preset`, `--dtype`,
`--steps` and `--seed` are the example's own.
"""

import argparse
import datetime
import io
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

RECIPES = ("none", "fp8", "fp8_block", "mxfp8")
WIDTH = 8  # entries of a curve that are averaged for the picture: single steps are noise
KEPT = ("settings", "device", "versions", "parameters", "bits_per_byte", "scored", "tokens", "tokens_per_second")
KEPT += ("evals", "loss")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.convergence",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES[:3], help="default: %(default)s")
    parser.add_argument("--json", type=Path, required=True, help="write the results there")
    parser.add_argument("--picture", type=Path, help="and their curves, a PNG")
    args, options = parser.parse_known_args(argv)
    asked = " ".join(["--recipes", *args.recipes, *map(shlex.quote, options)])
    command = f"python -m benchmarks.convergence {asked}"
    report = {"command": command, "date": datetime.date.today().isoformat(), "runs": {}}
    for recipe in args.recipes:
        report["runs"][recipe] = train([*options, *(() if recipe == "none" else ("--recipe", recipe))])
    args.json.write_text(json.dumps(report, indent=None, separators=(",", ":")) + "\n", encoding="utf-8")
    if args.picture:
        args.picture.write_bytes(picture(report))
    print(table(report))
    return 0


def train(options: list[str]) -> dict:
    """What a run with these options says of itself, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        subprocess.run([sys.executable, "-m", "flax_examples.train", "--out", out, *options], check=True)
        record = json.loads((out / "run.json").read_text(encoding="utf-8"))
    return {name: record[name] for name in KEPT}


def table(report: dict) -> str:
    """Markdown: held-out bits per byte as training goes on, and at its end how far from the run without a recipe."""
    runs = report["runs"]
    plain = runs["none"]["bits_per_byte"]["after"] if "none" in runs else None
    steps = [e["step"] for e in next(iter(runs.values()))["evals"][1:]]
    lines = [["recipe", *(f"after {s:,} steps" for s in steps), "against none"]]
    lines.append(["---"] * len(lines[0]))
    for recipe, run in runs.items():
        bits = [f"{e['bits_per_byte']:.3f}" for e in run["evals"][1:]]
        off = "" if plain is None else f"{100 * (run['bits_per_byte']['after'] / plain - 1):+.2f} %"
        lines.append([recipe, *bits, "" if recipe == "none" else off])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def picture(report: dict) -> bytes:
    """Training loss and held-out bits of every run, and below how far each is from the one without a recipe."""
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    plain = smooth(report["runs"]["none"]["loss"])[1] if "none" in report["runs"] else None
    for i, (recipe, run) in enumerate(report["runs"].items()):
        steps, bits = smooth(run["loss"])
        above.plot(steps, bits, linewidth=1, color=f"C{i}", label=recipe)
        evals = np.array([(e["step"], e["bits_per_byte"]) for e in run["evals"]]).T
        above.plot(*evals, "o", color=f"C{i}", markersize=4)
        if plain is not None and recipe != "none":
            below.plot(steps, 100 * (bits / plain - 1), linewidth=1, color=f"C{i}", label=recipe)
    above.set(ylabel="bits per byte", ylim=(1.5, 5))
    above.legend(title="training; dots: held out")
    below.set(xlabel="step", ylabel="% more than none")
    below.axhline(0, color="black", linewidth=0.8)
    below.axhspan(-1, 1, color="tab:gray", alpha=0.2)
    for axes in (above, below):
        axes.grid(alpha=0.3)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=110)
    return image.getvalue()


def smooth(loss: list) -> tuple:
    import numpy as np

    steps, bits = np.array(loss).T
    kernel = np.ones(min(WIDTH, len(bits))) / min(WIDTH, len(bits))
    return np.convolve(steps, kernel, "valid"), np.convolve(bits, kernel, "valid")


if __name__ == "__main__":
    sys.exit(main())
