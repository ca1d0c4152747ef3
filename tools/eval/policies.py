#!/usr/bin/env python3
"""What every cache policy does to the bundled model: captions and documents of the held-out sets, scored, beside bits.

    tools/eval/policies.py --out OUT [--kv SPEC ...] [--images 200] [--fidelity 100] [--jobs N] [--device cuda]
    tools/eval/orderings.py --out OUT      which of the papers' orderings these answers carry

Runs `vlm-run --batch` over the held-out captions and documents once for every spec, and `vlm-kv fidelity` over captions,
on the CPU, scores the answers with tools/pocket/score.py, and prints a Markdown table with 95 % intervals (bootstrap over images).
Stored bits are those of fidelity's forced text, the same rows for every spec, so that an answer's own length moves no
figure. A second start goes on where the first stopped. Needs numpy.
"""

import argparse
import concurrent.futures
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
POCKET = ROOT / "tools" / "pocket"
sys.path.insert(0, str(POCKET))
import claims  # noqa: E402
import score  # noqa: E402
import significance  # noqa: E402
from errors import run_main  # noqa: E402
from factors import normal  # noqa: E402
from significance import RESAMPLES, SEED  # noqa: E402

# Every policy at its paper's setting, then by width or by share of tokens kept, then compositions. What stands beside a
# published setting differs from it in one thing, so that orderings.py can compare them.
SPECS = """
f16
int8
int4
kivi,bits=8
kivi,bits=4
kivi
kivi,residual=32
kivi,bits=1
asymkv
head_quantile,bits=8
head_quantile,bits=8,alpha=0.2
head_quantile,bits=4
head_quantile,bits=2
head_quantile,bits=2,group_axes=channel
head_quantile,bits=2,alpha=0
head_quantile,bits=2,alpha=0,group_axes=channel
head_quantile
head_quantile,round=floor
head_quantile,alpha=0
calibquant,bits=8
calibquant,bits=4
calibquant,bits=2
calibquant
calibquant,tau=0:0
calibquant,shrink=none
calibquant,shrink=none,tau=0:0
calibquant,profile=official
xquant
xquant,eta1=0,eta2=0
vidkv,key_bits=2,value_bits=2
vidkv,key_bits=2,value_bits=2,residual=32
vidkv,value_bits=2
vidkv,fft=off,value_bits=2
vidkv
vidkv,fft=off
vidkv,scale=unit
vidkv,key_bits=1.25
vidkv,protect=0.2
vidkv,profile=official
kivi,key_bits=8,value_bits=1,residual=32
kivi,key_bits=1,value_bits=8,residual=32
kivi,key_bits=4,value_bits=2,residual=32
kivi,key_bits=2,value_bits=4,residual=32
random,keep=0.9
random,keep=0.5
random,keep=0.5,seed=1
random,keep=0.2
random,head_shared=on,keep=0.9
random,head_shared=on,keep=0.9,seed=1
random,head_shared=on,keep=0.5
random,head_shared=on,keep=0.5,seed=1
random,head_shared=on,keep=0.2
random,head_shared=on,keep=0.2,seed=1
uniform,keep=0.9
uniform,keep=0.5
uniform,keep=0.2
uniform,keep=0.1
prefixkv,keep=0.9
prefixkv,keep=0.5
prefixkv,keep=0.2
prefixkv,keep=0.1
prefixkv,keep=0.5,merge=position
streaming,keep=0.5
streaming,keep=0.2
h2o,keep=0.5
h2o,keep=0.2
snapkv,keep=0.5
snapkv,keep=0.2
pyramidkv,keep=0.5
pyramidkv,keep=0.2
pyramidkv,keep=0.2,no_floor=on,evict=score
tova,keep=0.5
elastic,keep=0.5
elastic,keep=0.2
vlcache,keep=0.5
vlcache,keep=0.28
vlcache,keep=0.2
calibquant,bits=2 + int4,scope=text
calibquant,bits=4 + int4,scope=text
head_quantile,bits=4 + int4,scope=text
prefixkv,keep=0.5 + int4
prefixkv,keep=0.7 + int4
h2o,keep=0.5 + int4
prefixkv,keep=0.5 + calibquant,bits=4 + int4,scope=text
prefixkv,keep=0.5 + vidkv
prefixkv,keep=0.5 + xquant
int4 + share=codes
"""

SETS = ("captions", "documents")


def all_specs() -> list[str]:
    """Those above and what the claims compare, but for budgets that only a profile has."""
    wanted = [normal(line) for line in SPECS.splitlines() if line] + claims.specs()
    return [spec for spec in dict.fromkeys(wanted) if "mode=profile" not in spec]


def slug(spec: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "_", spec.lower()).strip("_")


class Evaluation:
    """Answers and figures of specs in one folder, made when they are missing."""

    def __init__(self, folder: Path, images: int, forced: int, build: Path | None = None, flags: tuple[str, ...] = ()):
        self.folder, self.images, self.forced, self.flags = folder, images, forced, flags
        self.tools = (build or ROOT / "build" / "release") / "tools"
        folder.mkdir(parents=True, exist_ok=True)

    def requests(self, name: str, count: int) -> Path:
        """The first `count` requests of a held-out set, with full paths."""
        path = self.folder / f"{name}.{count}.jsonl"
        if path.exists():
            return path
        lines = (POCKET / "heldout" / f"{name}.jsonl").read_text().splitlines()[:count]
        records = [json.loads(line) for line in lines]
        for record in records:
            record["image"] = str(POCKET / "heldout" / record["image"])
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return path

    def answer(self, spec: str, name: str) -> None:
        command = [self.tools / "vlm-run", "-q", "--batch", self.requests(name, self.images)]
        command += ["--out", self._answers(spec, name), "--kv", spec, *self.flags]
        self._run(command, f"answers of {spec}")

    def measure(self, spec: str) -> None:
        """`vlm-kv fidelity` over captions: KL, top-1 and bits on forced text."""
        path = self._fidelity(spec)
        if path.exists():
            return
        command = [self.tools / "vlm-kv", "fidelity", "--kv", spec, "--json", "-t", "1"]
        command += ["--data", self.requests("captions", self.forced)]
        path.write_text(self._run(command, f"fidelity of {spec}"))

    def texts(self, spec: str, name: str) -> dict[str, str]:
        path = self._answers(spec, name)
        if not path.exists():
            raise SystemExit(f"{path} is missing; run tools/eval/policies.py --out {self.folder} --kv '{spec}' first")
        records = [json.loads(line) for line in path.read_text().splitlines()]
        for record in records:
            if "text" not in record:
                raise SystemExit(f"{path}: {record['id']} has no answer ({record.get('error')}); mend that and run again")
        # In one order, whatever the order in which they were answered: the bootstrap draws by index.
        texts = {record["id"]: record["text"] for record in sorted(records, key=lambda record: str(record["id"]))}
        if len(texts) != self.images:
            raise SystemExit(f"{path} has answers to {len(texts)} of {self.images} requests; run policies.py to its end")
        return texts

    def answer_bits(self, spec: str, name: str) -> list[float]:
        """Stored bits at the end of every answer; an answer's length moves them."""
        records = map(json.loads, self._answers(spec, name).read_text().splitlines())
        return [record["kv"]["stored_bits"] for record in records if "kv" in record]

    def answered(self, spec: str) -> bool:
        return all(self._answers(spec, name).exists() for name in SETS)

    def fidelity(self, spec: str) -> dict | None:
        path = self._fidelity(spec)
        return json.loads(path.read_text()) if path.exists() else None

    def _answers(self, spec: str, name: str) -> Path:
        return self.folder / f"{slug(spec)}.{name}.{self.images}.jsonl"

    def _fidelity(self, spec: str) -> Path:
        return self.folder / f"{slug(spec)}.fidelity.{self.forced}.json"

    def _run(self, command: list, what: str) -> str:
        if not Path(command[0]).is_file():
            raise SystemExit(f"{command[0]} is not built; run tools/demo.sh, or name the build folder with --build")
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"{what}: status {done.returncode}: {done.stderr.strip()}")
        return done.stdout


def caption_scores(texts: dict[str, str]) -> dict[str, tuple[bool, int, int]]:
    """Of every caption: exactly right, slots told rightly, slots in all."""
    heldout = POCKET / "heldout"
    facts = json.loads((heldout / "scene_facts.json").read_text())
    coco = json.loads((heldout / "captions_heldout.json").read_text())
    keys = {image["id"]: Path(image["file_name"]).stem for image in coco["images"]}
    accepted: dict[str, list[str]] = {}
    for note in coco["annotations"]:
        accepted.setdefault(keys[note["image_id"]], []).append(note["caption"])
    return {key: (text.strip() in accepted[key], *score.slots(text, facts[key])) for key, text in texts.items()}


def document_scores(texts: dict[str, str]) -> dict[str, float]:
    """The ANLS of every document's answer."""
    data = json.loads((POCKET / "heldout" / "documents_heldout.json").read_text())["data"]
    answers = {Path(record["image"]).stem: record["answers"] for record in data}
    return {key: score.anls(text, answers[key]) for key, text in texts.items()}


def row(work: Evaluation, spec: str) -> str:
    captions = caption_scores(work.texts(spec, "captions"))
    exact = sum(right for right, _, _ in captions.values())
    told = [(right, total) for _, right, total in captions.values()]
    slots = sum(right for right, _ in told) / sum(total for _, total in told)
    ends = significance.of_quotient(told, RESAMPLES, SEED)
    anls = statistics.mean(document_scores(work.texts(spec, "documents")).values())
    found = work.fidelity(spec)
    cells = [f"`{spec}`", f"{exact}", f"{100 * slots:.1f} ({100 * ends.low:.1f} to {100 * ends.high:.1f})", f"{anls:.3f}"]
    if found:
        kl = f"{found['kl_mean']:.4f}" if found["kl_mean"] >= 5e-5 else "< 0.0001" if found["kl_mean"] else "0"
        cells += [kl, f"{100 * found['top1']:.1f}", f"{found['stored_bits']:.2f}", f"{found['nominal_bits']:.2f}"]
    else:
        cells += ["-"] * 4
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for answers and figures")
    parser.add_argument("--kv", action="append", help="a spec; repeatable; all of SPECS if none is given")
    parser.add_argument("--images", type=int, default=200, help="images of each set")
    parser.add_argument("--fidelity", type=int, default=100, help="captions for KL, top-1 and bits; 0 leaves them out")
    parser.add_argument("--jobs", type=int, default=1, help="specs at a time")
    parser.add_argument("--device", default="auto", help="as vlm-run's --device")
    parser.add_argument("--batch-size", type=int, default=8, help="as vlm-run's --batch-size")
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "release", help="build folder")
    parser.add_argument("flags", nargs="*", help="further flags of vlm-run, after --")
    options = parser.parse_args()
    flags = ("--device", options.device, "--batch-size", str(options.batch_size), *options.flags)
    work = Evaluation(options.out, options.images, options.fidelity, options.build, flags)
    specs = options.kv or all_specs()
    for name in SETS:  # before threads ask for them
        work.requests(name, options.images)
    work.requests("captions", options.fidelity)

    def make(spec: str) -> str:
        for name in SETS:
            work.answer(spec, name)
        if options.fidelity:
            work.measure(spec)
        return row(work, spec)

    print("| spec | exact | slots, % (95 %) | ANLS | KL | top-1 | stored bits | nominal |")
    print("|---|---|---|---|---|---|---|---|")
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for line in pool.map(make, specs):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_main("policies.py", main))
