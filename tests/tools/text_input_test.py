#!/usr/bin/env python3
"""Text as editors, Windows and PowerShell save it, wherever vlm-run and vlm-kv read a person's text."""

import codecs
import json
import subprocess
import sys
import unittest

from vlm_run_case import MODEL, PICTURE, PROGRAM, TIMEOUT_S, VlmRun, run

# How a text is saved: each must read as the first does.
SAVED = {
    "plain": lambda text: text.encode(),
    "mark": lambda text: codecs.BOM_UTF8 + text.encode(),
    "returns": lambda text: text.replace("\n", "\r\n").encode(),
    "mark and returns": lambda text: codecs.BOM_UTF8 + text.replace("\n", "\r\n").encode(),
    "UTF-16 with a mark": lambda text: text.replace("\n", "\r\n").encode("utf-16"),
    "UTF-16, big end first, with a mark": lambda text: codecs.BOM_UTF16_BE + text.encode("utf-16-be"),
    "UTF-16 without a mark": lambda text: text.encode("utf-16-le"),
    "UTF-16, big end first": lambda text: text.encode("utf-16-be"),
}


class SavedText(VlmRun):
    def same(self, text, read):
        """What read(file) returns for each way to save the text is the same; the file has them in turn."""
        file = self.folder / "text"
        results = {}
        for name, save in SAVED.items():
            file.write_bytes(save(text))
            results[name] = read(file)
        for name, result in results.items():
            with self.subTest(name):
                self.assertEqual(result, results["plain"])
        return results["plain"]

    def tokens(self, *arguments, **options):
        result = run("-m", MODEL, "--image", PICTURE, "-n", 3, "--json", *arguments, **options)
        self.assert_sound(result)
        answer = json.loads(result.stdout)
        return answer["prompt_tokens"], answer["tokens"]

    def test_a_prompt_from_a_file(self):
        question = "What is this?\nA caf\u00e9 or a \u732b \U0001f600?\n"
        self.same(question, lambda file: self.tokens("-p", f"@{file}"))
        self.same(question, lambda file: self.tokens("-p", "-", input=file.read_bytes()))

    def test_a_list_of_records(self):
        records = [{"id": "\u00e9", "image": str(PICTURE), "prompt": "What\nis this?"},
                   {"id": 2, "image": str(PICTURE), "prompt": "A caf\u00e9?"}]
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)

        def answers(file):
            output = self.folder / "out.jsonl"
            output.unlink(missing_ok=True)
            self.assert_sound(run("-m", MODEL, "--batch", file, "--out", output, "-n", 2))
            return [(answer["id"], answer["tokens"]) for answer in map(json.loads, output.read_text().splitlines())]

        self.assertEqual([key for key, _ in self.same(lines, answers)], ["\u00e9", 2])

    def test_lists_joined_from_files_with_marks(self):
        lines = [codecs.BOM_UTF8 + json.dumps({"id": i, "image": str(PICTURE)}).encode() for i in range(3)]
        self.assert_sound(run("-m", MODEL, "--batch", "-", "--out", self.folder / "o", "-n", 2,
                              input=b"\r\n".join(lines)))

    def test_a_conversation_through_a_pipe(self):
        lines = f"/image {PICTURE}\nWhat is \u00e9?\n\n/clear\nAnd now?\n/quit\n"

        def answers(file):
            result = run("-m", MODEL, "--chat", "-q", "-n", 3, input=file.read_bytes())
            self.assert_sound(result)
            return result.stdout

        self.assertEqual(self.same(lines, answers).count(b"\n"), 2)

    def test_records_and_policies_of_vlm_kv(self):
        data = self.folder / "data.jsonl"
        data.write_text(json.dumps({"id": 1, "image": str(PICTURE), "text": "a b c"}) + "\n")
        kv = PROGRAM.with_name("vlm-kv")

        def fidelity(data, spec):
            result = subprocess.run([kv, "fidelity", "-m", MODEL, "--data", data, "--kv", spec, "--csv",
                                     "--layer-records", "0", "-n", "3", "-t", "1"],
                                    capture_output=True, timeout=TIMEOUT_S)
            self.assertEqual(result.returncode, 0, result.stderr)
            return result.stdout

        self.same(data.read_text(), lambda file: fidelity(file, "int8"))
        self.same('{"default": "int8",\n "layers": {"0": "f16"}}\n', lambda file: fidelity(data, f"@{file}"))

    def test_a_profile(self):
        command = ["-m", MODEL, "--image", PICTURE, "-n", 2, "-q", "--kv", "xquant", "--kv-profile"]

        def answer(file):
            result = run(*command, file)
            self.assert_sound(result)
            return result.stdout

        self.same('{"xquant":\n {"eta": {"2": 0.25}}}\n', answer)

    def test_other_encodings_are_refused_with_the_way_out(self):
        file = self.folder / "text"
        for encoding in ("latin-1", "cp1252", "cp1250"):
            file.write_bytes("Was hei\u00dft \u201eCaf\u00e9\u201c?\n".encode(encoding, "replace"))
            with self.subTest(encoding):
                self.assert_refused(run("-m", MODEL, "--image", PICTURE, "-p", f"@{file}"), 1,
                                    [str(file), "UTF-8", "Latin-1", "iconv -f"])
                self.assert_refused(run("-m", MODEL, "--kv", f"@{file}", "-p", "a"), 1,
                                    [str(file), "UTF-8", "iconv -f"])
                result = run("-m", MODEL, "--chat", "-q", input=file.read_bytes())
                self.assert_refused(result, 1, ["--chat", "UTF-8", "iconv -f"])

    def test_one_line_in_another_encoding_fails_by_itself(self):
        good = json.dumps({"id": 1, "image": str(PICTURE)}).encode()
        bad = '{"id": 2, "prompt": "caf\u00e9"}'.encode("latin-1")
        output = self.folder / "o"
        result = run("-m", MODEL, "--batch", "-", "--out", output, "-n", 2, input=good + b"\n" + bad + b"\n")
        self.assert_sound(result, 1)
        answers = [json.loads(line) for line in output.read_text().splitlines()]
        self.assertEqual([answer["id"] for answer in answers if "text" in answer], [1])
        self.assertIn("line 2", answers[-1]["error"])
        self.assertIn("iconv -f", answers[-1]["error"])


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
    unittest.main()
