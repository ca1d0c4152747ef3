"""Files that are no UTF-8 JSON or TSV, no regular file or too large are read, or refused with what to do."""

import gzip
import json
import os
import resource
import signal
import unittest
from unittest import mock

from eval_case import EvalCase

import files  # noqa: E402  (of tools/eval)
import results  # noqa: E402
import rows  # noqa: E402
from errors import EvaluationError  # noqa: E402

DOCUMENTS = {"dataset_split": "val", "data": [
    {"questionId": n, "question": "Was für \U0001f600?", "image": f"{n}.png", "answers": [str(n)]} for n in (5, 6)
]}  # fmt: skip
TABLE = "index\tquestion\tanswer\timage_path\n1\tWas für?\t['\xe9']\ta.png\n"


def bounded():
    """A script that reads without end fails, and leaves the machine its memory."""
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    signal.alarm(20)


class Contents(EvalCase):
    def test_encodings_that_are_recognised(self):
        path = self.write("val_v1.0.json", DOCUMENTS)
        expected = files.read_documents(path)
        for text in (json.dumps(DOCUMENTS, ensure_ascii=False), json.dumps(DOCUMENTS, ensure_ascii=False, indent=1).replace("\n", "\r\n")):
            for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-32", "utf-16-le", "utf-16-be", "utf-32-be"):
                path.write_bytes(text.encode(encoding))
                self.assertEqual(files.read_documents(path), expected, encoding)
        table = self.folder / "DocVQA_VAL.tsv"
        for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-32", "utf-16-le"):
            table.write_bytes(TABLE.encode(encoding))
            (item,) = files.read_documents(table).items
            self.assertEqual((item.question, item.references), ("Was für?", ["\xe9"]), encoding)

    def test_contents_that_are_refused_with_a_cure(self):
        plain = json.dumps(DOCUMENTS).encode()
        lines = b"".join(json.dumps(row).encode() + b"\n" for row in DOCUMENTS["data"])
        for name, content, words in (
            ("val.json", b'{"data": "f\xfcr"}', ["not UTF-8", "0xfc", "iconv -f WINDOWS-1252 -t UTF-8"]),
            ("DocVQA_VAL.tsv", TABLE.encode("latin-1"), ["not UTF-8", "0xfc", "iconv -f WINDOWS-1252 -t UTF-8"]),
            ("val.json", b"\xff\xfe[\0\0\xd8]\0", ["UTF-16", "save it again as UTF-8"]),
            ("val.json", b"\xff\xfe[\0]", ["UTF-16", "save it again as UTF-8"]),
            ("val.json", gzip.compress(plain), ["gzip", "gunzip"]),
            ("DocVQA_VAL.tsv", gzip.compress(TABLE.encode()), ["gzip", "gunzip"]),
            ("val.json", b"PK\x03\x04\x14\0\0\0", ["zip archive", "unzip"]),
            ("val.json", b"PAR1\x15\x04", ["Parquet", "name"]),
            ("val.json", b"version https://git-lfs.github.com/spec/v1\n", ["Git LFS", "git lfs pull"]),
            ("val.json", b"<!DOCTYPE html><html>", ["web page", "download"]),
            ("val.json", lines, ["is JSON Lines", "expected one JSON value", "jq -s"]),
            ("val.json", b"\n" + lines.replace(b"\n", b"\r\n\r\n"), ["is JSON Lines"]),
            ("val.json", plain + b"]", ["no JSON file", "Extra data", "download it again"]),
            ("val.json", plain[:-9], ["no JSON file", "download it again"]),
            ("val.json", b"", ["is empty", "download it again"]),
        ):
            (self.folder / name).write_bytes(content)
            with self.assertRaises(EvaluationError, msg=str(content)) as caught:
                files.read_documents(self.folder / name)
            for word in (str(self.folder / name), *words):
                self.assertIn(word, str(caught.exception))
            self.assertTrue(str(caught.exception).isprintable())


class Kinds(EvalCase):
    def test_what_is_no_regular_file(self):
        for name in ("pipe.json", "pipe.tsv", "pipe.parquet"):
            os.mkfifo(self.folder / name)
        (self.folder / "folder.json").mkdir()
        (self.folder / "zero.tsv").symlink_to("/dev/zero")
        gone = ["No such file or directory", "check the path"]
        for path, words in (
            ("/dev/zero", ["is a device", "regular file"]), ("zero.tsv", ["is a device", "regular file"]),
            ("pipe.json", ["is a pipe", "regular file"]), ("pipe.tsv", ["is a pipe", "regular file"]),
            ("pipe.parquet", ["is a pipe", "regular file"]), ("none.json", gone), ("none.tsv", gone), ("none.parquet", gone),
            ("folder.json", ["is a folder", "regular file"]), ("x" * 300, ["File name too long", "check the path"]),
        ):  # fmt: skip
            for script in ("docvqa.py --annotations", "docvqa.py --tune-on", "docvqa.py --results", "coco.py --annotations",
                           "coco.py --instances", "vqa.py --task textvqa --annotations"):  # fmt: skip
                with self.subTest(path=path, script=script):
                    self.assert_refused(self.run_script(*script.split(), path, "--out", "out", preexec_fn=bounded), path, *words)
        with self.assertRaisesRegex(EvaluationError, "pipe.json is a pipe"):
            results.read_results(self.folder / "pipe.json")
        for path in ("/dev/zero", "pipe.json"):
            for script in ("video.py", "fidelity.py"):
                with self.subTest(path=path, script=script):
                    refused = self.run_script(script, "--annotations", path, "--out", "out", preexec_fn=bounded)
                    self.assert_refused(refused, path, "regular file")
        self.assertFalse((self.folder / "out").exists())

    def test_sizes_are_bounded(self):
        with (self.folder / "val.json").open("wb") as file:
            file.truncate(5 << 30)
        refused = self.run_script("docvqa.py", "--annotations", "val.json", "--out", "out", preexec_fn=bounded)
        self.assert_refused(refused, "5368709120 bytes", "at most 4 GiB")
        path = self.folder / "DocVQA_VAL.tsv"
        path.write_text(TABLE, encoding="utf-8")
        with mock.patch.object(rows, "LONGEST_LINE", 20), self.assertRaisesRegex(EvaluationError, "line of more than 20"):
            files.read_documents(path)

    def test_out_is_no_standard_output(self):
        for script in ("coco.py", "docvqa.py", "vqa.py --task vizwiz", "video.py", "fidelity.py", "budgets.py", "tables.py",
                       "report.py results.json"):  # fmt: skip
            for out in ("-", ""):
                status, _, err = self.run_script(*script.split(), "--out", out, preexec_fn=bounded)
                self.assertEqual(status, 2, err)
                self.assertIn(f"--out: {out!r} is no folder", err.splitlines()[-1])
        self.assertEqual(list(self.folder.iterdir()), [])


if __name__ == "__main__":
    unittest.main()
