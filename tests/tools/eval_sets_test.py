"""Image sets as people have them: tables with images inside, test splits, Karpathy's file, ids as text; wrong and hostile files."""

import base64
import contextlib
import csv
import importlib.util
import io
import itertools
import json
import shutil
import unittest

from eval_case import HELDOUT, EvalCase, WithModel, results_of

import descriptions  # noqa: E402  (of tools/eval)
import files  # noqa: E402
import protocols  # noqa: E402
import results  # noqa: E402
import video_files  # noqa: E402
from errors import EvaluationError  # noqa: E402

IMAGES = sorted((HELDOUT / "documents").glob("*.png"))[:3]
TEN = ["yes"] * 7 + ["no"] * 3
COCO = "https://images.cocodataset.org/val2014/COCO_val2014_000000000042.jpg"
# task -> columns of two rows as lmms-lab has them, without the image
PARQUET = {
    files.DOCUMENTS: [{"questionId": "49153", "question": "What?", "docId": 1, "answers": ["a", "b"], "data_split": "val"},
                      {"questionId": "49154", "question": "Who?", "docId": 1, "answers": ["c"], "data_split": "val"}],
    files.CAPTIONS: [{"question_id": "COCO_val2014_000000000042.jpg", "question": "Caption?", "answer": ["a cat", "cat"], "id": 3,
                      "coco_url": COCO},
                     {"question_id": "COCO_val2014_000000000073.jpg", "question": "Caption?", "answer": ["a dog"], "id": 4, "coco_url": COCO}],
    files.CHARTQA: [{"type": "human_test", "question": "How many?", "answer": "14"},
                    {"type": "augmented_test", "question": "Which?", "answer": "[1, 2]"}],
    files.TEXTVQA: [{"question_id": 34602, "image_id": "003a8ae2ef43b901", "question": "What brand?", "answers": TEN},
                    {"question_id": 34603, "image_id": "003a8ae2ef43b901", "question": "Which?", "answers": TEN}],
    files.VIZWIZ: [{"question_id": "VizWiz_val_00000000", "question": "What is it?", "answers": TEN, "category": "other"},
                   {"question_id": "VizWiz_val_00000001", "question": "And this?", "answers": TEN, "category": "other"}],
}  # fmt: skip
# the same of VLMEvalKit, by its file names
TSV = {
    "DocVQA_VAL.tsv": (files.DOCUMENTS, [{"question": "What?", "answer": "['a', \"b's\"]"}, {"question": "Who?", "answer": "['c']"}]),
    "COCO_VAL.tsv": (files.CAPTIONS, [{"answer": "['a cat', 'cat']"}, {"answer": "['a dog']"}]),
    "ChartQA_TEST.tsv": (files.CHARTQA, [{"question": "How many?", "answer": "14", "split": "test_human"},
                                         {"question": "Which?", "answer": "x", "split": "test_augmented"}]),
    "TextVQA_VAL.tsv": (files.TEXTVQA, [{"question": "What brand?", "answer": str(TEN)}, {"question": "Which?", "answer": str(TEN)}]),
    "VizWiz.tsv": (files.VIZWIZ, [{"question": "What is it?", "answers": str(TEN)}, {"question": "And this?", "answers": str(TEN)}]),
}  # fmt: skip
SCRIPTS = {files.CAPTIONS: ["coco.py", "--skip", "pycocoevalcap"], files.DOCUMENTS: ["docvqa.py"],
           **{task: ["vqa.py", "--task", task] for task in (files.CHARTQA, files.TEXTVQA, files.VIZWIZ)}}  # fmt: skip
REGIONS = [{"question_id": "1-a", "question": "?", "answer": answers, "bbox": box, "segmentation": [1.0], "file_name": "a.jpg"}
           for answers, box in ((["left cat", "cat"], [2.0, 3.0, 10.0, 20.0]), (["dog"], [9.0, 9.0, 21.0, 22.0]))]
needs_pyarrow = unittest.skipUnless(importlib.util.find_spec("pyarrow"), "pyarrow is not here; tools/eval/setup.sh installs it")


def read(task, path, images=None):
    return files.read_captions(path, images) if task == files.CAPTIONS else files.read_questions(path, images, task=task)


class SetCase(EvalCase):
    def parquet(self, name, rows, images=IMAGES):
        import pyarrow
        import pyarrow.parquet

        rows = [row | {"image": {"bytes": image.read_bytes(), "path": None}} for row, image in zip(rows, images)]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), self.folder / name)
        return self.folder / name

    def tsv(self, name, rows, images=IMAGES):
        cells = [base64.b64encode(x.read_bytes()).decode() if hasattr(x, "read_bytes") else x for x in images]
        rows = [{"index": n, "image": cell} | row for n, (row, cell) in enumerate(zip(rows, cells))]
        with (self.folder / name).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0], delimiter="\t", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        return self.folder / name

    def refused(self, task, path, *words):
        with self.assertRaises(EvaluationError) as caught:
            read(task, path)
        message = str(caught.exception)
        self.assertEqual(len(message.splitlines()), 1)
        for word in (path.name, *words):
            self.assertIn(word, message)


class Tables(SetCase):
    def check(self, task, split, ids):
        self.assertEqual((split.task, [item.id for item in split.items]), (task, ids))
        self.assertTrue(split.scored)
        made = split.with_images(self.folder / "images")
        self.assertEqual([item.image.read_bytes() for item in made.items], [image.read_bytes() for image in IMAGES[:2]])
        self.assertEqual({item.image.suffix for item in made.items}, {".png"})
        return made

    @needs_pyarrow
    def test_parquet_of_lmms_lab(self):
        ids = {files.DOCUMENTS: [49153, 49154], files.CAPTIONS: [42, 73], files.CHARTQA: [0, 1], files.TEXTVQA: [34602, 34603],
               files.VIZWIZ: ["VizWiz_val_00000000", "VizWiz_val_00000001"]}  # fmt: skip
        for task, rows in PARQUET.items():
            split = read(task, self.parquet("validation-00000-of-00001.parquet", rows))
            self.assertEqual(split.name, "val2014" if task == files.CAPTIONS else "validation")
            self.check(task, split, ids[task])
            self.assertEqual(descriptions.read_any(split.path), split)
        chart = read(files.CHARTQA, self.parquet("test-00000-of-00001.parquet", PARQUET[files.CHARTQA]))
        self.assertEqual([(item.references, item.groups) for item in chart.items],
                         [(["14"], {"split": "human"}), (["[1, 2]"], {"split": "augmented"})])  # fmt: skip

    def test_tsv_of_vlmevalkit(self):
        for name, (task, rows) in TSV.items():
            split = read(task, self.tsv(name, rows))
            self.check(task, split, [0, 1])
            self.assertEqual(split.name, name[:-4])
            self.assertEqual(descriptions.read_any(split.path), split)
        documents = read(files.DOCUMENTS, self.tsv("DocVQA_VAL.tsv", TSV["DocVQA_VAL.tsv"][1]))
        self.assertEqual(documents.items[0].references, ["a", "b's"])

    def test_rows_that_share_an_image(self):
        rows = [{"question": f"What {n}?", "answer": str(n)} for n in range(4)]
        split = read(files.CHARTQA, self.tsv("ChartQA_TEST.tsv", rows, [IMAGES[0], "0", "3", IMAGES[1]]))
        made = split.with_images(self.folder / "images")
        expected = [IMAGES[n].read_bytes() for n in (0, 0, 1, 1)]
        self.assertEqual([item.image.read_bytes() for item in made.items], expected)
        self.assertEqual(len(list((self.folder / "images").iterdir())), 2)

    def test_images_are_written_once_and_only_those_that_are_asked_about(self):
        path = self.tsv("DocVQA_VAL.tsv", TSV["DocVQA_VAL.tsv"][1])
        first = read(files.DOCUMENTS, path).part(1, 0).with_images(self.folder / "images")
        (written,) = (self.folder / "images").iterdir()
        self.assertEqual(written, first.items[0].image)
        before = written.stat()
        read(files.DOCUMENTS, path).with_images(self.folder / "images")
        self.assertEqual((written.stat().st_mtime_ns, written.stat().st_ino), (before.st_mtime_ns, before.st_ino))
        self.assertEqual(len(list((self.folder / "images").iterdir())), 2)

    @needs_pyarrow
    def test_the_parts_of_a_split(self):
        rows = PARQUET[files.TEXTVQA]
        for number in range(2):
            self.parquet(f"validation-0000{number}-of-00003.parquet", [rows[number]], IMAGES[number:])
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            split = read(files.TEXTVQA, self.folder / "validation-00000-of-00003.parquet")
        self.assertIn("note: 2 of the 3 parts", said.getvalue())
        self.check(files.TEXTVQA, split, [34602, 34603])
        self.assertEqual(split.name, "validation")

    def test_a_test_split_has_empty_answers(self):
        rows = [{"question": "What?", "answer": cell} for cell in ("", "[]")]
        self.assertFalse(read(files.DOCUMENTS, self.tsv("DocVQA_TEST.tsv", rows)).scored)
        self.refused(files.DOCUMENTS, self.tsv("DocVQA_TEST.tsv", [rows[0], rows[1] | {"answer": "x"}]), "question 1", "answers")

    def test_damaged_tables(self):
        for words, name, content in (
            (["no parquet file", "pyarrow"], "val.parquet", b"PAR1 and no more"),
            (["not UTF-8"], "DocVQA_VAL.tsv", b"index\tquestion\n\xff\xfe\t3\n"),
            (["no rows"], "DocVQA_VAL.tsv", b"index\tquestion\tanswer\n"),
            (["more cells"], "DocVQA_VAL.tsv", b"index\tquestion\tanswer\timage\n1\ta\tb\tc\td\n"),
        ):
            (self.folder / name).write_bytes(content)
            with self.assertRaises(EvaluationError) as caught:
                read(files.DOCUMENTS, self.folder / name)
            self.assertTrue(any(word in str(caught.exception) for word in words), str(caught.exception))
        split = read(files.DOCUMENTS, self.tsv("DocVQA_VAL.tsv", TSV["DocVQA_VAL.tsv"][1], ["!" * 100, "?" * 100]))
        with self.assertRaisesRegex(EvaluationError, "row 0 .* no base64"):
            split.with_images(self.folder / "images")


class Published(SetCase):
    def test_authors_files_of_questions(self):
        (self.folder / "train_images").mkdir()
        (self.folder / "train_images/003a.jpg").write_bytes(b"")
        text = [{"question_id": 7, "image_id": "003a", "question": "What?", "answers": TEN}]
        wiz = [{"image": f"VizWiz_val_{n}.jpg", "question": "?", "answers": [{"answer": x, "answer_confidence": "yes"} for x in TEN]}
               for n in range(2)]  # fmt: skip
        chart = [{"imgname": "1.png", "query": "How many?", "label": "3"}]
        for task, name, value, split, ids, image in (
            (files.TEXTVQA, "TextVQA_0.5.1_val.json", {"data": text}, "val", [7], "train_images/003a.jpg"),
            (files.VIZWIZ, "val.json", wiz, "val", ["VizWiz_val_0.jpg", "VizWiz_val_1.jpg"], "VizWiz_val_0.jpg"),
            (files.CHARTQA, "test_human.json", chart, "test_human", [0], "1.png"),
        ):
            found = read(task, self.write(name, value))
            self.assertEqual((found.name, [item.id for item in found.items], found.items[0].image), (split, ids, self.folder / image))
            self.assertEqual(len(found.items[0].references), 1 if task == files.CHARTQA else 10)
        bare = [{"image": "VizWiz_test_0.jpg", "question": "?"}]
        self.assertFalse(read(files.VIZWIZ, self.write("test.json", bare)).scored)

    def test_karpathy_s_file(self):
        images = [{"filepath": "val2014", "filename": f"COCO_val2014_{n:012}.jpg", "cocoid": n, "imgid": 0, "split": split,
                   "sentences": [{"raw": f"Caption {n}.", "tokens": []}] * 5}
                  for n, split in ((1, "train"), (2, "test"), (3, "val"), (4, "test"))]  # fmt: skip
        split = read(files.CAPTIONS, self.write("dataset_coco.json", {"images": images, "dataset": "coco"}))
        self.assertEqual((split.name, [item.id for item in split.items]), ("karpathy_test", [2, 4]))
        self.assertEqual(split.items[0].references, ["Caption 2."] * 5)
        self.assertEqual(split.items[0].image, self.folder / "val2014/COCO_val2014_000000000002.jpg")
        flickr = [{"filename": "1.jpg", "imgid": 9, "split": "test", "sentences": [{"raw": "x"}]}]
        split = read(files.CAPTIONS, self.write("dataset_flickr30k.json", {"images": flickr, "dataset": "flickr30k"}))
        self.assertEqual((split.name, split.items[0].id), ("flickr30k_karpathy_test", 9))

    def test_ids_as_text(self):
        images = [{"id": "COCO_train2014_000000581857_16", "file_name": "a.png"}, {"id": "b", "file_name": "b.png"}]
        notes = [{"id": f"r{n}", "image_id": images[n]["id"], "caption": "a cat"} for n in range(2)]
        annotations = self.write("captions_refs.json", {"images": images, "annotations": notes})
        rows = self.write("r.json", [{"image_id": image["id"], "caption": "a cat"} for image in images])
        texts = files.read_caption_results(rows, read(files.CAPTIONS, annotations))
        self.assertEqual(list(texts), [image["id"] for image in images])
        documents = {"data": [{"questionId": "q-1", "question": "?", "image": "a.png", "answers": ["x"]}]}
        out = self.run_well("docvqa.py", "--out", "out", "--annotations", self.write("val.json", documents), "--results",
                            self.write("d.json", [{"questionId": "q-1", "answer": "x"}]))  # fmt: skip
        self.assertIn("| val | lmms-eval | 1 | 1.0000 |", out)

    def test_what_a_wrong_file_is(self):
        documents = {"data": [{"questionId": 1, "question": "?", "image": "a.png", "answers": ["x"]}]}
        for task, path, words in (
            (files.CAPTIONS, self.write("val_v1.0.json", documents), ["DocVQA", "docvqa.py"]),
            (files.CHARTQA, self.write("val_v1.0.json", documents), ["DocVQA", "docvqa.py"]),
            (files.DOCUMENTS, self.write("human.json", [{"imgname": "1", "query": "?", "label": "3"}]), ["ChartQA", "vqa.py --task chartqa"]),
            (files.DOCUMENTS, self.write("captions.json", {"images": [{"id": 1, "file_name": "a"}], "annotations": []}), ["COCO"]),
            (files.DOCUMENTS, self.write("mme.json", [{"video_id": "1", "questions": []}]), ["Video-MME"]),
            (files.CHARTQA, self.tsv("DocVQA_VAL.tsv", TSV["DocVQA_VAL.tsv"][1]), ["DocVQA", "docvqa.py"]),
            (files.DOCUMENTS, self.tsv("COCO_VAL.tsv", TSV["COCO_VAL.tsv"][1]), ["COCO", "coco.py"]),
        ):
            self.refused(task, path, *words)

    @needs_pyarrow
    def test_what_a_wrong_parquet_is(self):
        for task, given in itertools.permutations(PARQUET, 2):
            if (task, given) == (files.VIZWIZ, files.TEXTVQA):
                continue  # has all that VizWiz's has
            path = self.parquet("val.parquet", PARQUET[given])
            self.refused(task, path)
        self.refused(files.TEXTVQA, self.parquet("val.parquet", REGIONS), "RefCOCO, which coco.py reads")
        for box in ([0, 0, 1], [0, 0, -1, 1], [0, 0, float("nan"), 1], "box"):
            self.refused(files.CAPTIONS, self.parquet("val.parquet", [REGIONS[0] | {"bbox": box}]), "region 0", "left, top")

    @needs_pyarrow
    @unittest.skipUnless(importlib.util.find_spec("PIL"), "Pillow is not here; tools/eval/setup.sh installs it")
    def test_regions_are_drawn(self):
        from PIL import Image

        path = self.parquet("val-00000-of-00001.parquet", REGIONS, [IMAGES[0], IMAGES[0]])
        split = descriptions.read_any(path)
        self.assertEqual((split, split.name), (read(files.CAPTIONS, path), "regions_val"))
        self.assertEqual([(x.id, x.references) for x in split.items], [(0, ["left cat", "cat"]), (1, ["dog"])])
        whole = Image.open(IMAGES[0]).convert("RGB")
        for item, (left, top, right, bottom) in zip(split.with_images(self.folder / "images").items, [(2, 3, 12, 23), (9, 9, 30, 31)]):
            drawn = Image.open(item.image)
            edge = {(x, y) for x in range(left, right + 1) for y in range(top, bottom + 1) if x in (left, right) or y in (top, bottom)}
            for place in itertools.product(range(40), range(40)):
                self.assertEqual(drawn.getpixel(place), (255, 0, 0) if place in edge else whole.getpixel(place), place)
        way = protocols.find_protocol("lmms-eval", split, "qwen2_5")
        self.assertEqual((way.ask(split.items[0]), way.max_tokens), ("Provide a short description for this region.", 128))
        with self.assertRaisesRegex(EvaluationError, "no way with regions"):
            protocols.find_protocol("vlmevalkit", split, "llava")

    def test_images_stay_in_their_folder(self):
        for name in ("../../../etc/passwd", "/etc/passwd", "a/../../x.png", "..", "a\0b", "", "."):
            documents = {"data": [{"questionId": 1, "question": "?", "image": name, "answers": ["x"]}]}
            coco = {"images": [{"id": 1, "file_name": name}], "annotations": [{"id": 1, "image_id": 1, "caption": "x"}]}
            self.refused(files.DOCUMENTS, self.write("val.json", documents), "question 1")
            if name:
                self.refused(files.CAPTIONS, self.write("captions.json", coco), "image 1", "--images")
                self.refused(files.TEXTVQA, self.write("val.json", {"data": [{"question_id": 1, "image_id": name + "/x.png",
                             "question": "?"}]}) if name not in (".", "a/../../x.png") else self.write("val.json", {}))  # fmt: skip
        with self.assertRaisesRegex(EvaluationError, "record 0 .* --images"):
            descriptions.read_any(self.write("mm-vet.json", [{"image": "../x", "question": "?", "answer": "x"}]))
        clip = {"data": [{"questionId": 1, "question": "?", "video": "../../x.webp", "answers": ["x"], "kind": "question"}]}
        with self.assertRaisesRegex(EvaluationError, "question 1 .* --videos"):
            video_files.read_videos(self.write("clips.json", clip))


class Runs(SetCase, WithModel):
    COMMAND = ("--device", "cpu", "--threads", 1, "--batch-size", 1, "--fidelity", 0)

    def test_a_test_split_of_coco_is_answered(self):
        (self.folder / "img").mkdir()
        shutil.copy(IMAGES[0], self.folder / "img/1.png")
        annotations = self.write("image_info_test2014.json", {"images": [{"id": 1, "file_name": "1.png"}], "categories": []})
        status, out, err = self.run_script("coco.py", "--out", "out", "--annotations", annotations, "--images", "img", *self.COMMAND)
        self.assertEqual((status, out), (0, ""), err)
        self.assertIn("nothing is scored", err)
        (file,) = self.folder.glob("out/pocket/f16/captions_test2014_pocket-f16_results.json")
        self.assertEqual([(row["image_id"], type(row["caption"])) for row in json.loads(file.read_text())], [(1, str)])

    def test_a_table_is_answered_and_scored(self):
        data = json.loads((HELDOUT / "documents_heldout.json").read_text())["data"][:2]
        rows = [{"question": row["question"], "answer": str(row["answers"])} for row in data]
        path = self.tsv("DocVQA_VAL.tsv", rows, [HELDOUT / row["image"] for row in data])
        out = self.run_well("docvqa.py", "--out", "out", "--annotations", path, "--protocol", "native", *self.COMMAND)
        self.assertIn("| DocVQA_VAL | native | 2 | 1.0000 |", out)
        self.assertEqual(len(list((self.folder / "out/images").iterdir())), 2)
        self.assertEqual(list(results_of(self.folder / "out/results.json")[0]["items"]), ["0", "1"])


DEEP = "[" * 100_000
STRANGE = [None, True, 5, -1.5, "text", "\ud800", "", [], {}, [1], [None], [[]], [{}], {"a": 1}, {"id": []}, [{"id": {}}], {"images": 5},
           {"images": [1]}, {"images": [{"id": []}]}, {"images": [{"id": 1}], "annotations": [1]},
           {"images": [{"id": 1}], "annotations": {"a": 1}}, {"images": [{"id": 1}], "annotations": [{"id": 1, "image_id": []}]},
           {"images": [{"id": 1}], "annotations": [{"id": 1, "image_id": {}, "bbox": 1}]}, {"images": [{"id": 1, "sentences": 5}]},
           {"images": [{"id": 1, "split": "test", "sentences": [5], "cocoid": 1, "filename": []}]}, {"data": 5}, {"data": [5]},
           {"data": [{"questionId": []}]}, {"data": [{"questionId": 1, "question": "?", "image": [], "answers": 5}]},
           {"data": [{"questionId": 1, "question": "?", "image": "a", "answers": {"a": 1}}]}, {"data": [{"question_id": {}, "image_id": []}]},
           {"meta": {"a": 5}, "root": {"a": 5}}, {"meta": {"a": [5]}, "root": {"a": "b"}}, [{"questions": 5, "video_id": []}],
           [{"questions": [5]}], [{"questions": [{"question_id": [], "options": 5}]}], [{"candidates": 5}],
           [{"video": [], "candidates": ["a", "b"], "answer": []}], [{"imgname": 5, "query": 5, "label": []}], [{"image": 5, "conversations": 5}],
           [{"image": "a", "conversations": [5, 5]}], [{"image": "a", "question": "?", "answers": [5]}], [{"imagename": 5}],
           {"a": {"imagename": 5}}, [{"model": 5}], [{"id": 1e400}], [10**30], {"images": [{"id": 10**30, "file_name": 5}]}]  # fmt: skip


class Strange(SetCase):
    """No file gives a traceback: every reader refuses it in a sentence, or reads it."""

    def readers(self):
        documents = read(files.DOCUMENTS, HELDOUT / "documents_heldout.json")
        captions = read(files.CAPTIONS, HELDOUT / "captions_heldout.json")
        mme = files.Split(video_files.VIDEO_MME, "x", self.folder, documents.items)
        yield files.read_captions
        for task in files.QUESTIONS:
            yield lambda path, task=task: files.read_questions(path, task=task)
        yield from (descriptions.read_any, video_files.read_videos, results.read_results)
        yield lambda path: files.with_objects(captions, path)
        yield lambda path: files.read_caption_results(path, captions)
        yield lambda path: files.read_answer_results(path, documents)
        yield lambda path: video_files.read_video_results(path, mme)

    def test_structures(self):
        texts = [json.dumps(value) for value in STRANGE] + [DEEP, "", "{", '{"a":' * 3000, "\0", "1" * 5000, '[{"id":' + "9" * 4400 + "}]"]
        self.assertGreaterEqual(len(texts), 40)
        for text, reader in itertools.product(texts, list(self.readers())):
            for name in ("x.json", "x.tsv"):
                path = self.folder / name
                path.write_text(text, encoding="utf-8")
                try:
                    reader(path)
                except EvaluationError as error:
                    self.assertEqual(len(str(error).splitlines()), 1, text[:80])
                    self.assertTrue(str(error).isprintable(), text[:80])

    def test_facts_of_scenes(self):
        for value in STRANGE:
            shutil.copy(HELDOUT / "captions_heldout.json", self.folder)
            self.write("scene_facts.json", value)
            with contextlib.suppress(EvaluationError):
                files.read_captions(self.folder / "captions_heldout.json")

    def test_commands(self):
        for value in ({"images": [{"id": 1}], "annotations": [1]}, [], {"data": [{"questionId": [], "question": "\x1b[31m"}]}, DEEP):
            path = self.folder / "x\x1b[31m.json"
            path.write_text(value if isinstance(value, str) else json.dumps(value))
            for script in ("coco.py", "docvqa.py", "vqa.py", "video.py", "fidelity.py"):
                task = ("--task", "vizwiz") if script == "vqa.py" else ()
                status, out, err = self.run_script(script, *task, "--out", "out", "--annotations", path)
                self.assertEqual((status, out, len(err.splitlines())), (1, "", 1), err)
                self.assertTrue(err.strip().isprintable() and "Traceback" not in err and "a fault of" not in err, err)
        status, _, err = self.run_script("report.py", "--out", "out", path)
        self.assertEqual((status, len(err.splitlines())), (1, 1), err)

    def test_names_on_the_command_line(self):
        for arguments in (("--out", "o", "--annotations", "\x1b[31m.json"), ("--out", "o", "--bogus\x1b[31m"), ("--out", "o", "--limit", "\x1b[31m"),
                          ("--out", "o", "--model", "\x1b[31m"), ("--out", "o", "--kv", "\x1b[31m")):  # fmt: skip
            status, _, err = self.run_script("docvqa.py", *arguments)
            self.assertIn(status, (1, 2), err)
            self.assertNotIn("\x1b", err)


if __name__ == "__main__":
    unittest.main()
