#!/usr/bin/env python3
"""One page of results: score against stored bits and speed, equal bytes, the papers' claims, layers, objects.

    python3 tools/eval/report.py --out OUT OUT_A/results.json OUT_B/results.json

Writes report.md with its plots (--format), overview.md (its first part: verdicts and scores, a column a setting),
scores.csv, claims.csv and report.json. Results are compared within a setting (model, task, split, protocol) and over the
same records; other results are refused with the first record that differs. The same results give the same files. Needs
numpy, and matplotlib unless --skip plots (tools/eval/setup.sh).
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from pathlib import Path

import arguments
import comparison
import page
import plots
import significance
from comparison import ClaimRow, Comparison
from errors import EvaluationError, note, printable, run_main
from factors import Catalogue
from groups import Estimate, grouped, setting_of
from results import Result, read_results
from runs import Programs
from storage import write_json, write_text
from summary import Row, Summary, summarise

SKIPPABLE = ("plots",)


def main() -> int:
    parser = arguments.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "results", nargs="+", type=Path, metavar="RESULTS.json", help="of coco.py, docvqa.py and the others"
    )
    parser.add_argument("--out", type=arguments.folder, required=True, help="folder for the page, its plots and tables")
    parser.add_argument(
        "--metric", action="append", default=[], help="score that decides where a task has it; repeatable, first wins"
    )
    parser.add_argument("--resamples", type=int, default=significance.RESAMPLES, help="of the bootstrap")
    parser.add_argument("--seed", type=int, default=significance.SEED, help="of the bootstrap")
    parser.add_argument(
        "--skip", action="append", default=[], choices=SKIPPABLE, help="leave out, where matplotlib is missing"
    )
    parser.add_argument("--format", action="append", choices=plots.FORMATS, help="of the plots; repeatable (default: png)")
    parser.add_argument("--style", choices=plots.STYLES_OF_PAGES, default="screen",
                        help="of the plots; paper: a file a panel, one column wide, 8 pt, no title (default: screen)")  # fmt: skip
    arguments.add_build(parser)
    options = parser.parse_args()
    if options.resamples < 1:
        raise EvaluationError(
            f"--resamples {options.resamples} is too few; a bootstrap takes at least 1 (usual: "
            f"{significance.RESAMPLES})"
        )
    if not 0 <= options.seed < 2**32:
        raise EvaluationError(f"--seed {options.seed} is no seed; expected 0 to {2**32 - 1}")
    significance.import_numpy()
    if "plots" not in options.skip:
        plots.import_matplotlib()
    summaries = read(options.results, arguments.programs(options), options.resamples, options.seed, tuple(options.metric))
    look = plots.Look(tuple(dict.fromkeys(options.format or ["png"])), options.style == "paper")
    write(options.out, summaries, options.resamples, options.seed, None if "plots" in options.skip else look)
    print(options.out / "report.md")
    return 0


def read(paths: list[Path], programs: Programs, resamples: int, seed: int, wanted: tuple[str, ...] = ()) -> list[Summary]:
    """What the files' results amount to, a summary for every setting; EvaluationError names what cannot be used."""
    results: list[Result] = []
    for path in paths:
        results += read_results(path)
    if not results:
        raise EvaluationError(f"{paths[0]} has no results; make some with coco.py or docvqa.py")
    if empty := next((x for x in results if not x.items or not x.scores), None):
        raise EvaluationError(
            f"the result of {empty.spec!r} ({' / '.join(setting_of(empty))}) has no scored records; "
            "leave it out, or make it again"
        )
    catalogue = Catalogue.from_json(programs.policies())
    if unknown := catalogue.unknown([x.spec for x in results if x.spec != "-"]):
        note(f"{', '.join(unknown)} is unknown to {programs.build / 'tools' / 'vlm-kv'}, so its kind and options are too; name the "
             "build that has it with --build, or the file that makes it with --rules")  # fmt: skip
    groups = grouped(results, resamples=resamples, seed=seed, metrics_wanted=wanted)
    known = dict.fromkeys(metric for group in groups for metric in group.scores)
    if strange := [metric for metric in wanted if metric not in known]:
        raise EvaluationError(
            f"--metric {printable(strange[0])} is no score of these results; there are {', '.join(known)}"
        )
    return [summarise(i, group, catalogue) for i, group in enumerate(groups, 1)]


def write(
    folder: Path, summaries: list[Summary], resamples: int, seed: int, look: plots.Look | None = plots.Look()
) -> None:
    """The files of a report, the page last. Plots of an earlier one are deleted: there may have been more."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if plots.FILE_NAME.fullmatch(path.name):
            path.unlink()
    pictures = plots.draw(summaries, folder, resamples, seed, look) if look else None
    write_text(folder / "scores.csv", _csv(_score_rows(summaries)))
    write_text(folder / "claims.csv", _csv(_claim_rows(summaries)))
    write_json(folder / "report.json", as_json(summaries, resamples, seed))
    write_text(folder / "overview.md", page.short_page(summaries, resamples, seed))
    write_text(folder / "report.md", page.page(summaries, resamples, seed, pictures))


def as_json(summaries: list[Summary], resamples: int, seed: int) -> dict:
    """All that the page says, as numbers."""
    return {
        "resamples": resamples,
        "seed": seed,
        "level": significance.LEVEL,
        "tolerance": comparison.TOLERANCE,
        "settings": [_setting(summary) for summary in summaries],
    }


def _setting(summary: Summary) -> dict:
    return setting_of(summary.rows[0].result)._asdict() | {
        "n": len(summary.group.ids),
        "clusters": summary.group.clusters,
        "metric": summary.metric,
        "notes": summary.notes,
        "prompt_tokens": _short(summary.prompt_tokens),
        "devices": summary.devices,
        "versions": summary.versions,
        "commands": summary.commands,
        "seeds": summary.seeds,
        "specs": [_spec(row) for row in summary.rows],
        "equal_bytes": [
            {
                "stored_bits": _short(list(equal.bits)),
                "best": equal.best.result.spec,
                "others": [_comparison(compared) for _, compared in equal.others],
            }
            for equal in summary.equal_bytes
        ],
        "frontier": [row.result.spec for row in summary.frontier],
        "claims": [_claim(row) for row in summary.claims],
        "objects": [
            {"count": x.count, "or_more": x.or_more, "n": x.n, "scores": _estimates(x.scores)} for x in summary.objects
        ],
    }


def _spec(row: Row) -> dict:
    return (
        {
            "number": row.number,
            "spec": row.result.spec,
            "scores": _estimates(row.scores),
            "against_f16": _estimate(row.loss),
            "forced": _estimates(row.forced),
        }
        | {name: _short(getattr(row.result, name)) for name in MEASURED}
        | {"retained": _short(row.result.retained), "layer_error": _short(row.result.layer_error)}
        | {"layer_records": row.result.layer_records}
    )


def _claim(row: ClaimRow) -> dict:
    return {
        "claim": row.claim.text,
        "at": row.claim.at,
        "source": row.claim.source,
        "verdict": row.verdict.word,
        "reason": row.verdict.reason,
        "comparisons": [_comparison(compared) for compared in row.comparisons],
    }


MEASURED = ("stored_bits", "nominal_bits", "residual", "kl", "top1", "tokens_per_second", "prompt_tokens")


def _score_rows(summaries: list[Summary]) -> list[dict]:
    rows = []
    for summary in summaries:
        for row in summary.rows:
            for metric, estimate in row.scores.items():
                against = row.loss if metric == summary.metric else None
                rows.append(
                    summary.group.setting._asdict()
                    | {
                        "n": len(summary.group.ids),
                        "clusters": summary.group.clusters,
                        "number": row.number,
                        "spec": row.result.spec,
                        "metric": metric,
                        "decides": metric == summary.metric,
                    }
                    | _ends("", estimate)
                    | _ends("against_f16", against)
                    | {name: _short(getattr(row.result, name)) for name in MEASURED}
                    | {"seed": row.result.seed, "device": row.result.device, "command": row.result.command}
                )
    return rows


def _claim_rows(summaries: list[Summary]) -> list[dict]:
    return [
        summary.group.setting._asdict()
        | {
            "n": compared.n,
            "claim": row.claim.text,
            "at": row.claim.at,
            "source": row.claim.source,
            "spec": compared.a.spec,
            "compared_with": compared.b.spec,
            "factors": "not known" if compared.factors is None else "; ".join(map(str, compared.factors)),
            "one_factor": compared.one_factor,
            "metric": compared.metric,
            "score": _short(compared.a.scores[compared.metric]),
            "compared_score": _short(compared.b.scores[compared.metric]),
        }
        | _ends("difference", compared.difference)
        | {
            "stored_bits": _short(compared.a.stored_bits),
            "compared_stored_bits": _short(compared.b.stored_bits),
            "residual": compared.a.residual,
            "compared_residual": compared.b.residual,
            "verdict_of_row": str(compared.verdict),
            "verdict": row.verdict.word,
        }
        for summary in summaries
        for row in summary.claims
        for compared in row.comparisons
    ]


def _comparison(compared: Comparison) -> dict:
    return {
        "spec": compared.a.spec,
        "compared_with": compared.b.spec,
        "metric": compared.metric,
        "difference": _estimate(compared.difference),
        "more_bytes": _short(compared.more_bytes),
        "one_factor": compared.one_factor,
        "factors": None if compared.factors is None else [vars(factor) for factor in compared.factors],
        "matched": [vars(factor) for factor in compared.matched],
        "verdict": compared.verdict.word,
        "reason": compared.verdict.reason,
        "exactness": {
            name: {"only_first": x.only_a, "only_second": x.only_b, "p": _short(x.p)}
            for name, x in compared.exact.items()
        },
        "other_scores": _estimates(compared.others),
    }


def _estimates(estimates: dict[str, Estimate]) -> dict:
    return {name: _estimate(estimate) for name, estimate in estimates.items()}


def _estimate(estimate: Estimate | None) -> dict | None:
    return None if estimate is None else _ends("", estimate)


def _ends(name: str, estimate: Estimate | None) -> dict:
    before = f"{name}_" if name else ""
    interval = estimate.interval if estimate else None
    return {
        f"{before}value": _short(estimate.value) if estimate else None,
        f"{before}low": _short(interval.low) if interval else None,
        f"{before}high": _short(interval.high) if interval else None,
    }


def _short(value):
    """To nine digits: the last ones of a sum depend on the machine's number of threads."""
    if isinstance(value, list):
        return [_short(x) for x in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def _csv(rows: list[dict]) -> str:
    made = io.StringIO()
    if rows:
        writer = csv.DictWriter(made, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return made.getvalue()


if __name__ == "__main__":
    sys.exit(run_main("report.py", main))
