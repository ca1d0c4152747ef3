#!/usr/bin/env python3
"""Text as editors, Windows and PowerShell save it, wherever vlm-run and vlm-kv read a person's text."""

import codecs
import json
import subprocess
import sys
import unittest

from vlm_run_case import MODEL, PICTURE, PROGRAM, ROOT, TIMEOUT_S, VlmRun, run

CHATTY = ROOT / "tools/pocket/pocket-qwen"  # has system messages

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
    "returns alone": lambda text: text.replace("\n", "\r").encode(),
    "the end mark of DOS": lambda text: text.replace("\n", "\r\n").encode() + b"\x1a",
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

    def tokens(self, *arguments, model=MODEL, **options):
        result = run("-m", model, "--image", PICTURE, "-n", 3, "--json", *arguments, **options)
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

    def test_a_system_message(self):
        text = "Answer in one word.\n"
        self.same(text, lambda file: self.tokens("--system", f"@{file}", "-p", "What?", model=CHATTY))
        self.assertEqual(self.same(text, lambda file: self.tokens(
            "--system", "-", "-p", "What?", model=CHATTY, input=file.read_bytes())),
            self.tokens("--system", text.strip(), "-p", "What?", model=CHATTY))
        self.assertEqual(self.tokens("--system", "@@a", "-p", "What?", model=CHATTY),
                         self.tokens("--system", "\ufeff@a", "-p", "\ufeffWhat?", model=CHATTY))

    def test_what_is_no_text_is_refused_with_the_way_out(self):
        file = self.folder / "question"
        for content, words in (("Was?".encode("utf-32-le"), ["UTF-32LE text", "iconv -f UTF-32LE"]),
                               ("Was?".encode("utf-32-be"), ["UTF-32BE text", "iconv -f UTF-32BE"]),
                               (b"Was\nist\0das?", ["NUL byte in line 2", "tr -d"]),
                               (PICTURE.read_bytes(), ["is an image, not a text", "--image"]),
                               (b"\x1f\x8b\x08\0\xff", ["compressed by gzip", "gunzip -c"])):
            file.write_bytes(content)
            for flag in ("-p", "--system"):
                with self.subTest(words, flag=flag):
                    self.assert_refused(run("-m", MODEL, "--image", PICTURE, flag, f"@{file}"), 1,
                                        [f"{flag} @{file}", *words])
        for flag in ("-p", "--system", "--stop"):
            with self.subTest(flag):
                self.assert_refused(run("-m", MODEL, "--image", PICTURE, flag, b"Gr\xfc\xdfe"), 2,
                                    [flag, "is not UTF-8", "0xfc"])

    def test_lists_in_other_forms_are_refused_once(self):
        output = self.folder / "out"
        record = json.dumps({"id": 1, "image": str(PICTURE)})
        for text, words in ((f"{record},\n{record},\n".encode(), ["a comma at the end", "sed"]),
                            (b"{'id': 3, 'image': 'x.png'}\n" * 2, ["single quotes", "json.dumps"]),
                            (f"{record}\n".encode("utf-32-le"), ["UTF-32LE text"]),
                            (f"{record}\n".encode("utf-7").replace(b"{", b"+AHs-"), ["UTF-7 text"]),
                            (f"{PICTURE}\0{PICTURE}\0".encode(), ["find -print0", "tr "])):
            file = self.folder / "list"
            file.write_bytes(text)
            for name, options in ((file, {}), ("-", {"input": text})):
                with self.subTest(words, name=name):
                    self.assert_refused(run("-m", MODEL, "--batch", name, "--out", output, "-n", 1, "-q", **options), 1,
                                        [f"--batch {name}", *words])
        lines = f"\x1e{record}\n\ufeff\ufeff{record.replace('1', '2', 1)}\n".encode()
        self.assert_sound(run("-m", MODEL, "--batch", "-", "--out", output, "-n", 1, input=lines))

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
