#!/usr/bin/env python3
"""Runs vlm-run --batch as a person would: resumed, interrupted, with bad records, on a full disk.

Whatever happens, --out holds whole records, and what was finished is finished.
"""

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import unittest
from pathlib import Path

from vlm_run_case import MODEL, PICTURE, PROGRAM, TIMEOUT_S, VlmRun, run


class Batches(VlmRun):
    def setUp(self):
        super().setUp()
        self.input = self.folder / "in.jsonl"
        self.output = self.folder / "out.jsonl"

    def write_input(self, records, extra=()):
        lines = [json.dumps({"id": i, "image": str(PICTURE), "prompt": "what is it?"})
                 for i in range(records)]
        for at, line in extra:
            lines.insert(at, line)
        self.input.write_text("\n".join(lines) + "\n")

    def batch(self, tokens=4, **options):
        return run("-m", MODEL, "--batch", self.input, "--out", self.output, "-n", tokens,
                   **options)

    def records(self):
        """The whole lines of the output; every one must be JSON."""
        lines = self.output.read_bytes().split(b"\n")
        return [json.loads(line) for line in lines[:-1]]

    def append(self, text):
        with self.output.open("a") as file:
            file.write(text)

    def ids(self):
        return sorted(record["id"] for record in self.records() if "text" in record)

    def test_a_folder_or_a_pattern_is_a_batch(self):
        pictures = self.folder / "pictures"
        for name in ("b.png", "a.PNG", "c.png", "deep/b.png"):
            (pictures / name).parent.mkdir(exist_ok=True, parents=True)
            shutil.copy(PICTURE, pictures / name)
        (pictures / "notes.txt").write_text("none")
        (pictures / "d.gif").write_bytes(b"GIF99a")
        output = pictures / "out.jsonl"
        for batch, expected, failed in (
                (pictures, ["a.PNG", "b.png", "c.png"], ["d.gif"]),
                (f"{pictures}/", ["a.PNG", "b.png", "c.png"], ["d.gif"]),
                (pictures / "*.png", ["b.png", "c.png"], []),
                (pictures / "[bc]*", ["b.png", "c.png"], []),
                (f"{self.folder}/*/deep/?.png", ["pictures/deep/b.png"], []),
                (f"{pictures}/*", ["a.PNG", "b.png", "c.png"], ["d.gif", "notes.txt"])):
            with self.subTest(str(batch)):
                output.unlink(missing_ok=True)
                command = ["-m", MODEL, "--batch", batch, "--out", output, "-n", 2, "-p", "what?"]
                for _ in range(2):
                    self.assert_sound(run(*command), 1 if failed else 0)
                    records = [json.loads(line) for line in output.read_text().splitlines()]
                    self.assertEqual([r["id"] for r in records if "text" in r], expected)
                    self.assertEqual([r["id"] for r in records if "error" in r], failed)

    def test_threads_that_prepare_change_nothing(self):
        pictures = self.folder / "pictures"
        pictures.mkdir()
        for i in range(9):
            shutil.copy(MODEL / f"image{i % 2}.png", pictures / f"{i}.png")
        (pictures / "2.png").write_bytes(PICTURE.read_bytes()[:90])  # its headers are whole
        (pictures / "4.png").write_bytes(b"no picture")
        for size in (1, 4):
            outputs = []
            for threads in (1, 3):
                self.output.unlink(missing_ok=True)
                result = run("-m", MODEL, "--batch", pictures, "--out", self.output, "-n", 3, "-t",
                             threads, "--batch-size", size)
                self.assert_sound(result, 1)
                outputs.append([(record["id"], record.get("tokens"), record.get("error"))
                                for record in self.records()])
            self.assertEqual(outputs[0], outputs[1])
            self.assertEqual([id for id, tokens, _ in outputs[0] if tokens is None],
                             ["2.png", "4.png"])
            if size == 1:
                self.assertEqual([id for id, _, _ in outputs[0]], [f"{i}.png" for i in range(9)])

    def test_a_second_folder_is_not_the_first(self):
        for name in ("a", "b"):
            (self.folder / name).mkdir()
            shutil.copy(MODEL / f"image{'ab'.index(name)}.png", self.folder / name / "x.png")
        command = ["-m", MODEL, "--out", self.output, "-n", 2, "--batch"]
        self.assert_sound(run(*command, self.folder / "a"))
        done = self.output.read_bytes()
        (record,) = self.records()
        self.assertEqual(record["images"], [str(self.folder / "a/x.png")])
        for batch in (self.folder / "b", f"{self.folder}/b/*.png"):
            self.assert_refused(run(*command, batch), 2, [
                "x.png", f"{self.folder}/a/x.png", f"{self.folder}/b/x.png", "another --out"])
        (self.folder / "link").symlink_to("a")
        for batch in (f"{self.folder}/b/../a/", f"{self.folder}/a/*", self.folder / "link", "a"):
            self.assert_sound(run(*command, batch, cwd=self.folder))
        self.assertEqual(self.output.read_bytes(), done)

    def test_an_id_asks_one_thing(self):
        other = self.folder / "other.png"
        shutil.copy(MODEL / "image1.png", other)
        picture = {"id": 1, "image": str(PICTURE)}
        for before, now, words in (
                (picture, {"id": 1, "image": str(other)}, ["image0.png", "other.png"]),
                (picture, {"id": 1, "images": [str(PICTURE)] * 2}, ["1 image"]),
                (picture, picture | {"prompt": "why?"}, ["no prompt", "why?"]),
                ({"id": 1, "prompt": "what?"}, {"id": 1, "prompt": "why?"}, ["what?", "why?"])):
            with self.subTest(now):
                self.output.unlink(missing_ok=True)
                self.input.write_text(json.dumps(before) + "\n")
                self.assert_sound(self.batch())
                done = self.output.read_bytes()
                self.input.write_text(json.dumps(now) + "\n")
                self.assert_refused(self.batch(), 2, ["record 1", "another id", *words])
                self.assertEqual(self.output.read_bytes(), done)
                self.input.write_text(json.dumps(now | {"id": 2}) + "\n")
                self.assert_sound(self.batch())
                self.assertEqual(self.ids(), [1, 2])

    def test_a_data_set_that_moved_goes_on(self):
        old, new = self.folder / "old", self.folder / "new"
        for absolute in (False, True):
            old.mkdir()
            for i in range(2):
                shutil.copy(MODEL / f"image{i}.png", old / f"{i}.png")

            def start(folder, records, status=0):
                lines = [json.dumps({"id": i, "image": f"{folder}/{i % 2}.png" if absolute else f"{i % 2}.png"})
                         for i in range(records)]
                (folder / "in.jsonl").write_text("\n".join(lines))
                result = run("-m", MODEL, "--batch", folder / "in.jsonl", "--out", self.output, "-n", 2)
                self.assert_sound(result, status)
                return result

            with self.subTest(absolute=absolute):
                start(old, 2)
                done = self.output.read_bytes()
                old.rename(new)
                self.assertIn(b"2 of 3 records are in", start(new, 3).stderr)
                self.assertTrue(self.output.read_bytes().startswith(done))
                shutil.copy(new / "1.png", new / "0.png")  # another image where one was
                new.rename(old)
                self.assertIn(b"this run asks about", start(old, 3, 2).stderr)
            shutil.rmtree(old)
            self.output.unlink()

    def test_a_folder_says_what_it_leaves_out(self):
        for name in ("b.png", "deep/c.png", "deep/d/e.png", ".hidden.png", "no_suffix"):
            (self.folder / "in" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(PICTURE, self.folder / "in" / name)
        (self.folder / "in/notes.md").write_text("words")
        command = ["-m", MODEL, "--out", self.output, "-n", 2, "--batch"]
        result = run(*command, self.folder / "in")
        self.assert_sound(result)
        (note,) = [line for line in result.stderr.decode().splitlines() if "leaves out" in line]
        self.assertTrue(note.startswith("vlm-run: note: --batch "), note)
        for words in ("takes 1 image", "1 folder", "/in/**'", "1 image not named like one",
                      "1 hidden file", "1 other file"):
            self.assertIn(words, note)
        self.assertNotIn(b"leaves out", run(*command, self.folder / "in", "-q").stderr)
        (self.folder / "in/b.png").unlink()
        self.assert_refused(run(*command, self.folder / "in"), 1, ["has no image file", "/in/**'"])
        self.output.unlink()
        for pattern, expected in ((f"{self.folder}/in/**", ["deep/c.png", "deep/d/e.png"]),
                                  (f"{self.folder}/in/**/e.*", ["deep/d/e.png"]),
                                  (f"{self.folder}/**/d/*.png", ["in/deep/d/e.png"])):
            self.output.unlink(missing_ok=True)
            self.assert_sound(run(*command, pattern))
            self.assertEqual(self.ids(), expected)

    def test_a_list_is_looked_at_as_a_whole(self):
        shutil.copy(PICTURE, self.folder / "a b.png")
        shutil.copy(PICTURE, self.folder / "c.png")
        answered = {
            "array.json": (json.dumps([{"id": i, "image": "c.png"} for i in range(2)], indent=1), [0, 1]),
            "names.json": (json.dumps(["a b.png", "c.png"]), ["a b.png", "c.png"]),
            "names.txt": ("a b.png\r\n\r\nc.png", ["a b.png", "c.png"]),
            "absolute": (f"{self.folder}/c.png\n", [f"{self.folder}/c.png"]),
            "pretty.json": (json.dumps({"id": 7, "image": "c.png"}, indent=2), [7])}
        for name, (text, ids) in answered.items():
            with self.subTest(name):
                self.output.unlink(missing_ok=True)
                (self.folder / name).write_text(text)
                for _ in range(2):
                    self.assert_sound(run("-m", MODEL, "--batch", self.folder / name, "--out",
                                          self.output, "-n", 2))
                self.assertEqual(sorted(record["id"] for record in self.records()), ids)
        self.output.unlink()
        refused = {"a.csv": ("id,image\n1,c.png\n", ["is a table"]), "a.tsv": ("c.png\tA dog\n", ["is a table"]),
                   "coco.json": ('{"images": [{"id": 1}], "annotations": []}', ["JSON object", "images, annot"]),
                   "notes": ("Dear reader,\nthese are\nwords.\n" * 2000, ["is no list of records"]),
                   "pretty.jsonl": ('{\n "id": 1\n}\n' * 3, ["jq -c"]),
                   "data.parquet": ("PAR1\0\0", ["Parquet"]), "in.gz": ("\x1f\x8b\x08", ["gunzip -c"])}
        for name, (text, words) in refused.items():
            (self.folder / name).write_bytes(text.encode("latin-1"))
            with self.subTest(name):
                self.assert_refused(run("-m", self.folder, "--batch", self.folder / name, "--out",
                                        self.output), 1, [f"--batch {self.folder}", name, *words])
                self.assertFalse(self.output.exists(), "refused before the model is opened")

    def test_meta_is_copied_to_the_answer(self):
        meta = {"row": [1, None], "sku": "77"}
        self.input.write_text("".join(json.dumps(record) + "\n" for record in (
            {"id": 1, "image": str(PICTURE), "meta": meta}, {"id": 2, "image": "gone.png", "meta": "x"})))
        self.assert_sound(self.batch(), 1)
        self.assertEqual({record["id"]: record["meta"] for record in self.records()}, {1: meta, 2: "x"})

    def test_two_answers_to_one_record_are_refused(self):
        self.write_input(2)
        self.assert_sound(self.batch())
        first = self.output.read_text().splitlines()[0]
        for line, words in ((json.dumps({"id": 0, "text": "by hand"}), ["record 0", "lines 1 and 3"]),
                            ('{"id": 0, "text": 7}', ["not a record"]), ('{"id": 0, "text": null}', ["not a record"])):
            before = self.output.read_bytes()
            self.append(line + "\n")
            self.assert_refused(self.batch(), 1, [str(self.output), *words])
            self.output.write_bytes(before)
        self.append(first + "\n")
        self.assert_sound(self.batch())

    def test_hidden_files_are_no_part_of_a_folder(self):
        for name in (".a.png", "b.png", "c.pbm", "d.pam"):
            shutil.copy(PICTURE, self.folder / name)
        self.assert_sound(run("-m", MODEL, "--batch", self.folder, "--out", self.output, "-n", 2))
        self.assertEqual(self.ids(), ["b.png"])

    def test_a_picture_is_no_file_of_records(self):
        cut = self.folder / "cut.png"
        cut.write_bytes(PICTURE.read_bytes()[:9])
        tiff = self.folder / "scan"
        tiff.write_bytes(b"II*\0")
        for picture in (PICTURE, cut, tiff):
            self.assert_refused(run("-m", MODEL, "--batch", picture, "--out", self.output), 1,
                                [picture.name, "--image", "folder", "quoted pattern"])
        shutil.copy(PICTURE, self.folder / "b.png")
        for rest in ([self.folder / "b.png"], [self.folder / "b.png", PICTURE]):
            self.assert_refused(run("-m", MODEL, "--out", self.output, "--batch", PICTURE, *rest),
                                2, ["b.png", "quote a pattern"])
        self.assertFalse(self.output.exists())

    def test_a_name_that_is_not_utf_8_fails_by_itself(self):
        for name in (b"a\xff.png", b"b.png"):
            shutil.copy(PICTURE, os.fsencode(self.folder) + b"/" + name)
        result = run("-m", MODEL, "--batch", self.folder, "--out", self.output, "-n", 2)
        self.assert_sound(result, 1)
        self.assertEqual(self.ids(), ["b.png"])
        self.assertIn(b"not UTF-8", result.stderr)
        self.assertIn(b"image 1", result.stderr)
        self.assertNotIn(b"line 1", result.stderr)

    def test_records_come_from_standard_input(self):
        self.write_input(2)
        with self.input.open("rb") as file:
            self.assert_sound(run("-m", MODEL, "--batch", "-", "--out", self.output, "-n", 2,
                                  stdin=file))
        self.assertEqual(self.ids(), [0, 1])

    def test_what_is_wrong_with_a_record_is_named(self):
        os.mkfifo(self.folder / "pipe")
        (self.folder / "folder").mkdir()
        for name, content in (("empty", b""), ("page.png", b"<!DOCTYPE html>\n<html>"), ("a.pdf", b"%PDF-1.4"), ("a.svg", b"<svg/>")):
            (self.folder / name).write_bytes(content)
        for name, target in (("loop", "loop"), ("dangling", "gone")):
            (self.folder / name).symlink_to(target)
        cases = [('{"id": 1, "image": "a.png", "promt": "x"}', ['"promt"', 'mean "prompt"']),
                 ('{"id": 1, "imagess": ["a.png"]}', ['mean "images"', "id, image, images"]),
                 ('{"id": 1, "image": "a.png\\u0000.txt"}', ["a.png\\x00.txt", "not a file name"]),
                 ('{"id": 1, "image": ""}', ["not a file name"]),
                 ('{"id": 1, "image": "pipe"}', ["pipe is a pipe"]),
                 ('{"id": 1, "image": "-"}', ["/- does not exist"]),
                 ('{"id": 1, "image": "/dev/zero"}', ["/dev/zero is a device"]),
                 ('{"id": 1, "image": "http://a.org/b.png"}', ["is a URL"]),
                 ('{"id": 1, "video": "a.mp4"}', ["video ", "a.mp4 does not exist"]),
                 ('{"id": 1, "video": "-"}', ["/- does not exist"]),
                 ('{"id": 1, "id": 2}', ["twice", 'write it like {"id"']),
                 ("{'id': 1}", ["line 1, column 2", 'write it like {"id"']),
                 ('{"id": 1 "prompt": "x"}', ["expected '}'", 'write it like {"id"']),
                 ('{"id": 1, "instruction": "x"}', ['"instruction", which is "prompt" here']),
                 ('{"id": 1, "conversations": []}', ['"conversations", which is "prompt" here']),
                 ('{"id": 1, "image_path": "a.png"}', ['"image_path", which is "image" here']),
                 ('{"id": 1, "filename": "a.png"}', ['"filename", which is "image" here']),
                 ('{"id": 1, "clip": "a.mp4"}', ['"clip", which is "video" here']),
                 ('{"id": 1, "bbox": [1, 2]}', ['unknown key "bbox"; the keys of a record', "columns of your own go into meta"]),
                 ('{"id": 1, "max_tokens": 5}', ['unknown key "max_tokens"; the keys of a record']),
                 ('{"id": 1e3, "prompt": "x"}', ["a string or an integer"]),
                 ('{"id": true, "prompt": "x"}', ["a string or an integer"]),
                 ('{"id": 1, "images": []}', ["image is missing"]),
                 ('{"id": 1, "image": "C:\\\\a.png"}', ["has backslashes", "write / between them"]),
                 ('{"id": 1, "image": " a.png"}', ["begins or ends with a blank"]),
                 ('{"id": 1, "image": "s3://a/b.png"}', ["is a URL"]),
                 ('{"id": 1, "image": "file://host/b.png"}', ["names another machine"]),
                 ('{"id": 1, "image": "data:image/png;base64,iVBORw0K"}', ["is a data URI", "write it to a file"]),
                 ('{"id": 1, "image": "%s"}' % ("iVBORw0KGgoAAAAN" * 40), ["is base64 text", "write it to a file"]),
                 ('{"id": 1, "image": "folder"}', ["folder is a directory"]),
                 ('{"id": 1, "image": "empty"}', ["empty is empty (zero bytes)"]),
                 ('{"id": 1, "image": "page.png"}', ["page.png is text, not an image"]),
                 ('{"id": 1, "image": "a.pdf"}', ["a.pdf is a PDF file", "convert it"]),
                 ('{"id": 1, "image": "a.svg"}', ["a.svg is an SVG file", "convert it"]),
                 ('{"id": 1, "image": "loop"}', ["loop cannot be opened"]),
                 ('{"id": 1, "image": "dangling"}', ["dangling does not exist"]),
                 ('{"id": 1, "image": ', ["line 1", 'write it like {"id"'])]
        for line, words in cases:
            with self.subTest(line):
                self.output.unlink(missing_ok=True)
                self.input.write_text(line + "\n")
                self.assert_sound(self.batch(), 1)
                (record,) = self.records()
                for word in words:
                    self.assertIn(word, record["error"])
                self.assertNotIn("download it again", record["error"])

    def test_a_stream_is_answered_record_by_record(self):
        program = subprocess.Popen([PROGRAM, "-m", MODEL, "--batch", "-", "--out", "-", "-n", "2", "-t", "1"],
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for i in range(3):  # the next question follows the answer
            program.stdin.write(json.dumps({"id": i, "image": str(PICTURE)}).encode() + b"\n")
            program.stdin.flush()
            self.assertEqual(json.loads(program.stdout.readline())["id"], i)
        program.stdin.write(b'{"id": 3, "image": "gone.png"}')  # the last line has no end
        rest, error = program.communicate(timeout=60)
        self.assertIn("does not exist", json.loads(rest)["error"])
        self.assertEqual(program.returncode, 1)
        self.assertIn(b"4 records done, 1 failed", error)
        self.assertFalse(Path("-").exists())

    def test_a_stream_into_a_file_resumes(self):
        self.write_input(3)
        lines = self.input.read_bytes().splitlines(keepends=True)
        command = ["-m", MODEL, "--batch", "-", "--out", self.output, "-n", 2]
        self.assert_sound(run(*command, input=b"".join(lines[:2])))
        self.assert_sound(run(*command, input=b"".join(lines)))
        self.assertEqual(self.ids(), [0, 1, 2])
        self.assertEqual(len(self.records()), 3)

    def test_a_stream_that_is_a_list_is_read_as_a_whole(self):
        self.write_input(2)
        records = [json.loads(line) for line in self.input.read_text().splitlines()]
        for text in ("", "\n\n", json.dumps(records), "\n  " + json.dumps(records, indent=2)):
            result = run("-m", MODEL, "--batch", "-", "--out", "-", "-n", 1, input=text.encode())
            self.assertEqual(result.stdout.count(b'"text"'), 2 if "[" in text else 0, result.stderr)

    def test_a_stream_obeys_a_signal_while_it_waits(self):
        for signal_ in (signal.SIGINT, signal.SIGTERM):
            program = subprocess.Popen([PROGRAM, "-m", MODEL, "--batch", "-", "--out", "-", "-n", "1"],
                                       stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            program.stdin.write(json.dumps({"id": 0, "image": str(PICTURE)}).encode() + b"\n")
            program.stdin.flush()
            program.stdout.readline()
            program.send_signal(signal_)
            self.assertEqual(program.wait(timeout=30), 130)
            program.communicate()

    def test_a_lean_answer_has_what_differs_and_the_rest_is_written_once(self):
        self.write_input(2)
        command = ["-m", MODEL, "--batch", self.input, "--out", self.output, "-n", 2, "--kv", "int8", "--lean"]
        self.assert_sound(run(*command))
        for record in self.records():
            self.assertEqual(sorted(record), ["finish_reason", "id", "text"])
        shared = json.loads(Path(f"{self.output}.run.json").read_text())
        self.assertEqual((shared["model"], shared["spec"], shared["settings"]), (str(MODEL), "int8", {"max_tokens": 2}))
        self.write_input(3)
        result = run(*command)
        self.assert_sound(result)
        self.assertNotIn(b"do not record their flags", result.stderr)
        self.assertEqual(self.ids(), [0, 1, 2])
        result = run(*command, "-p", "why?")
        self.assertEqual(result.returncode, 2)
        self.assertIn(b"out.jsonl.run.json says that the answers", result.stderr)

    def test_lean_answers_do_not_mix_with_others(self):
        self.write_input(4)
        command = ["-m", MODEL, "--batch", self.input, "--out", self.output, "-n", 2]
        self.assert_sound(run(*command, "--lean"))
        Path(f"{self.output}.run.json").unlink()
        before = self.output.read_bytes()
        for more in (["--kv", "int4"], ["--kv", "int4", "--lean"], ["--lean"], []):
            self.assert_refused(run(*command, *more), 1, ["answers of --lean", "out.jsonl.run.json", "missing"])
        self.assertEqual(self.output.read_bytes(), before)

    def test_a_stream_that_nobody_takes_ends_the_batch(self):
        self.write_input(12)
        command = ["-m", MODEL, "--batch", self.input, "--out", "-", "-n", 2]
        with open("/dev/full", "w") as full:
            result = run(*command, capture_output=False, stdout=full, stderr=subprocess.PIPE)
        self.assertEqual(result.returncode, 1)
        self.assertIn(b"standard output cannot be written: No space left on device", result.stderr)
        self.assertNotIn(b"12 of 12", result.stderr)
        reader, writer = os.pipe()
        os.close(reader)
        result = run(*command, capture_output=False, stdout=writer, stderr=subprocess.PIPE)
        os.close(writer)
        self.assertEqual(result.returncode, 1)
        self.assertIn(b"standard output was closed", result.stderr)
        self.assertNotIn(b"12 of 12", result.stderr)

    def test_blank_lines_of_an_output_are_no_answers(self):
        self.write_input(3)
        self.assert_sound(self.batch())
        lines = self.output.read_text().splitlines(keepends=True)
        self.output.write_text(lines[0] + "\n  \n" + lines[1] + "\r\n")
        self.assert_sound(self.batch())
        after = [line for line in self.output.read_text().splitlines() if line.strip()]
        self.assertEqual([json.loads(line)["id"] for line in after], [0, 1, 2])
        self.output.write_text(lines[0] + "\nnot a record\n")
        self.assert_refused(self.batch(), 1, ["line 3 is not a record"])

    def test_quiet_is_not_silent_about_failures(self):
        self.write_input(1, [(0, json.dumps({"id": "gone", "image": "gone.png"}))])
        result = run("-q", "-m", MODEL, "--batch", self.input, "--out", self.output, "-n", 2)
        self.assert_refused(result, 1, ["1 failed (1 unreadable or damaged)", "out.jsonl"])

    def test_only_the_first_errors_are_printed(self):
        self.write_input(1, [(0, json.dumps({"id": f"gone {i}", "image": "gone.png"})) for i in range(50)])
        result = self.batch()
        self.assert_sound(result, 1)
        self.assertEqual(result.stderr.count(b"does not exist"), 20)
        self.assertEqual(result.stderr.count(b"further errors are in"), 1)
        self.assertIn(b"50 failed (50 unreadable or damaged)", result.stderr)
        self.assertEqual(len(self.records()), 51)

    def test_fewer_at_once_than_asked_is_said(self):
        self.write_input(6)
        result = run("-m", MODEL, "--batch", self.input, "--out", self.output, "-n", 4, "--batch-size", 6,
                     "--kv-memory", "30kB")
        self.assert_sound(result)
        self.assertRegex(result.stderr, rb"batch: memory holds \d sequences of these records at once, not 6; ")
        self.assertEqual(self.ids(), list(range(6)))

    def test_the_size_chosen_is_said(self):
        self.write_input(2)
        result = self.batch()
        self.assertRegex(result.stderr, rb"batch: --batch-size auto: 2 at once of records of \d+ tokens \(cache of ")
        for size in ("0", "4097", "many", ""):
            result = run("-m", MODEL, "--batch", self.input, "--out", self.output, "--batch-size", size)
            self.assertEqual(result.returncode, 2)

    def test_several_devices_answer_as_one(self):
        self.write_input(12, [(3, json.dumps({"id": "gone", "image": "gone.png"})), (5, "no record")])
        self.assert_sound(self.batch(), 1)
        alone = {str(record["id"]): record for record in self.records()}
        for more in ([], ["--lean"]):
            self.output.unlink()
            result = run("-m", MODEL, "--batch", self.input, "--out", self.output, "-n", 4, "--device=cpu,cpu,cpu", *more)
            self.assert_sound(result, 1)
            self.assertIn(b"14 of 14 records done, 2 failed", result.stderr)
            together = {str(record["id"]): record for record in self.records()}
            self.assertEqual(alone.keys(), together.keys())
            for name, record in together.items():
                for key in set(record) - {"timings", "memory"}:
                    self.assertEqual(record[key], alone[name][key], (name, key))
                if not more:
                    self.assertEqual(set(record), set(alone[name]))

    def test_several_devices_resume_and_stream(self):
        self.write_input(3)
        command = ["-m", MODEL, "--out", self.output, "-n", 2, "--device", "cpu,cpu", "--batch"]
        self.assert_sound(run(*command, self.input))
        self.write_input(6)
        result = run(*command, "-", input=self.input.read_bytes())
        self.assert_sound(result)
        self.assertIn(b"3 records done, 0 failed", result.stderr)
        self.assertEqual(self.ids(), list(range(6)))

    def test_a_lost_device_is_named_and_what_is_finished_is_kept(self):
        self.write_input(400)
        program = subprocess.Popen([PROGRAM, "-m", MODEL, "--batch", self.input, "--out", self.output, "-n", "100", "-t", "1",
                                    "--device", "cpu,cpu"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        while not (self.output.exists() and b"\n" in self.output.read_bytes()):
            self.assertIsNone(program.poll())
            time.sleep(0.01)
        children = Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()
        self.assertEqual(len(children), 2)
        os.kill(int(children[0]), signal.SIGKILL)
        error = program.communicate(timeout=60)[1]
        self.assertEqual(program.returncode, 1)
        self.assertRegex(error, rb"the process of cpu ended with status 137 and \d+ unanswered records?; run the same command")
        for child in children:
            self.assertFalse(Path(f"/proc/{child}").exists())
        self.assertGreater(len(self.ids()), 0)

    def test_several_devices_obey_a_signal(self):
        self.write_input(400)
        for signal_ in (signal.SIGINT, signal.SIGTERM):
            program = subprocess.Popen([PROGRAM, "-m", MODEL, "--batch", self.input, "--out", self.output, "-n", "100", "-t", "1",
                                        "--device", "cpu,cpu"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            count = self.output.read_bytes().count(b"\n") if self.output.exists() else 0
            while not (self.output.exists() and self.output.read_bytes().count(b"\n") > count):
                self.assertIsNone(program.poll())
                time.sleep(0.01)
            program.send_signal(signal_)
            program.communicate(timeout=30)
            self.assertEqual(program.returncode, 130)

    def test_devices_that_are_not_there_are_refused(self):
        self.write_input(1)
        for more in (["--gpus", "0"], ["--gpus", "many"], ["--gpus", "99"], ["--gpus", "2", "--device", "cpu"],
                     ["--device", "cpu,gpu"], ["--device", "cpu,"]):
            result = run("-m", MODEL, "--batch", self.input, "--out", self.output, *more)
            self.assertIn(result.returncode, (1, 2), more)
            self.assertEqual(len(result.stderr.splitlines()), 1, result.stderr)
        result = run("-m", MODEL, "--image", PICTURE, "--device", "cpu,cpu")
        self.assertEqual(result.returncode, 2)

    def test_the_end_tells_the_totals(self):
        self.write_input(3, [(1, json.dumps({"id": "lost", "image": "gone.png"}))])
        for size in (1, 2):
            self.output.unlink(missing_ok=True)
            result = run("-m", MODEL, "--batch", self.input, "--out", self.output, "-n", 4,
                         "--batch-size", size)
            self.assert_sound(result, 1)
            last = result.stderr.decode().splitlines()[-1]
            answers = [record for record in self.records() if "text" in record]
            tokens = sum(record["generated_tokens"] for record in answers)
            self.assertRegex(last, rf"^batch: 4 of 4 records done, 1 failed \(1 unreadable or damaged\); {tokens} tokens in "
                                   r"[\d.]+ s \([\d.]+ records/s, [\d.]+ tokens/s\), cache at most [\d.]+ .?B$")
            for record in answers:  # a rate that others share is none
                self.assertEqual("decode_tps" in record["timings"], size == 1)

    def test_a_malformed_line_is_reported_and_the_others_are_done(self):
        for line in ['{"id": 99, "image": ', "[1, 2]", '{"image": "x.png"}', "\xff not JSON"]:
            with self.subTest(line):
                self.output.unlink(missing_ok=True)
                self.write_input(3, [(1, line)])
                result = self.batch()
                self.assert_sound(result, 1)
                self.assertEqual(self.ids(), [0, 1, 2])
                self.assertIn("2", result.stderr.decode() + self.output.read_text())

    def test_a_record_that_fails_says_so_and_the_others_are_done(self):
        lost = json.dumps({"id": "lost", "image": str(self.folder / "gone.png")})
        self.write_input(2, [(1, lost)])
        self.assert_sound(self.batch(), 1)
        self.assertEqual(self.ids(), [0, 1])
        (failed,) = [record for record in self.records() if "error" in record]
        self.assertEqual(failed["id"], "lost")
        self.assertIn("gone.png", failed["error"])

    def test_a_second_start_skips_what_is_done(self):
        self.write_input(3)
        self.assert_sound(self.batch())
        done = self.output.read_bytes()
        result = self.batch()
        self.assert_sound(result)
        self.assertEqual(result.stderr.decode(), f"batch: 3 of 3 records are in {self.output} "
                                                 "already; nothing is left to do\n")
        self.assertEqual(self.output.read_bytes(), done)
        self.write_input(5)
        self.assert_sound(self.batch())
        self.assertTrue(self.output.read_bytes().startswith(done))
        self.assertEqual(self.ids(), [0, 1, 2, 3, 4])

    def test_a_file_that_is_not_ours_is_refused_and_kept(self):
        self.write_input(1)
        for text in ('[{"annotation": "precious"}]', "notes", '{"a": 1}\n', '{"annotation": 2}',
                     '{"id": 5, "caption": "precious"}', '{"id":5,"caption":"precious"}',
                     '{"id":5,"text":"x"}\n{"id":6,"caption":"precious"}', "\0" * 64):
            with self.subTest(text=text):
                self.output.write_text(text)
                result = self.batch()
                self.assert_sound(result, 1)
                self.assertIn(b"is not a record of a batch", result.stderr)
                self.assertEqual(self.output.read_text(), text)

    def test_a_whole_last_line_without_an_end_is_kept(self):
        line = '{"id": "mine", "text": "an answer"}'
        self.write_input(1)
        self.output.write_text(line)
        self.assert_sound(self.batch())
        self.assertEqual(self.output.read_text().splitlines()[0], line)
        self.assertEqual(len(self.records()), 2)

    def test_answers_of_other_settings_do_not_mix(self):
        self.write_input(2)
        cases = [(["--kv", "f16"], ["--kv", "int8"], ["--kv f16", "--kv int8"]),
                 (["-n", 2], ["-n", 3], ["--max-tokens 2", "--max-tokens 3"]),
                 (["-n", 2], [], ["--max-tokens 2", "no --max-tokens"]),
                 ([], ["-p", "abc"], ["no --prompt", "--prompt abc"]),
                 ([], ["--system", "be brief"], ["no --system", "--system be brief"]),
                 ([], ["--dtype", "f16"], ["no --dtype", "--dtype f16"]),
                 (["--temp", 0.5, "--seed", 1], ["--temp", 0.5, "--seed", 2], ["--seed 1"]),
                 (["--stop", "a"], ["--stop", "b"], ['--stop ["a"]', '--stop ["b"]']),
                 (["--system", "x" * 300], ["--system", "x" * 299], ["300 bytes", "299 bytes"]),
                 ([], ["--image-aspect", "pad"], ["--image-aspect pad"])]
        for before, now, words in cases:
            with self.subTest(f"{before} {now}"[:80]):
                self.output.unlink(missing_ok=True)
                command = ["-m", MODEL, "--batch", self.input, "--out", self.output]
                self.assert_sound(run(*command, *before))
                done = self.output.read_bytes()
                self.assert_refused(run(*command, *now), 2,
                                    [str(self.output), "record 0", "another --out", *words])
                self.assertEqual(self.output.read_bytes(), done)
                self.assert_sound(run(*command, *before))
                self.assertEqual(self.output.read_bytes(), done)

    def test_a_policy_is_the_same_however_it_is_spelt(self):
        self.write_input(1)
        for before, now in (("kivi,bits=2,group=8,residual=8", "kivi,residual=8,group=8,bits=2"),
                            ("prefixkv,keep=0.5 + int4", "int4 + prefixkv,keep=0.50"),
                            ("f16", "f16")):
            self.output.unlink(missing_ok=True)
            command = ["-m", MODEL, "--batch", self.input, "--out", self.output, "-n", 2, "--kv"]
            self.assert_sound(run(*command, before))
            self.assert_sound(run(*command, now, "--batch-size", 3, "-t", 1))

    def test_another_model_is_refused_and_another_name_of_it_is_not(self):
        self.write_input(1)
        self.assert_sound(self.batch())
        other = self.checkpoint(MODEL)
        command = ["--batch", self.input, "--out", self.output, "-n", 4]
        self.assert_refused(run("-m", other, *command), 2, ["--model", str(other), str(MODEL)])
        (self.folder / "link").symlink_to(MODEL)
        self.assert_sound(run("-m", self.folder / "link", *command))

    def test_an_output_of_an_earlier_version_is_gone_on_with(self):
        self.write_input(3)
        self.assert_sound(self.batch())
        lines = []
        for record in self.records()[:2]:
            for key in ("settings", "images", "prompt", "content"):
                del record[key]
            lines.append(json.dumps(record) + "\n")
        self.output.write_text("".join(lines))
        result = self.batch()
        self.assert_sound(result)
        self.assertIn(b"2 answers", result.stderr)
        self.assertEqual(self.ids(), [0, 1, 2])
        self.assert_refused(run("-m", MODEL, "--batch", self.input, "--out", self.output,
                                "--kv", "int4"), 2, ["--kv int4"])

    def test_a_failed_record_is_in_the_output_once(self):
        lost = [json.dumps({"id": "lost", "image": "gone.png"}), "no record"]
        self.write_input(2, enumerate(lost))
        for _ in range(3):
            self.assert_sound(self.batch(), 1)
            self.assertEqual(self.ids(), [0, 1])
            failed = [record for record in self.records() if "error" in record]
            self.assertEqual([record["id"] for record in failed], ["lost", None])
        # What an earlier version left: an error that was answered later, and one of another input.
        answered = '{"id":1,"error":"odd"}\n'
        foreign = '{"id":"elsewhere","error":"odd"}\n'
        self.output.write_text(answered + foreign + self.output.read_text())
        self.output.chmod(0o640)
        self.assert_sound(self.batch(), 1)
        self.assertEqual(len(self.records()), 5)
        self.assertIn(foreign, self.output.read_text())
        self.assertNotIn(answered, self.output.read_text())
        self.assertEqual(self.output.stat().st_mode & 0o777, 0o640)
        self.assertEqual(sorted(p.name for p in self.folder.iterdir()), ["in.jsonl", "out.jsonl"])

    def test_an_error_without_an_id_leaves_with_its_line(self):
        self.write_input(1, [(1, "no record")])
        self.assert_sound(self.batch(), 1)
        self.assertCountEqual([record["id"] for record in self.records()], [0, None])
        self.write_input(2)
        self.assert_sound(self.batch())
        self.assertEqual(self.ids(), [0, 1])
        self.append('{"id":null,"line":9,"error":"odd"}\n')
        self.assert_sound(self.batch())  # with nothing left to do
        self.assertEqual([record["id"] for record in self.records()], [0, 1])

    def test_a_failed_record_is_there_once_in_a_folder_that_takes_no_new_file(self):
        self.output = self.folder / ("x" * 254)  # so that no file beside it can be named after it
        self.write_input(3, [(1, json.dumps({"id": "lost", "image": "gone.png"})),
                             (3, json.dumps({"id": "gone", "image": "gone.png"}))])
        for _ in range(3):
            self.assert_sound(self.batch(), 1)
            self.assertEqual(self.ids(), [0, 1, 2])
            self.assertEqual([record["id"] for record in self.records() if "error" in record],
                             ["lost", "gone"])
        shutil.copy(PICTURE, self.folder / "gone.png")
        self.assert_sound(self.batch())
        self.assertEqual(len(self.records()), 5)

    def test_a_profile_is_what_its_file_says(self):
        self.write_input(1)
        profile = self.folder / "profile.json"
        command = ["-m", MODEL, "--batch", self.input, "--out", self.output, "-n", 2,
                   "--kv-profile"]
        profile.write_text('{"xquant": {"eta": {"2": 0.25}}}')
        self.assert_sound(run(*command, profile))
        renamed = self.folder / "renamed.json"
        shutil.copy(profile, renamed)
        self.assert_sound(run(*command, renamed))
        profile.write_text('{"xquant": {"eta": {"2": 0.125}}}')
        self.assert_refused(run(*command, profile), 2, ["--kv-profile", "profile.json"])

    def test_a_link_stays_a_link(self):
        self.write_input(1, [(0, json.dumps({"id": "lost", "image": "gone.png"}))])
        target = self.folder / "elsewhere.jsonl"
        self.output.symlink_to(target)
        self.assert_sound(self.batch(), 1)
        self.assert_sound(self.batch(), 1)
        self.assertTrue(self.output.is_symlink())
        self.assertEqual(len(target.read_text().splitlines()), 2)

    def test_an_output_that_another_program_changes_is_left_as_it_is(self):
        def changes():
            line = '{"id": "mine", "text": "by hand"}\n'
            yield "written to", lambda: self.append(line)
            yield "cut short", lambda: os.truncate(self.output, 0)
            yield "deleted or replaced", lambda: self.output.unlink()
            yield "deleted or replaced", lambda: other.replace(self.output)
        other = self.folder / "other"
        for words, change in changes():
            with self.subTest(words):
                other.write_text("")
                self.output.unlink(missing_ok=True)
                self.write_input(5000)
                process = subprocess.Popen(
                    [PROGRAM, "-m", MODEL, "--batch", self.input, "--out", self.output, "-n",
                     "300", "-q"], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
                try:
                    self.wait_for_a_record(process)
                    change()
                    kept = self.output.read_bytes() if self.output.exists() else None
                    _, stderr = process.communicate(timeout=TIMEOUT_S)
                finally:
                    process.kill()
                    process.wait()
                self.assertEqual(process.returncode, 1, stderr)
                self.assertIn(words, stderr)
                if kept is not None:  # one record may have been on its way
                    self.assertTrue(self.output.read_bytes().startswith(kept))
                self.assertEqual(self.output.exists(), kept is not None)

    def test_failed_records_are_tried_again(self):
        picture = self.folder / "later.png"
        record = json.dumps({"id": "late", "image": str(picture)})
        self.write_input(1, [(1, record)])
        self.assert_sound(self.batch(), 1)
        self.assert_sound(self.batch(), 1)
        picture.write_bytes(PICTURE.read_bytes())
        result = self.batch()
        self.assert_sound(result)
        self.assertIn(b"1 record of", result.stderr)
        self.assertIn("text", self.records()[-1])
        done = self.output.read_bytes()
        result = self.batch()
        self.assert_sound(result)
        self.assertNotIn(b"tried again", result.stderr, "its later line counts")
        self.assertEqual(self.output.read_bytes(), done)

    def test_a_failed_record_is_named_once(self):
        records = [{"id": "long", "prompt": "what is it? " * 600},
                   {"id": "mismatch", "image": str(PICTURE), "prompt": "<image> <image>"},
                   {"id": "gone", "image": "gone.png"}]
        self.write_input(0, [(i, json.dumps(record)) for i, record in enumerate(records)] +
                         [(3, "{}")])
        result = self.batch()
        self.assert_sound(result, 1)
        said = [line for line in result.stderr.decode().splitlines() if line.startswith("vlm-run")]
        self.assertEqual(len(said), 4, said)
        for line, name in zip(said, ("long", "mismatch", "gone", "line 4")):
            self.assertEqual(line.count(name), 1 if name != "gone" else 2, line)
            self.assertNotIn("null", line)
        self.assertNotIn(b"\r", result.stderr)
        self.assertNotIn(b"\033", result.stderr)

    def test_an_output_that_is_no_file_is_refused(self):
        self.write_input(1)
        os.mkfifo(self.output)
        self.assert_refused(self.batch(), 1, [str(self.output), "regular file"])

    def test_a_cache_for_no_more_sequences_than_records(self):
        if re.search(rb"__[at]san_init", PROGRAM.read_bytes()):
            self.skipTest("a sanitizer maps more memory than any limit that could show this")
        self.write_input(1)
        for size in (1, 4000):
            self.output.unlink(missing_ok=True)
            limit = 2**31
            result = run("-m", MODEL, "--batch", self.input, "--out", self.output, "-n", 400,
                         "--batch-size", size, "--kv", "f32", preexec_fn=lambda: resource.setrlimit(
                             resource.RLIMIT_DATA, (limit, limit)))
            self.assert_sound(result)

    def test_two_writers_of_one_file(self):
        import fcntl
        self.write_input(1)
        with self.output.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            result = self.batch()
        self.assert_sound(result, 1)
        self.assertIn(b"written by another vlm-run", result.stderr)

    def test_a_common_question(self):
        self.input.write_text(json.dumps({"id": 0, "image": str(PICTURE)}) + "\n")
        first = run("-m", MODEL, "--batch", self.input, "--out", self.output, "-n", 4, "-p", "abc")
        self.assert_sound(first)
        asked = self.records()[0]
        alone = run("-m", MODEL, "--image", PICTURE, "-n", 4, "-p", "abc", "--json")
        self.assertEqual(asked["tokens"], json.loads(alone.stdout)["tokens"])

    def test_a_torn_last_line_is_repaired(self):
        self.write_input(4)
        self.assert_sound(self.batch())
        whole = self.output.read_bytes()
        for torn in (whole[:-1], whole[:-10], whole[:len(whole) // 2]):
            with self.subTest(length=len(torn)):
                self.output.write_bytes(torn)
                self.assert_sound(self.batch())
                self.assertEqual(self.ids(), [0, 1, 2, 3])
                self.assertEqual(len(self.records()), 4)

    def test_a_full_disk_keeps_what_was_finished(self):
        self.write_input(40)
        limit = 2000  # bytes a file may have; writing on fails as on a full disk

        def full_disk():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        result = self.batch(preexec_fn=full_disk)
        self.assert_sound(result, 1)
        self.assertIn("out.jsonl", result.stderr.decode())
        self.assertLessEqual(self.output.stat().st_size, limit)
        kept = self.ids()
        self.assertGreaterEqual(len(kept), 1)
        self.assertEqual(kept, sorted(set(kept)))
        self.assert_sound(self.batch())  # room again
        self.assertEqual(self.ids(), list(range(40)))

    def wait_for_a_record(self, process):
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(FileNotFoundError):
                if b"\n" in self.output.read_bytes():
                    break
            time.sleep(0.02)

    def interrupt(self, number):
        self.write_input(5000)
        process = subprocess.Popen(
            [PROGRAM, "-m", MODEL, "--batch", self.input, "--out", self.output, "-n", "300"],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            self.wait_for_a_record(process)
            process.send_signal(number)
            _, stderr = process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()
            process.wait()
        self.assertNotIn(b"Sanitizer", stderr)
        self.assertEqual(process.returncode, 130, stderr.decode())
        self.assertTrue(self.output.read_bytes().endswith(b"\n"))
        kept = self.ids()
        self.assertGreaterEqual(len(kept), 1)
        self.assertLess(len(kept), 5000)

    def test_an_interrupt_keeps_what_was_finished(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            with self.subTest(number):
                self.interrupt(number)
                self.output.unlink()


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
    unittest.main()
