"""Parts of a set that run apart give the scores of one run; what is missing or there twice is refused.

Under mpirun (Debian's openmpi-bin) and as an array of Slurm (slurm-wlm, of which a test starts its own) where they are
installed, which tools/setup.sh leaves to the machine's owner, since they bring services; these tests skip elsewhere, and a
scheduler's variables are set by hand everywhere.
"""

import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
import unittest

import eval_case
from eval_case import ROOT, EvalCase, WithModel, results_of

from errors import EvaluationError  # noqa: E402  (of tools/eval)
from shards import Shard, parse_shard, shard_of, without_shard  # noqa: E402
from storage import Lock  # noqa: E402

COMMAND = ("coco.py", "--limit", 8, "--kv", "kivi,bits=1", "--skip", "pycocoevalcap", "--device", "cpu", "--fidelity", 1)


def array(task, first, last, count, step=1):
    names = ("ID", "MIN", "MAX", "COUNT", "STEP")
    return {f"SLURM_ARRAY_TASK_{n}": str(v) for n, v in zip(names, (task, first, last, count, step))}


class Places(EvalCase):
    def test_every_record_is_in_one_part(self):
        for count in (1, 2, 7, 40):
            parts = [Shard(index, count).of(range(23)) for index in range(1, count + 1)]
            self.assertEqual(sorted(sum(parts, [])), list(range(23)))
            self.assertLessEqual(max(map(len, parts)) - min(map(len, parts)), 1)

    def test_what_is_written(self):
        self.assertEqual(parse_shard("2/8"), Shard(2, 8))
        for text in ("0/2", "3/2", "1", "1/0", "-1/2", "1/2/3", "a/b", "", "1/ 2", "\u0661/2", "1/9999999"):
            with self.assertRaises(ValueError, msg=text):
                parse_shard(text)

    def test_schedulers(self):
        for expected, environment in (
            (Shard(1, 1), {}),
            (Shard(1, 4), array(0, 0, 3, 4)),
            (Shard(4, 4), array(3, 0, 3, 4)),
            (Shard(2, 3), array(15, 10, 20, 3, 5)),
            (Shard(3, 8), {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "8"}),
            (Shard(3, 8), {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "8"}),
            # The script of a job with four tasks is one process until srun starts the four.
            (Shard(1, 1), {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}),
            # Two tasks of an array, each with two ranks.
            (Shard(4, 4), array(2, 1, 2, 2) | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}),
        ):
            self.assertEqual(shard_of(environment), expected, environment)
        for environment in (
            array(5, 1, 5, 3),  # --array=1,2,5
            array(2, 1, 5, 3),
            {"OMPI_COMM_WORLD_RANK": "8", "OMPI_COMM_WORLD_SIZE": "8"},
            {"OMPI_COMM_WORLD_RANK": "one", "OMPI_COMM_WORLD_SIZE": "8"},
        ):
            with self.assertRaisesRegex(EvaluationError, "--shard I/N", msg=environment):
                shard_of(environment)

    def test_a_program_that_has_its_part_does_not_divide_it_again(self):
        environment = array(2, 1, 3, 3) | {"SLURM_PROCID": "1", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
        self.assertEqual(without_shard(environment | {"SLURM_JOB_ID": "7"}), {"SLURM_JOB_ID": "7"})
        self.assertEqual(shard_of(without_shard(environment)), Shard())


    def test_of_those_that_share_a_lock_the_last_gets_it(self):
        path = self.folder / "lock"
        first, second, third = (Lock(path, shared=True) for _ in range(3))
        self.assertFalse(first.take_alone())
        third.release()
        self.assertTrue(second.take_alone())
        with self.assertRaises(EvaluationError):
            Lock(path, shared=True, wait_s=0)


class Merged(WithModel):
    def whole(self):
        self.run_well(*COMMAND, "--out", "whole")
        return results_of(self.folder / "whole/results.json")

    def test_two_at_a_time_and_seven_in_turn_give_the_scores_of_one(self):
        whole = self.whole()
        self.assertTrue(0 < whole[0]["scores"]["slots"] < 1)
        ranks = [self.start(*COMMAND, "--out", "two", env={"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2"})
                 for rank in range(2)]  # fmt: skip
        tables = [process.communicate(timeout=120)[0] for process in ranks]
        self.assertEqual([process.returncode for process in ranks], [0, 0])
        self.assertEqual(sorted(table.count("kivi") for table in tables), [0, 1], "one of them merges")
        self.assertEqual(results_of(self.folder / "two/results.json"), whole)
        for part in (3, 1, 2, 5, 4, 7, 6):
            self.assertEqual(self.run_well(*COMMAND, "--out", "seven", "--shard", f"{part}/7").count("kivi"), part == 6)
        self.assertEqual(results_of(self.folder / "seven/results.json"), whole)
        folder = self.folder / "seven/pocket/kivi-bits-1"
        self.assertEqual(len(list(folder.glob("answers.?-of-7.jsonl"))), 7)
        (folder / "captions_heldout-first-8_pocket-kivi-bits-1_results.json").unlink()
        self.run_well(*COMMAND, "--out", "seven", "--merge")
        self.assertEqual(results_of(self.folder / "seven/results.json"), whole)

    def test_what_is_missing_twice_or_of_another_build(self):
        command = (*COMMAND, "--out", "out", "--merge")
        for part in ("1/3", "3/3"):
            self.run_well(*COMMAND, "--out", "out", "--shard", part)
        self.assertFalse((self.folder / "out/results.json").exists())
        self.assert_refused(self.run_script(*command), "kivi,bits=1", "5 of 8", "1 is missing", "shard 2/3")
        self.run_well(*COMMAND, "--out", "out", "--shard", "2/3")
        folder = self.folder / "out/pocket/kivi-bits-1"
        parts = [(folder / f"answers.{n}-of-3.jsonl") for n in (1, 2, 3)]
        texts = [path.read_text() for path in parts]
        parts[1].write_text(texts[1] + texts[0])
        self.assert_refused(self.run_script(*command), "answers.2-of-3.jsonl", "answered already")
        parts[1].write_text(texts[1].replace('{"id":1,', '{"id":9,'))
        self.assert_refused(self.run_script(*command), "answers.2-of-3.jsonl", "record 9", "not of shard 2/3")
        parts[1].write_text(texts[1])
        record = folder / "run.2-of-3.json"
        before = record.read_text()
        record.write_text(before.replace("(commit ", "(commit 0"))
        self.assert_refused(self.run_script(*command), "run.2-of-3.json", "version")
        record.write_text(before)
        self.run_well(*command)


class Started(WithModel):
    """By the schedulers' own programs."""

    COMMAND = (*COMMAND, "--limit", 4, "--threads", 1)

    def require(self, package, *programs):
        missing = [name for name in programs if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
        if missing:
            self.skipTest(f"there is no {missing[0]}; Debian's {package} has it")

    def words(self, out):
        return [sys.executable, str(ROOT / "tools/eval" / self.COMMAND[0]), *map(str, self.COMMAND[1:]), "--out", str(out)]

    def run_words(self, *words, **more):
        """Standard output and error of a program that must succeed."""
        done = subprocess.run([*map(str, words)], cwd=self.folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, timeout=240, env=eval_case.environment() | more)  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stdout)
        return done.stdout

    def compare(self, out, parts):
        """The results are those of one process, of so many parts."""
        self.run_words(*self.words("whole"))
        whole, found = (results_of(self.folder / name / "results.json") for name in ("whole", out))
        self.assertTrue(0 < whole[0]["scores"]["slots"] < 1)
        self.assertEqual(found, whole)
        answers = self.folder / out / "pocket/kivi-bits-1"
        self.assertEqual(len(list(answers.glob(f"answers.?-of-{parts}.jsonl"))), parts)

    def test_two_ranks_of_mpirun(self):
        self.require("openmpi-bin", "mpirun")
        out = self.run_words("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", 2, *self.words("ranks"))
        self.assertEqual(out.count("| `kivi,bits=1` |"), 1, out)
        self.compare("ranks", 2)

    def test_an_array_of_slurm(self):
        self.require("slurm-wlm", "slurmctld", "slurmd", "sbatch", "srun")
        if os.geteuid() != 0:
            self.skipTest("slurmd starts jobs as root only")
        conf = self.start_slurm()
        job = self.folder / "job.sh"
        job.write_text(f"#!/bin/bash\nsrun {shlex.join(self.words('array'))}\n")
        self.run_words("sbatch", "--wait", "--array=1-2", "--output=job-%a.log", job, SLURM_CONF=str(conf))
        logs = [(self.folder / f"job-{task}.log").read_text() for task in (1, 2)]
        self.assertEqual(sum(log.count("| `kivi,bits=1` |") for log in logs), 1, logs)
        self.compare("array", 2)

    def start_slurm(self):
        """The configuration file of a Slurm of this machine alone, which ends with the test."""
        ports = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        control, node = (port.getsockname()[1] for port in ports)
        for port in ports:
            port.close()
        host, folder = socket.gethostname().split(".")[0], self.folder / "slurm"
        for name in ("state", "spool"):
            (folder / name).mkdir(parents=True)
        settings = {
            "ClusterName": "test", "SlurmctldHost": f"{host}(127.0.0.1)", "SlurmUser": "root",
            "AuthType": "auth/none", "CredType": "cred/none", "SlurmctldPort": control, "SlurmdPort": node,
            "SlurmctldPidFile": folder / "slurmctld.pid", "SlurmdPidFile": folder / "slurmd.pid",
            "StateSaveLocation": folder / "state", "SlurmdSpoolDir": folder / "spool",
            "ProctrackType": "proctrack/pgid", "TaskPlugin": "task/none", "MpiDefault": "none",
            "SchedulerType": "sched/builtin", "SelectType": "select/cons_tres", "SelectTypeParameters": "CR_CPU",
        }  # fmt: skip
        conf = folder / "slurm.conf"
        conf.write_text("".join(f"{name}={value}\n" for name, value in settings.items())
                        + f"NodeName={host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} State=UNKNOWN\n"
                        + "PartitionName=all Nodes=ALL Default=YES State=UP\n")  # fmt: skip
        env = eval_case.environment() | {"SLURM_CONF": str(conf), "PATH": f"{os.environ['PATH']}:/usr/sbin"}
        for words in (["slurmctld", "-D"], ["slurmd", "-D", "-N", host]):
            log = (folder / f"{words[0]}.log").open("w")
            daemon = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env)
            self.addCleanup(log.close)
            self.addCleanup(daemon.wait, timeout=60)
            self.addCleanup(daemon.terminate)
        end = time.monotonic() + 30
        state = ["sinfo", "-h", "-o", "%t"]
        while subprocess.run(state, env=env, capture_output=True, text=True).stdout != "idle\n":
            if time.monotonic() > end:
                said = "\n".join(path.read_text() for path in folder.glob("*.log")).splitlines()
                self.skipTest(f"Slurm does not start on this machine: {said[-3:]}")
            time.sleep(0.2)
        return conf


if __name__ == "__main__":
    unittest.main()
