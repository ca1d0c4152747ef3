#!/usr/bin/env python3
"""Makes docs/results.md, tables of other pages and the plots (docs/images) of docs/data; measure.py makes the newest of that.

    tools/results/page.py             writes the page and, where matplotlib is installed, the plots
    tools/results/page.py --check     writes nothing; ends with 1 if a page is out of date
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys

import data
import plots
from data import BATCHES, CALIBQUANT, EXACT_2_BITS, MODELS, ROOT, Figure, find
from measure import SPEED

PAGE = ROOT / "docs" / "results.md"
IMAGES = ROOT / "docs" / "images"
PLOTS = tuple(plots.PLOTS)
BUDGET_TABLE = ("f16", "int8", "int4", CALIBQUANT[4], "kivi,residual=32", EXACT_2_BITS, CALIBQUANT[2],
                "calibquant", "prefixkv,keep=0.5", "prefixkv,keep=0.5 + int4")  # fmt: skip


def stamp(name: str, figures: list[Figure]) -> str:
    """What the file of a plot must hold if it shows these figures."""
    return plots.digest(plots.PLOTS[name][0](figures))


def thousands(value: float) -> str:
    return f"{value:,.0f}"


def three(figures: list[Figure], spec: str, metric: str, digits: int) -> str:
    """The three models' values, pocket-llava, pocket-internvl, pocket-qwen."""
    return ", ".join(f"{find(figures, spec=spec, model=model, metric=metric).number():.{digits}f}" for model in MODELS)


def over_f16(figures: list[Figure], spec: str, metric: str, batch: int) -> float:
    own, base = (find(figures, spec=one, metric=metric, batch=str(batch)).number() for one in (spec, "f16"))
    return own / base


def faster_from(figures: list[Figure]) -> int:
    """The smallest batch from which on every row of the table decodes faster than f16."""
    slow = [batch for batch in BATCHES for spec in BUDGET_TABLE[1:] if over_f16(figures, spec, "step_ms", batch) >= 1]
    return min(batch for batch in BATCHES if batch > max(slow, default=0))


def budget_row(figures: list[Figure], spec: str) -> str:
    as_f16 = ", ".join(find(figures, spec=spec, model=model, metric="captions_as_f16_of_200").value for model in MODELS)
    steps = ", ".join(f"{1 / over_f16(figures, spec, 'step_ms', batch):.2f}" for batch in BATCHES)
    sequences = find(figures, spec=spec, metric="sequences_in_30GB").value
    rate = thousands(find(figures, spec=spec, metric="decode_in_30GB_tokens_s").number())
    prefill = over_f16(figures, spec, "prefill_ms", 1)
    return (f"| `{spec}` | {three(figures, spec, 'captions_stored_bits', 2)} | {as_f16} | "
            f"{three(figures, spec, 'documents_anls', 3)} | {sequences} | {rate} | {steps} | {prefill:.2f} |\n")  # fmt: skip


def results(figures: list[Figure]) -> str:
    """The whole page."""
    step = find(figures, spec="f16", metric="step_ms", batch="1")
    roof = find(figures, spec="f16", metric="copy_percent", batch="1").number()
    copy = statistics.median(f.number() for f in figures if f.metric == "copy_gb_s" and f.commit == step.commit) / 1000
    f16_64 = find(figures, spec="f16", metric="step_ms", batch="64").number()
    prefill = find(figures, spec="f16", metric="prefill_ms", batch="1").number()
    right = sum(int(find(figures, spec="f16", model=model, metric="captions_right_of_200").number()) for model in MODELS)
    changed, dropped = (sorted(200 - int(find(figures, spec=spec, model=model, metric="captions_as_f16_of_200").number())
                               for model in MODELS) for spec in ("calibquant", "prefixkv,keep=0.5"))  # fmt: skip
    rows = "".join(budget_row(figures, spec) for spec in BUDGET_TABLE)
    return f"""# Results

<!-- Made by tools/results/page.py of docs/data; edit these. -->

Every figure on this page is a row of [docs/data](data), with its date, commit, device and command. Kernel figures, and
what was tried and failed, are in the [engineering notes](engineering-notes.md); the papers' claims are in
[papers](papers/README.md).

## What is measured on what

- **Quality**: the three bundled models, trained by this project on drawn scenes and documents. They are small, and every
  patch of their images may matter. Their answers show what a policy does to these models, not to a 7B model. Nothing was
  measured on photographs.
- **Speed and memory**: released shapes with **random weights** (`synthetic:internvl2.5-8b`). Speed does not depend on the
  weights' values, except under rules that choose tokens by their scores.
- **No released checkpoint has been run here.** Outputs are compared with `transformers` on small random checkpoints of
  every family.

## Pick by budget

One build, `{step.commit}`, on one {step.device.split(" (")[0]}, {step.date}. The quality columns have three values: pocket-llava, pocket-internvl,
pocket-qwen, over 200 captions and 200 documents each. Speed is that of the 8B shape after a prompt of {step.prompt} visual tokens;
decode speed has three values: batches of {", ".join(map(str, BATCHES[:-1]))} and {BATCHES[-1]}.

| `--kv` | stored bits, captions | captions unchanged of 200 | documents, ANLS | sequences in 30 GB | tokens/s in 30 GB | decode speed over f16 | prefill time over f16 |
|---|---|---|---|---|---|---|---|
{rows}
*Stored bits* count every byte of the cache: codes, scales, zero points and tokens kept in 16 bits. Bundled prompts have 281
to 593 tokens, so tokens kept in 16 bits weigh more than with a released model. *Captions unchanged*: same text as with the
f16 cache. *ANLS*: 1 is every answer right. No policy was calibrated (`--kv-profile`). Stored bits of the 8B shape are
of 3,420 tokens; sequences in 30 GB are of a shorter run. More decimals and intervals: [data/answers.csv](data/answers.csv).

With one sequence a smaller cache saves little, and some policies take longer than the smaller cache saves. From {faster_from(figures)} sequences on
every row is faster than f16. Rows whose captions change are lossy: `calibquant` alone, which packs image tokens to 1 bit,
changes {changed[0]} to {changed[-1]} of 200 captions, and dropping half of the tokens changes {dropped[0]} to {dropped[-1]}.

## Plots

![Share of facts right and ANLS against stored bits](images/quality_vs_bits.svg)

Mean of three models. Left and up is better. Random eviction is the baseline that a retention rule must beat.

![Tokens per second against the memory of the cache](images/throughput_vs_memory.svg)

8B shape, prompt of {step.prompt} tokens, one {step.device.split(" (")[0]}. Dashed: CalibQuant's own figures for InternVL-8B on an H100 (its table 5).

![Decode step time over that of f16, by batch size](images/step_time_vs_batch.svg)

## Speed in absolute numbers

| what (8B shape, random weights, f16 cache) | measured |
|---|---|
| decode step, one sequence | {step.number():.2f} ms, {roof:.1f} % of the measured copy bandwidth |
| decode step, 64 sequences | {f16_64:.2f} ms |
| prefill of {step.prompt} tokens | {prefill:.1f} ms |
| copy bandwidth of that card, read and written | {copy:.2f} TB/s |
{captions_rows(figures)}
## Correctness

| what | measured |
|---|---|
| held-out captions exactly right, f16 cache, this build | {right} of 600 |
{correctness_rows(figures)}
Tests compare every policy with a slow reference, the GPU with the CPU, and stored bytes with closed formulas:
[CONTRIBUTING.md](../CONTRIBUTING.md).

## Against other engines

{engine_rows(figures)}
vLLM, LMDeploy and SGLang were not measured: no released checkpoint is at hand, and they do not run random shapes.

## Targets missed

{missed_rows(figures)}
## Make this page again

On a machine with a GPU, after `cmake --preset cuda` and its build; then the page itself, anywhere:

    tools/results/measure.py speed --build build/cuda --device cuda --out docs/data/speed.csv
    tools/results/measure.py captions --build build/cuda --device cuda --model synthetic:llava-1.5-7b \\
        --batch-size 128 --out docs/data/captions_speed.csv
    tools/results/measure.py answers --build build/cuda --device cuda --jobs 8 --batch-size 64 \\
        --out docs/data/answers.csv
    tools/results/page.py
"""


def captions_rows(figures: list[Figure]) -> str:
    cells = []
    for spec in ("f16", "int4", "prefixkv,keep=0.5"):
        figure = find(figures, spec=spec, metric="captions_images_s")
        cells.append(f"`{spec}` {figure.number():.1f} images/s ({float(figure.min):.1f} to {float(figure.max):.1f})")
    return f"| 400 image files to captions of 64 tokens, LLaVA-1.5-7B's shape, batch 128, loading included | {', '.join(cells)} |\n"


def correctness_rows(figures: list[Figure]) -> str:
    right = ", ".join(find(figures, model=model, metric="gate_requests_right_of_600").value for model in MODELS)
    same = ", ".join(find(figures, model=model, metric="gate_same_tokens_of_50").value for model in MODELS)
    videos = find(figures, model="pocket-qwen", metric="gate_videos_right_of_50").value
    return (f"| held-out captions, documents and questions right, by model | {right} of 600 |\n"
            f"| videos described without a fault, pocket-qwen | {videos} of 50 |\n"
            f"| requests with the greedy tokens of `transformers` in fp32, by model | {same} of 50 |\n"
            "| small random checkpoints of every family against `transformers`, tap by tap | logits within 1e-3, tokens equal |\n"
            "| bytes stored, against the closed formulas, after every step | equal |\n")  # fmt: skip


def engine_rows(figures: list[Figure]) -> str:
    """kvlm and llama.cpp, one machine, one run each."""
    text = "Decode and prefill of the 8B shape on one NVIDIA H100, kvlm and llama.cpp (llama-cpp-python 0.3.36), single runs:\n"
    text += "\n| what | kvlm | llama.cpp | ratio |\n|---|---|---|---|\n"
    for what, ours, theirs, batch in (("decode, 1 sequence, 16-bit cache", "f16", "llama.cpp f16", "1"),
                                      ("decode, 1 sequence, 4-bit cache", "int4", "llama.cpp q4_0", "1"),
                                      ("decode, 16 sequences, 16-bit cache", "f16", "llama.cpp f16", "16"),
                                      ("decode, 64 sequences, 16-bit cache", "f16", "llama.cpp f16", "64"),
                                      ("decode, 64 sequences, 4-bit cache", "int4", "llama.cpp q4_0", "64"),
                                      ("prefill of 3328 tokens", "f16", "llama.cpp f16", "1")):  # fmt: skip
        metric = "engine_prefill_tokens_s" if "prefill" in what else "engine_decode_tokens_s"
        own, other = (find(figures, spec=spec, metric=metric, batch=batch).number() for spec in (ours, theirs))
        text += f"| {what} | {own:,.0f} tokens/s | {other:,.0f} tokens/s | {own / other:.2f} |\n"
    return text + cpu_engine_rows(figures)


def cpu_engine_rows(figures: list[Figure]) -> str:
    """The same on a CPU, by weights."""
    def rate(spec, what, device="AMD EPYC (Zen 5), 2 cores"):
        return find(figures, device=device, spec=spec, metric=f"engine_{what}_2_threads_tokens_s").number()
    text = ("\nThe 1.1B shape on two threads of an AMD EPYC (Zen 5), 640 tokens of prompt, in tokens/s, two alternating runs:\n\n"
            "| weights | prefill, kvlm | llama.cpp | ratio | decode, kvlm | llama.cpp | ratio |\n|---|---|---|---|---|---|---|\n")
    for name, own, other in (("bf16", "16", "BF16"), ("`int8`; Q8_0", "int8", "Q8_0"), ("`int4`; Q4_0", "int4", "Q4_0")):
        cells = []
        for what in ("prefill", "decode"):
            ours, theirs = rate(f"kvlm {own}", what), rate(f"llama.cpp {other}", what)
            cells.append(f"{ours:.1f} | {theirs:.1f} | {ours / theirs:.2f}")
        text += f"| {name} | {' | '.join(cells)} |\n"
    xeon = rate("kvlm 16", "prefill", "Intel Xeon (AMX), 2 threads")
    before = rate("kvlm bf16", "prefill", "Intel Xeon (AVX-512, AMX)")
    return text + f"""
A prompt in bf16 reaches {xeon:.1f} tokens/s on an Intel Xeon, on AMX, and {before:.1f} before it was used. kvlm's towers against those of
`transformers`: [engineering notes](engineering-notes.md).
"""


NEEDS = (  # of the README's table
    ("the model's own answers; the reference", "f16"),
    ("a quarter of the memory", "int4"),
    ("a fifth of the memory", "kivi,residual=32"),
    ("an eighth of the memory, many sequences", CALIBQUANT[2]),
    ("long prompts where some tokens may go (lossy) †", "prefixkv,keep=0.5 + int4"),
    ("most sequences, answers may change (lossy)", "calibquant"),
)


def spread(figures: list[Figure], spec: str, metric: str, digits: int) -> str:
    """Least to greatest of the three models."""
    values = sorted(find(figures, spec=spec, model=model, metric=metric).number() for model in MODELS)
    low, high = (f"{value:.{digits}f}" for value in (values[0], values[-1]))
    return low if low == high else f"{low} to {high}"


def on_real_weights(figures: list[Figure], spec: str) -> str:
    """Captions of 200 that stay under a spec on SmolLM2's and DINOv2's weights."""
    return find(figures, spec=spec, model="smol-internvl", metric="captions_as_f16_of_200").value


def readme_policies(figures: list[Figure]) -> str:
    text = ("| need | `--kv` | stored bits | captions unchanged, of 600 | on real weights, of 200 | decode over f16, 1 / 64 sequences | "
            "sequences in 30 GB |\n|---|---|---|---|---|---|---|\n")  # fmt: skip
    whole = data.derived(figures)
    for need, spec in NEEDS:
        same = find(whole, spec=spec, metric="captions_as_f16_of_600").value
        bits = find(figures, spec=spec, metric="stored_bits", batch="1").number()
        speeds = " / ".join(f"{1 / over_f16(figures, spec, 'step_ms', batch):.2f}x" for batch in (1, 64))
        count = find(figures, spec=spec, metric="sequences_in_30GB").value
        text += f"| {need} | `{spec}` | {bits:.2f} | {same} | {on_real_weights(figures, spec)} | {speeds} | {count} |\n"
    return text


def readme_speed(figures: list[Figure]) -> str:
    step = find(figures, spec="f16", metric="step_ms", batch="1").number()
    roof = find(figures, spec="f16", metric="copy_percent", batch="1").number()
    prefill = find(figures, spec="f16", metric="prefill_ms", batch="1").number()
    photos = find(figures, spec="int4", metric="captions_images_s").number()
    base = find(figures, spec="f16", metric="captions_images_s").number()
    third = find(figures, spec=CALIBQUANT[2], metric="captions_images_s").number()
    return f"""- **Absolute speed** on one H100: an 8B shape decodes one sequence in {step:.2f} ms a token ({roof:.1f} % of the copy bandwidth)
  and reads a prompt of 3,328 tokens in {prefill:.0f} ms, both with `--kv f16`. LLaVA-1.5-7B's shape
  captions {base:.1f} images/s with `f16`, {photos:.1f} images/s with `int4` and {third:.1f} images/s with
  `calibquant,bits=2 + int4,scope=text`, loading included.
"""


def choosing(figures: list[Figure]) -> str:
    text = ("| `--kv` | stored bits, 8B prompt | stored bits, captions | captions unchanged, of 600 | on real weights, of 200 | captions, facts right | "
            "documents, ANLS | decode over f16, 1 / 16 / 64 | prefill over f16 | sequences in 30 GB |\n|" + "---|" * 10 + "\n")  # fmt: skip
    whole = data.derived(figures)
    for spec in BUDGET_TABLE:
        same = find(whole, spec=spec, metric="captions_as_f16_of_600").value
        speeds = " / ".join(f"{1 / over_f16(figures, spec, 'step_ms', batch):.2f}x" for batch in BATCHES)
        count = find(figures, spec=spec, metric="sequences_in_30GB").value
        bits = find(figures, spec=spec, metric="stored_bits", batch="1").number()
        text += (f"| `{spec}` | {bits:.2f} | {spread(figures, spec, 'captions_stored_bits', 2)} | {same} | "
                 f"{on_real_weights(figures, spec)} | "
                 f"{spread(figures, spec, 'captions_facts', 3)} | {spread(figures, spec, 'documents_anls', 3)} | {speeds} | "
                 f"{over_f16(figures, spec, 'prefill_ms', 1):.2f}x | {count} |\n")  # fmt: skip
    return text


BLOCKS = {  # parts of other pages: between <!-- NAME: made by tools/results/page.py --> and <!-- end -->
    ("README.md", "policies"): readme_policies,
    ("README.md", "speed"): readme_speed,
    ("docs/choosing-a-policy.md", "choosing"): choosing,
}


def with_blocks(name: str, text: str, figures: list[Figure]) -> str:
    """The page's text with its blocks made anew. ValueError if a mark is missing."""
    for (page, block), make in BLOCKS.items():
        if page == name:
            start, end = f"<!-- {block}: made by tools/results/page.py -->\n", "<!-- end -->\n"
            at = text.find(start)
            last = text.find(end, at)
            if at < 0 or last < 0:
                raise ValueError(f"{name} has no lines {start.strip()} and {end.strip()}")
            text = text[: at + len(start)] + make(figures) + text[last:]
    return text


TARGETS = {  # metric of docs/data/targets.csv -> what people read
    "attention_2_bits_q4_over_f16_x": "attention at 8,192 tokens, over f16",
    "attention_1_bit_q4_over_f16_x": "attention at 8,192 tokens, over f16",
    "later_attention_q4_over_f16_x": "attention at 8,192 tokens, over f16",
    "step_of_copy_percent": "decode step of one sequence, of copy bandwidth",
    "captions_over_f16_x": "400 captions, over f16",
    "tower_over_transformers_pixels_on_gpu_x": "InternViT over transformers, pixels on the GPU",
    "cpu_decode_over_llama_cpp_x": "decode on a CPU, over llama.cpp",
    "step_of_f16_x": "decode speed with one sequence, over f16",
}


def missed_rows(figures: list[Figure]) -> str:
    """Specs of this run below 0.95 of f16, then what docs/data/targets.csv has below its target, with the commit of each."""
    rows: dict[tuple[str, str, str], str] = {}
    for spec in SPEED:
        for batch in BATCHES:
            speed = 1 / over_f16(figures, spec, "step_ms", batch)
            sequences = "one sequence" if batch == 1 else f"{batch} sequences"
            cells = (f"decode speed with {sequences}, over f16", f"`{spec}`", "H100")
            commit = find(figures, spec=spec, metric="step_ms", batch=str(batch)).commit
            rows[cells] = f"| {' | '.join(cells)} | {speed:.2f}x | 0.95x | {commit} |\n" if speed < 0.945 else ""
    for reached in (figure for figure in figures if figure.metric.startswith("reached_")):
        name = reached.metric.removeprefix("reached_")
        goal = find(figures, metric="target_" + name, spec=reached.spec, device=reached.device, model=reached.model,
                    batch=reached.batch, prompt=reached.prompt)  # fmt: skip
        if name in TARGETS and reached.number() < goal.number():
            unit = next(unit for end, unit in data.UNITS.items() if name.endswith(end)).replace("%", " %")
            cells = (TARGETS[name], f"`{reached.spec}`" if reached.spec else "", reached.device.removeprefix("NVIDIA "))
            rows.setdefault(cells, f"| {' | '.join(cells)} | {reached.value}{unit} | {goal.value}{unit} | {reached.commit} |\n")
    return "| what | `--kv` | device | reached | target | commit |\n|---|---|---|---|---|---|\n" + "".join(rows.values()) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; end with 1 if a page is out of date")
    options = parser.parse_args()
    figures = data.load()
    text = results(figures)
    if options.check:
        stale = [name for name in sorted({page for page, _ in BLOCKS})
                 if with_blocks(name, old := (ROOT / name).read_text("utf-8"), figures) != old]  # fmt: skip
        stale += ["docs/results.md"] if PAGE.read_text("utf-8") != text else []
        for name in stale:
            print(f"{name} is not what docs/data makes of it; run tools/results/page.py", file=sys.stderr)
        return 1 if stale else 0
    PAGE.write_text(text, "utf-8")
    for name in {page for page, _ in BLOCKS}:
        path = ROOT / name
        path.write_text(with_blocks(name, path.read_text("utf-8"), figures), "utf-8")
    if importlib.util.find_spec("matplotlib") is None:
        print("page.py: no matplotlib, so the plots stay as they are; run: apt-get install python3-matplotlib", file=sys.stderr)
        return 0
    IMAGES.mkdir(exist_ok=True)
    for name, (_, draw) in plots.PLOTS.items():
        draw(figures, IMAGES / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
