#!/usr/bin/env python3
"""Runs `vlm-bench throughput` and `latency` as a person would, on the CPU with tiny models: its
accounting, its columns, and one sentence for what it cannot do.

KVLM_BUILD is the build folder.
"""

import csv
import io
import json
import os
import re
import resource
import signal
import subprocess
import time
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(os.environ.get("KVLM_BUILD", ROOT / "build/release")) / "tools/vlm-bench"
MODEL = ROOT / "tests/golden/llava_gqa"
TIMEOUT_S = 300

SMALL = ["--prompt-tokens", "40", "--text-tokens", "8", "--tokens", "2", "--repeats", "1"]


def setUpModule():
    if not PROGRAM.is_file():
        raise unittest.SkipTest(f"{PROGRAM} is not built")


def run(*arguments, model=MODEL, command="throughput"):
    return subprocess.run([PROGRAM, command, "--device", "cpu", "-m", model,
                           *map(str, arguments)], stdin=subprocess.DEVNULL, capture_output=True,
                          timeout=TIMEOUT_S, text=True)


def rows(*arguments, status=0, model=MODEL):
    result = run(*SMALL, *arguments, "--json", model=model)
    assert result.returncode == status, result.stderr + result.stdout
    return [json.loads(line) for line in result.stdout.splitlines()]


# (arguments, words of the one sentence); the exit status is 2.
WRONG = [
    (["--kv-memory", "1G", "--memory", "2G"], ["several of --kv-memory, --memory and --batch"]),
    (["--kv-memory", "1G", "--batch", "2"], ["several of"]),
    (["--kv-memory", "5Q"], ['--kv-memory is "5Q"; expected a memory size']),
    (["--kv-memory", "1G,lots"], ['--kv-memory is "lots"']),
    (["--kv-memory", "-1G"], ["-1G"]),
    (["--dry-run", "--memory", "1XB"], ['--memory is "1XB"; expected a memory size']),
    (["--memory", "1G"], ["--memory", "on the CPU", "--kv-memory"]),
    (["--batch", "0"], ["--batch"]),
    (["--batch", "2", "--prompt-tokens", "1000000"], ["--prompt-tokens 1000000", "context"]),
    (["--batch", "2", "--kv", "kiwi"], ['"kiwi"', "did you mean kivi?"]),
    (["--batch", "2", "--json", "--csv"], ["--csv"]),
    (["--dry-run", "--answer-tokens", "500"], ["--dry-run", "--answer-tokens"]),
    (["--batch", "2", "--answer-tokens", "0"], ["--answer-tokens"]),
    (["--dry-run", "--batch", "2", "--kv", "kivi bits=2"], ["did you mean kivi,bits=2?"]),
]


class Latency(unittest.TestCase):
    def test_a_share_beyond_the_roof_is_explained(self):
        table = run("--prompt-tokens", 40, "--tokens", 8, "--repeats", 1, command="latency").stdout
        share = float(re.search(r"decode_of_roof +([0-9.]+) %", table)[1])
        self.assertEqual("reads from the processor's cache" in table, share > 100, table)

    def test_every_kind_of_policy_runs(self):
        specs = ["f16", "int4", "kivi", "calibquant", "xquant", "vidkv", "uniform,keep=0.5",
                 "prefixkv,keep=0.5", "h2o,keep=0.5", "snapkv,keep=0.5", "vlcache,keep=0.5",
                 "elastic,keep=0.5", "prefixkv,keep=0.5 + calibquant,bits=2 + int4,scope=text"]
        result = run("--prompt-tokens", 90, "--tokens", 3, "--repeats", 1, "--json",
                     *[word for spec in specs for word in ("--kv", spec)], command="latency")
        self.assertEqual(result.returncode, 0, result.stderr)
        found = [json.loads(line) for line in result.stdout.splitlines()]
        self.assertEqual(len(found), len(specs))
        for spec, row in zip(specs, found, strict=True):
            with self.subTest(spec):
                self.check_figures(row)
        # keys and values x layers x kv_heads x head_dim x 2 bytes, of 90 tokens and 3 steps
        text = json.loads((MODEL / "config.json").read_text())["text_config"]
        token = 2 * 2 * text["num_hidden_layers"] * text["num_key_value_heads"] * text["head_dim"]
        self.assertEqual(found[0]["kv_bytes"], 93 * token)
        self.assertEqual(found[0]["stored_bits"], 16)
        for row in found[1:]:
            self.assertAlmostEqual(row["stored_bits"], 16 * row["kv_bytes"] / (93 * token))

    def check_figures(self, row):
        """Figures of one repeat that follow from each other."""
        figures = {name: row[name]["median"] for name in row if isinstance(row[name], dict)
                   and "median" in row[name]}
        for name, median in figures.items():
            self.assertEqual((row[name]["min"], row[name]["max"]), (median, median), name)
            self.assertGreater(median, 0, name)
        step_bytes = row["kv_bytes"] / (row["kv_share_percent"] / 100)  # weights and cache
        self.assertAlmostEqual(figures["decode_rate"] * 1e9 / (figures["decode"] * step_bytes), 1)
        self.assertAlmostEqual(figures["decode_of_roof"] / 100 * figures["memory_roof"] /
                               figures["decode_rate"], 1)
        self.assertAlmostEqual(figures["prefill_of_library"] / 100 * figures["library_product"] /
                               figures["prefill_rate"], 1)


class Throughput(unittest.TestCase):
    def test_what_is_wrong_is_one_sentence(self):
        for arguments, words in WRONG:
            with self.subTest(arguments=arguments):
                result = run(*arguments)
                self.assertEqual(result.returncode, 2, result.stderr)
                self.assertEqual(result.stdout, "")
                self.assertTrue(result.stderr.startswith("vlm-bench: "), result.stderr)
                self.assertEqual(result.stderr.count("\n"), 1, result.stderr)
                for word in words:
                    self.assertIn(word, result.stderr)

    def test_what_is_not_given_suits_the_model(self):
        """A bare command works, also with a model whose context is short."""
        result = run("--json")
        self.assertEqual(result.returncode, 0, result.stderr)
        row = json.loads(result.stdout)
        context = json.loads((MODEL / "config.json").read_text())["text_config"]["max_position_embeddings"]
        self.assertEqual(row["batch"], 8)
        steps = 12 + 16 * 3  # warm-up and timed
        self.assertEqual(row["prompt_tokens"], context - 32 - steps)
        planned = run("--dry-run", "--json")
        self.assertEqual(planned.returncode, 0, planned.stderr)
        self.assertEqual([json.loads(planned.stdout)[key] for key in ("batch", "prompt_tokens")], [8, 3328])

    def test_the_batch_is_what_the_memory_holds(self):
        specs = ["f16", "kivi,group=8,residual=8", "calibquant", "calibquant + int4,scope=text",
                 "uniform,keep=0.5", "h2o,keep=0.5", "vidkv,key_bits=2,value_bits=2"]
        budgets = ["200K", "300Ki", "400000"]
        arguments = [word for spec in specs for word in ("--kv", spec)]
        found = rows(*arguments, "--kv-memory", ",".join(budgets))
        self.assertEqual(len(found), len(specs) * len(budgets))
        for i, row in enumerate(found):
            memory = [200_000, 300 * 1024, 400_000][i % 3]
            self.assertEqual(row["budget"], budgets[i % 3])
            free = memory - row["staging_bytes"]
            self.assertEqual(row["batch"], free // row["sequence_bytes"], row)
            self.assertGreater(row["batch"], 0)
            self.assertLessEqual(row["kv_bytes"], memory)
            self.assertAlmostEqual(row["tokens_per_s"], 1000 * row["batch"] / row["step_ms"]["median"])
            self.assertAlmostEqual(row["kv_percent"], 100 * row["kv_bytes"] /
                                   (row["kv_bytes"] + row["step_weight_bytes"]))
        self.assertEqual(found[0]["staging_bytes"], 0)
        self.assertEqual([row["spec"] for row in found[::3]][:1], ["f16"])
        self.assertAlmostEqual(found[0]["stored_bits"], 16)

    def test_batches_can_be_given(self):
        found = rows("--batch", "1,5,2", "--kv", "f16")
        self.assertEqual([row["batch"] for row in found], [1, 5, 2])
        sizes = {row["kv_bytes"] / row["batch"] for row in found}
        self.assertEqual(len(sizes), 1)  # prompt, text and steps, as many for each

    def test_a_budget_is_measured_as_if_it_were_the_only_one(self):
        arguments = ["--kv", "calibquant", "--kv", "uniform,keep=0.5"]
        together = rows(*arguments, "--kv-memory", "400K,200K")
        alone = rows(*arguments, "--kv-memory", "200K")
        for found, expected in zip(together[1::2], alone, strict=True):
            for name in ("batch", "sequence_bytes", "kv_bytes", "stored_bits"):
                self.assertEqual(found[name], expected[name])

    def test_a_released_shape(self):
        found = rows("--kv-memory", "300K", "--kv", "int4",  # some twenty sequences
                     model="synthetic:llava-tinyllama-1.1b,layers=1")
        free = 300_000 - found[0]["staging_bytes"]
        self.assertEqual(found[0]["batch"], free // found[0]["sequence_bytes"])
        self.assertGreater(found[0]["batch"], 1)

    def test_what_does_not_fit_is_a_row(self):
        found = rows("--kv", "f16", "--kv", "int4", "--kv-memory", "100,300K", status=1)
        self.assertEqual(["error" in row for row in found], [True, False, True, False])
        for row in found[::2]:
            self.assertIn("100 does not hold one sequence", row["error"])
            self.assertIn(f"it takes {row['sequence_bytes'] / 1e3:.1f} kB", row["error"])
            self.assertNotIn("batch", row)

    def test_table_and_csv_have_every_column(self):
        arguments = [*SMALL, "--kv", "f16", "--kv-memory", "100,300K"]
        table = run(*arguments).stdout.splitlines()
        self.assertEqual(len(table), 5)
        for word in ("spec", "bits", "B/sequence", "batch", "KV", "step ms", "tokens/s", "GB/s",
                     "copy %", "host ms"):
            self.assertIn(word, table[2])
        self.assertIn("error: 100 does not hold", table[3])
        found = list(csv.DictReader(io.StringIO(run(*arguments, "--csv").stdout)))
        self.assertEqual(len(found), 2)
        self.assertIn("does not hold", found[0]["error"])
        self.assertEqual(found[1]["error"], "")
        self.assertGreater(float(found[1]["tokens_per_s"]), 0)
        for row in found:
            self.assertNotIn(None, row)  # as many fields as names
            self.assertNotIn(None, row.values())

    def test_a_dry_run_finds_the_same_batches(self):
        arguments = ["--kv-memory", "200K,400K", "--kv", "f16", "--kv", "calibquant + int4,scope=text",
                     "--kv", "h2o,keep=0.5"]
        measured = rows(*arguments)
        planned = rows(*arguments, "--dry-run")
        self.assertEqual(len(planned), 6)
        for plan, row in zip(planned, measured):
            for name in ("spec", "budget", "batch", "sequence_bytes", "staging_bytes"):
                self.assertEqual(plan[name], row[name])
            self.assertEqual(plan["reserved_bytes"],
                             plan["batch"] * plan["sequence_bytes"] + plan["staging_bytes"])
            self.assertNotIn("step_ms", plan)

    def test_a_dry_run_makes_no_weights(self):
        """A model of 8e9 parameters; the budget is of the cache alone."""
        big = "synthetic:internvl2.5-8b"
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        result = run("--kv-memory", "20G,1K", "--kv", "f16", "--kv", "kivi", "--dry-run", model=big)
        self.assertEqual(result.returncode, 1, result.stderr)  # 1K holds nothing
        after = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
        self.assertLessEqual(after, max(before, 512 << 10))  # KiB
        self.assertIn(big, result.stdout)
        for word in ("batch", "sequence", "staging", "reserved", "error: 1K does not hold one"):
            self.assertIn(word, result.stdout)
        found = list(csv.DictReader(io.StringIO(run(
            "--kv-memory", "20G,1K", "--kv", "f16", "--kv", "kivi", "--dry-run", "--csv",
            model=big).stdout)))
        self.assertEqual([row["batch"] == "" for row in found], [False, True, False, True])
        self.assertGreater(int(found[2]["batch"]), 3 * int(found[0]["batch"]))

    def test_a_dry_run_bounds_what_is_beside_the_cache(self):
        big = "synthetic:internvl2.5-8b"
        found = [json.loads(line) for line in run("--memory", "20G,80G", "--kv", "f16", "--dry-run", "--json", model=big).stdout.splitlines()]
        self.assertGreater(found[0]["weights_bytes"], 15e9)
        for row, memory in zip(found, (20e9, 80e9)):
            left = memory - row["weights_bytes"] - row["workspace_bytes"] - row["staging_bytes"]
            self.assertEqual(row["batch"], left // (row["sequence_bytes"] + row["workspace_bytes_per_sequence"]))
            self.assertLess(row["workspace_bytes"], 3.5e9)
        self.assertGreater(found[1]["batch"], 100)
        table = run("--memory", "80G,1G", "--kv", "f16", "--dry-run", model=big)
        self.assertEqual(table.returncode, 1)
        self.assertIn("of weights, and at most", table.stdout)
        self.assertIn("1G does not hold one sequence", table.stdout)

    def test_what_the_machine_cannot_hold_is_refused_before_it_is_made(self):
        start = time.monotonic()
        result = run("--kv-memory", "900000G", model="synthetic:internvl2.5-8b")
        self.assertLess(time.monotonic() - start, 30)
        self.assertEqual(result.returncode, 1)
        self.assertRegex(result.stderr, r"does not fit in memory: its weights take \d+\.\d+ GB and "
                         r"--kv-memory 900000\.00 GB, but there are \d+\.\d+ GB in all")

    def test_rows_that_are_no_whole_blocks_are_refused(self):
        result = subprocess.run([PROGRAM, "kernels", "--rows", "33"], capture_output=True, text=True, check=False)
        self.assertEqual((result.returncode, result.stdout), (2, ""))
        self.assertRegex(result.stderr, r"^vlm-bench: .*--rows.* 33 is not a multiple of 32; use 32 or 64")

    def test_a_format_that_is_none_is_refused(self):
        result = subprocess.run([PROGRAM, "kernels", "--only", "kivi, 2"], capture_output=True, text=True, check=False)
        self.assertEqual((result.returncode, result.stdout), (2, ""))
        self.assertRegex(result.stderr, r'^vlm-bench: --only "kivi, 2" matches no format.s name; the formats are "kivi 1 bit", ')

    def test_a_subcommand_is_asked_for_by_name(self):
        for words, found in (([], "no subcommand was given"), (["kernel"], '"kernel" is not a subcommand')):
            result = subprocess.run([PROGRAM, *words], capture_output=True, text=True, check=False)
            self.assertEqual((result.returncode, result.stdout), (2, ""))
            self.assertRegex(result.stderr,
                             rf"^vlm-bench: {found}.*; give latency, throughput, kernels or vision")

    def test_help_fits_a_terminal_and_its_subcommand(self):
        for command in (None, "latency", "throughput", "kernels"):
            words = [word for word in (command, "--help") if word]
            text = subprocess.run([PROGRAM, *words], capture_output=True, text=True, check=True).stdout
            for line in text.splitlines():
                self.assertLessEqual(len(line), 80, line)
            for other in ("latency", "throughput", "kernels"):
                self.assertEqual(f"\n  vlm-bench {other} " in text, other == command, text)
        self.assertIn("--kv-memory SIZE", run("--help").stdout)

    def test_whole_requests_are_prompts_and_steps(self):
        """CalibQuant's "overall": the batch over its prompts, one after the other, and its steps."""
        row, = rows("--batch", 3, "--answer-tokens", 500, "--kv", "kivi,group=8,residual=8")
        seconds = (3 * row["prompt_ms"]["median"] + 500 * row["step_ms"]["median"]) / 1000
        self.assertAlmostEqual(row["requests_per_s"], 3 / seconds, delta=1e-6 / seconds)
        self.assertGreater(row["prompt_ms"]["min"], 0)
        self.assertEqual(row["answer_tokens"], 500)
        self.assertNotIn("prompt_ms", rows("--batch", 3)[0])

    def test_an_interrupt_ends_it(self):
        with subprocess.Popen([PROGRAM, "throughput", "--device", "cpu", "-m", MODEL, "--batch",
                               "4", *SMALL[:4], "--tokens", "60", "--repeats", "1", "--kv", "f16",
                               *["--kv", "kivi,group=8,residual=8"] * 2000],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            process.stdout.readline()
            time.sleep(0.2)
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=60)
        self.assertEqual((process.returncode, stderr), (130, ""))

    def test_help_says_what_is_made_up(self):
        text = " ".join(run("--help").stdout.split())
        for words in ("random keys and values", "5GB (1e9)"):
            self.assertIn(words, text)


if __name__ == "__main__":
    unittest.main()
