"""Runs the programs for an evaluation: one (model, spec, shard) is one `vlm-run --batch` into a folder of --out.

    OUT/run.json                    what decides the answers: task, protocol, device, calibration; another's are refused
    OUT/records.json                id -> digest of a record's question and image; another record of that id is refused
    OUT/MODEL/requests.jsonl        what is asked; references.jsonl: what fidelity forces; tuning.jsonl, profile.json
    OUT/MODEL/SPEC/answers.jsonl    vlm-run's own file, to which a second start adds what is missing
    OUT/MODEL/SPEC/run.json         command, versions, device; written before the first answer
    OUT/MODEL/SPEC/fidelity.json    KL, top-1 and stored bits, over the references

With shards, requests, answers and run.json are x.I-of-N.jsonl. --limit may change, and the number of shards, and the folder
of the data: what is answered stays, by record. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import specs
from errors import EvaluationError, guarded, note, printable
from models import ROOT, Model
from protocols import Protocol
from records import Item, Split
from shards import Shard, without_shard
from storage import Lock, digest, read_json, write_json, write_lines, write_text

LIBC = ctypes.CDLL(None)  # loaded before there are threads
PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
FORCED_TOGETHER = 8  # specs of a call: each holds a batch of records while the plain cache is read
OF_PLAN = ("--results", "task", "protocol", "--device", "--tune", "--tune-on", "tuning")  # of run.json, what must stay
OF_ROW = {"id": (int, str), "text": str, "kv": dict, "timings": dict, "generated_tokens": int, "prompt_tokens": int}
DECIDES = ("model", "fingerprint", "spec", "version", "arguments", "profile", "rules")  # of a spec's run.json


@dataclass(frozen=True)
class Programs:
    """The build folder's programs, started so that they end with this one; with `rules`, files that make policies in Python,
    those of the module."""

    build: Path
    rules: tuple[Path, ...] = ()

    @functools.cache
    def version(self) -> str:
        return self.run("vlm-run", ["--version"]).strip()

    def rule_files(self, spec: str) -> dict[str, str] | None:
        """Digests of the files of rules, by name and place, where the spec may name a policy of theirs; else None."""
        made = [policy["name"].rpartition(":")[2] for policy in self.policies()["policies"] if ":" in policy["name"]] if self.rules else []
        if "@" not in spec and not any(re.search(rf"\b{name}\b", spec) for name in made):
            return None
        return {f"{number}, {path.name}": digest(path.read_bytes()) for number, path in enumerate(self.rules, 1)} or None

    @functools.cache
    def policies(self) -> dict:
        """What `vlm-kv list --json` prints."""
        return json.loads(self.run("vlm-kv", ["list", "--json"]))

    def _command(self, name: str) -> list[str]:
        if self.rules:
            if importlib.util.find_spec("kvlm") is None:
                raise EvaluationError(f"--rules needs the module kvlm, which {sys.executable} lacks; see docs/python.md")
            return [sys.executable, "-m", "kvlm", *(word for path in self.rules for word in ("--rules", str(path))), name]
        program = self.build / "tools" / name
        if not program.is_file():
            raise EvaluationError(
                f"{program} is not built; build it (cmake --preset release, cmake --build --preset release --target vlm-run "
                "vlm-kv), or name another build folder with --build"
            )
        return [str(program)]

    def run(self, name: str, arguments: list[str], *, locks: tuple[Lock, ...] = (), show: bool = False) -> str:
        """Standard output. With `show`, its progress is seen; EvaluationError holds what it said last."""
        command = self._command(name)
        parent = os.getpid()

        def end_with_parent() -> None:
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # it ended before the call
                os.kill(os.getpid(), signal.SIGKILL)

        done = subprocess.run(
            [*command, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=None if show else subprocess.PIPE, text=True, errors="replace", env=without_shard(),
            pass_fds=[lock.fileno() for lock in locks], preexec_fn=end_with_parent,
        )  # fmt: skip
        if done.returncode == 128 + signal.SIGINT:
            raise KeyboardInterrupt
        if done.returncode != 0:
            said = (done.stderr or "").strip().splitlines()
            how = (f"ended with status {done.returncode}" if done.returncode > 0
                   else f"was ended by {signal.Signals(-done.returncode).name}")
            raise EvaluationError(
                f"{name} {how}" + (f": {printable(said[-1], 500)}" if said else "") + f" ({shlex.join(arguments)})"
            )
        return done.stdout


def require_specs(programs: Programs, jobs: list[tuple[Model, str]], *, tuned: bool) -> None:
    """EvaluationError for the first spec that its model cannot run, before one that can has taken hours. What only a
    profile is missing for will have it if the run is `tuned`."""
    for model, spec in jobs:
        try:
            programs.run("vlm-kv", ["explain", spec, "--model", str(model.folder), "--tokens", "64", "--json"])
        except EvaluationError as error:
            if not (tuned and "--kv-profile" in str(error)):
                raise


def at_equal_bits(
    programs: Programs, jobs: list[tuple[Model, str]], item: Item, ways: dict[str, Protocol], bits: float
) -> list[tuple[Model, str]]:
    """The jobs with specs as `vlm-kv explain --bits` solves them for the prompt of `item`; changes are reported."""
    sizes: dict[Model, dict] = {}
    solved: dict[tuple[Model, str], str] = {}
    for model, spec in jobs:
        if model not in sizes:
            with tempfile.TemporaryDirectory() as folder:
                asked = Path(folder) / "request.jsonl"
                write_lines(asked, [request(item, ways[model.name])])
                sizes[model] = json.loads(programs.run("vlm-run", [
                    "--dry-run", "--json", "--model", str(model.folder), "--batch", str(asked), *ways[model.name].flags,
                ]))  # fmt: skip
        tokens, visual = str(sizes[model]["prompt_tokens"]), str(sizes[model]["visual_tokens"])
        made = json.loads(programs.run("vlm-kv", ["explain", "--kv", spec, "--model", str(model.folder), "--tokens", tokens,
                                                  "--visual", visual, "--bits", f"{bits:g}", "--json"]))["spec"]  # fmt: skip
        if made != spec:
            note(f"--bits {bits:g}: {spec} is {made} on {model.name}, for a prompt of {tokens} tokens")
        if (other := solved.setdefault((model, made), spec)) != spec:
            raise EvaluationError(f"--bits {bits:g}: --kv {other} and {spec} are one policy, {made}; give one of them")
    return list(solved)


@dataclass(frozen=True)
class Plan:
    """What an output folder is about. Two starts with equal plans go on with one another's work."""

    split: Split
    protocol: str
    device: str
    tune: int
    tune_on: bool  # whether the tuning records are of another file
    forced: int  # records of fidelity
    layer_records: int  # of those, with a curve over layers, which takes longer than all else and asks for no small intervals
    shard: Shard
    threads: int = 0
    batch_size: int = 1
    jobs: int = 1

    def describe(self) -> dict:
        """Of what the answers are: OF_PLAN decides them, the rest tells a reader what was asked last."""
        tuning = digest("".join(map(record_key, self.split.tuning))) if self.split.tuning else None
        return {
            "--results": None,
            "task": self.split.task,
            "annotations": self.split.path.name,
            "split": self.split.name,
            "--tune": self.tune,
            "--tune-on": self.tune_on,
            "tuning": tuning,
            "protocol": self.protocol,
            "--device": self.device,
            "--fidelity": self.forced,
            "shards": self.shard.count,
        }


def record_key(item: Item) -> str:
    """Of what is asked: the question and the image's contents, wherever its file is. Of a video, which may be large, its
    name and size."""
    shown = [item.image.name, item.image.stat().st_size] if item.video else _contents(item.image)
    return digest(json.dumps([item.question, item.choices, shown]))


@functools.lru_cache(maxsize=100_000)
def _contents(image: Path) -> str:
    return digest(image.read_bytes())


def slug(text: str) -> str:
    """A file name of a spec or model: short, plain, and another for another text."""
    plain = re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") or "model"
    return plain if len(plain) <= 80 else f"{plain[:70]}-{digest(text)[:9]}"


@dataclass
class Folder:
    """An output folder, held by one run or by one run of each of its shards."""

    path: Path
    plan: Plan
    programs: Programs
    command: str
    _locks: list[Lock] = field(default_factory=list)

    def open(self, *, merging: bool = False) -> None:
        """Takes the folder for this shard, or as a whole; EvaluationError if it is taken, or of another plan."""
        shard, record = self.plan.shard, self.path / "run.json"
        alone = merging or shard.count == 1
        plan = self.plan.describe()
        mine = {} if merging else {str(item.id): record_key(item) for item in shard.of(self.plan.split.items)}
        with Lock(self.path / ".plan", wait_s=120):  # shards that start together
            # A shard that has ended looks for a moment whether it is the last.
            self._locks.append(Lock(self.path / ".lock", shared=not alone, wait_s=2 if alone else 60))
            if not alone:
                self._locks.append(Lock(shard.name(self.path / ".lock")))
            if record.exists():
                # Merging asks nothing.
                names = [name for name in OF_PLAN if not (merging and name == "--device")]
                before = refuse_other(record, {name: plan[name] for name in names}, self.path)
                if not alone and before.get("shards") != shard.count:
                    self._take_other_shards(before.get("shards"))
            if not merging:
                self._know_records(mine)
                write_json(record, plan)

    def _take_other_shards(self, count: object) -> None:
        """Goes on with what another number of shards has answered; EvaluationError while one of them is at work."""
        if not self._locks[0].take_alone():
            raise EvaluationError(
                f"{self.path} is being written by shards of {printable(count)}, and this run is shard {self.plan.shard}; wait "
                "for them, or give another --out"
            )
        self._locks[0].share()

    def _know_records(self, mine: dict[str, str]) -> None:
        """Adds this shard's records, id -> record_key, to records.json; EvaluationError for an id that was another record."""
        path = self.path / "records.json"
        known = read_object(path) if path.exists() else {}
        if other := next((key for key, value in mine.items() if known.get(key, value) != value), None):
            raise EvaluationError(
                f"{self.path} holds results of another command: record {printable(other)} of {self.plan.split.path} had another "
                "question or image; give another --out"
            )
        if known | mine != known:
            write_json(path, known | mine)

    def take_whole(self) -> bool:
        """Whether this shard is the last at work, which then has the folder to itself."""
        return self._locks[0].take_alone()

    def close(self) -> None:
        for lock in self._locks:
            lock.release()
        self._locks.clear()

    def model(self, model: Model) -> Path:
        return self.path / slug(Path(model.name).name if Path(model.name).is_dir() else model.name)

    def spec(self, model: Model, spec: str) -> Path:
        return self.model(model) / slug(spec)

    def answer(self, model: Model, spec: str, protocol: Protocol, profile: Path | None) -> None:
        """Answers of this shard, those that are missing."""
        shard, plan = self.plan.shard, self.plan
        folder = self.spec(model, spec)
        items = shard.of(plan.split.items)
        requests = shard.name(self.model(model) / "requests.jsonl")
        write_lines(requests, [request(item, protocol) for item in items])
        answers = shard.name(folder / "answers.jsonl")
        arguments = ["--model", self._name(model), "--kv", spec, "--device", plan.device, *protocol.flags]
        arguments += ["--max-tokens", str(protocol.max_tokens)] if protocol.max_tokens else []
        arguments += ["--kv-profile", str(profile)] if profile else []
        decides = {
            "model": model.name, "fingerprint": model.fingerprint, "spec": spec, "version": self.programs.version(),
            "arguments": [word for word in arguments if not word.startswith(str(self.path))],
            "profile": digest(profile.read_bytes()) if profile else None, "rules": self.programs.rule_files(spec),
        }  # fmt: skip
        assert tuple(decides) == DECIDES
        record = shard.name(folder / "run.json")
        if record.exists():
            refuse_other(record, decides, self.path)
        self._keep_answers(folder, items, decides)
        arguments += ["--batch", str(requests), "--out", str(answers), "--batch-size", str(plan.batch_size)]
        arguments += ["--threads", str(plan.threads)] if plan.threads else []
        write_json(record, decides | {"command": self.command, "vlm-run": shlex.join(arguments), "records": len(items)})
        show = sys.stderr.isatty() and plan.jobs == 1
        try:
            self.programs.run("vlm-run", arguments if show else ["-q", *arguments], locks=tuple(self._locks), show=show)
        except EvaluationError as error:
            failed = next((row for row in _rows(answers) if "error" in row), None)
            if failed is None:
                raise
            raise EvaluationError(
                f"{model.name}, {spec}: record {failed.get('id')} has no answer: {printable(failed['error'], 400)}; fix "
                "that and start the same command again"
            ) from error

    def _keep_answers(self, folder: Path, items: list[Item], decides: dict) -> None:
        """Gives this shard's file the answers that other numbers of shards have made to its records, and its answers the
        places where the images are now: records.json says that they are the same."""
        path = self.plan.shard.name(folder / "answers.jsonl")
        places = {item.id: str(item.image.resolve()) for item in items}
        rows = _rows(path)
        found = {row.get("id") for row in rows if "error" not in row}
        changed = False
        current = {shard.name(folder / "answers.jsonl") for shard in self.plan.shard.all}
        for other in sorted(set(folder.glob("answers*.jsonl")) - current):
            taken = [row for row in _rows(other) if "error" not in row and row.get("id") in places and row["id"] not in found]
            record = folder / other.name.replace("answers", "run", 1).replace(".jsonl", ".json")
            if taken and record.exists():
                refuse_other(record, decides, self.path)
            unique = {row["id"]: row for row in taken}
            rows += unique.values()
            found |= unique.keys()
            changed |= bool(unique)
        for row in rows:
            for name in ("images", "videos"):
                if row.get(name) and row.get("id") in places and row[name] != [places[row["id"]]]:
                    row[name], changed = [places[row["id"]]], True
        if changed:
            write_lines(path, rows)

    def asked_by(self, model: Model, spec: str) -> str:
        """The command that had it answered, of the first shard."""
        record = self.plan.shard.all[0].name(self.spec(model, spec) / "run.json")
        return str(read_object(record).get("command")) if record.exists() else self.command

    def rows(self, model: Model, spec: str) -> dict[int, dict]:
        """vlm-run's rows of all shards by id; EvaluationError for what is missing, strange or there twice."""
        folder, plan = self.spec(model, spec), self.plan
        found: dict[int, dict] = {}
        known = read_object(self.path / "records.json") if (self.path / "records.json").exists() else {}
        first = plan.shard.all[0].name(folder / "run.json")
        for shard in plan.shard.all:
            path = shard.name(folder / "answers.jsonl")
            record = shard.name(folder / "run.json")
            if record.exists() and first.exists():  # parts of two builds are no whole
                refuse_other(record, {key: read_object(first).get(key) for key in DECIDES}, self.path)
            version = read_object(record).get("version") if record.exists() else None
            mine = {item.id for item in shard.of(plan.split.items)}
            for row in _rows(path):
                key = row.get("id")
                if key in found:
                    raise EvaluationError(f"{path} has record {printable(key)}, which is answered already; remove that line")
                if key not in mine and str(key) in known:
                    continue  # of an earlier run with a higher --limit
                if key not in mine:
                    raise EvaluationError(f"{path} has record {printable(key)}, which is not of shard {shard}; remove it")
                if "error" not in row:
                    if version and row.get("version") != version:
                        raise EvaluationError(
                            f"{path}: record {key} was answered by {printable(row.get('version'))}, and this run is of "
                            f"{printable(version)} ({record}); remove that line and start the same command again, or give "
                            "another --out"
                        )
                    found[key] = row
        for item in plan.split.items:
            if item.id not in found:
                at = next(shard for shard in plan.shard.all if item in shard.of(plan.split.items))
                where = f"shard {at} " if plan.shard.count > 1 else "it "
                raise EvaluationError(
                    f"{model.name}, {spec}: {len(found)} of {len(plan.split.items)} records are answered, {printable(item.id)} is "
                    f"missing; run {where}to its end, then merge"
                )
        return {item.id: found[item.id] for item in plan.split.items}

    def answered(self, model: Model, spec: str) -> bool:
        """Whether every shard has written as many answers as it was asked for."""
        folder = self.spec(model, spec)
        for shard in self.plan.shard.all:
            path = shard.name(folder / "answers.jsonl")
            ids = {row.get("id") for row in _rows(path) if "error" not in row}
            if not ids.issuperset(item.id for item in shard.of(self.plan.split.items)):
                return False
        return True

    def profile(self, model: Model, spec: str, protocol: Protocol) -> Path | None:
        """What `vlm-kv profile` fits on the tuning records, which are never scored; None without --tune.

        PrefixKV's part is of one share of the rows, so a spec that keeps another has a profile of its own.
        """
        if not self.plan.split.tuning:
            return None
        folder = self.model(model)
        keep = specs.prefixkv_keep(spec)
        with Lock(folder / ".profile", wait_s=24 * 3600):  # shards wait for the one that does it
            path = self._fit(model, protocol, folder / "profile.json", None, [])
            if keep is None:
                return path
            return self._fit(model, protocol, folder / f"profile-keep-{keep}.json", path,
                             ["--policy", "prefixkv", "--keep", keep])  # fmt: skip

    def _fit(self, model: Model, protocol: Protocol, path: Path, start: Path | None, options: list[str]) -> Path:
        """A profile, unless it is there; `start` is one whose other parts it keeps."""
        if path.exists():
            return path
        tuning, part = path.with_name("tuning.jsonl"), path.with_name(".profile.part")
        write_lines(tuning, [forced(item, protocol) for item in self.plan.split.tuning])
        part.unlink(missing_ok=True)
        note(f"calibrating {self._name(model)} on {len(self.plan.split.tuning)} records; --tune 0 leaves this out")
        if start:
            write_text(part, start.read_text(encoding="utf-8"))
        self.programs.run("vlm-kv", [
            "profile", "--model", self._name(model), "--data", str(tuning), "--out", str(part), "--records",
            str(len(self.plan.split.tuning)), "--device", self.plan.device, *protocol.flags, *self._threads(), *options,
        ], locks=tuple(self._locks))  # fmt: skip
        write_text(path, part.read_text(encoding="utf-8"))
        part.unlink()
        return path

    def force(self, model: Model, wanted: list[tuple[str, Path | None]], protocol: Protocol) -> None:
        """fidelity.json of specs with their profiles, where it is missing: KL, top-1 and bits over the first records'
        references, the same text, of the same length, for every spec. Specs of one profile share calls, and with them
        the plain cache that they are measured against; a call that is cut loses its own specs."""
        if not self.plan.forced:
            return
        by_profile: dict[Path | None, list[str]] = {}
        for spec, profile in wanted:
            by_profile.setdefault(profile, []).append(spec)
        for profile, found in by_profile.items():
            for first in range(0, len(found), FORCED_TOGETHER):
                self._force(model, found[first : first + FORCED_TOGETHER], profile, protocol)

    def _force(self, model: Model, group: list[str], profile: Path | None, protocol: Protocol) -> None:
        paths = {spec: self.spec(model, spec) / "fidelity.json" for spec in group}
        with contextlib.ExitStack() as held:  # as above; in one order, so that two groups never wait for each other
            for path in sorted(paths.values()):
                held.enter_context(Lock(path.with_name(".fidelity"), wait_s=24 * 3600))
            items = self.plan.split.items[: self.plan.forced]
            of = digest(json.dumps([[record_key(item), item.references[:1]] for item in items] + [protocol.forced_tokens]))
            looked_at = min(self.plan.layer_records, len(items))

            def is_measured(path: Path) -> bool:
                found = read_object(path) if path.exists() else {}
                return found.get("references") == of and found.get("layer_records", 0) >= looked_at

            missing = [spec for spec in group if not is_measured(paths[spec])]
            if not missing:
                return
            data = self.model(model) / "references.jsonl"
            write_lines(data, [forced(item, protocol) for item in items])
            arguments = [
                "fidelity", "--model", self._name(model), *(word for spec in missing for word in ("--kv", spec)),
                "--data", str(data), "--json", "--per-record", "--batch-size", str(self.plan.batch_size),
                "--layer-records", str(looked_at), "--max-tokens", str(protocol.forced_tokens),
                "--device", self.plan.device, *protocol.flags, *self._threads(),
            ]  # fmt: skip
            arguments += ["--kv-profile", str(profile)] if profile else []
            try:
                rows = self.programs.run("vlm-kv", arguments, locks=tuple(self._locks)).splitlines()
            except EvaluationError as error:
                raise EvaluationError(f"{error}; --fidelity 0 leaves out KL, top-1 and stored bits") from error
            if len(rows) != len(missing):
                raise EvaluationError(f"vlm-kv gave {len(rows)} rows for {len(missing)} specs ({shlex.join(arguments)})")
            for spec, row in zip(missing, rows):
                write_lines(paths[spec], [json.loads(row) | {"references": of}])

    def fidelity(self, model: Model, spec: str) -> dict | None:
        """What force() has measured."""
        return read_object(self.spec(model, spec) / "fidelity.json") if self.plan.forced else None

    def _threads(self) -> list[str]:
        return ["--threads", str(self.plan.threads)] if self.plan.threads else []

    def _name(self, model: Model) -> str:
        """A bundled model is this tree's, also with another tree's programs."""
        return str(model.folder) if model.folder.is_relative_to(ROOT) else model.name


def request(item: Item, protocol: Protocol) -> dict:
    """A line for vlm-run --batch."""
    record: dict = {"id": item.id, "video" if item.video else "image": str(item.image.resolve())}
    prompt = protocol.ask(item)
    return record if prompt is None else record | {"prompt": prompt}


def forced(item: Item, protocol: Protocol) -> dict:
    """A line for vlm-kv: the first reference is the text; where there is none, the model's own answer."""
    record = request(item, protocol)
    return record | {"text": item.references[0]} if item.references else record


def read_object(path: Path) -> dict:
    """A JSON object that a run wrote; EvaluationError for anything else."""
    found = read_json(path)
    if not isinstance(found, dict):
        raise EvaluationError(f"{path} is no record of a run; give another --out")
    return found


def refuse_other(path: Path, now: dict, folder: Path) -> dict:
    """What an earlier run recorded; EvaluationError that names the first thing in which it differs from this one."""
    before = read_object(path)
    for key, value in now.items():
        if before.get(key) != json.loads(json.dumps(value)):
            raise EvaluationError(
                f"{folder} holds results of another command: {key} was {printable(before.get(key))} and is "
                f"{printable(value)} ({path}); give another --out"
            )
    return before


@guarded
def _rows(path: Path) -> list[dict]:
    """Lines of vlm-run's file; a torn last line, which its next start repairs, is none."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        try:
            row = json.loads(line) if line else None
        except (ValueError, RecursionError):
            if number > text.count("\n"):
                break
            raise EvaluationError(f"{path}, line {number} is no record of vlm-run; remove that line") from None
        if isinstance(row, dict):
            if "error" not in row and not all(isinstance(row.get(name), kind) for name, kind in OF_ROW.items()):
                raise EvaluationError(f"{path}, line {number} is no answer of vlm-run; remove that line")
            rows.append(row)
    return rows
