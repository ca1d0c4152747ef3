#!/usr/bin/env python3
"""Starts the programs with a standard stream that is closed, full or left by its reader.

A program may lose what it says; it ends with its own status and writes into no file of the user's.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import unittest

from vlm_run_case import MODEL, PICTURE, PROGRAM, TIMEOUT_S, VlmRun

ENDS_BY_ITSELF = (0, 1, 2)


def closing(*descriptors):
    def close():
        for descriptor in descriptors:
            os.close(descriptor)
    return close


class StandardStreams(VlmRun):
    def setUp(self):
        super().setUp()
        self.input = self.folder / "in.jsonl"
        self.output = self.folder / "out.jsonl"
        self.input.write_text("".join(
            json.dumps({"id": i, "image": str(PICTURE if i % 2 else self.folder / "gone.png")})
            + "\n" for i in range(6)))

    def batch(self, **options):
        command = [PROGRAM, "-m", MODEL, "--batch", self.input, "--out", self.output, "-n", "2"]
        return subprocess.run(command, timeout=TIMEOUT_S, **options)

    def assert_whole(self):
        records = [json.loads(line) for line in self.output.read_text().splitlines()]
        self.assertEqual(sorted(record["id"] for record in records), list(range(6)))
        self.output.unlink()

    def test_a_batch_with_closed_streams_writes_its_records_alone(self):
        for closed in ((2,), (1, 2), (0, 1, 2), (0, 2), (0,)):
            with self.subTest(closed=closed):
                result = self.batch(stderr=subprocess.DEVNULL, preexec_fn=closing(*closed))
                self.assertEqual(result.returncode, 1)
                self.assert_whole()

    def test_a_batch_outlives_the_reader_of_its_messages(self):
        read, write = os.pipe()
        os.close(read)
        with os.fdopen(write, "wb") as broken, open("/dev/full", "wb") as full:
            for stderr in (broken, full):
                self.assertEqual(self.batch(stderr=stderr).returncode, 1)
                self.assert_whole()

    def test_a_message_that_is_lost_changes_no_status(self):
        for name in ("vlm-run", "vlm-kv", "vlm-bench"):
            program = PROGRAM.with_name(name)
            if not program.is_file():
                continue
            for arguments in (["--no-such-flag"], ["--image", "gone.png"]):
                with self.subTest(f"{name} {arguments}"), open("/dev/full", "wb") as full:
                    result = subprocess.run([program, *arguments], stderr=full,
                                            stdout=subprocess.DEVNULL, timeout=TIMEOUT_S)
                    self.assertIn(result.returncode, ENDS_BY_ITSELF)
                    result = subprocess.run([program, *arguments], preexec_fn=closing(2),
                                            stdout=subprocess.DEVNULL, timeout=TIMEOUT_S)
                    self.assertIn(result.returncode, ENDS_BY_ITSELF)

    def test_an_answer_that_cannot_be_written_is_a_failure(self):
        for arguments in (["-n", "2"], ["-n", "300", "--json"]):
            command = [PROGRAM, "-q", "-m", MODEL, "--image", PICTURE, *arguments]
            result = subprocess.run(command, preexec_fn=closing(1), stderr=subprocess.PIPE,
                                    timeout=TIMEOUT_S, text=True)
            self.assertEqual(result.returncode, 1)
            self.assertIn("standard output cannot be written", result.stderr)
            self.assertEqual(len(result.stderr.splitlines()), 1)

    def test_a_limit_on_the_size_of_files_is_a_full_disk(self):
        result = self.batch(stderr=subprocess.PIPE, text=True, preexec_fn=lambda: (
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL),
            resource.setrlimit(resource.RLIMIT_FSIZE, (700, 700))))
        self.assertEqual(result.returncode, 1, result.stderr)
        self.assertIn(f"--out {self.output} cannot be written", result.stderr)
        self.assertTrue(self.output.read_bytes().endswith(b"\n"))


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
    unittest.main()
