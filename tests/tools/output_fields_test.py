#!/usr/bin/env python3
"""docs/output.md has every field that the programs print with --json and --csv, and no other.

Each section of the page is compared with what RUNS of that name print: a field that is printed and on no row fails, and so
does a row that nothing prints. A row says what it is of: `spread` and `range` stand for the fields of repeated runs, `object`
for fields that are named elsewhere, "on a GPU" and "policies in Python" for what these programs do not print without them.

KVLM_BUILD is the build folder. Standard library only.
"""

import csv
import io
import json
import os
import re
import struct
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOLS = Path(os.environ.get("KVLM_BUILD", ROOT / "build/release")).resolve() / "tools"
PAGE = ROOT / "docs/output.md"
HELDOUT = ROOT / "tools/pocket/heldout"
TIMEOUT_S = 300

SPREADS = {"spread": ("unit", "median", "min", "max"), "range": ("median", "min", "max")}
TYPES = {"string": str, "integer": int, "number": (int, float), "boolean": bool}

GOLDEN = ROOT / "tests/golden"  # random checkpoints, which take milliseconds
IMAGE = f"--image {HELDOUT}/scenes/scene_000.png"
VIDEO = f"--video {HELDOUT}/clips/clip_001.webp"
CPU = f"--device cpu -t 1 -m {GOLDEN}/llava_gqa"
INTERNVL, QWEN = (CPU.replace("llava_gqa", name) for name in ("internvl", "qwen2_5_vl"))
DATA = f"{CPU} --data {HELDOUT}/captions.jsonl --records 1"
SMALL = f"{CPU} --prompt-tokens 40 --text-tokens 8 --tokens 2 --repeats 1"
LATENCY = f"{CPU} --prompt-tokens 16 --tokens 2 --repeats 1"

# Section of the page: what prints its fields. FOLDER is a temporary one that they share, in this order.
RUNS = {
    "vlm-kv profile": [f"vlm-kv profile {DATA} -n 3 --bits 1 --bits 2 --out FOLDER/profile.json --json"],
    "vlm-run": [f"vlm-run -q {CPU} -n 2 --json {IMAGE} -p <video>", f"vlm-run -q {QWEN} -n 2 --json --frames 2 {VIDEO}"],
    "vlm-run batch": [
        f"vlm-run -q {CPU} -n 2 --batch FOLDER/images.jsonl --out FOLDER/a.jsonl --dtype f32 --weights int8 "
        "--activations 16 --lora FOLDER/adapter --image-backend pil "
        "--image-aspect pad --kv prefixkv,keep=0.5 --kv-profile FOLDER/profile.json -p Hello --system Briefly --temp 1 --top-k 2 "
        "--top-p 0.9 --repeat-penalty 1.1 --seed 7 --stop x --stop y",
        f"vlm-run -q {INTERNVL} -n 2 --batch FOLDER/images.jsonl --out FOLDER/b.jsonl --tiles 2 --batch-size 2",
        f"vlm-run -q {QWEN} -n 2 --batch FOLDER/videos.jsonl --out FOLDER/c.jsonl --frames 4 --min-pixels 800 --max-pixels 1024",
        f"vlm-run -q {QWEN} -n 2 --batch FOLDER/videos.jsonl --out FOLDER/d.jsonl --fps 2 -p <video>"],
    "vlm-run dry run": [f"vlm-run --dry-run {CPU} {IMAGE} --json"],
    "vlm-kv list": ["vlm-kv list --json"],
    "vlm-kv explain": ["vlm-kv explain kivi --tokens 600 --visual 576 --json", "vlm-kv explain snapkv --tokens 70000 --json"],
    "vlm-kv fidelity": [f"vlm-kv fidelity {DATA} -n 3 --kv int4 --json --per-record"],
    "vlm-kv fidelity, CSV": [f"vlm-kv fidelity {DATA} -n 3 --kv int4 --csv"],
    "vlm-kv values": [f"vlm-kv values {DATA} --json"],
    "vlm-bench latency": [f"vlm-bench latency {LATENCY} --json"],
    "vlm-bench latency, CSV": [f"vlm-bench latency {LATENCY} --csv"],
    "vlm-bench kernels": ["vlm-bench kernels --device cpu -t 1 --batch 1 --rows 128 --head-dim 64 --repeats 1 --only kivi --json"],
    "vlm-bench throughput": [f"vlm-bench throughput {SMALL} --batch 2 --answer-tokens 5 --json",
                             f"vlm-bench throughput {SMALL} --kv-memory 1K --json"],
    "vlm-bench throughput, CSV": [f"vlm-bench throughput {SMALL} --batch 2 --csv"],
    "vlm-bench throughput, dry run": ["vlm-bench throughput -m pocket --kv-memory 1K,1G --dry-run --json",
                                      "vlm-bench throughput -m pocket --memory 4G --dry-run --json"],
    "vlm-bench throughput, dry run, CSV": ["vlm-bench throughput -m pocket --kv-memory 1G --dry-run --csv"],
    "vlm-bench vision": [f"vlm-bench vision {CPU} --repeats 1 {IMAGE} --json"],
}


def write_adapter(folder):
    """A LoRA adapter of llava_gqa, as PEFT saves it."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 1, "lora_alpha": 2}')
    root = "base_model.model.model.language_model.layers.0.self_attn.q_proj."
    header = json.dumps({f"{root}lora_{part}.weight": {"dtype": "F32", "shape": shape, "data_offsets": [begin, begin + 192]}
                         for part, shape, begin in (("A", [1, 48], 0), ("B", [48, 1], 192))}).encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<96f", *[0.01] * 96))


def sections(text):
    """{heading: {field: (type, meaning)}} of a page's tables; a row may name several fields."""
    found = {}
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        rows = re.findall(r"^\| (`[^|]*`) \| ([^|]*) \| ([^|]*) \|$", part, re.MULTILINE)
        found[part.splitlines()[0]] = {name: (kind, meaning) for names, kind, meaning in rows
                                       for name in re.findall(r"`([^`]+)`", names)}
    return found


def expanded(rows):
    """Paths of all fields; of a GPU or of policies in Python alone; of objects whose fields are not looked at."""
    paths, elsewhere, objects = {}, set(), set()
    for name, (kind, meaning) in rows.items():
        for path in [f"{name}.{part}" for part in SPREADS[kind]] if kind in SPREADS else [name]:
            paths[path] = kind if kind not in SPREADS else "number" if not path.endswith(".unit") else "string"
            if kind == "object":
                objects.add(path)
            if "on a GPU" in meaning or "policies in Python" in meaning:
                elsewhere.add(path)
    return paths, elsewhere, objects


def leaves(value, path, objects):
    """(path, value) of everything in a JSON value that is no object of its own on the page."""
    if path in objects:
        yield path, None
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from leaves(part, f"{path}.{key}" if path else key, objects)
    elif isinstance(value, list) and (path + "[]" in objects or not objects_in(value)):
        yield path, value
    elif isinstance(value, list):
        for part in value:
            yield from leaves(part, path + "[]", objects)
    else:
        yield path, value


def objects_in(values):
    return any(isinstance(value, dict) for value in values)


def faults(name, rows, printed):
    """What the page lacks, and what it has that none of the objects has."""
    paths, elsewhere, objects = expanded(rows)
    paths = {path.removesuffix("[]"): kind for path, kind in paths.items()}
    seen = {}
    for value in printed:
        for path, leaf in leaves(value, "", objects):
            seen.setdefault(path, leaf)
    for path in sorted(seen.keys() - paths.keys()):
        yield f"{name}: `{path}` is printed and on no row of the page"
    for path in sorted(paths.keys() - seen.keys() - elsewhere):
        yield f"{name}: `{path}` is a row of the page and printed by none of its runs"
    for path in sorted(seen.keys() & paths.keys()):
        kinds = [TYPES[kind] for kind in paths[path].split(" or ") if kind in TYPES]
        wrong = isinstance(seen[path], bool) and bool not in kinds  # to Python a boolean is an integer
        if seen[path] is not None and kinds and (wrong or not any(isinstance(seen[path], kind) for kind in kinds)):
            yield f"{name}: `{path}` is {seen[path]!r}, which is no {paths[path]}"


def run(command, folder):
    words = command.replace("FOLDER", str(folder)).split()
    result = subprocess.run([TOOLS / words[0], *words[1:]], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                            timeout=TIMEOUT_S)
    return words, result


def printed_by(command, folder):
    """The objects that a command prints or writes; of CSV the head of the columns."""
    words, result = run(command, folder)
    refused = "--kv-memory 1K" in command or "--batch FOLDER" in command  # prints what does not fit, or a failed record
    if result.returncode != 0 and not refused:
        raise AssertionError(f"{command}: status {result.returncode}: {result.stderr[-1000:]}")
    text = Path(words[words.index("--out") + 1]).read_text() if "--batch FOLDER" in command else result.stdout
    if "--csv" in words:
        return [dict.fromkeys(next(csv.reader(io.StringIO(text))))]
    return [json.loads(text)] if words[1] == "profile" else [json.loads(line) for line in text.splitlines()]


class Page(unittest.TestCase):
    maxDiff = None

    @classmethod
    def setUpClass(cls):
        if os.environ.get("KVLM_SANITIZE"):
            raise unittest.SkipTest("tens of times slower; the release build runs it")
        for program in ("vlm-run", "vlm-kv", "vlm-bench"):
            if not (TOOLS / program).is_file():
                raise unittest.SkipTest(f"{TOOLS / program} is not built")

    def test_every_section_has_runs_and_every_run_a_section(self):
        self.assertEqual(sorted(RUNS), sorted(sections(PAGE.read_text("utf-8"))))

    def test_fields_are_those_that_are_printed(self):
        page = sections(PAGE.read_text("utf-8"))
        page["vlm-run batch"] |= page["vlm-run"]
        with tempfile.TemporaryDirectory(prefix="kvlm-output-") as name:
            folder = Path(name)
            image, video = HELDOUT / "scenes/scene_000.png", HELDOUT / "clips/clip_001.webp"
            (folder / "images.jsonl").write_text(f'{{"id": 1, "image": "{image}", "meta": {{"sku": 1}}}}\n{{"id": 2, "image": "none.png"}}\nno JSON\n'
                                                 f'{{"id": "b", "image": "{image}", "prompt": "How many objects are there?"}}\n')
            (folder / "videos.jsonl").write_text(f'{{"id": 1, "video": "{video}"}}\n')
            write_adapter(folder / "adapter")
            for section, commands in RUNS.items():
                with self.subTest(section=section):
                    printed = [value for command in commands for value in printed_by(command, folder)]
                    self.assertEqual([], list(faults(section, page[section], printed)))


class Checker(unittest.TestCase):
    PAGE = ("## a\n\n| field | type | meaning |\n|---|---|---|\n| `x.y` | integer | y |\n| `z[]` | list of integers | z |\n"
            "| `t` | spread | t |\n| `g` | number | g. Sometimes: on a GPU |\n| `o` | object | o |\n| `l[].m`, `n` | string | m |\n")
    GOOD = {"x": {"y": 1}, "z": [1, 2], "t": {"unit": "ms", "median": 1.0, "min": 1, "max": 2}, "o": {"p": 1}, "l": [{"m": "m"}],
            "n": None}

    def found(self, value):
        return [fault.removeprefix("a: ") for fault in faults("a", sections(self.PAGE)["a"], [value])]

    def test_a_right_page_is_legal(self):
        self.assertEqual(self.found(self.GOOD), [])

    def test_a_missing_row_and_a_row_too_many_are_found(self):
        self.assertEqual(self.found({**self.GOOD, "new": 1}), ["`new` is printed and on no row of the page"])
        self.assertEqual(self.found({**self.GOOD, "l": [{}]}), ["`l[].m` is a row of the page and printed by none of its runs"])

    def test_a_wrong_type_is_found(self):
        self.assertEqual(self.found({**self.GOOD, "x": {"y": "1"}}), ["`x.y` is '1', which is no integer"])


if __name__ == "__main__":
    unittest.main()
