"""Read, run, write, score: what the scripts of a data set do with a split, for every model and spec."""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import shlex
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Callable

import arguments
import protocols
import scorers
import specs
from errors import EvaluationError, note, say
from factors import Catalogue, normal
from models import ROOT, Model, find_model
from protocols import Protocol
from records import Split
from results import Result, write_results
from runs import FORCED_TOGETHER, Folder, Plan, at_equal_bits, refuse_other, require_specs, slug
from shards import Shard
from storage import Lock, digest, read_json, sweep, write_json, write_lines


HARNESSES = ("lmms-eval", "vlmevalkit", "internvl")  # protocols whose words the bundled models were not trained on


@dataclass(frozen=True)
class Task:
    """What differs between the scripts: their standard files, protocols, and what answers are compared with."""

    read: Callable[[Path, Path | None], Split]  # annotations, and the folder of their pictures
    results_name: Callable[[Split, str], str]  # of a split and the name of what made it
    results: Callable[[Split, dict[int, str]], list[dict]]
    read_results: Callable[[Path, Split], dict[int, str]] | None = None  # for --results
    protocol: Callable[[str, Split, str], Protocol] = protocols.find_protocol  # of name, split and family
    against_own: bool = False  # answers are compared with the model's own under f16; perplexity is told


def evaluate(task: Task, split: Split, options: argparse.Namespace) -> list[Result]:
    """The rows of every model and spec; none where this shard's part is done and others are not, or nothing is scored.

    EvaluationError for whatever cannot be used, before a model runs where that can be.
    """
    tune_on = task.read(options.tune_on, None) if options.tune_on else None
    split = split.part(options.limit, options.tune, tune_on)
    name = options.protocol or ("native" if protocols.is_our_own(split) else "lmms-eval")
    if options.results:
        return [_score_file(task, split, name, options)]
    models = {model: find_model(model) for model in options.model or [options.default_model]}
    ways = {model: task.protocol(name, split, models[model].family) for model in models}
    programs = arguments.programs(options)
    asked = options.kv or ["f16"]
    if programs.rules:
        asked = map(Catalogue.from_json(programs.policies()).written, asked)
    jobs = [(models[model], spec) for model, spec in itertools.product(models, dict.fromkeys(asked))]
    _refuse_namesakes(jobs)
    metrics = _metrics(split, ways[jobs[0][0].name], options)
    split = split.with_images(options.out / "images")
    split.require_pictures()
    if options.bits:
        jobs = at_equal_bits(programs, jobs, split.items[0], ways, options.bits)
    for model, way in ways.items():
        if models[model].folder.is_relative_to(ROOT) and way.name in HARNESSES:
            note(f"{model} knows the questions of our own sets alone, so its scores in the words of {way.name} are near 0; give "
                 "--protocol native, or a published model")  # fmt: skip
    for departs in dict.fromkeys(way.departs for way in ways.values() if way.departs):
        say(f"protocol {name}: {departs}")
    shard = _shards_of(options.out) if options.merge else arguments.place(options)
    plan = Plan(split, name, options.device, options.tune, tune_on is not None, options.fidelity, options.layer_records, shard,
                options.threads, options.batch_size, options.jobs)  # fmt: skip
    folder = Folder(options.out, plan, programs, shlex.join(sys.argv))
    if not options.merge:
        require_specs(folder.programs, jobs, tuned=bool(split.tuning))
    try:
        folder.open(merging=options.merge)
        if not options.merge:
            _run(folder, jobs, ways)
            if shard.count > 1 and not _take_whole(folder, jobs):
                return []
        sweep(options.out)
        return _merge(task, folder, jobs, ways, metrics, options)
    finally:
        folder.close()


def _run(folder: Folder, jobs: list[tuple[Model, str]], ways: dict[str, Protocol]) -> None:
    mine = folder.plan.shard.of(jobs)  # the fidelity of a spec is one shard's work
    failures: list[BaseException] = []

    def work(job: tuple[Model, str]) -> None:
        if failures:  # a thread of the pool takes its next job before the pool is told of a failure or an interrupt
            raise failures[0]
        model, spec = job
        try:
            folder.answer(model, spec, ways[model.name], folder.profile(model, spec, ways[model.name]))
        except BaseException as error:
            failures.append(error)
            raise

    count = folder.plan.shard.of(folder.plan.split.items)
    part = f", shard {folder.plan.shard}" if folder.plan.shard.count > 1 else ""
    with concurrent.futures.ThreadPoolExecutor(folder.plan.jobs) as pool:
        waiting = {pool.submit(work, job): job for job in jobs}
        try:
            for number, done in enumerate(concurrent.futures.as_completed(waiting), 1):
                done.result()
                model, spec = waiting[done]
                say(f"{number} of {len(jobs)}: {model.name}, {spec}: {len(count)} records answered{part}")
            forced = [pool.submit(_force, folder, model, specs, ways) for model, specs in _by_model(mine, FORCED_TOGETHER)]
            for done in concurrent.futures.as_completed(forced):
                done.result()
        except BaseException:  # an interrupt, too, begins nothing more
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _by_model(jobs: list[tuple[Model, str]], most: int | None = None) -> list[tuple[Model, list[str]]]:
    """The specs of each model, at most so many at a time."""
    found: dict[str, tuple[Model, list[str]]] = {}
    for model, spec in jobs:
        found.setdefault(model.name, (model, []))[1].append(spec)
    return [(model, specs[i : i + (most or len(specs))])
            for model, specs in found.values() for i in range(0, len(specs), most or len(specs))]  # fmt: skip


def _force(folder: Folder, model: Model, specs: list[str], ways: dict[str, Protocol]) -> None:
    way = ways[model.name]
    folder.force(model, [(spec, folder.profile(model, spec, way)) for spec in specs], way)


def _take_whole(folder: Folder, jobs: list[tuple[Model, str]]) -> bool:
    """Whether this shard, having ended, is the one to merge: nobody else is at work and nothing is missing."""
    shard = folder.plan.shard
    if not folder.take_whole():
        say(f"shard {shard} is done; others are at work, and the last one merges")
        return False
    if not all(folder.answered(model, spec) for model, spec in jobs):
        say(f"shard {shard} is done; the last of {shard.count} merges")
        return False
    return True


def _merge(
    task: Task, folder: Folder, jobs: list[tuple[Model, str]], ways: dict[str, Protocol], metrics: tuple[str, ...],
    options: argparse.Namespace,
) -> list[Result]:  # fmt: skip
    split = folder.plan.split
    scorer = scorers.Scorer(split, metrics, ways[jobs[0][0].name])
    for model, of_model in _by_model(jobs) if split.scored else []:
        for spec in of_model:
            folder.rows(model, spec)  # nothing is forced while answers are missing
        _force(folder, model, of_model, ways)
    rows = []
    for model, spec in jobs:
        found = folder.rows(model, spec)
        way = ways[model.name]
        texts = {key: way.answer(row["text"]) for key, row in found.items()}
        at = folder.spec(model, spec)
        standard = at / task.results_name(split, f"{folder.model(model).name}-{slug(spec)}")
        write_json(standard, task.results(split, texts))
        if not split.scored:
            say(f"{split.path} has no answers, so nothing is scored; {standard} can be submitted")
            continue
        if task.against_own:
            scorer = scorers.Scorer(_own_answers(folder, model), metrics, way)
        scores = scorer.score(texts)
        write_lines(at / f"samples_{split.task}.jsonl", _samples(split, texts, scores))
        fidelity = folder.fidelity(model, spec) or {}
        if task.against_own and fidelity:
            scores.corpus["perplexity"] = fidelity["perplexity"]
        alone = options.batch_size == 1 and options.jobs == 1 and folder.plan.shard.count == 1
        rows.append(_result(folder, model, spec, list(found.values()), scores, fidelity, alone, options))
    if rows:
        write_results(folder.path / "results.json", rows)
    return rows


def _result(
    folder: Folder, model: Model, spec: str, rows: list[dict], scores: scorers.Scores, fidelity: dict, alone: bool,
    options: argparse.Namespace,
) -> Result:  # fmt: skip
    split = folder.plan.split
    layers = fidelity.get("layers", [])
    forced = {
        str(row["id"]): {"KL": row["kl_mean"], "top1": row["top1"], "nll": row["nll"], "tokens": row["tokens"]}
        for row in fidelity.get("per_record", []) if row["tokens"]
    }  # fmt: skip
    decode_s = sum(row["timings"]["decode_ms"] for row in rows) / 1000
    steps = sum(row["generated_tokens"] - 1 for row in rows)
    counts = {str(item.id): item.objects for item in split.items if item.objects is not None}
    return Result(
        model=model.name, spec=spec, task=split.task, split=split.name, protocol=folder.plan.protocol,
        items={str(key): value | forced.get(str(key), {}) for key, value in scores.items.items()}, scores=scores.corpus,
        clusters=_clusters(split), stored_bits=fidelity.get("stored_bits"),
        nominal_bits=fidelity.get("nominal_bits", statistics.fmean(row["kv"]["nominal_bits"] for row in rows)),
        # Steps of a batch are shared, and programs side by side slow one another.
        tokens_per_second=steps / decode_s if alone and decode_s > 0 else None,
        prompt_tokens=statistics.fmean(row["prompt_tokens"] for row in rows),
        kl=fidelity.get("kl_mean"), top1=fidelity.get("top1"),
        retained=[layer["share"] for layer in layers] or None,
        layer_error=[layer["error"] for layer in layers] or None,
        layer_records=fidelity["layer_records"] if layers else None,
        objects=counts or None, residual=specs.residual(rows[0]["kv"]["spec"], folder.programs.policies()),
        device=", ".join(sorted({row["device"] for row in rows})),
        versions={"kvlm": rows[0]["version"]} | scorers.versions() | (folder.programs.rule_files(spec) or {}),
        command=folder.asked_by(model, spec), seed=options.seed,
    )  # fmt: skip


def _score_file(task: Task, split: Split, protocol: str, options: argparse.Namespace) -> Result:
    """A file of standard results, made by whatever program."""
    for name in ("model", "kv", "bits", "shard", "merge"):
        if getattr(options, name):
            raise EvaluationError(f"--results scores a file and runs nothing, so --{name} says nothing; leave it out")
    if not split.scored:
        raise EvaluationError(f"{split.path} has no answers, so {options.results} cannot be scored")
    way = task.protocol(protocol, split, "")
    metrics = _metrics(split, way, options)
    assert task.read_results is not None
    texts = task.read_results(options.results, split)
    if protocol == "lmms-eval":  # strips before it scores
        texts = {key: way.answer(text) for key, text in texts.items()}
    with Lock(options.out / ".lock"):
        record, settings = options.out / "run.json", {
            "--results": str(options.results), "content": digest(options.results.read_bytes()), "protocol": protocol,
            "annotations": split.path.name, "split": split.name,
        }  # fmt: skip
        if record.exists():
            refuse_other(record, settings, options.out)
        write_json(record, settings)
        scores = scorers.Scorer(split, metrics, way).score(texts)
        row = Result(
            model=options.results.name, spec="-", task=split.task, split=split.name, protocol=protocol,
            items={str(key): value for key, value in scores.items.items()}, scores=scores.corpus, clusters=_clusters(split),
            versions=scorers.versions(), command=shlex.join(sys.argv), seed=options.seed,
        )  # fmt: skip
        write_results(options.out / "results.json", [row])
    return row


def _clusters(split: Split) -> dict[str, str] | None:
    return {str(item.id): item.video for item in split.items if item.video} or None


def _own_answers(folder: Folder, model: Model) -> Split:
    """The split with the model's own answers, under f16, for references."""
    own = folder.rows(model, "f16")
    split = folder.plan.split
    return replace(split, items=[replace(item, references=[own[item.id]["text"].strip()]) for item in split.items])


def _metrics(split: Split, protocol: Protocol, options: argparse.Namespace) -> tuple[str, ...]:
    if not split.scored:
        return ()
    metrics = scorers.plan_metrics(protocol.metrics, options.skip, getattr(options, "spice", False))
    if left_out := [name for name in protocol.metrics if name not in metrics]:
        say(f"skipped: {', '.join(left_out)}")
    return metrics


def _samples(split: Split, texts: dict[int, str], scores: scorers.Scores) -> list[dict]:
    """Records under the names of lmms-eval's samples files."""
    return [
        {"doc_id": item.id, "target": item.references, "resps": [[texts[item.id]]], "filtered_resps": [texts[item.id]]}
        | scores.items[item.id]
        for item in split.items
    ]


def _refuse_namesakes(jobs: list[tuple[Model, str]]) -> None:
    """Two models or specs of one folder name; their answers would mix."""
    for what, names in (("--model", [m.name for m, _ in jobs]), ("--kv", [spec for _, spec in jobs])):
        seen: dict[str, str] = {}
        for name in dict.fromkeys(names):
            short = slug(Path(name).name if Path(name).is_dir() else name)
            if short in seen:
                raise EvaluationError(f"{what} {name} and {seen[short]} would be written to one folder; give them two --out")
            seen[short] = name
    plain: dict[str, str] = {}
    for _, spec in jobs:
        if plain.setdefault(_normal(spec), spec) != spec:
            raise EvaluationError(f"--kv {spec} and {plain[_normal(spec)]} are one policy; give one of them")


def _normal(spec: str) -> str:
    try:
        return normal(spec)
    except ValueError:  # @FILE
        return spec


def _shards_of(out: Path) -> Shard:
    record = out / "run.json"
    before = read_json(record) if record.exists() else {}
    if not isinstance(before, dict) or not isinstance(before.get("shards"), int) or not 1 <= before["shards"] < 10**6:
        raise EvaluationError(f"--merge: {out} holds no run; start its shards first")
    return Shard(1, before["shards"])
