"""What documented_test.py runs, in this order and in one folder (see Workshop there), and what has to come out.

A new command in a document, or a new example of --help, is a line of DOCUMENTED, or of ELSEWHERE with the reason why it is
not run. A new option is used by a line of OPTIONS. A rule of RULES serves all commands that look alike. A page that shows what its
commands print (SHOWN) is compared with what they do print.
"""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable

import documented_commands


@dataclass
class Outcome:
    """What a command left behind. `facts` is what the workshop knows: captions, paths, ROOT."""

    status: int
    out: str
    err: str
    folder: object
    facts: dict

    def rows(self):
        return [json.loads(line) for line in self.out.splitlines()]

    def file_rows(self, name):
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]


@dataclass
class Case:
    """A command, exactly as documented; `changes` are texts replaced before it runs (smaller sizes, a model that is here);
    `checks` take the Outcome and return what is wrong, or nothing."""

    command: str
    checks: list[Callable]
    changes: dict = field(default_factory=dict)
    status: int = 0
    stdin: str = ""
    needs: str = ""  # a Python module; where it is missing the command ends with 1 and says how it is had

    def line(self):
        text = self.command
        for old, new in self.changes.items():
            assert old in text, f"{old!r} is not in {text!r}"
            text = text.replace(old, new)
        return text


# ---- checks -----------------------------------------------------------------------------------------------------------


def says(key):
    """Standard output is this text of the facts."""
    return lambda o: None if o.out.strip() == o.facts[key] else f"expected {o.facts[key]!r}"


def prints(*texts):
    return lambda o: [text for text in texts if text not in o.out] or None


def matches(*patterns):
    return lambda o: [pattern for pattern in patterns if not re.search(pattern, o.out)] or None


def reports(*texts):
    """In the summary on stderr."""
    return lambda o: [text for text in texts if text not in o.err] or None


def complains(*texts):
    """One sentence on stderr with these words, nothing on stdout."""
    def check(o):
        wrong = [text for text in texts if text not in o.err]
        return wrong or (o.out != "" and "printed something") or (o.err.count("\n") != 1 and "not one line") or None
    return check


def answers(o):
    """One line that is not empty."""
    return None if o.out.strip() and o.out.count("\n") == 1 else "expected an answer of one line"


def silent(o):
    return o.err and f"stderr is not empty: {o.err!r}"


def one(condition):
    """The only JSON object printed meets the condition."""
    return lambda o: None if len(o.rows()) == 1 and condition(o.rows()[0]) else "the object is not as expected"


def each(count, condition):
    return lambda o: None if len(o.rows()) == count and all(map(condition, o.rows())) else "the rows are not as expected"


def answered(name, count):
    """A file of answers: as many records, captions of the bundled model, none failed."""
    def check(o):
        rows = o.file_rows(name)
        if len(rows) != count or any("error" in row for row in rows):
            return f"{len(rows)} rows: {rows}"
        texts = {row["id"]: row["text"].strip() for row in rows}
        return texts.get("scene_000", o.facts["caption"]) != o.facts["caption"] and texts
    return check


def refuses_a_gpu(o):
    """Every word of the command is understood; what is missing is the GPU."""
    wanted = re.compile(r"this build has no CUDA; use --device cpu|there is no GPU: .*; use --device cpu")
    return None if wanted.search(o.err) and o.err.count("\n") == 1 else "expected the sentence on the missing GPU"


def plotted(*names):
    """Pictures, or where matplotlib is missing one sentence that says so; which of the two, the workshop knows."""
    def check(o):
        if not o.facts["matplotlib"]:
            return None if "matplotlib" in o.err else "expected a word on matplotlib"
        missing = [name for name in names if not (o.folder / name).is_file()]
        return missing and f"missing {missing}"
    return check


def exact(o):
    """f16 rows against f16 rows: nothing differs, in any column."""
    for row in o.rows():
        found = {key: row[key] for key in ("kl_mean", "kl_p99") if row[key] != 0}
        for layer in row["layers"]:
            found |= {f"layer {layer['layer']} {key}": layer[key] for key in layer if "error" in key and layer[key] != 0}
        if found or row["top1"] != 1 or row["stored_bits"] != 16:
            return f"not exact: {found or row}"
    return None


def sound(*specs):
    """A row for each spec, in order, with figures that can be: attention differs, by a share, in every kind of row."""
    def check(o):
        found = [re.split(r"[, ]", row["spec"])[0] for row in o.rows()]
        if found != list(specs):
            return f"specs {found}"
        for row in o.rows():
            for name in ("error", "visual_error", "text_error"):
                errors = [layer[name] for layer in row["layers"]]
                if not (min(errors) >= 0 and 0 < max(errors) < 10):
                    return f"{row['spec']}: {name} {errors}"
            if not (row["kl_mean"] > 0 and 0 <= row["top1"] <= 1 and 0 < row["stored_bits"] < 16):
                return f"{row['spec']}: {row}"
        return None
    return check


def rows_of_data(o):
    """The CSV named on stdout has the columns of docs/data and a value in each row."""
    lines = (o.folder / o.out.split(":")[0]).read_text().splitlines()
    wrong = [line for line in lines[1:] if not re.search(r"f16|kivi|int4", line) or not re.search(r",[\d.e+-]+,", line)]
    return lines[0] != "date,commit,device,model,weights,spec,batch,prompt,metric,value,min,max,command" or wrong or len(lines) < 5


def measured(*columns):
    """JSON rows in which every figure named is positive."""
    def check(o):
        for row in o.rows():
            for column in columns:
                value = row[column]["median"] if isinstance(row[column], dict) else row[column]
                if not value > 0:
                    return f"{column} is {value}"
        return None if o.rows() else "no row"
    return check


# Times, rates, threads and the last digits of a divergence depend on the machine.
MEASURED = re.compile(r"\d[\d,.]*(?= ?(?:ms|s|min|%|GB/s|GFLOP/s|images/s|records/s|tokens/s|threads)(?!\w))|\([\d.]+ to [\d.]+\)|\d\.\d{4,}")


def as_shown(lines):
    """Every line that the page shows is printed: measured figures may be others, "..." is any text."""
    def plain(line):
        return " ".join(MEASURED.sub("#", line).split())

    def check(o):
        printed = [plain(line) for line in (o.out + o.err).splitlines()]
        shown = [".*".join(map(re.escape, map(str.strip, plain(line).split("...")))).replace(re.escape("#"), ".+?")
                 for line in lines if line.strip() and not line.startswith("> ")]
        return [line for line in shown if not any(re.fullmatch(line, text) for text in printed)] or None
    return check


def prints_page(name):
    """What is printed, on stdout or into the file of that name, is the page."""
    def check(o):
        printed = o.folder / name
        text = printed.read_text() if printed.is_file() else o.out
        return text != (o.facts["root"] / name).read_text() and f"differs from {name}"
    return check


def has_policies(o):
    names = [line.split()[0] for line in o.out.splitlines() if line and not line.startswith(" ")]
    return {"f16", "kivi", "calibquant", "prefixkv", "share=codes"} - set(names) or None


# ---- every command of a document, every example of a --help -----------------------------------------------------------

RELEASED = "synthetic:llava-tinyllama-1.1b"  # the smallest; one layer of it is what fits into seconds

_VENV = "build/eval-venv/bin/python3"
_FEW = "--limit 2 --fidelity 1 --build build/release"
_MEASURE = '--device cpu --model pocket --repeats 1 --build "$PWD/build/release"'

DOCUMENTED = [
    Case('vlm-run -m pocket --weights int4 --image a.png -p "What is this?"', [reports("int4 in groups of 32")]),
    Case("vlm-run -m pocket --weights int4 --save-weights pocket-int4", [reports("wrote pocket-int4")]),
    Case("vlm-kv fidelity -m pocket --weights int4 --reference pocket --kv f16 --kv kivi --data captions.jsonl",
         [prints("Against an f16 cache of pocket with bf16 weights", "kivi")], {"captions.jsonl": "captions.jsonl --records 1 -n 8"}),
    # vlm-run --help, README.md
    Case("vlm-run --help", [prints("Usage:", "Examples:")]),
    Case("vlm-run -q --batch 'tools/pocket/heldout/scenes/scene_00[0-9].png' --out build/scenes.jsonl --kv int4",
         [answered("build/scenes.jsonl", 2)], {"[0-9]": "[01]"}),
    # README.md, docs/models.md: the bundled models under the published names (Workshop)
    Case('vlm-run -m Qwen/Qwen2.5-VL-3B-Instruct --image photo.jpg -p "What is this?"',
         [answers, reports("Qwen/Qwen2.5-VL-3B-Instruct (qwen2.5-vl")]),
    Case("vlm-run -m Qwen/Qwen2.5-VL-3B-Instruct --batch photos --out photos.jsonl --kv int4",
         [answered("photos.jsonl", 2)]),
    Case("vlm-run -m OpenGVLab/InternVL3-1B --image photo.jpg", [says("caption")]),
    Case('vlm-run -m OpenGVLab/InternVL3-1B --image photo.jpg -p "What is in the foreground?"', [answers]),
    Case("vlm-run -m OpenGVLab/InternVL3-1B --batch photos --out captions.jsonl --kv int4",
         [answered("captions_of_photos.jsonl", 2)], {"captions.jsonl": "captions_of_photos.jsonl"}),
    Case("vlm-kv explain int4 -m OpenGVLab/InternVL3-1B --tokens 3520 --visual 3328",
         [prints("int4 on OpenGVLab/InternVL3-1B after a prompt of 3520 tokens", "4.500 stored bits")]),
    Case("vlm-run --image cat.png", [says("caption")]),
    Case("vlm-run a.png", [says("caption")]),
    Case("vlm-run --image - -p @question.txt", [says("count")],
         {"vlm-run": "echo 'How many objects are there?' >question.txt; vlm-run", "@question.txt": "@question.txt <a.png"}),
    Case('vlm-run --batch FOLDER --out answers.jsonl -p "What is this?"',
         [lambda o: [row["id"] for row in o.file_rows("answers.jsonl")] != ["a.png", "b.png"] and "not two answers"],
         {"FOLDER": "'[ab].png'"}),
    Case('vlm-run -m llava-hf/llava-1.5-7b-hf --image a.png "What is this?"', [answers, reports("llava-hf/llava-1.5-7b-hf")]),
    Case('vlm-run -m MODEL --video a.mp4 --frames 8 -p "What happens?"', [reports("a.mp4: 4 of 6 frames", "internvl")],
         {"MODEL": "golden/internvl", "--frames 8": "--frames 4"}),
    Case("vlm-run --image a.png --chat", [prints("seven")], stdin="How many objects are there?\n/quit\n"),
    Case("vlm-run --image a.png --json", [one(lambda row: row["visual_tokens"] == 576 and row["kv"]["spec"] == "f16")]),
    Case("vlm-run --batch in.jsonl --out out.jsonl --batch-size 8", [answered("out.jsonl", 2)]),
    Case("vlm-run --batch in.jsonl --out out.jsonl --shard 2/4", [answered("parts.2-of-4.jsonl", 1)],
         {"--out out.jsonl": "--out parts.jsonl"}),
    Case("vlm-run -m synthetic:llava-1.5-7b,layers=4 --image a.png",
         [reports(f"{RELEASED},layers=1", "answer   2 tokens")],
         {"synthetic:llava-1.5-7b,layers=4": f"{RELEASED},layers=1 -n 2"}),
    # vlm-kv --help, docs/policies.md
    Case("vlm-kv list", [has_policies]),
    Case("vlm-kv list kivi", [prints("kivi (quantizer)", "residual=")]),
    Case("vlm-kv list --markdown", [prints_page("docs/policies.md")]),
    Case("vlm-kv list --markdown options", [prints_page("docs/policy-options.md")]),
    Case("vlm-kv list --markdown > docs/policies.md", [prints_page("docs/policies.md")]),
    Case("vlm-kv explain kivi,bits=2 -m pocket --tokens 624 --visual 576",
         [prints("8 layers, 2 kv_heads, head_dim 64", "878,592 bytes", "key codes", "5.500 stored bits")]),
    Case("vlm-kv explain SPEC -m MODEL --tokens N --visual M", [prints("2,555,904 bytes, 100.0 % of f16's")],
         {"SPEC": "f16", "MODEL": "pocket", "tokens N": "tokens 624", "visual M": "visual 576"}),
    Case('vlm-kv explain "visual=calibquant text=kivi" --tokens 4096 --json',
         [one(lambda row: row["kv_heads"] == 2 and 0 < row["bytes"] < row["f16_bytes"])]),
    Case("vlm-kv fidelity --kv int4 --data captions.jsonl --records 10 --csv",
         [lambda o: len(o.out.splitlines()) != 2, prints("spec,model,weights_format", '"int4",')]),
    Case("vlm-kv fidelity -m MODEL --data tools/pocket/heldout/captions.jsonl --records 100 --layer-records 0 -n 64 -t 1 --json "
         "--per-record",
         [each(2, lambda row: len(row["per_record"]) == 1 and row["kl_mean"] > 0)],
         {"MODEL": "pocket --kv kivi,bits=1 --kv kivi,bits=1,rotate=hadamard", "--records 100": "--records 1"}),
    Case("vlm-kv fidelity -m pocket-qwen --data tools/pocket/heldout/clips.jsonl --records 50 --layer-records 0 -n 64 -t 2 "
         "--json --per-record --kv vidkv --kv vidkv,gamma=0.5", [prints('"spec":"vidkv,gamma=0.5"', '"per_record":[')],
         {"--records 50": "--records 1"}),
    Case("vlm-bench throughput -m synthetic:internvl2.5-8b --kv-memory 5G,30G --dry-run",
         [prints("internvl2.5-8b", "batch", "staging", "reserved")]),
    Case("vlm-kv fidelity --kv kivi --kv vidkv --data captions.jsonl --plot plots",
         [plotted("plots/layer_error.png", "plots/retained.png", "plots/bits.png", "plots/scores.png")]),
    Case("vlm-kv profile -m pocket --data captions.jsonl --out pocket.profile.json",
         [prints("pocket.profile.json"),
          lambda o: set(json.loads((o.folder / "pocket.profile.json").read_text())) !=
          {"model", "prefixkv", "calibquant", "head_quantile", "xquant"}],
         {"captions.jsonl": "captions.jsonl -n 3"}),
    Case("vlm-kv values -m pocket --data captions.jsonl --plot plots",
         [plotted("plots/ranges.png", "plots/codes.png", "plots/keys_visual.png", "plots/values_text.png")]),
    Case("vlm-kv values -m pocket --data captions.jsonl --records 5",
         [prints("pocket, 1 prompts", "keys    visual", "values  text", " %")]),
    # docs/choosing-a-policy.md
    Case("vlm-kv fidelity -m pocket --data tools/pocket/heldout/captions.jsonl --kv int4 --kv kivi,residual=32",
         [matches(r"int4 +\d.* 4\.500 ", r"kivi,residual=32 +\d")],
         {"captions.jsonl": "captions.jsonl --records 1 --layer-records 0 -n 8"}),
    Case('vlm-kv explain "calibquant,bits=2 + int4,scope=text" -m synthetic:qwen2.5-vl-7b --tokens 3400 --visual 3300',
         [prints("28 layers, 4 kv_heads, head_dim 128")]),
    # docs/add-a-policy.md, whose rule is in the tree under another name
    Case("build/release/tools/vlm-kv fidelity --kv vnorm,keep=0.5,evict=score --kv random,keep=0.5,evict=score "
         "--data tools/pocket/heldout/captions.jsonl --records 10 --layer-records 0",
         [matches(*(rf"{rule},evict=score,keep=0.5 +\d" for rule in ("knorm", "random")))],
         {"vnorm": "knorm", "--records 10": "--records 1 -n 8"}),
    Case("build/release/tools/vlm-kv fidelity --kv vnorm,keep=0.5,evict=score --kv random,keep=0.5,evict=score "
         "--data tools/pocket/heldout/captions.jsonl --records 2 --plot plots",
         [plotted("plots/retained.png")], {"vnorm": "knorm", "--records 2": "--records 1 -n 4"}),
    Case("python3 tools/eval/docvqa.py --out OUT/documents --limit 20 --kv f16 --kv vnorm,keep=0.5 --kv random,keep=0.5",
         [prints("| `knorm,keep=0.5` | heldout-first-2 |", "| `random,keep=0.5` | heldout-first-2 |")],
         {"vnorm": "knorm", "OUT/documents --limit 20": "OUT/new_rule --limit 2 --fidelity 0 --build build/release"}),
    Case("python3 tools/eval/report.py --out OUT/report OUT/documents/results.json",
         [prints("OUT/new_rule/report/report.md")],
         {"OUT/report": "OUT/new_rule/report --skip plots --build build/release", "OUT/documents": "OUT/new_rule"}, needs="numpy"),
    # docs/results.md
    Case("tools/results/measure.py speed --build build/cuda --device cuda --out docs/data/speed.csv", [prints("speed.csv: ", " figures"), rows_of_data],
         {"docs/data/": "", "--build build/cuda --device cuda": f"{_MEASURE} --prompt-tokens 16 --batches 1 --budgets 1MB --kv kivi"}),
    Case("tools/results/measure.py captions --build build/cuda --device cuda --model synthetic:llava-1.5-7b "
         "--batch-size 128 --out docs/data/captions_speed.csv", [prints("captions_speed.csv: 4 figures"), rows_of_data],
         {"docs/data/": "", "--build build/cuda --device cuda --model synthetic:llava-1.5-7b --batch-size 128":
             f"{_MEASURE} --limit 1 --kv f16 --kv int4"}),
    Case("tools/results/measure.py answers --build build/cuda --device cuda --jobs 8 --batch-size 64 "
         "--out docs/data/answers.csv",
         [matches(r"answers\.csv: \d+ figures"), rows_of_data],
         {"docs/data/": "", "--build build/cuda --device cuda --jobs 8 --batch-size 64": f"{_MEASURE} --models pocket-llava --limit 1 --kv f16"}),
    # CONTRIBUTING.md
    Case("tools/results/builds.py --device cuda --out compare.csv OLD/build/cuda build/cuda",
         [matches(r"int4 +2 builds_step_ms +[\d.]+ +[\d.]+  [\d.]+ \("), rows_of_data],
         {"--device cuda": "--device cpu --only decode --model golden/llava_gqa --batches 1,2 --kv f16 --kv int4",
          "OLD/build/cuda build/cuda": "build/release build/release"}),
    Case("tools/results/page.py", [], {"page.py": "page.py --check"}),
    # vlm-bench --help
    Case("vlm-bench latency -m synthetic:llava-tinyllama-1.1b", [prints("prefill", "decode", "GB/s")],
         {"1.1b": "1.1b,layers=1 --repeats 1 --tokens 2 --prompt-tokens 40"}),
    Case("vlm-bench latency -m pocket --kv f16 --kv kivi --json", [each(2, lambda row: row["decode"]["median"] > 0)],
         {"--json": "--json --repeats 1 --tokens 2"}),
    Case("vlm-bench vision -m pocket --size 240x320,960x1280",
         [prints("240 x 320 pixels", "96 x 128 pixels", "prepare", "images/s")], {"960x1280": "96x128 --repeats 1"}),
    Case("vlm-bench vision -m pocket --image page.png -t 2",
         [prints("2 threads", "336 x 336 pixels", "read", "prepare", "ready", "images/s")],
         {"page.png": "a.png --repeats 1"}),
    Case('vlm-bench kernels --only "2 bits" -t 1', [prints("kivi 2 bits", "calibquant 2 bits", " x (")],
         {"-t 1": "-t 1 --rows 256 --repeats 1"}),
    # tools/*/README.md and docs/: the bundled sets, three of each
    Case("vlm-run -m pocket-qwen --image heldout/scenes/scene_003.png", [answers], {"heldout": "tools/pocket/heldout"}),
    Case('vlm-run -m pocket-qwen --video heldout/clips/clip_001.webp -p "Describe the video."',
         [answers, reports("clip_001.webp: 8 of 8 frames")], {"heldout": "tools/pocket/heldout"}),
    Case("for set in captions documents questions clips; do vlm-run -m pocket-qwen --batch heldout/$set.jsonl "
         "--out $set.pred.jsonl --batch-size 8; done",
         [answered(f"{name}.pred.jsonl", 3) for name in ("captions", "documents", "questions", "clips")],
         {"heldout/": "few/"}),
    Case("python3 score.py captions.pred.jsonl documents.pred.jsonl questions.pred.jsonl clips.pred.jsonl --gate --clips",
         [matches(r"captions_exact +1\.50%", r"questions_accuracy +1\.50%", "below the gate: captions_exact")],
         {"score.py": "tools/pocket/score.py"}, status=1),
    # docs/evaluation.md, "The report page", with what needs no package but numpy
    *(Case(f"build/eval-venv/bin/python3 tools/eval/{script} --out OUT/{name} --kv f16 --kv kivi,residual=32 --kv calibquant,bits=2",
           [prints("| `f16` | heldout-first-2 | native | 2 |")],
           {"build/eval-venv/bin/python3": "python3", "--out": f"--limit 2 --fidelity 1 --build build/release{skip} --out"})
      for script, name, skip in (("coco.py", "captions", " --skip pycocoevalcap"), ("docvqa.py", "documents", ""))),
    Case("build/eval-venv/bin/python3 tools/eval/report.py --out OUT/report OUT/captions/results.json OUT/documents/results.json",
         [prints("OUT/report/report.md"), lambda o: None if all(
             words in (o.folder / "OUT/report/report.md").read_text() for words in ("### At equal stored bytes", "n = 2, "))
          else "the page lacks what it should say"],
         {"build/eval-venv/bin/python3": "python3", "--out": "--skip plots --build build/release --out"}, needs="numpy"),
    # docs/evaluation.md: on our own sets, with what needs no package; eval_scores_test.py has the others
    *(Case(f"{_VENV} tools/eval/{script} --out OUT --annotations {annotations} --model MODEL --kv f16 --kv kivi",
           [matches(*(rf"\| pocket \| `{spec}` \| heldout-first-2 \| native \| 2 \| 1.0000 \|" for spec in ("f16", "kivi")))],
           {_VENV: "python3", "OUT": script, f"--annotations {annotations} --model MODEL": _FEW + skip})
      for script, annotations, skip in (("coco.py", "annotations/captions_val2014.json", " --skip pycocoevalcap"),
                                        ("docvqa.py", "val_v1.0.json", ""))),
    Case(f"{_VENV} tools/eval/coco.py --out OUT --annotations annotations/captions_val2014.json "
         "--results captions_val2014_NAME_results.json", [prints("| native | 2 | 1.0000 | 1.0000 |")],
         {_VENV: "python3", "OUT": "scored", "--annotations annotations/captions_val2014.json": _FEW + " --skip pycocoevalcap",
          "captions_val2014_NAME_results.json":
              "coco.py/pocket/f16/captions_heldout-first-2_pocket-f16_results.json"}),
    Case("python3 tools/eval/coco.py --out OUT --limit 20 --kv f16 --kv kivi --skip pycocoevalcap",
         [reports("skipped: BLEU-1"), prints("| native | 1 |")],
         {"OUT": "smoke", "--limit 20": "--limit 1 --fidelity 0 --build build/release"}),
    Case('python3 tools/eval/docvqa.py --out OUT --kv f16 --kv kivi --kv "prefixkv,keep=0.5 + int4"',
         [prints("| `prefixkv,keep=0.5 + int4` | heldout-first-2 | native | 2 |")], {"OUT": f"documents {_FEW}"}),
    Case(f"{_VENV} tools/eval/video.py --out OUT --annotations videomme/test-00000-of-00001.parquet --model MODEL --kv f16 "
         "--kv kivi", [prints("| pocket-qwen | `kivi` | heldout-first-2 | native | 2 |", "| kind | description | 2 | 2 |")],
         {_VENV: "python3", "OUT": "mme", "--annotations videomme/test-00000-of-00001.parquet --model MODEL": _FEW}),
    Case("python3 tools/eval/video.py --out OUT --annotations MVBench/json --videos MVBench/video --model MODEL --frames 16 "
         "--kv kivi", [prints("| pocket-qwen | `kivi` | heldout-2frames-first-2 | native | 2 |")],
         {"OUT": "mvbench", "--annotations MVBench/json --videos MVBench/video --model MODEL": _FEW, "16": "2"}),
    Case("python3 tools/eval/video.py --out OUT --limit 20 --kv f16 --kv kivi",
         [prints("| native | 1 | 1.0000 | 1.0000 |")],
         {"OUT": "clips", "--limit 20": "--limit 1 --fidelity 0 --build build/release"}),
    Case("python3 tools/eval/vqa.py --task chartqa --out OUT --kv f16 --kv kivi",
         [prints("| pocket | `kivi` | heldout-first-2 | native | 2 |")], {"OUT": f"chartqa {_FEW}"}),
    Case("python3 tools/eval/budgets.py --out OUT", [prints("| 5 % | `random` |", "VizWiz (VQA accuracy)")],
         {"OUT": "table --limit 1 --fidelity 0 --rule random --budgets 0.05 --build build/release"}),
    Case('python3 tools/eval/fidelity.py --out OUT --kv kivi --kv "prefixkv,keep=0.5 + int4"',
         [prints("ROUGE-L F1 | perplexity", "| pocket | `f16` | heldout-first-1 | prefixkv | 1 | 1.0000 |",
                 "| pocket | `prefixkv,keep=0.5 + int4` |")],
         {"OUT": "fidelity --limit 1 --build build/release"}),
    Case("python3 tools/eval/fidelity.py --out OUT --rule prefixkv --rule h2o --budgets 0.1,0.3,0.5 --annotations mm-vet.json",
         [prints("| `h2o,keep=0.5` | heldout-first-1 | prefixkv |")],
         {"OUT": "budgets --limit 1 --build build/release", "0.1,0.3,0.5 --annotations mm-vet.json": "0.5"}),
    Case(f"{_VENV} tools/eval/tables.py --out OUT --device cuda --jobs 8 --batch-size 64",
         [prints("| `kivi` | heldout-first-2 | native | 2 |"), lambda o: None if (o.folder / "tables/report/report.md").is_file() else "no page"],
         {_VENV: "python3", "OUT": "tables", "--device cuda --jobs 8 --batch-size 64":
             "--limit 2 --fidelity 1 --tune 0 --kv f16 --kv kivi --model pocket-llava --skip pycocoevalcap --skip plots "
             "--build build/release"}, needs="numpy"),
    Case(f"{_VENV} tools/eval/coco.py --out OUT --limit 14 --kv int4 --shard 3/7", [reports("shard 3/7 is done")],
         {_VENV: "python3", "OUT": "shards --fidelity 0 --build build/release --skip pycocoevalcap"}),
]

# Not run here, and why.
ELSEWHERE = {
    'draw_scene.py "large red circle marked A, row 2 column 3"': "draw_scene_test.py runs it where Pillow is installed",
    "tools/demo.sh": "builds the tree; Demo in documented_test.py runs it with a build that is done",
    "tools/eval/setup.sh": "downloads packages",
    "tools/real/stamps.py OUT --package FILE.deb": "real_sets_test.py runs it with a package that it makes",
    "tools/real/scans.py OUT FILE.tar.xz": "real_sets_test.py runs it with an archive that it makes",
    "python3 tools/real/prompts.py >prompts.jsonl": "real_test.py makes its records",
    "tools/test.sh": "runs this test",
    "tools/setup.sh --python": "installs packages; tools/python.sh runs it, which tools/test.sh does",
    "pip install .": "builds the module; tools/python.sh does that, and tests/python what it is for",
    "pip install . -C cmake.define.KVLM_CUDA=ON": "needs the CUDA toolkit and half an hour",
    'python -m kvlm --rules my.py vlm-kv fidelity --kv "vnorm,keep=0.5" --data tools/pocket/heldout/captions.jsonl':
        "needs the module; programs_test.py runs it where it is installed",
    "tools/python.sh --wheel": "builds the module; without --wheel tools/test.sh runs it",
    "tools/test.sh --lint": "runs this test",
    "python3 tests/mutants/run.py": "builds and tests the tree once a mutant; list_test.py keeps its list applicable",
    "cmake --preset fuzz && nice ninja -C build/fuzz image_fuzz": "builds with clang; the corpus is replayed by ctest",
    "ctest -L fuzz": "ctest runs those tests too",
    "tools/eval/fidelity.py --rule prefixkv": "a name; docs/evaluation.md has the command",
    "xargs -d '\\n' rm -f <build/release-programs/install_manifest.txt": "removes an installation",
    "python -m venv venv && venv/bin/pip install -r tools/golden/requirements.txt": "downloads torch",
    "python3 -m pip install torch transformers tokenizers sentencepiece pillow matplotlib": "downloads torch",
}

_TORCH = "needs torch and transformers"
_OTHER_TEST = "a test of its own in this suite"


def _elsewhere(reason):
    return lambda command: reason


def _on_a_gpu(command):
    """Without a GPU it is refused by the sentence on the GPU and no other, so all of its words are known."""
    return Case(command, [refuses_a_gpu], {" ...": " f16"} if command.endswith(" ...") else {}, status=1)


def _small_bench(command):
    """Any further command of vlm-bench: one layer of a released shape, few rows and steps."""
    subcommand = command.split()[1]
    case = Case(command, [measured({"latency": "decode", "throughput": "tokens_per_s",
                                    "kernels": "packed_ns_per_row"}[subcommand])])
    sizes = {"latency": "--prompt-tokens 40 --tokens 2 --repeats 1", "kernels": "--rows 256 --repeats 1",
             "throughput": "--prompt-tokens 40 --text-tokens 8 --tokens 2 --repeats 1"}[subcommand]
    kept = re.sub(r" --(?:prompt-tokens|text-tokens|tokens|repeats|rows) \d+| --(?:json|csv)(?= |$)", "", command)
    kept = re.sub(r"(-m synthetic:)[^ ]+", rf"\1{RELEASED.split(':')[1]},layers=1", kept)
    case.changes = {command: f"{kept} {sizes} --json"}
    return case


def _served(command):
    """A server, told to end once it listens."""
    return Case(command, [reports("/v1  ")], {command: f"timeout --preserve-status -s TERM 4 {command} --port 0 -t 1"})


# (pattern of the whole command, what makes a Case or a reason of it); the first that matches.
RULES = [
    (r"vlm-kv list --markdown options > docs/policy-options\.md", lambda command: Case(command, [prints_page("docs/policy-options.md")])),
    (r"(python3 )?tools/setup\.sh.*|apt-get .*", _elsewhere("installs packages of the system")),
    (r"hf .*|pip install .*", _elsewhere("needs the network")),
    (r"cmake --(?:preset|build).*", _elsewhere("builds the tree")),
    (r"cmake --install .*|cmake -G Ninja -S examples .*|build/examples/.*", _elsewhere("tests/install_test.py does it")),
    (r"cpack .*|tests/package/.*|debootstrap .*", _elsewhere("needs root and debootstrap; tests/package/deb.sh is run by hand")),
    (r"docker .*", _elsewhere("needs Docker")),
    (r"for .* in .*:", _elsewhere("Python; tests/python/pages_test.py runs the pages")),
    (r"(OPENAI_API_KEY=none )?python -m lmms_eval .*", _elsewhere("tests/python/harness_test.py, where lmms-eval is installed")),
    (r"python run\.py .*", _elsewhere("needs VLMEvalKit, with some twenty packages of its own")),
    (r"srun .*", _elsewhere("needs Slurm; eval_shards_test.py sets its variables")),
    (r"mpirun .*", _elsewhere("needs Open MPI; vlm_run_shard_test.py and eval_shards_test.py set its variables")),
    (r"vlm-serve( .*)?", _served),
    (r"vlm-(run|bench) .*--device cuda\b.*", _on_a_gpu),
    (r"vlm-bench (latency|kernels|throughput) .*", _small_bench),
    (r"venv/bin/python tools/golden/export\.py.*", _elsewhere(_TORCH)),
    (r".*\bvenv/bin/python tests/tools/full_size_test\.py", _elsewhere(_TORCH)),
    (r"(python3 )?(tokenizer|byte_level|train|export|heldout)\.py .*", _elsewhere(_TORCH)),
    (r"(for .*)?python3 evaluate\.py .*", _elsewhere(_TORCH)),
    (r"python3 tools/real/(parity|sample|train)\.py.*", _elsewhere(_TORCH)),
    (r"vlm-kv .* build/real/.*", _elsewhere("needs build/real, which tools/real/get.sh makes of downloads")),
    (r"build/real-venv/bin/python3 tools/real/convert\.py .*", _elsewhere("needs packages of weights; real_test.py tests its functions")),
    (r"KVLM_TEST_DEVICE=cuda .*|cuda_tests .*", _elsewhere("needs a GPU")),
    (r"(python3 )?tests/tools/[a-z_]+_test\.py", _elsewhere(_OTHER_TEST)),
    (r"[a-z]+_tests .*", _elsewhere(_OTHER_TEST)),
]


# ---- pages that show what their commands print ------------------------------------------------------------------------


def shown(page):
    """A Case for each command of a transcript: the lines of "> " are typed, a refusal of an option ends with 2."""
    text = (Path(__file__).resolve().parents[2] / page).read_text("utf-8")
    known = {case.command: case for case in DOCUMENTED}
    for command, lines in documented_commands.transcripts(text):
        reasons = [make(command) for pattern, make in RULES if re.fullmatch(pattern, command)]
        if command in known and not known[command].changes:
            known[command].checks.append(as_shown(lines))
        elif command not in known and not any(isinstance(reason, str) for reason in reasons):
            typed = "".join(f"{line[2:]}\n" for line in lines if line.startswith("> "))
            refused = any(re.match("vlm-[a-z]+: --", line) for line in lines)
            yield Case(command, [as_shown(lines)], status=2 if refused else 0, stdin=typed)


for _page in ("README.md", "docs/guide.md"):
    DOCUMENTED += shown(_page)


# ---- every option ------------------------------------------------------------------------------------------------------

SMALL = "--prompt-tokens 40 --text-tokens 8 --tokens 2 --repeats 1"

OPTIONS = [
    Case("vlm-run --version", [prints("kvlm ", "commit", "CPU target")]),
    Case("vlm-kv --version", [prints("kvlm ")]),
    Case("vlm-bench --version", [prints("kvlm ")]),
    Case("vlm-serve --version", [prints("kvlm ")]),
    Case("vlm-serve --help", [prints("Options:", "Examples:")]),
    _served("vlm-serve -m pocket --name mine --host 0.0.0.0 --no-key --kv kivi --kv-profile pocket.profile.json --request-kv aliases "
            "--max-batch 4 --max-queue 9 --max-prompt 700 --max-answer 64 --decode-share 0.1 --media-root . --max-body 1MB --max-images 2 "
            "--connections 8 --drain 1 --log-json --device cpu --dtype f32 --image-backend pil --image-aspect pad --fps 1"),
    _served("vlm-serve -m pocket-qwen --quiet --frames 4 --weights int8 --activations 16 --min-pixels 3136 --max-pixels 50176"),
    _served("vlm-serve -m pocket-internvl --tiles 2 --alias small=kivi"),
    Case("vlm-serve --gpus 99", [complains("--gpus 99 needs 99 GPUs")], status=2),
    Case("vlm-serve --port 0 --lora nowhere", [complains("nowhere/adapter_config.json")], status=1),
    Case("vlm-kv --help", [prints("Subcommands:")]),
    Case("vlm-bench --help", [prints("Subcommands:")]),
    *(Case(f"{name} --help", [prints("Options:", "--")])
      for name in ("vlm-kv list", "vlm-kv explain", "vlm-kv fidelity", "vlm-kv profile", "vlm-kv values", "vlm-bench latency",
                   "vlm-bench throughput", "vlm-bench kernels", "vlm-bench vision")),

    Case("vlm-run --image a.png -q -m pocket --device cpu -t 1", [says("caption"), silent]),
    Case("vlm-run --image a.png --image b.png --json -n 2", [one(lambda row: row["visual_tokens"] == 2 * 576)]),
    Case('vlm-run --image a.png -p "How many objects are there?" -q', [says("count")]),
    Case('vlm-run --image a.png --system "Be brief." --json -n 2', [one(lambda row: row["prompt_tokens"] > 590)]),
    Case("vlm-run --image a.png --chat -q", [prints("seven", "one")],
         stdin="How many objects are there?\n/clear\n/image b.png\nHow many objects are there?\n/quit\n"),
    Case("vlm-run --image a.png --max-tokens 3 --json",
         [one(lambda row: len(row["tokens"]) == 3 and row["finish_reason"] == "length")]),
    Case("vlm-run --image a.png --temp 1.5 --top-k 1 -q", [says("caption")]),  # the likeliest is all there is
    Case("vlm-run --image a.png --temp 5 --top-p 0.000001 --seed 7 -q", [says("caption")]),
    Case("vlm-run --image a.png --temp 50 --seed 7 -n 4 -q && vlm-run --image a.png --temp 50 --seed 8 -n 4 -q",
         [lambda o: (lines := o.out.split("\n"))[0] == lines[1] and "two seeds draw the same",
          lambda o: o.facts["caption"].startswith(o.out.split("\n")[0].strip()) and "as greedy"]),
    Case("vlm-run --image a.png --repeat-penalty 100 -n 12 --json",
         [one(lambda row: len(set(row["tokens"])) == len(row["tokens"]) == 12)]),
    Case('vlm-run --image a.png --stop " objects" --json',
         [one(lambda row: row["text"].strip() == "There are seven" and row["finish_reason"] == "stop")]),
    Case("vlm-run --image a.png --kv prefixkv,keep=0.5 --kv-profile pocket.profile.json -n 4 --json",
         [one(lambda row: row["kv"]["spec"].startswith("prefixkv") and row["kv"]["slots"] < 0.6 * 590)]),
    Case("vlm-kv explain prefixkv,profile=official -m pocket --tokens 600 --visual 576 --kv-profile pocket.profile.json",
         [prints("prefixkv", "600 tokens")]),
    Case("vlm-run --image a.png --kv-memory 10MB -q", [says("caption")]),
    Case("vlm-run --image a.png --kv-memory 10KB -q", [complains("does not fit", "cache memory")], status=1),
    Case("vlm-run --image a.png --device cuda", [refuses_a_gpu], status=1),
    Case("vlm-run -m pocket-int4 --image a.png --weights int8 --json",
         [one(lambda row: row["memory"]["weights_bytes"] < 15e6 and row["text"].startswith("There are"))]),
    Case("vlm-run --image a.png --weights int4 --activations 16 -n 4 -q", [prints("There are")]),
    Case("vlm-run --image a.png --lora nowhere", [complains("nowhere/adapter_config.json")], status=1),
    Case("vlm-bench vision -m golden/internvl --device cpu -t 2 --weights int8 --activations 16 --size 30x60 --repeats 1 --json",
         [one(lambda row: row["encode"]["median"] > 0)]),
    Case("vlm-bench latency -m pocket --device cpu -t 1 --weights int4 --activations 16 --prompt-tokens 40 --tokens 2 --repeats 1 --json",
         [one(lambda row: row["decode"]["median"] > 0)]),
    Case(f"vlm-bench throughput -m pocket --device cpu -t 1 --weights int8 --activations 16 --kv f16 {SMALL} --json",
         [each(1, lambda row: row["step_weight_bytes"] < 8e6)]),
    Case("vlm-run --image a.png --dtype f32 --json",
         [one(lambda row: row["memory"]["weights_bytes"] > 40e6), lambda o: o.rows()[0]["text"].strip() != o.facts["caption"]]),
    Case("vlm-run --image a.png --image-backend pil -q", [says("caption")]),
    Case("vlm-run --image wide.png --image-aspect pad -n 4 --json", [one(lambda row: row["visual_tokens"] == 576)]),

    Case("vlm-run -m golden/internvl --video a.mp4 --video golden/qwen2_5_vl/video0 --frames 4 -n 2 --json",
         [one(lambda row: [clip["of"] for clip in row["clips"]] == [6, 5])]),
    Case("vlm-run -m golden/internvl --video a.mp4 --fps 10 -n 2 --json",
         [one(lambda row: row["clips"] == [{"frames": 3, "of": 6, "fps": row["clips"][0]["fps"]}])]),
    Case("vlm-run -m golden/internvl --chat --frames 4 -n 2", [reports("a.mp4: 4 of 6 frames")],
         stdin="/video a.mp4\nWhat happens?\n/quit\n"),
    Case("vlm-run --video a.mp4", [complains("takes no videos")], status=1),
    Case("vlm-run -m golden/qwen2_5_vl --image wide.png --min-pixels 3000 --max-pixels 9000 -n 2 --json",
         [one(lambda row: row["visual_tokens"] > 20)]),
    Case("vlm-run -m golden/internvl --image a.png --tiles 1 -n 2 --json", [one(lambda row: row["visual_tokens"] == 4)]),

    Case("vlm-bench vision -m golden/internvl --device cpu --dtype f32 -t 2 --size 30x60 --batch 2 --repeats 2 --json",
         [one(lambda row: row["tokens"] == 12 and row["encode"]["median"] > 0)]),
    Case("vlm-run --batch in.jsonl --out lean.jsonl --lean", [answered("lean.jsonl", 2)]),
    Case("vlm-run --batch in.jsonl --out gpus.jsonl --gpus 99", [complains("--gpus 99 needs 99 GPUs")], status=2),
    Case("vlm-kv explain kivi -m golden/internvl --image a.png -p 'Is it a photo?' --json",
         [one(lambda row: 0 < row["visual"] < row["tokens"])]),
    Case("vlm-bench throughput -m synthetic:internvl2.5-8b --memory 80GB --dry-run --json",
         [one(lambda row: row["batch"] > 100 and row["workspace_bytes"] < row["weights_bytes"])]),
    Case("vlm-kv explain --kv snapkv --bits 4 --tokens 600 --json", [one(lambda row: abs(row["stored_bits"] - 4) < 0.05)]),
    Case("vlm-kv fidelity --kv snapkv --bits 8 --data captions.jsonl --records 1 --layer-records 0 -n 8 --json",
         [one(lambda row: "keep=0." in row["spec"])]),
    Case("vlm-kv fidelity --weights int4 --activations 16 --kv int4 --data captions.jsonl --records 1 --layer-records 0 -n 8 --json",
         [one(lambda row: row["weights_format"] == "int4 in groups of 32")]),
    Case("vlm-kv values -m pocket --weights int8 --activations 16 --data captions.jsonl --records 1", [prints("pocket, 1 prompts")]),
    Case("vlm-kv profile -m pocket --weights int8 --activations 16 --data captions.jsonl -n 3 --out int8.profile.json",
         [prints("int8.profile.json")]),
    Case("vlm-kv fidelity --kv int4 --data captions.jsonl --records 1 -n 8 --plot plots/fig.pdf --style paper",
         [plotted("plots/fig.pdf")]),
    Case("vlm-kv values -m pocket --data captions.jsonl --records 1 --plot plots/fig.svg --style paper",
         [plotted("plots/fig.svg")]),
    Case("vlm-kv list --json", [one(lambda row: len(row["policies"]) > 10)]),
    Case("vlm-kv fidelity --kv f16 --kv uniform,keep=1 --data captions.jsonl --json", [exact]),
    Case("vlm-kv fidelity --kv f16 --data captions.jsonl --batch-size 3 --json --per-record", [exact]),
    Case("vlm-kv fidelity --kv f16 --data captions.jsonl --layer-records 0 --json",
         [one(lambda row: row["kl_mean"] == 0 and row["layers"] == [] and row["layer_records"] == 0)]),
    Case("vlm-kv fidelity -m pocket --kv kivi --kv calibquant --kv vidkv --kv h2o --kv prefixkv --data captions.jsonl "
         "--kv-profile pocket.profile.json -n 8 --records 1 --device cpu -t 2 --json",
         [sound("kivi", "calibquant", "vidkv", "h2o", "prefixkv")]),
    *(Case(f"vlm-kv fidelity -m golden/qwen2_5_vl --kv f16 --data videos.jsonl {options} -n 2 --json", [exact])
      for options in ("--frames 4", "--fps 10 --min-pixels 800 --max-pixels 1024")),
    Case("vlm-kv fidelity --kv f16 --data captions.jsonl --tiles 4", [complains("--tiles is for InternVL")], status=2),
    Case("vlm-kv profile -m golden/qwen2_5_vl --data videos.jsonl --out clip.json --policy prefixkv -n 2 --min-pixels 800 "
         "--max-pixels 1024 --frames 4 --json && vlm-kv profile -m golden/qwen2_5_vl --data videos.jsonl --out clip.json "
         "--policy prefixkv -n 2 --fps 10 --json", [lambda o: o.out.count('"model": "golden/qwen2_5_vl"') != 2]),
    Case("vlm-kv values -m golden/qwen2_5_vl --data videos.jsonl --min-pixels 800 --max-pixels 1024 --frames 4 --json && "
         "vlm-kv values -m golden/qwen2_5_vl --data videos.jsonl --fps 10 --device cpu -t 1 --json",
         [lambda o: {row["part"] for row in o.rows()} != {"keys", "values"},
          lambda o: any(sum(head["histogram"]) != head["count"] for row in o.rows() for head in row["heads"])]),
    Case("vlm-kv values --data captions.jsonl --tiles 4", [complains("--tiles is for InternVL")], status=2),
    Case("vlm-kv profile --data captions.jsonl --out none.json --tiles 4", [complains("--tiles is for InternVL")], status=2),
    Case("vlm-kv profile -m pocket --data captions.jsonl --out small.json --policy prefixkv --policy head_quantile "
         "--bits 4 --keep 0.3 --records 1 -n 2 --batch-size 2 --device cpu -t 1 --json",
         [lambda o: json.loads(o.out)["prefixkv"]["keep"] != 0.3,
          lambda o: set(json.loads(o.out)["head_quantile"]["alpha"]) != {"4"},
          lambda o: json.loads(o.out) != json.loads((o.folder / "small.json").read_text())]),

    Case("vlm-bench latency -m pocket --device cpu --dtype f32 -t 1 --kv int4 --prompt-tokens 40 --tokens 2 --repeats 1 --csv",
         [lambda o: o.out.splitlines()[0] != "spec,figure,unit,median,min,max,stored_bits,device,threads",
          lambda o: not all(float(line.split(",")[3]) > 0 for line in o.out.splitlines()[1:])]),
    Case("vlm-bench kernels --device cpu --batch 2 --rows 128 --head-dim 64 --repeats 1 --only kivi -t 1 --json",
         [measured("packed_ns_per_row"), lambda o: not all(row["batch"] == 2 and row["rows"] == 128 and row["head_dim"] == 64 for row in o.rows())]),
    Case(f"vlm-bench throughput -m pocket --device cpu --dtype f32 -t 1 --kv f16 --kv kivi --kv-memory 2M {SMALL} --json",
         [each(2, lambda row: row["batch"] > 0 and row["kv_bytes"] <= 2e6)]),
    Case(f"vlm-bench throughput --batch 1,2 {SMALL} --csv", [lambda o: len(o.out.splitlines()) != 3]),
    Case(f"vlm-bench throughput --batch 2 --answer-tokens 500 {SMALL} --json",
         [one(lambda row: row["requests_per_s"] > 0 and row["prompt_ms"]["median"] > 0)]),
    Case(f"vlm-bench throughput --memory 1G {SMALL}", [complains("--memory", "--kv-memory")], status=2),
]
