"""The first part of a report: how its figures are made, every claim with its verdicts, every spec's score, a column a setting.

It begins the page and is all of overview.md. Standard library only.
"""

from __future__ import annotations

import significance
from claims import CLAIMS
from comparison import ALPHA, CONFIRMED, CONTRADICTED, INCONCLUSIVE, TOLERANCE, ClaimRow
from groups import Estimate
from markup import NONE, code, number, score, small, table, text
from metrics import title
from summary import Row, Summary


def overview(summaries: list[Summary], resamples: int, seed: int) -> str:
    return "\n".join([_preamble(summaries, resamples, seed), _claims(summaries), *_scores(summaries)])


def name_of(summary: Summary) -> str:
    setting = summary.group.setting
    return f"{text(setting.model)}, {text(setting.task)}, {text(setting.split)}, protocol {text(setting.protocol)}"


def percent(share: float) -> str:
    return f"{100 * share:g} %"


def _preamble(summaries: list[Summary], resamples: int, seed: int) -> str:
    return (
        f"Intervals are {percent(significance.LEVEL)} percentile intervals over {resamples} resamples of the records "
        f"(seed {seed}). Records that share a video are drawn together; fewer than {significance.FEWEST} records have no interval. "
        "Differences are paired: each resample takes the same records for both specs, and positive is better for the first. "
        "Stored bits count every byte of the cache, per cached number, over the same teacher-forced text for every spec. Nominal "
        "bits count codes alone.\n\n"
        f"Two specs are compared at equal stored bytes (within {percent(TOLERANCE)}), or where the better one stores no more. "
        f"A claim is {CONFIRMED} or {CONTRADICTED} if the interval of the difference excludes 0. Otherwise it is {INCONCLUSIVE}. "
        "It is also inconclusive if the better spec stores more, if another score of the same answers is decided the other way, "
        f"or if McNemar's exact p of a score that is right or wrong is {ALPHA} or more. Claims against the random baseline need "
        "the same verdict from every draw. Nothing corrects for the number of rows: of forty, two may be decided by luck. Rows "
        "whose specs differ in more than one factor are marked \\*.\n"
    )


def _claims(summaries: list[Summary]) -> str:
    """Every claim with its verdicts, a column a setting."""
    rows = []
    for claim in CLAIMS:
        weighed = [next((row for row in summary.claims if row.claim is claim), None) for summary in summaries]
        if any(weighed):
            rows.append(
                [
                    text(claim.text) + (f", {text(claim.at)}" if claim.at else ""),
                    text(claim.source),
                    *(row.verdict.word + _mark(row) if row else NONE for row in weighed),
                ]
            )
    missing = len(CLAIMS) - len(rows)
    left = (
        f"{missing} of {len(CLAIMS)} claims are left out, since their specs are not among the results.\n"
        if missing
        else ""
    )
    settings = "".join(
        f"- {summary.number}: {about(summary)}, device {text('; '.join(summary.devices)) or 'not known'}; decided by "
        f"{text(title(summary.metric or 'nothing'))}: {_counted(summary)}\n"
        for summary in summaries
    )
    if not rows:
        return f"## Claims\n\n{settings}\n{left}"
    return "\n".join(["## Claims\n", settings, table(["claim", "source", *(str(summary.number) for summary in summaries)], rows), left])


def _counted(summary: Summary) -> str:
    words = [row.verdict.word for row in summary.claims]
    return ", ".join(f"{words.count(word)} {word}" for word in (CONFIRMED, CONTRADICTED, INCONCLUSIVE))


def _mark(row: ClaimRow) -> str:
    return "" if all(found.one_factor for found in row.comparisons) else " \\*"


def clusters(summary: Summary) -> str:
    return f" in {summary.group.clusters} clusters" if summary.group.clusters else ""


def about(summary: Summary) -> str:
    """The conditions of a figure, printed with every table."""
    length = (
        f"{summary.prompt_tokens:.0f} prompt tokens" if summary.prompt_tokens is not None else "prompt length not known"
    )
    seeds = ", ".join(map(str, summary.seeds))
    return f"n = {len(summary.group.ids)}{clusters(summary)}, {length}, seed {seeds}, {name_of(summary)}"


def _scores(summaries: list[Summary]) -> list[str]:
    """A table for each set of records: what every model makes of it under every spec."""
    sets: dict[tuple[str, str, str], list[Summary]] = {}
    for summary in summaries:
        _, *records = summary.group.setting
        sets.setdefault(tuple(records), []).append(summary)
    return [
        part
        for of_models in sets.values()
        for part in (f"## Scores: {_records(of_models[0])}\n", _by_model(of_models), _lossless(of_models))
    ]


def _records(summary: Summary) -> str:
    setting = summary.group.setting
    return f"{text(setting.task)}, {text(setting.split)}, protocol {text(setting.protocol)}"


def _by_model(summaries: list[Summary]) -> str:
    """Of settings that differ in their model."""
    head, of_spec = ["spec", "window"], []
    for summary in summaries:
        head += [f"{summary.number}: {name}" for name in ("bits", text(title(summary.metric or "score")), *_also(summary), "KL")]
        of_spec.append({row.result.spec: row for row in summary.rows})
    bits: dict[str, float] = {}  # most first; what was not measured last
    for spec, row in (pair for rows in of_spec for pair in rows.items()):
        bits[spec] = bits.get(spec) or row.result.stored_bits or 0
    specs = sorted(bits, key=bits.__getitem__, reverse=True)
    window = {spec: row.result.residual for rows in of_spec for spec, row in rows.items()}
    made = [
        [code(spec), NONE if window[spec] is None else str(window[spec]), *(cell for summary, rows in zip(summaries, of_spec) for cell in _cells(summary, rows.get(spec)))]
        for spec in specs
    ]
    return (
        table(head, made) + "\nWindow: the newest tokens, which a residual window keeps unquantized. Bits are stored bits. KL is against f16, in nats a token, over "
        "teacher-forced text (of fewer records, where the setting's own section says so).\n"
    )


def _lossless(summaries: list[Summary]) -> str:
    """The specs that cost no record anything, by any score, with any model."""
    found: dict[str, list[Row]] = {}
    for summary in summaries:
        plain = summary.plain
        for row in summary.rows if plain else []:
            if row is not plain and all(
                row.result.items[key].get(name) == plain.result.items[key].get(name)
                for key in summary.group.ids
                for name in summary.group.scores
                if name != "perplexity"
            ):
                found.setdefault(row.result.spec, []).append(row)
    everywhere = [rows for rows in found.values() if len(rows) == len(summaries)]
    everywhere.sort(key=lambda rows: max(row.result.stored_bits or 0 for row in rows))
    if not everywhere:
        return "No spec scores as f16 does in every record.\n"
    head = ["as f16 in every record", "window", *(f"{summary.number}: bits" for summary in summaries)]
    return table(
        head,
        [
            [
                code(rows[0].result.spec),
                NONE if rows[0].result.residual is None else str(rows[0].result.residual),
                *(number(row.result.stored_bits, 2) for row in rows),
            ]
            for rows in everywhere
        ],
    )


def _also(summary: Summary) -> list[str]:
    """Further scores that papers give, where this setting has them."""
    return [name for name in ("exact", "CIDEr", "perplexity") if name in summary.group.scores and name != summary.metric]


def _cells(summary: Summary, row: Row | None) -> list[str]:
    also = _also(summary)
    if row is None:
        return [NONE] * (3 + len(also))
    decides = score(row.scores[summary.metric]) if summary.metric else NONE
    others = (number(row.scores[name].value) for name in also)
    return [number(row.result.stored_bits, 2), decides, *others, _kl(row.forced.get("KL"))]


def _kl(estimate: Estimate | None) -> str:
    return small(estimate.value) if estimate else NONE
