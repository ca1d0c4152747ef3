#!/usr/bin/env python3
"""Runs vlm-run --batch as several processes that share the records.

By --shard, and as Slurm and Open MPI start them.
"""

import json
import os
import shutil
import subprocess
import sys
import unittest

from vlm_run_case import MODEL, PICTURE, PROGRAM, TIMEOUT_S, VlmRun, run

TOLD = ("SLURM_", "OMPI_")


def array(task, first=1, step=1, count=3):
    return {"SLURM_ARRAY_TASK_ID": task, "SLURM_ARRAY_TASK_MIN": first,
            "SLURM_ARRAY_TASK_MAX": first + step * (count - 1),
            "SLURM_ARRAY_TASK_STEP": step, "SLURM_ARRAY_TASK_COUNT": count}


class Shards(VlmRun):
    def setUp(self):
        super().setUp()
        self.input = self.folder / "in.jsonl"
        self.output = self.folder / "out.jsonl"
        lines = [json.dumps({"id": i, "prompt": f"what is {i}?"}) for i in range(7)]
        lines.insert(2, "no record")
        lines.insert(5, json.dumps({"id": 3, "prompt": "again"}))
        self.input.write_text("\n\n".join(lines) + "\n")

    def command(self, *more, batch=None):
        return ["-m", MODEL, "--batch", batch or self.input, "--out", self.output, "-n", 3,
                "-t", 1, "--batch-size", 1, *more]

    def told(self, variables):
        environment = {name: value for name, value in os.environ.items()
                       if not name.startswith(TOLD)}
        return environment | {name: str(value) for name, value in variables.items()}

    def batch(self, *more, told=(), batch=None, **options):
        return run(*self.command(*more, batch=batch), env=self.told(dict(told)), **options)

    def part(self, index, count):
        return self.folder / f"out.{index}-of-{count}.jsonl"

    @staticmethod
    def answers(*files):
        rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        return [(row["id"], row.get("line"), row.get("tokens"), row.get("error"))
                for row in rows]

    def whole(self):
        self.assertEqual(self.batch("-q").returncode, 1, "of the records with an error")
        answers = self.answers(self.output)
        self.output.unlink()
        return answers

    def test_the_parts_are_the_whole(self):
        whole = self.whole()
        self.assertEqual(len(whole), 9)
        for count in (2, 4, 12):
            for index in range(1, count + 1):
                result = self.batch("--shard", f"{index}/{count}")
                self.assertIn(f"batch: shard {index}/{count}: ", result.stderr.decode())
                self.assertEqual(self.answers(self.part(index, count)), whole[index - 1::count])
            self.assertFalse(self.output.exists())
            for part in self.folder.glob("out.*-of-*.jsonl"):
                part.unlink()

    def test_each_launcher_tells_the_part(self):
        whole = self.whole()
        ranks = {"OMPI_COMM_WORLD_RANK": 1, "OMPI_COMM_WORLD_SIZE": 2}
        cases = [(ranks, 2, 2),
                 ({"SLURM_PROCID": 3, "SLURM_STEP_NUM_TASKS": 4, "SLURM_NTASKS": 4}, 4, 4),
                 (array(2), 2, 3),
                 (array(8, first=4, step=4, count=2), 2, 2),
                 (array(2) | ranks, 4, 6)]
        for told, index, count in cases:
            with self.subTest(told):
                result = self.batch(told=told)
                self.assertIn(f"shard {index}/{count} (set by the launcher", result.stderr.decode())
                self.assertEqual(self.answers(self.part(index, count)), whole[index - 1::count])
                self.part(index, count).unlink()
                self.batch("--shard", "1/1", told=told)
                self.assertEqual(self.answers(self.output), whole)
                self.output.unlink()
                self.batch("--shard", "3/5", told=told)
                self.assertEqual(self.answers(self.part(3, 5)), whole[2::5])
                self.part(3, 5).unlink()
        script = {"SLURM_JOB_ID": 1, "SLURM_PROCID": 0, "SLURM_NTASKS": 4}
        self.assertNotIn(b"shard", self.batch(told=script).stderr, "a job's script is one process")
        self.assertEqual(self.answers(self.output), whole)

    def test_parts_at_a_time_and_put_together(self):
        whole = self.whole()
        for _ in range(2):  # the second time they are gone on with
            started = [subprocess.Popen(
                [PROGRAM, *map(str, self.command("-q"))], stderr=subprocess.DEVNULL,
                env=self.told({"OMPI_COMM_WORLD_RANK": i, "OMPI_COMM_WORLD_SIZE": 3}))
                for i in range(3)]
            for process in started:
                process.wait(TIMEOUT_S)
            parts = [self.part(i, 3) for i in (1, 2, 3)]
            self.assertEqual(sorted(self.answers(*parts), key=str), sorted(whole, key=str))
        self.output.write_text(self.part(1, 3).read_text() + self.part(3, 3).read_text())
        self.batch()  # what is missing is found by the command without shards
        self.assertEqual(sorted(self.answers(self.output), key=str), sorted(whole, key=str))

    def test_another_number_of_shards_goes_on(self):
        whole = sorted((answer for answer in self.whole() if answer[0] is not None), key=str)
        for before, now in (([(1, 3)], [(1, 2), (2, 2)]), ([(1, 2), (2, 2)], [(2, 3), (1, 3)]),
                            ([(2, 4)], [(1, 1)]), ([(1, 1)], [(1, 2), (2, 2)])):
            with self.subTest(f"{before} {now}"):
                for file in self.folder.glob("out.*"):
                    file.unlink()
                for index, count in before:
                    self.batch("--shard", f"{index}/{count}")
                done = {path: path.read_bytes() for path in self.folder.glob("out.*")}
                for index, count in now:
                    self.batch("--shard", f"{index}/{count}")
                for path, text in done.items():
                    self.assertTrue(path.read_bytes().startswith(text), "answers are kept")
                files = list(self.folder.glob("out.*"))
                if now != [(1, 1)]:  # each record is answered by one process
                    given = [answer for answer in self.answers(*files) if answer[0] is not None]
                    self.assertEqual(sorted(given, key=str), whole)
                self.batch()  # which joins them
                joined = [answer for answer in self.answers(self.output) if answer[0] is not None]
                self.assertEqual(sorted(joined, key=str), whole)

    def test_a_list_that_grew_goes_on(self):
        self.batch("--shard", "1/2")
        self.batch("--shard", "2/2")
        first = {"id": "new", "image": str(PICTURE), "prompt": "first?"}
        self.input.write_text(json.dumps(first) + "\n" + self.input.read_text())
        before = {answer[0] for answer in self.answers(self.part(1, 2), self.part(2, 2))}
        self.batch("--shard", "1/2")
        self.batch("--shard", "2/2")
        after = [answer[0] for answer in self.answers(self.part(1, 2), self.part(2, 2))
                 if answer[0] is not None]
        self.assertEqual(sorted(after, key=str), sorted({*before, "new"} - {None}, key=str))

    def test_shards_of_other_settings_are_refused(self):
        self.batch("--shard", "1/3")
        self.assert_refused(self.batch("--shard", "1/2", "-q", "--kv", "int4"), 2,
                            ["out.1-of-3.jsonl", "--kv f16", "--kv int4", "another --out"])

    def test_one_part_is_written_by_one(self):
        import fcntl
        with self.part(1, 2).open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            result = self.batch("--shard", "1/2", "-q")
        self.assert_refused(result, 1, ["out.1-of-2.jsonl", "written by another vlm-run"])

    def test_answers_among_the_pictures_are_none_of_them(self):
        for name in "abcde":
            shutil.copy(PICTURE, self.folder / f"{name}.png")
        self.input.unlink()
        for index in (1, 2, 3):
            self.assert_sound(self.batch("--shard", f"{index}/3", batch=f"{self.folder}/*"))
        parts = [self.part(i, 3) for i in (1, 2, 3)]
        self.assertEqual([answer[0] for answer in self.answers(*parts)],
                         ["a.png", "d.png", "b.png", "e.png", "c.png"])

    def test_records_of_standard_input(self):
        told = {"OMPI_COMM_WORLD_RANK": 1, "OMPI_COMM_WORLD_SIZE": 2}
        self.assert_refused(self.batch(told=told, batch="-"), 2,
                            ["--batch -", "standard input", "--shard I/N"])
        text = self.input.read_bytes()
        self.batch("--shard", "2/2", told=told, batch="-", input=text)
        self.assertEqual([answer[0] for answer in self.answers(self.part(2, 2))], [1, 2, None, 5])

    def test_what_is_no_part_is_refused(self):
        for value in ("0/4", "5/4", "4", "1/0", "a/b", "-1/2", "1/4/8", ""):
            self.assert_refused(self.batch(f"--shard={value}"), 2, ["--shard"])
        self.assert_refused(run("-m", MODEL, "--image", PICTURE, "--shard", "1/2"), 2,
                            ["--shard", "--batch"])
        gaps = array(7) | {"SLURM_ARRAY_TASK_MAX": 7}
        self.assert_refused(self.batch(told=gaps), 2,
                            ["SLURM_ARRAY_TASK_ID", "evenly spaced", "--shard I/N"])
        self.assert_refused(self.batch(told={"OMPI_COMM_WORLD_RANK": "x",
                                             "OMPI_COMM_WORLD_SIZE": 2}), 2,
                            ['OMPI_COMM_WORLD_RANK is "x"'])
        self.assertEqual([p.name for p in self.folder.iterdir()], ["in.jsonl"])

    def test_pictures_of_the_command_line_have_no_parts(self):
        told = self.told({"OMPI_COMM_WORLD_RANK": 1, "OMPI_COMM_WORLD_SIZE": 2})
        self.assert_sound(run("-m", MODEL, "--image", PICTURE, "-n", 2, env=told))


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
    unittest.main()
