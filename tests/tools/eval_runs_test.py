"""Runs of tools/eval that are killed, doubled, cut off by a full disk, changed, tuned: nothing is lost and nothing mixed."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import unittest
from pathlib import Path

from eval_case import BUILD, HELDOUT, WithModel, python_with_scorers, results_of

from errors import EvaluationError  # noqa: E402  (of tools/eval)
from storage import Lock, write_text  # noqa: E402

# All relative, so that two folders hold the same.
COMMAND = ("docvqa.py", "--out", "out", "--limit", 4, "--kv", "int4", "--fidelity", 1, "--batch-size", 2, "--device", "cpu",
           "--threads", 1)  # fmt: skip


def contents(out):
    """name -> what a file holds, without clocks and the order in which records were finished."""
    found = {}
    locks = (".lock", ".plan", ".profile", ".fidelity")
    for path in sorted(path for path in out.rglob("*") if path.is_file() and not path.name.startswith(locks)):
        name, text = str(path.relative_to(out)), path.read_text()
        if path.name.startswith("answers"):
            rows = [json.loads(line) for line in text.splitlines()]
            text = sorted(({k: v for k, v in row.items() if k not in ("timings", "memory")} for row in rows),
                          key=lambda row: row["id"])  # fmt: skip
        found[name] = text
    return found


def wait_for(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.01)


class Killed(WithModel):
    def test_ten_kills_leave_the_files_of_an_uninterrupted_run(self):
        whole = self.folder / "whole"
        whole.mkdir()
        start = time.monotonic()
        table = self.run_well(*COMMAND, folder=whole)
        lasts = time.monotonic() - start
        expected = contents(whole / "out")
        self.assertEqual(len([name for name in expected if name.endswith("answers.jsonl")]), 1)
        draw = random.Random(14)
        killed = number = 0
        while killed < 10:
            self.assertLess(number, 40, "hardly a run was killed")
            folder = self.folder / f"run{number}"
            folder.mkdir()
            number += 1
            for _ in range(3):  # of one folder, so that what a kill left is killed again
                process = self.start(*COMMAND, folder=folder)
                time.sleep(draw.uniform(0.02, 0.95 * lasts))
                process.kill()
                process.communicate(timeout=60)
                killed += process.returncode == -signal.SIGKILL
            self.assertEqual(self.run_well(*COMMAND, folder=folder), table)
            self.assertEqual(contents(folder / "out"), expected)

    def replace_vlm_run(self, commands):
        """--build of programs whose vlm-run only knows --version and runs these commands of a shell."""
        program = self.folder / "build/tools/vlm-run"
        program.parent.mkdir(parents=True)
        program.write_text(f'#!/bin/sh\n[ "$1" = --version ] || {{ {commands}; }}\n')
        program.chmod(0o755)
        (program.parent / "vlm-kv").symlink_to(BUILD / "tools/vlm-kv")  # specs are looked at before

    def test_the_programs_of_a_killed_run_end_with_it(self):
        self.replace_vlm_run("echo $$ >pid.part; mv pid.part pid; exec sleep 100")
        process = self.start(*COMMAND, "--build", "build")
        try:
            wait_for((self.folder / "pid").exists)
            pid = int((self.folder / "pid").read_text())
            os.kill(pid, 0)
        finally:
            process.kill()
            process.communicate(timeout=60)
        wait_for(lambda: not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes())
        Lock(self.folder / "out/.lock", wait_s=0).release()

    def test_an_interrupted_run_says_how_to_go_on(self):
        command = (*COMMAND, "--limit", 200, "--kv", "kivi", "--kv", "int8")
        with self.start(*command, start_new_session=True) as process:
            wait_for(lambda: list(self.folder.glob("out/pocket/*/answers.jsonl")))
            os.killpg(process.pid, signal.SIGINT)
            _, err = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 130, err)
        self.assertIn("start the same command again", err)
        self.assertNotIn("Traceback", err)
        self.assertEqual([path.name for path in (self.folder / "out/pocket").iterdir() if path.is_dir()], ["int4"])

    def test_nothing_begins_after_an_interrupt(self):
        self.replace_vlm_run("echo >>calls; exit 130")
        status, _, err = self.run_script(*COMMAND, "--kv", "kivi", "--kv", "int8", "--build", "build")
        self.assertEqual((status, (self.folder / "calls").read_text()), (130, "\n"), err)


class Again(WithModel):
    """A second run on the same machine changes timings only."""

    def files(self, script, folder, *more):
        """name -> bytes of a run's files; rows where there are timings among them, which are taken out."""
        (self.folder / folder).mkdir()
        self.run_well(script, "--out", "out", "--limit", 4, "--kv", "f16", "--kv", "kivi,bits=1", "--fidelity", 2, "--threads",
                      2, "--device", "cpu", *more, folder=self.folder / folder)  # fmt: skip
        found = {}
        for path in sorted((self.folder / folder).rglob("*")):
            if not path.is_file() or path.name.startswith("."):  # locks name the process that holds them
                continue
            found[str(path.relative_to(self.folder / folder))] = content = [path.read_bytes()]
            if path.name == "answers.jsonl":
                content[:] = [json.loads(line) for line in path.read_text().splitlines()]
                self.assertTrue(all(row.pop("timings")["decode_ms"] > 0 for row in content))
            if path.name == "results.json":
                content[:] = json.loads(path.read_text())
                self.assertTrue(all(row.pop("tokens_per_second") for row in content))
        return found

    def test_all_files_but_their_timings_are_the_same(self):
        for script, standard, samples, more in (
            ("coco.py", "captions_heldout-first-4_pocket-{}_results.json", "samples_captions.jsonl", ("--skip", "pycocoevalcap")),
            ("docvqa.py", "docvqa_heldout-first-4_pocket-{}.json", "samples_documents.jsonl", ()),
        ):
            first, second = (self.files(script, f"{number}-{script}", "--batch-size", 1, *more) for number in (1, 2))
            for spec in ("f16", "kivi-bits-1"):
                for name in (standard, samples, "answers.jsonl", "fidelity.json", "run.json"):
                    self.assertIn(f"out/pocket/{spec}/{name.format(spec)}", first)
            self.assertIn("out/results.json", first)
            self.assertEqual(list(first), list(second))
            for name, content in first.items():
                self.assertEqual(content, second[name], name)


class Forced(WithModel):
    """Specs of a model share calls of vlm-kv fidelity."""

    def test_missing_specs_are_forced_together(self):
        build = Path(os.environ.get("KVLM_BUILD", Path(__file__).resolve().parents[2] / "build/release"))
        tools = self.folder / "build/tools"
        tools.mkdir(parents=True)
        (tools / "vlm-run").symlink_to(build.resolve() / "tools/vlm-run")
        calls = self.folder / "calls"
        program = tools / "vlm-kv"
        program.write_text(f'#!/bin/sh\n[ "$1" = fidelity ] && echo "$@" >>{calls}\nexec {build.resolve()}/tools/vlm-kv "$@"\n')
        program.chmod(0o755)
        command = (*COMMAND, "--build", "build", "--kv", "kivi", "--kv", "prefixkv,keep=0.5", "--fidelity", 2)
        self.run_well(*command)
        whole = contents(self.folder / "out")
        (call,) = calls.read_text().splitlines()
        self.assertIn("--kv int4 --kv kivi --kv prefixkv,keep=0.5 ", call)
        self.assertIn("--batch-size 2 --layer-records 2 ", call)
        for row in results_of(self.folder / "out/results.json"):
            forced = [item for item in row["items"].values() if "tokens" in item]
            self.assertEqual((len(row["items"]), len(forced)), (4, 2))
            tokens = sum(item["tokens"] for item in forced)
            for name, value in (("KL", row["kl"]), ("top1", row["top1"])):
                self.assertAlmostEqual(sum(item[name] * item["tokens"] for item in forced) / tokens, value, 12)
            self.assertTrue(all(item["nll"] > 0 for item in forced))
            self.assertNotIn("perplexity", row["scores"])

        calls.unlink()
        self.run_well(*command, "--layer-records", 0)  # asks for less than there is
        self.assertFalse(calls.exists())
        self.run_well(*command, "--limit", 1, "--out", "one", "--layer-records", 0)
        self.run_well(*command, "--limit", 1, "--out", "one")
        self.assertEqual([call.count("--layer-records 1 ") for call in calls.read_text().splitlines()], [0, 1])
        calls.unlink()
        self.run_well(*command, "--limit", 1, "--out", "one")
        self.assertFalse(calls.exists())
        self.run_well(*command, "--layer-records", 3)  # more than --fidelity's two
        self.assertFalse(calls.exists())
        self.run_well(*command, "--fidelity", 3, "--layer-records", 3)
        self.assertIn("--layer-records 3 ", calls.read_text())
        self.run_well(*command)

        calls.unlink()  # a run that was cut goes on with what is missing
        (self.folder / "out/pocket/kivi/fidelity.json").unlink()
        self.run_well(*command)
        (call,) = calls.read_text().splitlines()
        self.assertEqual((call.count("--kv "), "--kv kivi " in call), (1, True))
        self.assertEqual(contents(self.folder / "out"), whole)


class Refused(WithModel):
    def test_two_runs_on_one_folder(self):
        with Lock(self.folder / "out/.lock"):
            answer = self.run_script(*COMMAND)
        self.assert_refused(answer, "out is being written by another run", f"process {os.getpid()}", "--out")
        self.run_well(*COMMAND, "--skip", "answers")

    def test_a_run_holds_its_folder_as_long_as_a_program_of_it_writes(self):
        lock = Lock(self.folder / "lock")
        child = subprocess.Popen(["sleep", "30"], pass_fds=[lock.fileno()])
        lock.release()
        with self.assertRaises(EvaluationError):
            Lock(self.folder / "lock", wait_s=0)
        child.kill()
        child.wait()
        Lock(self.folder / "lock", wait_s=0).release()

    def test_another_command(self):
        self.run_well(*COMMAND)
        before = contents(self.folder / "out")
        for words, changes in (
            (("protocol", "was native", "is lmms-eval"), ("--protocol", "lmms-eval")),
            (("task", "was documents"), ()),
            (("--device", "was cpu", "is auto"), ("--device", "auto")),
            (("record 0", "questions_heldout.json", "another question or image"), ("--annotations", HELDOUT / "questions_heldout.json")),
        ):
            command = [*COMMAND, *changes] if changes else ["coco.py", *COMMAND[1:], "--skip", "pycocoevalcap"]
            self.assert_refused(self.run_script(*command), "out holds results of another command", *words)
        own = self.folder / "own.json"
        own.write_text((self.folder / "out/pocket/int4/docvqa_heldout-first-4_pocket-int4.json").read_text())
        scored = ("docvqa.py", "--limit", 4, "--results", own)
        self.assert_refused(self.run_script(*scored, "--out", "out"), "--results was None")
        self.assertEqual(contents(self.folder / "out"), before)
        for _ in range(2):
            self.assertIn("| own.json | `-` | heldout-first-4 | native | 4 | 1.0000 |", self.run_well(*scored, "--out", "own"))
        own.write_text(own.read_text() + " ")
        self.assert_refused(self.run_script(*scored, "--out", "own"), "own holds results of another command: content")
        self.assert_refused(self.run_script(*COMMAND, "--out", "own"), "--results was")
        # Another spec is more work of the same command.
        self.assertIn("`kivi`", self.run_well(*COMMAND, "--kv", "kivi"))

    def test_another_build(self):
        self.run_well(*COMMAND)
        record = self.folder / "out/pocket/int4/run.json"
        record.write_text(record.read_text().replace("(commit ", "(commit 0"))
        self.assert_refused(self.run_script(*COMMAND), "version was", "give another --out")

    def test_answers_of_another_version_than_the_run_s(self):
        self.run_well(*COMMAND)
        answers = self.folder / "out/pocket/int4/answers.jsonl"
        mine, rows = answers.read_text(), answers.read_text().splitlines()
        version = json.loads(rows[2])["version"]
        rows[2] = rows[2].replace(version, "kvlm 0.0.9")
        answers.write_text("\n".join(rows) + "\n")
        before = (self.folder / "out/results.json").read_bytes()
        for more in ((), ("--merge",)):
            self.assert_refused(self.run_script(*COMMAND, *more), "answers.jsonl", f"record {json.loads(rows[2])['id']} ",
                                "kvlm 0.0.9", version, "--out")  # fmt: skip
        self.assertEqual((self.folder / "out/results.json").read_bytes(), before)
        answers.write_text(mine)
        self.run_well(*COMMAND, "--merge")

    def test_a_record_without_an_answer(self):
        annotations = {"dataset_split": "val", "data": [
            {"questionId": n, "question": "What?", "image": image, "answers": ["x"]}
            for n, image in ((1, "document.png"), (2, "text.png"))
        ]}  # fmt: skip
        shutil.copy(HELDOUT / "documents/document_000.png", self.folder / "document.png")
        shutil.copy(__file__, self.folder / "text.png")
        answer = self.run_script("docvqa.py", "--out", "out", "--annotations", self.write("val.json", annotations))
        self.assert_refused(answer, "record 2 has no answer", "start the same command again")

    def test_specs_and_options_that_cannot_be(self):
        self.assert_refused(self.run_script(*COMMAND, "--out", "typo", "--kv", "int5"), "int5")
        self.assertFalse((self.folder / "typo").exists())  # nothing was asked under the right ones before it
        twice = ("--out", "typo", "--kv", "kivi,residual=32,bits=2", "--kv", "kivi,bits=2,residual=32")
        self.assert_refused(self.run_script(*COMMAND, *twice), "kivi,bits=2,residual=32 and kivi,residual=32,bits=2 are one policy")
        profiled = ("--out", "typo", "--kv", "prefixkv,mode=profile,keep=0.5")
        self.assert_refused(self.run_script(*COMMAND, *profiled), "--kv-profile")
        (self.folder / "file").write_text("")
        self.assert_refused(self.run_script(*COMMAND, "--out", "file"), "file cannot be written", "--out")
        self.assert_refused(self.run_script(*COMMAND, "--model", "nobody/nothing"), "nobody/nothing")
        self.assert_refused(self.run_script("docvqa.py", "--out", "none", "--merge"), "none holds no run")
        status, _, err = self.run_script(*COMMAND, "--shard", "3/2")
        self.assertEqual((status, "3/2" in err), (2, True), err)


class Grown(WithModel):
    """What is answered stays answered, by record: --limit, --shard and the folder of the data may change."""

    def answers(self):
        """id -> text of every answer that a run has asked vlm-run for since the last call."""
        paths = self.folder.glob("out/pocket/int4/answers*.jsonl")
        rows = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
        found = {(row["id"], row["timings"]["decode_ms"]) for row in rows}
        before, self.seen = getattr(self, "seen", set()), found
        return sorted(key for key, _ in found - before)

    def scored(self):
        (row,) = results_of(self.folder / "out/results.json")
        return row["split"], sorted(map(int, row["items"]))

    def test_a_limit_that_rises_and_falls(self):
        for limit, new in ((2, [0, 1]), (4, [2, 3]), (3, []), (5, [4])):
            self.run_well(*COMMAND, "--limit", limit)
            self.assertEqual(self.answers(), new)
            self.assertEqual(self.scored(), (f"heldout-first-{limit}", list(range(limit))))
        self.run_well(*COMMAND, "--limit", 5, "--fidelity", 3)
        (row,) = results_of(self.folder / "out/results.json")
        self.assertEqual(sum("KL" in item for item in row["items"].values()), 3)  # those that were teacher-forced

    def test_another_number_of_shards(self):
        for part in ("1/2", "2/2"):
            self.run_well(*COMMAND, "--shard", part)
        self.assertEqual(self.answers(), [0, 1, 2, 3])
        before = self.scored()
        for parts in (("1/3", "2/3", "3/3"), ("1/1",), ("2/2", "1/2")):
            for part in parts:
                self.run_well(*COMMAND, "--shard", part)
            self.assertEqual((self.answers(), self.scored()), ([], before))
        for part in ("1/3", "2/3", "3/3"):
            self.run_well(*COMMAND, "--limit", 6, "--shard", part)
        self.assertEqual((self.answers(), self.scored()), ([4, 5], ("heldout-first-6", list(range(6)))))

    def test_shards_of_another_number_wait_for_those_at_work(self):
        self.run_well(*COMMAND, "--shard", "1/2")
        with Lock(self.folder / "out/.lock", shared=True):
            self.assert_refused(self.run_script(*COMMAND, "--shard", "1/3"), "by shards of 2", "shard 1/3", "wait")
        self.run_well(*COMMAND, "--shard", "1/3")

    def test_data_that_moved_and_data_that_changed(self):
        self.run_well(*COMMAND)
        self.answers()
        for name in ("documents", "documents_heldout.json"):
            copy = shutil.copytree if name == "documents" else shutil.copy
            copy(HELDOUT / name, self.folder / "moved" / name) if name == "documents" else copy(HELDOUT / name, self.folder / "moved")
        annotations = self.folder / "moved/documents_heldout.json"
        command = (*COMMAND, "--annotations", annotations)
        self.run_well(*command, "--limit", 5)
        self.assertEqual(self.answers(), [4])
        data = json.loads(annotations.read_text())
        data["data"][1]["answers"] = ["nothing"]  # another score, the same answers
        annotations.write_text(json.dumps(data))
        self.run_well(*command)
        (row,) = results_of(self.folder / "out/results.json")
        self.assertEqual((self.answers(), row["items"]["1"]["ANLS"]), ([], 0))
        data["data"][2]["question"] += " Please."
        annotations.write_text(json.dumps(data))
        self.assert_refused(self.run_script(*command), "record 2", "another question or image", "--out")
        annotations.write_text((HELDOUT / "documents_heldout.json").read_text())
        shutil.copy(HELDOUT / "documents/document_007.png", self.folder / "moved/documents/document_003.png")
        self.assert_refused(self.run_script(*command), "record 3", "another question or image", "--out")
        self.run_well(*command, "--limit", 3)


class FullDisk(WithModel):
    def test_what_was_finished_is_kept(self):
        whole = self.folder / "whole"
        whole.mkdir()
        self.run_well(*COMMAND, folder=whole)
        size = (whole / "out/pocket/int4/answers.jsonl").stat().st_size
        for share in (0.4, 0.9):  # of what the answers take
            limit = int(share * size)
            folder = self.folder / f"cut{limit}"
            folder.mkdir()
            answer = self.run_script(*COMMAND, folder=folder,
                                     preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
            self.assert_refused(answer)
            self.run_well(*COMMAND, folder=folder)
            self.assertEqual(contents(folder / "out"), contents(whole / "out"))

    def test_a_file_is_replaced_whole_or_not_at_all(self):
        path = self.folder / "x.json"
        write_text(path, "before")
        code = ("import resource, sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; from storage import *;"
                "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)); write_text(Path(sys.argv[2]), 'a' * 5000)")
        done = subprocess.run([sys.executable, "-B", "-c", code, Path(sys.modules["storage"].__file__).parent, path],
                              capture_output=True, text=True)  # fmt: skip
        self.assertIn(f"EvaluationError: {path} cannot be written", done.stderr)
        self.assertEqual(path.read_text(), "before")
        self.assertEqual(list(self.folder.iterdir()), [path])


class Tuned(WithModel):
    def test_settings_come_from_records_that_are_never_scored(self):
        self.run_well(*COMMAND, "--tune", 1)
        out = self.folder / "out/pocket"
        ids = {name: {json.loads(line)["id"] for line in (out / name).read_text().splitlines()}
               for name in ("tuning.jsonl", "requests.jsonl", "references.jsonl")}  # fmt: skip
        self.assertEqual(ids, {"tuning.jsonl": {199}, "requests.jsonl": {0, 1, 2, 3}, "references.jsonl": {0}})
        answers = json.loads((HELDOUT / "documents_heldout.json").read_text())["data"][199]["answers"]
        self.assertEqual(json.loads((out / "tuning.jsonl").read_text().splitlines()[0])["text"], answers[0])
        profile = json.loads((out / "profile.json").read_text())
        self.assertLessEqual({"prefixkv", "calibquant", "head_quantile", "xquant"}, set(profile))
        self.assertIn("--kv-profile", json.loads((out / "int4/run.json").read_text())["vlm-run"])
        row = results_of(self.folder / "out/results.json")[0]
        self.assertEqual((row["split"], len(row["items"])), ("heldout-without-last-1-first-4", 4))

    def test_settings_come_from_a_file_of_their_own(self):
        tuning = HELDOUT.parent / "tuning" / "documents_tuning.json"
        self.run_well(*COMMAND, "--tune", 1, "--tune-on", tuning)
        (line,) = (self.folder / "out/pocket/tuning.jsonl").read_text().splitlines()
        self.assertEqual(Path(json.loads(line)["image"]), tuning.parent.resolve() / "documents/document_000.png")
        self.assertEqual(results_of(self.folder / "out/results.json")[0]["split"], "heldout-first-4")
        self.assert_refused(self.run_script(*COMMAND, "--tune", 1), "--tune-on was")


class EqualBits(WithModel):
    def test_specs_are_solved_for_the_first_prompt(self):
        command = ("--out", "out", "--limit", 1, "--fidelity", 1, "--bits", 4, "--kv", "kivi", "--device", "cpu")
        for script, model, more in (("docvqa.py", "pocket", ()), ("video.py", "pocket-qwen", ("--frames", 8))):
            folder = self.folder / model
            folder.mkdir()
            rules = ("--kv", "snapkv", "--kv", "snapkv+int4")
            whole = self.run_well(script, *command, *rules, *more, folder=folder)
            kivi, alone, packed = results_of(folder / "out/results.json")
            self.assertEqual(kivi["spec"], "kivi")  # nothing to solve
            self.assertRegex(alone["spec"], r"^snapkv,evict=score,keep=0\.2\d+$")
            self.assertRegex(packed["spec"], r"^snapkv,evict=window,keep=0\.\d+ \+ int4$")
            for row in (alone, packed):
                self.assertAlmostEqual(row["stored_bits"], 4, delta=0.2)
            status, out, err = self.run_script(script, *command, *rules, *more, "--merge", folder=folder)
            self.assertEqual((status, out), (0, whole), err)
            self.assertIn(f"note: --bits 4: snapkv is {alone['spec']} on {model}, for a prompt of ", err)
        for words, more in (
            (["keep= and --bits"], ("--kv", "snapkv,keep=0.5")),
            (["one policy, snapkv,evict=score,keep=0.25;"], ("--kv", "snapkv", "--kv", "snapkv,evict=score")),
            (['--bits is "99"'], ("--bits", 99)),
        ):
            self.assert_refused(self.run_script("docvqa.py", *command, *more), *words)
        self.assert_refused(self.run_script("docvqa.py", "--out", "o", "--bits", 4, "--results", "x"), "--bits says nothing")

    def test_a_question_names_no_file(self):
        shutil.copy(HELDOUT / "documents/document_000.png", self.folder / "a.png")
        for question in ("@none.txt", "-", "What?\0"):
            row = {"questionId": 1, "question": question, "image": "a.png", "answers": ["x"]}
            (self.folder / "val.json").write_text(json.dumps({"data": [row]}))
            _, _, err = self.run_script("docvqa.py", "--annotations", "val.json", "--protocol", "native", "--bits", 4, "--kv", "snapkv",
                                        "--device", "cpu", "--fidelity", 0, "--out", f"out{len(question)}")  # fmt: skip
            self.assertIn("is snapkv,evict=score,keep=", err, question)


class Smoke(WithModel):
    """The bundled sets, without network and without pycocoevalcap."""

    def test_results_have_all_that_the_report_reads(self):
        self.run_well("coco.py", "--out", "c", "--limit", 2, "--kv", "f16", "--kv", "kivi,residual=32", "--fidelity", 2,
                      "--batch-size", 1, "--skip", "pycocoevalcap", "--device", "cpu")  # fmt: skip
        plain, packed = results_of(self.folder / "c/results.json")
        raw = json.loads((self.folder / "c/results.json").read_text())
        self.assertEqual(plain["scores"], {"exact": 1, "slots": 1})
        own = plain["items"]["0"]
        self.assertEqual({name: own[name] for name in ("exact", "slots", "KL", "top1")}, {"exact": 1, "slots": 1, "KL": 0, "top1": 1})
        self.assertTrue(own["tokens"] > 0 and own["nll"] > 0)
        self.assertEqual(plain["items"].keys(), {"0", "1"})
        self.assertEqual(plain["objects"], {"0": 7, "1": 1})
        self.assertEqual((plain["stored_bits"], plain["kl"], plain["residual"]), (16, 0, None))
        self.assertEqual((packed["nominal_bits"], packed["residual"]), (2, 32))
        self.assertTrue(2 < packed["stored_bits"] < 16 and packed["kl"] > 0)
        self.assertEqual((len(packed["retained"]), len(packed["layer_error"]), packed["layer_records"]), (8, 8, 2))
        self.assertEqual((packed["protocol"], packed["device"]), ("native", "cpu"))
        self.assertTrue(all(row["tokens_per_second"] > 0 and row["prompt_tokens"] > 576 for row in raw))
        self.assertIn("commit", packed["versions"]["kvlm"])
        standard = self.folder / "c/pocket/f16/captions_heldout-first-2_pocket-f16_results.json"
        rows = json.loads(standard.read_text())
        self.assertEqual([set(row) for row in rows], [{"image_id", "caption"}] * 2)
        self.assertTrue(rows[0]["caption"].startswith("There are seven objects"))

    def test_what_a_protocol_asks_and_these_runs_do_not_is_said(self):
        status, out, err = self.run_script("docvqa.py", "--out", "d", "--limit", 1, "--protocol", "internvl", "--fidelity", 0)
        self.assertEqual((status, "| internvl | 1 |" in out, "protocol internvl:" in err), (0, True, False), err)
        self.assertIn("protocol internvl: its least of 8 tokens", self.run_script(
            "coco.py", "--out", "c", "--limit", 1, "--protocol", "internvl", "--build", "none", "--skip", "METEOR",
            python=python_with_scorers() or self.skipTest("pycocoevalcap is not here"))[2])  # fmt: skip

    def test_a_harness_s_prompt_reaches_the_model(self):
        status, _, err = self.run_script("docvqa.py", "--out", "d", "--limit", 1, "--protocol", "lmms-eval", "--fidelity", 0, "--kv", "f16")
        self.assertEqual(status, 0, err)
        self.assertIn("docvqa.py: note: pocket knows the questions of our own sets alone", err)
        row = json.loads((self.folder / "d/pocket/f16/answers.jsonl").read_text())
        self.assertTrue(row["prompt"].endswith("?\nAnswer the question using a single word or phrase."), row["prompt"])
        self.assertEqual(row["settings"]["max_tokens"], 32)


if __name__ == "__main__":
    unittest.main()
