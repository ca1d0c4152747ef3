"""The Markdown page of a report. Standard library only; summary.py makes its contents."""

from __future__ import annotations

from comparison import INCONCLUSIVE, TOLERANCE, ClaimRow, Comparison, bytes_in_words
from errors import printable
from factors import Factor
from groups import Estimate
from markup import NONE, code, ends, exactness, gain, number, score, small, table, text
from metrics import title
from overview import about, clusters, name_of, overview, percent
from results import Result
from summary import EqualBytes, Summary


TITLE = "# Quality against memory and speed\n"
ORIGIN = "## How it was made\n"


def page(summaries: list[Summary], resamples: int, seed: int, pictures: dict[int, dict[str, list[str]]] | None) -> str:
    """`pictures` has the files of every setting's number by what they show; None: the report was asked to go without."""
    parts = [TITLE, overview(summaries, resamples, seed)]
    for summary in summaries:
        shown = (pictures or {}).get(summary.number, {})
        parts += [
            f"## {summary.number}. {name_of(summary)}\n",
            _facts(summary),
            "### Scores\n",
            _scores(summary),
            _pictures(summary, shown, "bits", "speed"),
            "### At equal stored bytes\n",
            _equal_bytes(summary),
            "### Claims\n",
            _claims(summary),
            "### Layers\n",
            _layers(summary, shown, pictures is not None),
            "### By number of objects\n",
            _objects(summary, shown),
        ]
    return "\n".join([*parts, ORIGIN, _origin(summaries, resamples, seed)])


def short_page(summaries: list[Summary], resamples: int, seed: int) -> str:
    """The first part by itself."""
    return "\n".join([TITLE, overview(summaries, resamples, seed), ORIGIN, _origin(summaries, resamples, seed, commands=False)])


def _facts(summary: Summary) -> str:
    length = NONE if summary.prompt_tokens is None else f"{summary.prompt_tokens:.1f} tokens (mean)"
    facts = [
        ("records", f"{len(summary.group.ids)}{clusters(summary)}"),
        ("prompt", length),
        ("decided by", text(title(summary.metric)) if summary.metric else "nothing"),
        ("seed", ", ".join(map(str, summary.seeds))),
        ("device", text("; ".join(summary.devices)) or "not known"),
    ]
    return "".join(f"- {name}: {value}\n" for name, value in facts) + "".join(
        f"- note: {text(note)}\n" for note in summary.notes
    )


def _scores(summary: Summary) -> str:
    metrics = summary.group.scores
    against = [f"{text(title(summary.metric))} - f16's"] if summary.metric and summary.plain else []
    forced = _forced_names(summary)
    head = ["", "spec", *(text(title(metric)) for metric in metrics), *against, "stored bits", "nominal", "window", *forced, "tokens/s", "prompt"]
    rows = [
        [
            str(row.number),
            code(row.result.spec),
            *(score(row.scores[metric]) for metric in metrics),
            *([gain(row.loss) if row.loss else NONE] if against else []),
            number(row.result.stored_bits, 2),
            number(row.result.nominal_bits, 2),
            _full(row.result),
            *(_forced(row.forced.get(name.replace("-", "")), name) for name in forced),
            number(row.result.tokens_per_second, 1),
            number(row.result.prompt_tokens, 1),
        ]
        for row in summary.rows
    ]
    return (
        table(head, rows)
        + f"\n{about(summary)}. Window: the newest tokens, which a residual window keeps unquantized. KL is against f16, "
        "in nats a token. The prompt is in tokens.\n"
    )


def _forced_names(summary: Summary) -> list[str]:
    """What teacher-forced text gives: perplexity too, where it is not one of the scores."""
    apart = "perplexity" not in summary.group.scores and any("perplexity" in row.forced for row in summary.rows)
    return ["KL", "top-1", *(["perplexity"] if apart else [])]


def _forced(estimate: Estimate | None, name: str) -> str:
    if estimate is None:
        return NONE
    value = small(estimate.value) if name == "KL" else number(estimate.value, 4)
    return value + (f" ({ends(estimate.interval)})" if estimate.interval else "")


def _pictures(summary: Summary, shown: dict[str, list[str]], *kinds: str) -> str:
    metric = title(summary.metric) if summary.metric else None
    titles = {
        "bits": f"{metric} against stored bits",
        "speed": f"{metric} against tokens/s",
        "retained": "Share of the tokens that each layer keeps",
        "error": "Error of attention's output by layer",
        "objects": f"{metric} by number of objects",
    }
    found = []
    for kind in kinds:
        for i, name in enumerate(shown.get(kind, ())):
            page_of = f" ({i + 1} of {len(shown[kind])})" if len(shown[kind]) > 1 else ""
            found.append(
                f"![{text(titles[kind])}{page_of}]({name})\n\n{text(titles[kind])}{page_of}: {about(summary)}.\n"
            )
    return "\n".join(found)


def _equal_bytes(summary: Summary) -> str:
    if summary.metric is None:
        return "Nothing is decided here.\n"
    parts = []
    if summary.equal_bytes:
        rows = [row for equal in summary.equal_bytes for row in _equal_rows(summary, equal)]
        head = [
            "stored bits",
            "best",
            "window",
            text(title(summary.metric)),
            "compared with",
            "window",
            text(title(summary.metric)),
            "difference",
            "they differ in",
            "",
        ]
        parts.append(table(head, rows))
        parts.append(
            f"{about(summary)}. The best by its score, compared with each that "
            f"stores the same within {percent(TOLERANCE)}. It was chosen by that score, which flatters its lead.\n"
        )
    else:
        parts.append(f"No two specs store the same within {percent(TOLERANCE)}.\n")
    if summary.frontier:
        names = ", ".join(f"{code(row.result.spec)} ({number(row.result.stored_bits, 2)})" for row in summary.frontier)
        parts.append(f"No spec is better with no more bytes than any of these (stored bits): {names}.\n")
    return "\n".join(parts)


def _equal_rows(summary: Summary, equal: EqualBytes) -> list[list[str]]:
    low, high = (number(bits, 2) for bits in equal.bits)
    found = []
    for other, compared in equal.others:
        verdict = INCONCLUSIVE if compared.verdict.word == INCONCLUSIVE else "worse"
        found.append(
            [
                low if low == high else f"{low} to {high}",
                code(equal.best.result.spec),
                _full(equal.best.result),
                score(equal.best.scores[summary.metric]),
                code(other.result.spec),
                _full(other.result),
                score(other.scores[summary.metric]),
                gain(compared.difference),
                _factors(compared),
                verdict,
            ]
        )
    return found


def _full(result: Result) -> str:
    return NONE if result.residual is None else str(result.residual)


def _factors(compared: Comparison) -> str:
    def words(factors: list[Factor]) -> str:
        return "; ".join(f"{text(x.name)} {code(x.a)} or {code(x.b)}" for x in factors)

    if compared.factors is None:
        return "not known \\*"
    alike = f" (alike by {words(compared.matched)})" if compared.matched else ""
    return (words(compared.factors) or "nothing") + alike + ("" if compared.one_factor else " \\*")


def _claims(summary: Summary) -> str:
    if not summary.claims:
        return "No claim has all its specs here.\n"
    head = [
        "claim",
        "source",
        "spec",
        "compared with",
        "they differ in",
        "stored bits",
        "window",
        text(title(summary.metric)),
        "difference",
        "other scores",
        "verdict",
    ]
    return table(head, [_claim(row) for row in summary.claims]) + f"\n{about(summary)}.\n"


def _claim(row: ClaimRow) -> list[str]:
    """A row of the table; every comparison has a line of its own within the cell."""
    compared = row.comparisons
    said = text(row.claim.text) + (f", {text(row.claim.at)}" if row.claim.at else "")
    reason = f" ({text(row.verdict.reason)})" if row.verdict.reason else ""
    columns = [
        [code(x.b.spec) for x in compared],
        [_factors(compared[0])],
        [f"{number(x.a.stored_bits, 2)}, {number(x.b.stored_bits, 2)}: {bytes_in_words(x.more_bytes)}" for x in compared],
        [f"{_full(x.a)}, {_full(x.b)}" for x in compared],
        [f"{number(x.a.scores[x.metric])}, {number(x.b.scores[x.metric])}" for x in compared],
        [gain(x.difference) for x in compared],
        [_others(x) for x in compared],
    ]
    cells = [said, text(row.claim.source), code(compared[0].a.spec), *map("<br>".join, columns)]
    return [*cells, f"**{row.verdict.word}**{reason}"]


def _others(compared: Comparison) -> str:
    """Exactness by counts and p; of the other scores, those whose interval leaves out 0."""
    found = [f"{text(title(name))} {exactness(test)}" for name, test in compared.exact.items()]
    found += [
        f"{text(title(name))} {gain(other)}"
        for name, other in compared.others.items()
        if name not in compared.exact and other.interval and other.interval.side
    ]
    return ", ".join(found) or NONE


def _layers(summary: Summary, shown: dict[str, list[str]], drawn: bool) -> str:
    measured = [row for row in summary.rows if row.result.retained or row.result.layer_error]
    if not measured:
        return "Layers were not measured.\n"
    rows = [
        [str(row.number), code(row.result.spec), _spread(row.result.retained), _spread(row.result.layer_error)]
        for row in measured
    ]
    head = [
        "",
        "spec",
        "share of tokens kept: least, mean, most of a layer",
        "relative error of attention's output: the same",
    ]
    counts = sorted({row.result.layer_records for row in measured if row.result.layer_records})
    records = f" Over the teacher-forced text of the first {' or '.join(map(str, counts))} records." if counts else ""
    return "\n".join([_pictures(summary, shown, "retained", "error"), table(head, rows), f"{about(summary)}.{records}\n"])


def _spread(values: list[float] | None) -> str:
    return NONE if not values else f"{min(values):.3f}, {sum(values) / len(values):.3f}, {max(values):.3f}"


def _objects(summary: Summary, shown: dict[str, list[str]]) -> str:
    if not summary.objects:
        return "The number of objects is not known, or no score is made of its records.\n"
    head = ["", "spec", *(f"{objects.label} (n = {objects.n})" for objects in summary.objects)]
    rows = []
    for row in summary.rows:
        found = [objects.scores.get(row.result.spec) for objects in summary.objects]
        if any(found):
            rows.append([str(row.number), code(row.result.spec), *(score(x) if x else NONE for x in found)])
    counted = sum(objects.n for objects in summary.objects)
    return "\n".join(
        [
            _pictures(summary, shown, "objects"),
            table(head, rows),
            f"{text(title(summary.metric))} over the records with so many objects ({counted} records); {about(summary)}.\n",
        ]
    )


def _origin(summaries: list[Summary], resamples: int, seed: int, commands: bool = True) -> str:
    lines = []
    for summary in summaries:
        lines.append(
            f"{summary.number}. {name_of(summary)}: seed {', '.join(map(str, summary.seeds))}; "
            f"device {text('; '.join(summary.devices)) or 'not known'}; versions "
            + (
                ", ".join(f"{text(name)} {text(' and '.join(found))}" for name, found in summary.versions.items())
                or "not known"
            )
            + ".\n"
        )
        if commands:
            lines += [f"    {printable(command, 1_000_000)}" for command in summary.commands] + [""]
    lines.append(f"The report: {resamples} resamples, seed {seed}, stored bytes equal within {percent(TOLERANCE)}.\n")
    return "\n".join(lines)
