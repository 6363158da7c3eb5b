"""Any class of pipelines of diffusers, as a tiny folder that a worker loads, with what is proven of it: a table.

    python zoo.py --classes A,B --write FOLDER                              writes tiny folders
    python zoo.py [--classes A,B] [--table zoo.md] [--list classes.json]    builds each, loads it as a worker does, proves
                                                                            it, and prints what came of it
    python zoo.py --rows zoo.jsonl --resume ...                             goes on where a run was cut off
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import diffusers
import torch
import transformers

sys.path.insert(0, os.environ.get("ZOO") or str(Path(__file__).parents[2]))

import proofs
from kinds import classes, write

from meander.torch import admission
from meander.torch.engine import Settings
from meander.torch.folder import Folder
from meander.torch.sessions import PipelineEngine
from meander.torch.whole import Pipeline

LIST = Path(__file__).parents[2] / "meander/torch/classes.json"
SETTINGS = {"AllegroPipeline": {"vae_tiling": True}}
"""Settings of the worker that a class needs."""


def look(name, folder, workers=()):
    """What comes of a class: a row of the table. workers: two of proofs.Standby of the folder, to prove it all."""
    began = time.process_time()
    row = {"class": name}
    write(folder, name)
    row["built_s"] = time.process_time() - began
    settings = Settings("cpu", "f32", **SETTINGS.get(name, {}))
    engine = PipelineEngine(Pipeline(Folder(Path(folder)), trust=True), settings)
    if workers:
        workers[0].start()
    with torch.no_grad():
        engine.check_decoder()
    card = engine.family.card()
    row |= {
        "scheduler": type(engine.family.pipe.scheduler).__name__,
        "access": engine.family.access,
        "conditions": [c["name"] for c in engine.family.conditions if c["required"]],
        "tracks": engine.family.tracks,
        "notes": engine.family.notes,
        "grid": card["grid"],
        "prediction": card["pipeline"].get("prediction", ""),
        "rows": engine.family.rows_alike,
    }
    if workers:
        with torch.no_grad():
            row |= proofs.prove(workers, engine.loaded, admission.recipe_of(engine.loaded))
    row["cpu_s"] = time.process_time() - began
    row["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return row


def _work(name, folder, pipe, prove):
    torch.set_num_threads(1)
    sockets = [Path(folder) / f"{i}.sock" for i in range(2 if prove else 0)]
    tiling = ["--vae-tiling"] if SETTINGS.get(name, {}).get("vae_tiling") else []
    workers = [proofs.Standby(Path(folder) / "model", s, *tiling) for s in sockets]
    try:
        pipe.send(look(name, Path(folder) / "model", workers))
    except LookupError as e:
        pipe.send({"class": name, "not_built": str(e)})
    except Exception as e:
        at = e.__traceback__
        while at.tb_next:
            at = at.tb_next
        where = f"{Path(at.tb_frame.f_code.co_filename).name}:{at.tb_lineno}"
        pipe.send({"class": name, "fault": f"{type(e).__name__}: {e}"[:300], "at": where})


STATE, MEDIA, GRADIENT = 1e-5, 1e-4, 0.01


def faults_of(row):
    """The columns of a row that are not as they must be."""
    apart = any("not compared" in n for n in row["notes"])
    solver = any("compared in its first order" in n for n in row["notes"])  # the pipeline's own steps are others
    right = {
        "state": apart or row["access"] != "exact" or isinstance(row.get("state"), float) and row["state"] <= STATE,
        "media": apart or solver or isinstance(row.get("media"), float) and row["media"] <= MEDIA,
        "ratio": row.get("ratio") == 0,
        "resume": row.get("resume") is True,
        "gradient": isinstance(row.get("gradient"), float) and abs(row["gradient"] - 1) <= GRADIENT,
    }
    return [n for n, ok in right.items() if not ok] if "ratio" in row else []


def cell(value):
    """A column of the table."""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.5g}" if isinstance(value, float) else str(value).split(chr(10))[0][:60]


def table(rows):
    """The rows as Markdown: those that are served, then what came of the others."""
    out = [
        "State, media: how far Euler's steps end from the pipeline itself (of inpainting, media alone). Ratio: the largest |ratio - 1| of a trainer. Resume: after kill "
        "-9 of the worker. Gradient: by finite differences.",
        "",
        "| class | state | scheduler | conditions | order | state | media | ratio - 1 | resume | gradient | rows together |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        if "access" in r:
            state = ", ".join("x".join(map(str, t["shape"])) for t in r["tracks"])
            of = r["scheduler"].removesuffix("Scheduler").removesuffix("Discrete") + (" *" if r["notes"] else "")
            proven = " | ".join(cell(r.get(n, "")) for n in ("state", "media", "ratio", "resume", "gradient"))
            out.append(
                f"| {r['class']} | {state} | {of} | {', '.join(r['conditions'])} | {r['access']} | {proven} | "
                f"{'yes' if r['rows'] else 'no'} |"
            )
    out += ["", *sorted({f"\\* {r['class']}: {n}" for r in rows for n in r.get("notes", ())})]
    out += ["", "| refused | why |", "|---|---|"]
    out += [
        f"| {r['class']} | {r['fault'].split(chr(10))[0][:160]} ({r.get('at', '')}) |" for r in rows if "fault" in r
    ]
    left = [r["class"] for r in rows if "not_built" in r]
    return "\n".join([*out, "", f"Not built here ({len(left)}): {', '.join(left)}", ""])


def code(admit=False):
    """The digest of what rows come from: the worker's code and this folder's, and the packages."""
    found = hashlib.sha256(f"{diffusers.__version__} {torch.__version__} {transformers.__version__} {admit}".encode())
    for file in sorted([*LIST.parent.glob("*.py"), *Path(__file__).parent.glob("*.py")]):
        found.update(b"" if file.name.startswith("test_") else file.read_bytes())
    return found.hexdigest()[:16]


def kept(args):
    """The rows of --rows that this code made, by their classes. Without --resume the file begins anew."""
    if args.rows and not args.resume:
        args.rows.unlink(missing_ok=True)
    lines = args.rows.read_text().splitlines(True) if args.rows and args.rows.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    mine = [r for r in rows if r["code"] == args.code]
    if args.rows:
        args.rows.write_text("".join(json.dumps(r) + "\n" for r in mine))
    return {r["class"]: r for r in mine}


def _row(name, args):
    """The row of a class, by a process of its own; unless that was cut off, it is kept."""
    here, there = multiprocessing.Pipe()
    with tempfile.TemporaryDirectory(dir=args.folder, ignore_cleanup_errors=True) as folder:
        worker = multiprocessing.Process(target=_work, args=(name, folder, there, not args.admit), daemon=True)
        worker.start()
        there.close()
        try:
            row = here.recv() if (came := here.poll(args.limit)) else {"fault": f"takes over {args.limit:.0f} s"}
        except EOFError:
            row, came = {"fault": "its process ended without a word"}, False
        row["class"] = name
        worker.kill()
        worker.join()
    line = json.dumps(row | {"code": args.code})
    print(line, flush=True)
    if args.rows and came:
        with open(args.rows, "a") as file:
            print(line, file=file)
    return row


def main():
    """Looks at each class in a process of its own."""
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--classes", default="", help="these alone, with commas between")
    a.add_argument("--table", type=Path, help="a Markdown file to write")
    a.add_argument("--rows", type=Path, help="a file that keeps each row as it is made")
    a.add_argument("--resume", action="store_true", help="take the rows of --rows that the same code made")
    a.add_argument("--list", type=Path, help="a file for the classes that are served, as workers read it")
    a.add_argument("--limit", type=float, default=1200, help="seconds of a class at most")
    a.add_argument("--write", type=Path, help="a folder for those of --classes, by their names, and nothing else")
    a.add_argument("--jobs", type=int, default=2, help="classes at a time")
    a.add_argument("--admit", action="store_true", help="admission alone: no ratio, kill and gradient")
    args = a.parse_args()
    torch.set_num_threads(1)  # before any that computes: workers are forked
    names = args.classes.split(",") if args.classes else classes()
    if args.write:
        for name in names:
            write(args.write / name, name)
        return
    args.code = code(args.admit)
    done = kept(args)
    # The folder of all outlives workers that are about to end.
    with tempfile.TemporaryDirectory() as args.folder, ThreadPoolExecutor(args.jobs) as pool:
        rows = list(pool.map(lambda name: done.get(name) or _row(name, args), names))
    served = [r for r in rows if "access" in r]
    short = {r["class"]: faults for r in served if (faults := faults_of(r))}
    print(
        f"{len(rows)} classes: {len(served)} served, {len(served) - len(short)} with every column, "
        f"{sum('fault' in r for r in rows)} refused, {sum('not_built' in r for r in rows)} not built"
    )
    for name, faults in short.items():
        print(f"{name}: {', '.join(faults)}")
    if args.table:
        args.table.write_text(table(rows))
    if args.list:
        keep = {r["class"]: {"access": r["access"], "diffusers": diffusers.__version__} for r in served}
        args.list.write_text(json.dumps(keep, indent=0) + "\n")
    known = args.classes.split(",") if args.classes else json.loads(LIST.read_text()) if LIST.exists() else []
    if lost := sorted(set(known) - {r["class"] for r in served}):
        sys.exit(f"not served: {', '.join(lost)}")


if __name__ == "__main__":
    main()
