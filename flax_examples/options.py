"""The command line, and what a run is settled to be: options over a checkpoint's settings over the preset's."""

import argparse
import dataclasses
import itertools
import json
import math
import pathlib

import jax

from flax_examples import mesh
from flax_examples.data import InputError
from flax_examples.model import MODULES
from flax_examples.presets import PRESETS, Preset

# Options that are settings of the run: they are stored in its checkpoints, and --resume takes them from there.
SETTINGS = ("preset", "module", "dtype", "recipe", "seed", "steps", "batch", "window", "learning_rate")
SETTINGS += ("pack", "pack_multiple")
# Options that each of several processes may be given another way: what it is, and where it finds the same files.
OWN = ("process_id", "data", "out")

# By recipe: of a row, half of what a device of the axis cp has is a multiple of this.
BLOCKS = {"mxfp8": 32, "fp8_block": 64}


@dataclasses.dataclass(frozen=True)
class Settings(Preset):
    """A preset with the options applied: all that decides the numbers, but for the data."""

    preset: str = ""
    module: str = "linen"
    dtype: str = "float32"
    recipe: str | None = None
    seed: int = 0
    pack: bool = False
    pack_multiple: int = 1

    @property
    def block(self) -> int:
        """Tokens that are rounded together are not shared by devices: half of a device's part of a row is a multiple of
        this."""
        return BLOCKS.get(self.recipe, 1)

    def to_json(self) -> dict:
        return json.loads(json.dumps(dataclasses.asdict(self)))  # what a JSON file gives back: lists, no tuples


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):  # argparse would print the usage before it, and exit by itself
        raise InputError(message)


def parse(argv: list[str] | None) -> argparse.Namespace:
    presets = "\n".join(f"  {name:8}{preset.about}" for name, preset in PRESETS.items())
    parser = _Parser(
        prog="python -m flax_examples.train",
        description="Trains a byte-level language model with Multi-head Latent Attention on text.",
        epilog=f"presets:\n{presets}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--data", nargs="+", default=[], metavar="PATH", help="folders and files; default: Python's standard library")
    add(
        "--glob",
        nargs="+",
        default=[],
        type=_named,
        metavar="PATTERN",
        help="what to take from folders; default: all not hidden",
    )
    add("--preset", choices=PRESETS, help="default: small")
    add("--module", choices=MODULES, help="which Flax API the model is written in; default: linen")
    add("--dtype", choices=("float32", "bfloat16"), help="what the blocks compute in; default: float32")
    add("--recipe", choices=("mxfp8", "fp8", "fp8_block"), help="what MLA rounds its operands to; default: nothing")
    add("--seed", type=_integer(0, 2**31 - 1), help="of initial values, order of the data and sample; default: 0")
    for name in ("steps", "batch", "window"):
        add(f"--{name}", type=_integer(1, 2**31 - 1), help="default: the preset's")
    add("--learning-rate", type=_positive, help="its peak; default: the preset's")
    add("--pack", action="store_true", default=None, help="train on rows of several files and pieces of files")
    add(
        "--pack-multiple",
        type=_integer(1, 2**31 - 1),
        metavar="TOKENS",
        help="with --pack, start each sequence at a multiple of this; default: 1",
    )
    add("--eval-every", type=_integer(1), metavar="STEPS", help="held-out evaluation; default: a quarter of the run")
    add("--checkpoint-every", type=_integer(1), metavar="STEPS", help="default: a quarter of the run")
    add("--stop-after", type=_integer(1), metavar="STEP", help="save and end once this step is done")
    add(
        "--out",
        type=lambda text: pathlib.Path(_named(text)),
        metavar="FOLDER",
        help="default: a new runs/PRESET-MODULE; with --resume, the last",
    )
    add("--resume", action="store_true", help="continue the run in --out; other options default to what it was given")
    add(
        "--sample-bytes",
        type=_integer(1, 1_000_000),
        default=400,
        metavar="BYTES",
        help="length of the sample; default: 400",
    )
    # Where a run goes on, not what it is: --resume takes none of these from the checkpoint.
    add(
        "--mesh",
        type=mesh.parse,
        metavar="AXIS=N,...",
        help="train on all devices (with --resume, to be given again): "
        + "; ".join(f"{axis}: {what}" for axis, what in mesh.AXES.items()),
    )
    add("--cpu-devices", type=_integer(1, 1024), metavar="N", help="make that many devices of the CPU, to try a mesh")
    add("--distributed", action="store_true", help="one of several processes that the cluster's scheduler has started")
    add("--coordinator", type=_address, metavar="HOST:PORT", help="one of several processes: where process 0 listens")
    add("--processes", type=_integer(1), metavar="N", help="with --coordinator: how many there are")
    add("--process-id", type=_integer(0), metavar="I", help="with --coordinator: which one this is, from 0")
    options = parser.parse_args(argv)
    _check_processes(options)
    if options.out is None:
        options.out = _default_out(f"{options.preset or 'small'}-{options.module or 'linen'}", options.resume)
    return options


def _default_out(name: str, resume: bool) -> pathlib.Path:
    """runs/NAME, runs/NAME-2, ...: the first that is free, or to resume the last that is not."""
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    last = free = pathlib.Path("runs", next(names))
    while free.exists():
        last, free = free, pathlib.Path("runs", next(names))
    return last if resume else free


def _integer(least: int, most: int | None = None):
    def convert(text: str) -> int:
        value = int(text) if text.lstrip("-").isdecimal() else least - 1
        if value < least or (most is not None and value > most):
            wanted = f"at least {least}" if most is None else f"at least {least} and at most {most}"
            raise argparse.ArgumentTypeError(f"found {text!r}, wanted a whole number, {wanted}")
        return value

    return convert


def _check_processes(options: argparse.Namespace) -> None:
    three = {
        "--coordinator": options.coordinator,
        "--processes": options.processes,
        "--process-id": options.process_id,
    }
    given = [name for name, value in three.items() if value is not None]
    if given and options.distributed:
        raise InputError(f"--distributed: found {given[0]} besides, wanted one way to find the processes")
    if given and len(given) < len(three):
        lacking = [name for name in three if name not in given]
        raise InputError(f"{given[0]}: found no {' and no '.join(lacking)}, wanted all of {', '.join(three)}")
    if given and options.process_id >= options.processes:
        raise InputError(
            f"--process-id: found {options.process_id}, wanted less than --processes = {options.processes}"
        )
    if (given or options.distributed) and options.out is None:
        raise InputError("--out: found none for several processes, wanted a folder that all of them reach")


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise argparse.ArgumentTypeError(f"found {text!r}, wanted a host and a port, as node0:1234")
    return text


def _named(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("found '', wanted a name")
    return text


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"found {text!r}, wanted a positive number")
    return value


def shared(options: argparse.Namespace) -> str:
    """The options that all processes of a run must have been given alike."""
    given = {name: value for name, value in vars(options).items() if name not in OWN and value not in (None, [], False)}
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in given.items())


def settle(options: argparse.Namespace, saved: dict | None) -> Settings:
    """The settings of a new run, or of the one whose saved settings are given; InputError where options contradict."""
    asked = {name: getattr(options, name) for name in SETTINGS if getattr(options, name) is not None}
    if saved is not None:
        if lacking := [name for name in SETTINGS if name not in saved]:
            raise InputError(f"--resume: found no {', '.join(lacking)} in the checkpoint's metadata, wanted a run's")
        for name, value in asked.items():
            if value != saved[name]:
                _refuse(f"--{name.replace('_', '-')}", saved[name], value)
        asked = {name: saved[name] for name in SETTINGS}
    if asked.setdefault("preset", "small") not in PRESETS:  # it was in the table when the checkpoint was made
        _refuse("--preset", asked["preset"], f"one of {', '.join(PRESETS)}")
    preset = PRESETS[asked["preset"]]
    fields = {field.name: getattr(preset, field.name) for field in dataclasses.fields(preset)}
    settings = Settings(**fields | asked)
    if options.pack_multiple is not None and not settings.pack:
        raise InputError(f"--pack-multiple: found {options.pack_multiple} without --pack, wanted both or neither")
    if settings.pack_multiple > settings.window:
        raise InputError(f"--pack-multiple: found {settings.pack_multiple}, wanted at most window = {settings.window}")
    if settings.pack and settings.recipe == "mxfp8" and settings.pack_multiple % settings.block:
        raise InputError(
            f"--pack-multiple: found {settings.pack_multiple} with --recipe {settings.recipe}, where no scale is of two"
            f" sequences: wanted a multiple of {settings.block}"
        )
    if saved is not None:  # the table of presets may have been edited since
        for name, value in _flatten(settings.to_json()).items():
            if value != (found := _flatten(saved).get(name)) and name != "about":
                _refuse(f"preset {settings.preset}, {name}", found, value)
    return settings


def check_data(found: dict, now: dict) -> None:
    """InputError unless the files are those the checkpoint's run was trained on: `found` is its summary of the data."""
    if found["fingerprint"] != now["fingerprint"]:
        show = "{fingerprint} ({train_bytes} + {heldout_bytes} bytes)".format_map
        _refuse("--data: fingerprint", show(found), show(now))


def _refuse(name: str, found, wanted):
    raise InputError(
        f"{name}: found {found} in the checkpoint, wanted {wanted}; resume with what it has, or start in another --out"
    )


def _flatten(tree: dict) -> dict:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: not isinstance(node, dict))
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
