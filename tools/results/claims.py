#!/usr/bin/env python3
"""Makes docs/papers/claims.md, the verdicts on all claims, of docs/data/claims.csv (the bundled models) and real_claims.csv.

    tools/results/claims.py                                                writes the page
    tools/results/claims.py --report OUT/report/claims.csv --device NAME   first takes over the rows of a report

The report is of tools/eval/tables.py. Of build/real/smol-internvl it replaces all rows, and tools/real/verdicts.sh does all of it. Of
the bundled models it replaces or adds the claims that it has, for which it must have all their models and sets. Standard library only.
"""

from __future__ import annotations

import argparse
import csv
import io
import subprocess
import sys
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "papers" / "claims.md"
BUNDLED = ROOT / "docs" / "data" / "claims.csv"
REAL = ROOT / "docs" / "data" / "real_claims.csv"
FIGURES = ROOT / "docs" / "data" / "real.csv"
BUDGETS = ROOT / "docs" / "data" / "budgets.csv"
MARKS = {"confirmed": "✓", "contradicted": "✗", "inconclusive": "○", "": ""}
OPPOSITE = {"confirmed": "contradicted", "contradicted": "confirmed"}
SHOWN_TASKS = ("docvqa_anls", "chartqa_relaxed_accuracy", "textvqa_accuracy")
COLUMNS = ("internvl_captions", "internvl_documents", "llava_captions", "llava_documents", "qwen_captions", "qwen_documents",
           "qwen_videos", "smol_captions", "smol_documents")  # fmt: skip
SETS = ("captions", "documents")
COLUMN_OF = {  # of a task and protocol of a report
    ("captions", "native"): "captions", ("documents", "native"): "documents", ("clips", "native"): "videos",
    ("captions", "prefixkv"): "captions_rouge",
}  # fmt: skip
BUNDLED_MODELS = ("pocket-internvl", "pocket-llava", "pocket-qwen")
KEPT = ("task", "n", "claim", "at", "source", "spec", "compared_with", "one_factor", "metric", "score", "compared_score", "difference_value",
        "difference_low", "difference_high", "stored_bits", "compared_stored_bits", "verdict")  # fmt: skip

Row = dict[str, str]


def read(path: Path) -> list[Row]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def of_report(path: Path) -> list[Row]:
    """A report's rows; ValueError names what is missing."""
    if not path.is_file():
        raise ValueError(f"{path} is no file; expected claims.csv of a report, which tools/real/verdicts.sh makes")
    rows = read(path)
    if rows and (missing := {"model", "protocol", *KEPT} - rows[0].keys()):
        raise ValueError(f"{path} has no column {sorted(missing)[0]}; expected claims.csv of a report")
    models: dict[str, set[str]] = {}
    for row in rows:
        models.setdefault(Path(row["model"]).name, set()).add(column(row))
    if not models.keys() & {"smol-internvl", *BUNDLED_MODELS}:
        raise ValueError(f"{path} has no rows of smol-internvl or a bundled model; make it with tools/eval/tables.py")
    if models.get("smol-internvl", set(SETS)) < set(SETS):
        raise ValueError(f"{path} lacks rows of smol-internvl's {' or '.join(SETS)}; make it with tools/real/verdicts.sh")
    return rows


def of_real(rows: list[Row], origin: Row) -> list[Row]:
    """Rows of smol-internvl as real_claims.csv has them; origin: date, commit and device."""
    return [origin | {key: row[key] for key in KEPT} for row in rows if Path(row["model"]).name == "smol-internvl" and column(row) in SETS]


def of_bundled(rows: list[Row], origin: Row) -> list[Row]:
    """Rows of the bundled models as claims.csv has them, one a claim and setting."""
    made: dict[tuple[str, str], Row] = {}
    for row in rows:
        if (name := Path(row["model"]).name) in BUNDLED_MODELS:
            of_pair = {"claim": row["claim"], "at": row["at"], "source": row["source"], "better": row["spec"], "worse": row["compared_with"]}
            one = made.setdefault((row["claim"], row["at"]), origin | of_pair | {"one_factor": "yes" if row["one_factor"] == "True" else "no"})
            one[f"{name.removeprefix('pocket-')}_{column(row)}"] = row["verdict"]
    return list(made.values())


def column(row: Row) -> str:
    """The column of a set in claims.csv, without its model; ValueError if there is none."""
    found = COLUMN_OF.get((row["task"], row["protocol"]))
    if found is None:
        raise ValueError(f"there is no column for {row['task']} under the protocol {row['protocol']}; leave this set out of the report")
    return found


def text(columns: list[str], rows: list[Row]) -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def take_over(path: Path, origin: Row) -> None:
    """Writes the rows of a report into claims.csv and real_claims.csv; ValueError names what is missing, and nothing is written."""
    rows = of_report(path)
    real, there = of_real(rows, origin), read(BUNDLED)
    if real and REAL.is_file():
        answered = {(row["claim"], row["at"], row["task"]): int(row["n"]) for row in real}
        for old in read(REAL):
            if answered.get((old["claim"], old["at"], old["task"]), 0) < int(old["n"]):
                raise ValueError(f"{path} has fewer {old['task']} or none for {old['claim']!r}, which {REAL.name} has with n = {old['n']}; "
                                 f"report all claims and records, or delete {REAL}")  # fmt: skip
    found = {(row["claim"], row["at"]): row for row in of_bundled(rows, origin)}
    for old in there:
        new = found.get((old["claim"], old["at"]), old)
        if lost := [name for name, verdict in old.items() if verdict and not new.get(name)]:
            raise ValueError(f"{path} has no {lost[0]} of {old['claim']!r}, which claims.csv has; report all models and sets of tables.py")
    merged = [found.pop((row["claim"], row["at"]), row) for row in there]
    bundled = text(list(there[0]), [*merged, *found.values()])
    if real:
        REAL.write_text(text(list(real[0]), real), "utf-8")
    BUNDLED.write_text(bundled, "utf-8")


def joined(bundled: list[Row], real: list[Row]) -> list[Row]:
    """The bundled models' rows with the real model's columns, then claims that only that has."""
    rows = {(row["claim"], row["at"]): dict(row) for row in bundled}
    for one in real:
        row = rows.setdefault((one["claim"], one["at"]), {"claim": one["claim"], "at": one["at"], "source": one["source"]})
        row.setdefault(f"smol_{one['task']}", one["verdict"])
    return list(rows.values())


def table(rows: list[Row]) -> list[str]:
    """A line a claim; the marks of its settings in one cell."""
    lines = ["| claim (source): settings | internvl C | D | llava C | D | qwen C | D | V | smol C | D |", "|---" * 10 + "|"]
    claims: dict[str, list[Row]] = {}
    for row in rows:
        claims.setdefault(row["claim"], []).append(row)
    for claim, settings in claims.items():
        sources = "; ".join(dict.fromkeys(source for row in settings for source in row["source"].split("; ")))
        at = "; ".join(row["at"] or "the default" for row in settings) if any(row["at"] for row in settings) else ""
        cells = []
        for column in COLUMNS:
            marks = [MARKS[row.get(column, "")] for row in settings]
            cells.append("".join(mark or "-" for mark in marks) if any(marks) else "")
        lines.append(f"| {claim} ({sources}){': ' if at else ''}{at} | {' | '.join(cells)} |")
    return lines


def bundled_verdict(row: Row, of_set: str) -> str:
    """What two or all of the bundled models say on one set; inconclusive if they disagree."""
    found = bundled_verdicts(row, of_set)
    return next((verdict for verdict in OPPOSITE if found.count(verdict) >= 2), "inconclusive" if any(found) else "")


def bundled_verdicts(row: Row, of_set: str) -> list[str]:
    return [row.get(f"{name.removeprefix('pocket-')}_{of_set}", "") for name in BUNDLED_MODELS]


def compared(rows: list[Row]) -> dict[str, list[tuple[Row, str]]]:
    """Rows and sets by what becomes of the bundled models' verdict on smol-internvl: it holds, turns into its opposite, opens (is
    inconclusive), or smol-internvl decides what they do not."""
    found: dict[str, list[tuple[Row, str]]] = {"holds": [], "turns": [], "opens": [], "decides": [], "neither": []}
    for row in rows:
        for of_set in SETS:
            here, there = row.get(f"smol_{of_set}", ""), bundled_verdict(row, of_set)
            if not here or not there:
                continue
            way = ("holds" if here == there else "turns" if here == OPPOSITE.get(there) else "opens" if there in OPPOSITE else "decides")
            found["neither" if here == there == "inconclusive" else way].append((row, of_set))
    return found


def page(bundled: list[Row], real: list[Row], figures: list[Row] = [], budgets: list[Row] = []) -> str:
    rows = joined(bundled, real)
    ways = compared(rows)
    intervals = {(one["claim"], one["at"], one["task"]): one for one in reversed(real)}
    made = [
        "<!-- Made by tools/results/claims.py. -->",
        "# All claims",
        "",
        "One mark for each setting, in their order: ✓ confirmed, ✗ contradicted, ○ inconclusive, - not asked",
        "([how they are decided](README.md#how-claims-are-decided)). C are captions, D documents, V videos.",
        "",
        "The models are pocket-internvl, pocket-llava, pocket-qwen and, of published parts, [smol-internvl](#on-real-weights).",
        "[data/claims.csv](../data/claims.csv) has all rows"
        + (", and [data/real_claims.csv](../data/real_claims.csv) those of smol-internvl." if real else "."),
        "",
        *table(rows),
    ]
    if real:
        n = sorted({int(one["n"]) for one in real})
        made += [
            "",
            "## On real weights",
            "",
            f"smol-internvl answered {' and '.join(map(str, n))} records of each set. Its decoder is SmolLM2-135M-Instruct (4-bit weights,",
            "dequantized) with adapters merged, its tower DINOv2-S; the projector was trained here. A verdict is compared with the",
            "one that at least two of the three bundled models have on the same set.",
            "",
            f"- {len(ways['holds'])} are the same, {len(ways['turns'])} are reversed.",
            f"- {len(ways['opens'])} are decided on the bundled models and inconclusive on smol-internvl.",
            f"- {len(ways['decides'])} are decided on smol-internvl alone: the bundled models disagree or are inconclusive.",
            f"- {len(ways['neither'])} are decided on neither.",
        ]
    if real and ways["turns"]:
        made += [
            "",
            "Those that are reversed. Differences are of the first spec minus the second (of two random draws the first), with 95 %",
            "intervals; bundled are the verdicts of internvl, llava and qwen.",
            "",
            "| claim | set | `--kv` | compared with | difference | interval | bundled | smol |",
            "|---" * 8 + "|",
        ]
        for row, of_set in ways["turns"]:
            one = intervals[(row["claim"], row["at"], of_set)]
            at = f": {row['at']}" if row["at"] else ""
            made.append(
                f"| {row['claim']}{at} | {of_set} | `{one['spec']}` | `{one['compared_with']}` | {float(one['difference_value']):+.3f} | "
                f"{float(one['difference_low']):+.3f} to {float(one['difference_high']):+.3f} | "
                f"{''.join(MARKS[verdict] for verdict in bundled_verdicts(row, of_set))} | {MARKS[one['verdict']]} |"
            )
    return "\n".join([*made, *tasks(budgets), *plain_english(figures), *outliers(figures)]) + "\n"


def tasks(budgets: list[Row]) -> list[str]:
    """A table of budgets.csv: a row a budget and rule, a column a model, scores over f16's. Our questions score alike in TextVQA's
    and VizWiz's form, so one of them is shown."""
    scores = {(row["model"], row["spec"], row["metric"]): float(row["value"]) for row in budgets}
    models = list(dict.fromkeys(row["model"] for row in budgets))
    specs = [spec for spec in dict.fromkeys(row["spec"] for row in budgets) if spec != "f16"]
    shares = [spec.partition(",keep=")[::2] for spec in specs]
    lines = [
        "",
        "## Four tasks at four budgets",
        "",
        "Scores over f16's in percent, of `tools/eval/budgets.py`: 200 questions about pages in the form of DocVQA, the same in that of",
        "ChartQA, and 200 about scenes in that of TextVQA; in VizWiz's form the last score the same. Nothing is calibrated.",
        "[data/budgets.csv](../data/budgets.csv) has devices and commits.",
        "",
        "`snapkv`, `pyramidkv` and `mixkv` always keep their window, the last 64 tokens: about 11 % of pocket-llava's prompts, 19 % of",
        "pocket-internvl's, and 23 % of the others'. Smaller budgets change nothing there, and the score is what the window alone gives.",
        "",
        f"| kept | rule | {' | '.join(models)} |",
        "|---" * (2 + len(models)) + "|",
    ]
    rank = {rule: place for place, rule in enumerate(dict.fromkeys(rule for rule, _ in shares))}
    for rule, keep in sorted(shares, key=lambda pair: (-float(pair[1]), rank[pair[0]])):
        cells = []
        for model in models:
            found = [scores.get((model, f"{rule},keep={keep}", metric), 0) / scores[model, "f16", metric] for metric in SHOWN_TASKS]
            cells.append(" / ".join(f"{100 * share:.1f}" for share in found) if any(found) else "")
        lines.append(f"| {100 * float(keep):g} % | `{rule}` | {' | '.join(cells)} |")
    return lines if budgets else []


def plain_english(figures: list[Row]) -> list[str]:
    """A table of real.csv's text_METRIC: every policy on a text model, by stored bits and KL."""
    found = {(row["spec"], row["metric"]): row for row in figures if row["metric"].startswith("text_")}

    def value(spec: str, metric: str) -> float:
        return float(found[spec, metric]["value"])

    lines = [
        "",
        "## Plain English",
        "",
        "SmolLM2-135M-Instruct (4-bit weights, dequantized) on 200 prompts of the licences that every Debian has",
        "(`tools/real/prompts.py`), teacher-forced: stored bits, KL in nats a token with its 95 % interval, and how often the likeliest",
        "token stays. Policies of images alone leave text as it is.",
        "",
        "| `--kv` | stored bits | KL | interval | top-1 |",
        "|---" * 5 + "|",
    ]
    specs = dict.fromkeys(spec for spec, _ in found)
    for spec in sorted(specs, key=lambda spec: (-round(value(spec, "text_stored_bits"), 1), value(spec, "text_kl_nats"))):
        kl = found[spec, "text_kl_nats"]
        lines.append(f"| `{spec}` | {value(spec, 'text_stored_bits'):.2f} | {float(kl['value']):.4f} | {float(kl['min']):.4f} to "
                     f"{float(kl['max']):.4f} | {value(spec, 'text_top1_percent'):.1f} % |")  # fmt: skip
    return lines if found else []


def outliers(figures: list[Row]) -> list[str]:
    """A table of real.csv's outlier_PART_TOKENS_x: the median layer, and the least and the greatest."""
    found = {(row["model"], row["metric"]): row for row in figures if row["metric"].startswith("outlier_")}
    kinds = [(f"{part}, {tokens}", f"outlier_{part}_{tokens}_x") for part in ("keys", "values") for tokens in ("visual", "text")]
    lines = [
        "",
        "## Outlier channels",
        "",
        "The mean magnitude of a layer's largest channel over that of its median one (`vlm-kv values`): the median layer, and the least",
        "and the greatest. smollm2 is SmolLM2-135M-Instruct without adapters, over plain English.",
        "",
        f"| model | {' | '.join(name for name, _ in kinds)} |",
        "|---" * (1 + len(kinds)) + "|",
    ]
    for model in dict.fromkeys(model for model, _ in found):
        cells = [found.get((model, metric)) for _, metric in kinds]
        shown = (f"{float(x['value']):.1f} ({float(x['min']):.1f} to {float(x['max']):.1f})" if x else "" for x in cells)
        lines.append(f"| {model} | {' | '.join(shown)} |")
    return lines if found else []


def made_of_data() -> str:
    return page(read(BUNDLED), read(REAL) if REAL.is_file() else [], read(FIGURES), read(BUDGETS))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, help="claims.csv of a report")
    parser.add_argument("--device", help="name of the machine's device, for the rows of --report")
    options = parser.parse_args()
    if (options.report is None) != (options.device is None):
        parser.error("--report and --device go together")
    if options.report:
        commit = subprocess.run(["git", "rev-parse", "--short=7", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True)
        try:
            take_over(options.report, {"date": date.today().isoformat(), "commit": commit.stdout.strip(), "device": options.device})
        except (OSError, ValueError) as error:
            print(f"claims.py: {error}", file=sys.stderr)
            return 1
    PAGE.write_text(made_of_data(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
