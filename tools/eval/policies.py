#!/usr/bin/env python3
"""What every cache policy does to the bundled model: captions and documents of the held-out sets, scored, beside bits.

    tools/eval/policies.py --out OUT [--kv SPEC ...] [--images 200] [--fidelity 40]

Runs `vlm-run --batch` over the held-out captions and documents once for every spec, and `vlm-kv fidelity` over some of
the captions, scores the answers with tools/pocket/score.py, and prints a Markdown table. A second start goes on where
the first stopped. Standard library only.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
POCKET = ROOT / "tools" / "pocket"
sys.path.insert(0, str(POCKET))
import score  # noqa: E402

# Every policy at its paper's setting, then by width or by share of tokens kept, then compositions.
SPECS = """
f16
int8
int4
kivi,bits=8
kivi,bits=4
kivi
kivi,bits=1
asymkv
head_quantile,bits=8
head_quantile,bits=4
head_quantile,bits=2
head_quantile
head_quantile,round=floor
head_quantile,alpha=0
calibquant,bits=8
calibquant,bits=4
calibquant,bits=2
calibquant
calibquant,tau=0:0
calibquant,profile=official
calibquant,profile=paper
xquant
xquant,eta1=0,eta2=0
vidkv,key_bits=2,value_bits=2
vidkv,value_bits=2
vidkv,fft=off,value_bits=2
vidkv
vidkv,fft=off
vidkv,key_bits=1.25
vidkv,protect=0.2
vidkv,profile=official
kivi,key_bits=8,value_bits=1
kivi,key_bits=1,value_bits=8
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
elastic,keep=0.5
elastic,keep=0.2
vlcache,keep=0.5
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


def slug(spec: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "_", spec.lower()).strip("_")


def requests(name: str, images: int, folder: Path) -> Path:
    """The first `images` requests of a held-out set, with full paths."""
    path = folder / f"{name}.{images}.jsonl"
    if not path.exists():
        lines = (POCKET / "heldout" / f"{name}.jsonl").read_text().splitlines()[:images]
        records = [json.loads(line) for line in lines]
        for record in records:
            record["image"] = str(POCKET / "heldout" / record["image"])
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def run(program: Path, spec: str, name: str, images: int, folder: Path, flags: list[str]) -> list[dict]:
    out = folder / f"{slug(spec)}.{name}.{images}.jsonl"
    command = [program, "-q", "--batch", requests(name, images, folder), "--out", out, "--batch-size", "8"]
    subprocess.run([*map(str, command), "--kv", spec, *flags], check=True)
    return [json.loads(line) for line in out.read_text().splitlines()]


def scored(records: list[dict], name: str) -> dict[str, float]:
    """score.py's figures over the images that were asked for, not over the whole set."""
    texts = {record["id"]: record.get("text", "") for record in records}
    heldout = POCKET / "heldout"
    if name == "captions":
        facts = json.loads((heldout / "scene_facts.json").read_text())
        coco = json.loads((heldout / "captions_heldout.json").read_text())
        keys = {image["id"]: Path(image["file_name"]).stem for image in coco["images"]}
        accepted: dict[str, list[str]] = {}
        for note in coco["annotations"]:
            accepted.setdefault(keys[note["image_id"]], []).append(note["caption"])
        told = [score.slots(text, facts[key]) for key, text in texts.items()]
        return {
            "exact": sum(text.strip() in accepted[key] for key, text in texts.items()) / len(texts),
            "slots": sum(right for right, _ in told) / sum(total for _, total in told),
        }
    data = json.loads((heldout / f"{name}_heldout.json").read_text())["data"]
    answers = {Path(record["image"]).stem: record["answers"] for record in data}
    return {"anls": statistics.mean(score.anls(text, answers[key]) for key, text in texts.items())}


def fidelity(program: Path, specs: list[str], images: int, folder: Path) -> dict[str, dict]:
    """`vlm-kv fidelity` of every spec that has not been measured yet."""
    results = {}
    for spec in specs:
        path = folder / f"{slug(spec)}.fidelity.{images}.json"
        if not path.exists():
            command = [program, "fidelity", "--kv", spec, "--data", requests("captions", images, folder), "--json"]
            done = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True)
            path.write_text(done.stdout)
        results[spec] = json.loads(path.read_text())
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for answers and figures")
    parser.add_argument("--kv", action="append", help="a spec; repeatable; all of SPECS if none is given")
    parser.add_argument("--images", type=int, default=200, help="images of each set")
    parser.add_argument("--fidelity", type=int, default=40, help="captions for KL and top-1; 0 leaves them out")
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "release", help="build folder")
    parser.add_argument("flags", nargs="*", help="further flags of vlm-run, after --")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    specs = options.kv or [line for line in SPECS.splitlines() if line]
    tools = options.build / "tools"
    measured = fidelity(tools / "vlm-kv", specs, options.fidelity, options.out) if options.fidelity else {}
    print("| spec | exact | slots | ANLS | KL | top-1 | stored bits | nominal |")
    print("|---|---|---|---|---|---|---|---|")
    for spec in specs:
        captions = run(tools / "vlm-run", spec, "captions", options.images, options.out, options.flags)
        documents = run(tools / "vlm-run", spec, "documents", options.images, options.out, options.flags)
        figures = scored(captions, "captions") | scored(documents, "documents")
        stored = statistics.mean(record["kv"]["stored_bits"] for record in captions)
        nominal = statistics.mean(record["kv"]["nominal_bits"] for record in captions)
        found = measured.get(spec)
        kl = f"{found['kl_mean']:.4f}" if found else "-"
        top = f"{100 * found['top1']:.1f}" if found else "-"
        print(
            f"| `{spec}` | {100 * figures['exact']:.1f} | {100 * figures['slots']:.1f} | {figures['anls']:.3f} | {kl} | {top} "
            f"| {stored:.2f} | {nominal:.2f} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
