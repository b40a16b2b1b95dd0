"""What is left of a run: a table to read, the loss curve as PNG, everything as JSON."""

import importlib.metadata
import io
import json
import os
import pathlib
import platform

import jax
import numpy as np
from matplotlib.figure import Figure

from flax_examples.options import Settings


def device() -> str:
    devices = jax.devices()
    processes = f" in {jax.process_count()} processes" * (jax.process_count() > 1)
    return f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform}){processes}"


def versions() -> dict[str, str]:
    names = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in names}


def summary(record: dict) -> str:
    """What the run's JSON holds, to be read: the four figures side by side, speed, and the sample."""
    bits, scored, sample = record["bits_per_byte"], record["scored"], record["sample"]
    rows = {
        "model before training": bits["before"],
        f"model after {record['settings']['steps']} steps": bits["after"],
        f"order-2 model fitted on the {record['distinct_bytes_seen']:,} bytes seen": bits["order2_seen"],
        f"order-2 model fitted on all {record['data']['train_bytes']:,} bytes": bits["order2_whole"],
    }
    width = max(map(len, rows))
    packing = []
    if packed := record["packed"]:
        multiple = record["settings"]["pack_multiple"]
        packing.append(
            f"{packed['sequences']:,} sequences in {packed['rows']:,} rows, {packed['fill']:.1%} filled"
            + f"; each starts at a multiple of {multiple}" * (multiple > 1)
        )
    return "\n".join(
        [
            f"\nbits per byte over {scored['heldout_bytes']:,} held-out bytes in {scored['windows']} windows:",
            *(f"  {name:{width}}  {value:6.3f}" for name, value in rows.items()),
            *packing,
            f"{record['tokens']:,} tokens, {record['tokens_per_second']:,} a second in training;"
            f" {record['seconds'] / 60:.1f} minutes in all",
            "\nthe end of a held-out window, and after the mark what the model writes ({cached:,} bytes a second from"
            " its caches, {recomputed:,} reading all again for each):".format(**record["sample_bytes_per_second"]),
            f"{sample['prompt'][-160:]}\u2588{sample['text']}\n",
        ]
    )


def printable(text: bytes) -> str:
    """Text that a terminal can be given: what is not UTF-8, and control characters, are shown as U+FFFD."""
    decoded = text.decode(errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in decoded)


def curve(settings: Settings, history: dict, bits: dict[str, float]) -> bytes:
    """The loss curve as the bytes of a PNG."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(
        xlabel="step",
        ylabel="bits per byte",
        title=f"{settings.preset}, {settings.module}, {settings.dtype}, seed {settings.seed}"
        + f", {settings.recipe}" * (settings.recipe is not None)
        + ", packed" * settings.pack,
    )
    steps, losses = np.array(history["loss"]).T
    axes.plot(steps, losses, linewidth=0.8, color="tab:blue", alpha=0.6, label="training")
    evals = history["evals"]
    axes.plot(
        [e["step"] for e in evals], [e["bits_per_byte"] for e in evals], "o-", color="tab:orange", label="held out"
    )
    axes.axhline(bits["order2_seen"], color="tab:gray", linestyle="--", label="order-2, bytes seen")
    axes.axhline(bits["order2_whole"], color="black", linestyle=":", label="order-2, whole training split")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=120)
    return image.getvalue()


def write(path: pathlib.Path, content: bytes) -> None:
    """Puts the whole file there or leaves what was there; OSError names the file."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def to_json(record: dict) -> bytes:
    """Raises ValueError for NaN and infinity, which JSON does not have."""
    return (json.dumps(record, indent=1, allow_nan=False) + "\n").encode()
