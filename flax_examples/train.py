"""Trains a small byte-level language model with MLA on real text: `python -m flax_examples.train --help`.

`main` turns what goes wrong into one line; `run` is the whole run in order. The model is in model.py, its sizes in
presets.py, the loop in loop.py.
"""

import logging
import os
import signal
import sys
import time
from typing import NamedTuple

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while the libraries load: no traceback

import jax

from flax_examples import checkpoint, data, loop, mesh, model, ngram, options, packing, processes, report


def main(argv: list[str] | None = None) -> int:
    """The exit status: 0; 1 when the run failed, 2 when its input is wrong, 128 + signal when it was interrupted."""
    # Of a write that fails, orbax and asyncio log tracebacks; it is raised too, and becomes the one line below.
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        asked = options.parse(argv)
        processes.start(asked)
        try:
            run(asked)
            line, code = "", 0
        except loop.Stopped as stopped:
            line, code = str(stopped), stopped.code
        except processes.TogetherError as error:
            line, code = f"error: {error}", 2
        except loop.TrainingError as error:
            line, code = f"error: {error}", 1
        # So far all processes have come, and one of them says it.
        line = line if processes.first() else ""
        processes.leave()
    except data.InputError as error:
        line, code = f"error: {error}", 2
    except checkpoint.SaveError as error:
        line, code = f"error: {error}", 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        line, code = f"error: {where}{error.strerror or error}", 1
    except KeyboardInterrupt:
        line, code = "interrupted; what was saved is intact", 130
    if line:
        print(" ".join(line.split()), file=sys.stderr)
    return code


class Prepared(NamedTuple):
    """What a run begins with: all that can be wrong with what was asked for has been found."""

    settings: options.Settings
    saved: dict | None  # the JSON of the checkpoint that is resumed
    corpus: data.Corpus
    source: data.Windows | packing.PackedRows
    heldout: loop.Heldout
    compiled: loop.Programs


def prepare(asked, checkpoints: checkpoint.Checkpoints, step: int | None) -> Prepared:
    """Raises InputError before anything is compiled or written."""
    out = asked.out
    if asked.resume and step is None:
        raise data.InputError(f"--resume: found no checkpoint in {out}, wanted a run that was started with --out {out}")
    if not asked.resume and (step is not None or (out / "run.json").exists()):
        raise data.InputError(f"--out: {out} already holds a run; continue it with --resume, or name another --out")
    saved = checkpoints.read_run(step) if asked.resume else None
    if saved is not None and not {"settings", "data", "history"} <= set(saved):
        raise data.InputError(f"--resume: found metadata with {sorted(saved)} in {out}, wanted settings, data, history")
    settings = options.settle(asked, saved and saved["settings"])
    compiled = loop.programs(settings, mesh.make(asked.mesh))
    named = saved["data"] if saved else {"paths": (), "globs": ()}
    corpus = data.load_corpus(asked.data or named["paths"], asked.glob or named["globs"])
    if saved:
        options.check_data(saved["data"], corpus.summary)
    if settings.pack:
        source = packing.PackedRows(corpus.train, settings.window, settings.seed, settings.pack_multiple)
    else:
        source = data.Windows(corpus.train, settings.window, settings.seed)
    heldout = loop.Heldout(corpus.heldout, settings)
    return Prepared(settings, saved, corpus, source, heldout, compiled)


def make_folder(out) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise data.InputError(f"--out: cannot make the folder {out}: {error.strerror}") from error


def run(asked) -> None:
    """One run, from the parsed options to the files in --out."""
    began = time.perf_counter()
    out, checkpoints = asked.out, checkpoint.Checkpoints(asked.out / "checkpoints")
    processes.same("options", options.shared(asked))
    processes.same("--out: checkpoints", "there" if checkpoints.folder.is_dir() else "none")
    step = checkpoints.latest()
    prepared = processes.together(lambda: prepare(asked, checkpoints, step))
    settings, saved, corpus, source, heldout, compiled = prepared
    processes.same("--data: fingerprint", corpus.summary["fingerprint"])
    processes.together(lambda: make_folder(out))  # when nothing else can be wrong
    order2_whole = ngram.OrderTwo(corpus.train).bits_per_byte(heldout.text, heldout.positions)

    if saved:
        params, state = checkpoints.restore(step, *compiled.wanted)
        history = saved["history"]
    else:
        params, state = compiled.init(jax.random.key(settings.seed))
        history = {"seconds": 0.0, "timed_seconds": 0.0, "timed_tokens": 0, "loss": [], "evals": []}
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    sizes = ", ".join(f"{axis}={size}" for axis, size in compiled.layout.sizes.items())
    processes.tell(
        f"{settings.preset}, {settings.module}, {settings.dtype}"
        + f", {settings.recipe}" * (settings.recipe is not None)
        + f": {size:,} parameters on {report.device()}"
        + f", mesh {sizes}" * bool(sizes)
        + "\n"
        + "{train_bytes:,} bytes of text in {train_files} files, {heldout_bytes:,} more in {heldout_files} files held"
        " out; {empty_files} files are empty".format_map(corpus.summary)
        + f"\npacked rows of {settings.window} tokens" * settings.pack
        + (f"\nresumed at step {step} of {settings.steps}" if saved else "")
    )
    trainer = loop.Trainer(
        settings=settings,
        compiled=compiled,
        source=source,
        heldout=heldout,
        checkpoints=checkpoints,
        out=out,
        data_summary=corpus.summary,
        threshold=order2_whole,
        params=params,
        state=state,
        step=step or 0,
        history=history,
        began=began - history["seconds"],
    )
    quarter = max(1, settings.steps // 4)
    trainer.train(
        last=min(asked.stop_after or settings.steps, settings.steps),
        eval_every=asked.eval_every or quarter,
        checkpoint_every=asked.checkpoint_every or quarter,
    )

    samples = settings.steps * settings.batch
    seen = source.seen(samples)
    packed = source.summary(samples) if settings.pack else None
    evals = history["evals"]
    bits = {
        "before": evals[0]["bits_per_byte"],
        "after": evals[-1]["bits_per_byte"],
        "order2_seen": ngram.OrderTwo(corpus.train, seen).bits_per_byte(heldout.text, heldout.positions),
        "order2_whole": order2_whole,
    }
    prompt = heldout.windows[len(heldout.windows) // 2, 1:]
    sample = model.generate(compiled.apply, trainer.params, prompt, asked.sample_bytes, settings.seed)
    if not processes.first():
        return
    record = {
        "settings": settings.to_json(),
        "data": corpus.summary,
        "versions": report.versions(),
        "device": report.device(),
        "mesh": compiled.layout.sizes,
        "parameters": size,
        "bits_per_byte": bits,
        "scored": {
            "heldout_bytes": heldout.positions.size,
            "windows": len(heldout.windows),
            "model_context_bytes": f"1 to {settings.window}, from the start of the byte's window",
            "order2_context_bytes": "2, also at the start of a window",
        },
        "distinct_bytes_seen": seen.size,
        "tokens": packed["tokens"] if packed else samples * settings.window,
        "tokens_per_second": round(history["timed_tokens"] / max(history["timed_seconds"], 1e-9)),
        "seconds": round(time.perf_counter() - trainer.began, 1),
        "packed": packed,
        "passed_order2_whole": next((e for e in evals if e["bits_per_byte"] < order2_whole), None),
        "evals": evals,
        "loss": history["loss"],  # [step, mean bits per byte of the steps since the entry before]
        "sample": {"prompt": report.printable(bytes(prompt.astype("uint8"))), "text": report.printable(sample.text)},
        "sample_bytes_per_second": {"cached": round(sample.cached), "recomputed": round(sample.recomputed)},
    }
    print(report.summary(record), flush=True)
    # Last, so that a full disk costs no figure.
    files = {"loss.png": report.curve(settings, history, bits), "run.json": report.to_json(record)}
    for name, content in files.items():
        try:
            report.write(out / name, content)
        except OSError as error:
            raise checkpoint.SaveError(
                f"{out / name} could not be written: {error.strerror};"
                f" the last checkpoint is intact, and --resume --out {out} writes it again"
            ) from error
    print(f"{out / 'run.json'}, {out / 'loss.png'}, {out / 'checkpoints'}")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout.reconfigure(errors="replace", line_buffering=True)  # a sample may hold what the terminal cannot show
    status = main()
    # JAX may still be at work, and tearing the interpreter down under it crashes; or it would wait for other processes.
    if status >= 128 or (status and processes.several()):
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
