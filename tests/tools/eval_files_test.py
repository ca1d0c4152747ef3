"""Wrong files are refused by the first offending id; right ones are read as the data sets have them."""

import unittest
from pathlib import Path

from eval_case import HELDOUT, EvalCase

import descriptions  # noqa: E402  (of tools/eval)
import files  # noqa: E402
import models  # noqa: E402
import protocols  # noqa: E402
import video_files  # noqa: E402
from errors import EvaluationError  # noqa: E402


def captions(**changes):
    images = [{"id": 11, "file_name": "a.png"}, {"id": 12, "file_name": "b.png"}]
    notes = [{"id": n, "image_id": 11 + n // 5, "caption": f"caption {n}"} for n in range(10)]
    return {"images": images, "annotations": notes} | changes


def documents(*changes):
    data = [{"questionId": n, "question": f"What is {n}?", "image": f"{n}.png", "answers": [str(n)]} for n in (5, 6)]
    for number, change in enumerate(changes):
        data[number] = {k: v for k, v in (data[number] | change).items() if v is not None}
    return {"dataset_split": "val", "data": data}


class Annotations(EvalCase):
    def refused(self, read, name, value, *words):
        with self.assertRaises(EvaluationError) as caught:
            read(self.write(name, value))
        message = str(caught.exception)
        self.assertEqual(len(message.splitlines()), 1)
        for word in (name, *words):
            self.assertIn(word, message)

    def test_captions(self):
        changed = captions()["annotations"]
        for words, value in (
            (["image 12", "no caption"], captions(annotations=changed[:5])),
            (["image 11", "twice"], captions(images=[captions()["images"][0]] * 2)),
            (["annotation 3", "twice"], captions(annotations=[*changed, changed[3]])),
            (["annotation 10", "image 99"], captions(annotations=[*changed, {"id": 10, "image_id": 99, "caption": ""}])),
            (["annotation 10", "no caption"], captions(annotations=[*changed, {"id": 10, "image_id": 11, "bbox": []}])),
            (["'id'"], captions(images=[{"file_name": "a.png"}])),
            (["'id'"], captions(annotations=[{"id": None, "image_id": 11, "caption": "text"}])),
            (["image 7", "twice"], captions(images=[{"id": 7}, {"id": "7"}])),
            (["'images'"], []),
        ):
            self.refused(files.read_captions, "captions_val2014.json", value, *words)

    def test_documents(self):
        for words, value in (
            (["question 5", "twice"], documents({}, {"questionId": 5})),
            (["question 6", "'question'"], documents({}, {"question": None})),
            (["question 6", "'image'"], documents({}, {"image": ""})),
            (["question 6", "no answers", "question 5"], documents({}, {"answers": None})),
            (["question 5", "strings"], documents({"answers": [7]})),
            (["'questionId'"], documents({"questionId": None})),
            (["'data'"], {"data": []}),
        ):
            self.refused(files.read_documents, "val_v1.0.json", value, *words)

    def test_no_file_and_no_json(self):
        (self.folder / "x.json").write_text("{\x1b[31m")
        (self.folder / "deep.json").write_text("[" * 100000)
        for name in ("x.json", "none.json", "deep.json"):
            with self.assertRaisesRegex(EvaluationError, name) as caught:
                files.read_captions(self.folder / name)
            self.assertNotIn("\x1b", str(caught.exception))

    def test_a_byte_order_mark_is_no_content(self):
        path = self.write("captions_val2014.json", captions())
        plain = files.read_captions(path)
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
        self.assertEqual(files.read_captions(path), plain)

    def test_half_a_surrogate_pair_is_refused_by_record_and_field(self):
        half = "What\ud800?"
        clip = {"questionId": 7, "video": "a.mp4", "kind": "question", "question": "What?", "answers": ["x"]}
        mvbench = {"video": "a.mp4", "question": "What?", "candidates": ["x", "y"], "answer": "x"}
        said = captions()["annotations"]
        for words, read, value in (
            (["question 6", "its question"], files.read_documents, documents({}, {"question": half})),
            (["question 5", "its references"], files.read_documents, documents({"answers": ["5", half]})),
            (["question 5", "its image"], files.read_documents, documents({"image": half})),
            (["question \\ud800", "its id"], files.read_documents, documents({"questionId": "\ud800"})),
            (["image 12", "its references"], files.read_captions, captions(annotations=[*said[:9], said[9] | {"caption": half}])),
            (["question 7", "its question"], video_files.read_videos, {"data": [clip | {"question": half}]}),
            (["question 7", "its video"], video_files.read_videos, {"data": [clip | {"video": half}]}),
            (["question val-0", "its options"], video_files.read_videos, [mvbench | {"candidates": ["x", half]}]),
            (["record 0", "its question"], descriptions.read_any, [{"image": "a.png", "question": half, "answer": "x"}]),
        ):
            self.refused(read, "val.json", value, *words, "half of a surrogate pair")
        for script in (["coco.py"], ["docvqa.py"], ["vqa.py", "--task", "vizwiz"], ["video.py"], ["fidelity.py"]):
            value = {"coco.py": captions(annotations=[*said[:9], said[9] | {"caption": half}]), "video.py": {"data": [clip | {"question": half}]},
                     "vqa.py": [{"image": "a.png", "question": half, "answers": []}]}.get(script[0], documents({"question": half}))
            status, _, err = self.run_script(*script, "--out", "out", "--annotations", self.write("val.json", value))
            self.assertEqual((status, "half of a surrogate pair" in err, len(err.splitlines())), (1, True, 1), err)

    def test_where_coco_has_its_pictures(self):
        bare = captions(images=[{"id": 11}, {"id": 12}])
        for name, split, picture in (
            ("captions_val2014", "val2014", "COCO_val2014_000000000011.jpg"),
            ("captions_val2017", "val2017", "000000000011.jpg"),
            ("coco_karpathy_test_gt", "karpathy_test", "COCO_val2014_000000000011.jpg"),
        ):
            (self.folder / "annotations").mkdir(exist_ok=True)
            (self.folder / ("val2014" if "karpathy" in name else split)).mkdir(exist_ok=True)
            read = files.read_captions(self.write(f"annotations/{name}.json", bare))
            self.assertEqual((read.name, read.items[0].image.name), (split, picture))
            self.assertEqual(read.items[0].image.parent.parent, self.folder)
        read = files.read_captions(self.write("captions_val2014.json", captions()), Path("elsewhere"))
        self.assertEqual([item.image for item in read.items], [Path("elsewhere/a.png"), Path("elsewhere/b.png")])
        self.assertEqual(read.items[1].references, [f"caption {n}" for n in range(5, 10)])

    def test_objects_of_coco_s_instances(self):
        split = files.read_captions(self.write("captions_val2014.json", captions()))
        images = captions()["images"]
        boxes = [{"id": n, "image_id": 12, "bbox": [0, 0, 1, 1]} for n in range(3)]
        path = self.write("instances.json", {"images": images, "annotations": boxes})
        self.assertEqual([item.objects for item in files.with_objects(split, path).items], [0, 3])
        for words, value in (
            ("annotation 7 .* no object", {"images": images, "annotations": [*boxes, {"id": 7, "image_id": 12}]}),
            ("annotation 8 .* no object", {"images": images, "annotations": [{"id": 8, "image_id": 1, "bbox": []}]}),
            ("image 11 .* is not in", {"images": images[1:], "annotations": boxes}),
            ("image 12 comes twice", {"images": [*images, images[1]], "annotations": boxes}),
        ):
            with self.assertRaisesRegex(EvaluationError, words):
                files.with_objects(split, self.write("instances.json", value))

    def test_parts(self):
        split = files.read_captions(HELDOUT / "captions_heldout.json")
        part = split.part(limit=5, tune=3)
        self.assertEqual([item.id for item in part.items], [0, 1, 2, 3, 4])
        self.assertEqual([item.id for item in part.tuning], [197, 198, 199])
        self.assertEqual(part.name, "heldout-without-last-3-first-5")
        self.assertEqual(split.part(limit=500, tune=0).name, "heldout")
        most = split.part(limit=None, tune=199)
        self.assertFalse({item.id for item in most.items} & {item.id for item in most.tuning})
        with self.assertRaisesRegex(EvaluationError, "--tune 200"):
            split.part(limit=None, tune=200)
        others = files.read_captions(HELDOUT.parent / "tuning" / "captions_tuning.json")
        apart = split.part(limit=None, tune=0, tune_on=others)
        self.assertEqual((len(apart.items), len(apart.tuning), apart.name), (200, 32, "heldout"))
        self.assertEqual([item.id for item in split.part(None, 5, others).tuning], [0, 1, 2, 3, 4])
        with self.assertRaisesRegex(EvaluationError, "--tune 33 is more than the 32 records"):
            split.part(limit=None, tune=33, tune_on=others)
        with self.assertRaisesRegex(EvaluationError, "record 0 of .* scored as well"):
            split.part(limit=None, tune=2, tune_on=split)
        self.assertEqual(part.items[0].objects, 7)  # "There are seven objects"


class Results(EvalCase):
    def test_results_of_another_split(self):
        annotations = self.write("captions_val2014.json", captions())
        right = [{"image_id": 11, "caption": "x"}, {"image_id": 12, "caption": "y"}]
        for words, rows in (
            (["image 13", "not in"], [*right, {"image_id": 13, "caption": "z"}]),
            (["image 11", "twice"], [right[0], *right]),
            (["1 results", "has 2", "image 12 is missing"], right[:1]),
            (["image 12", "'caption'"], [right[0], {"image_id": 12}]),
            (["'image_id'"], [{"caption": "x"}]),
            (["no array"], {"image_id": 11}),
        ):
            path = self.write("r.json", rows)
            with self.assertRaises(EvaluationError) as caught:
                files.read_caption_results(path, files.read_captions(annotations))
            for word in ("r.json", *words):
                self.assertIn(word, str(caught.exception))

    def test_answers_of_another_split_and_right_ones(self):
        annotations = self.write("val_v1.0.json", documents())
        command = ("docvqa.py", "--out", "out", "--annotations", annotations, "--results")
        wrong = self.write("r.json", [{"questionId": 5, "answer": "5"}, {"questionId": 7, "answer": "7"}])
        self.assert_refused(self.run_script(*command, wrong), "question 7", "r.json")
        self.assert_refused(self.run_script(*command, self.write("r.json", [])), "question 5 is missing")
        right = self.write("r.json", [{"questionId": 6, "answer": "7"}, {"questionId": 5, "answer": " 5"}])
        for idle in (("--kv", "kivi"), ("--model", "pocket"), ("--shard", "1/2"), ("--merge",)):
            self.assert_refused(self.run_script(*command, right, *idle), "--results", f"{idle[0]} says nothing")
        self.assertIn("| r.json | `-` | val | lmms-eval | 2 | 0.5000 |", self.run_well(*command, right))

    def test_a_missing_picture_is_refused_before_the_model_runs(self):
        answer = self.run_script("docvqa.py", "--out", "out", "--annotations", self.write("val_v1.0.json", documents()))
        self.assert_refused(answer, "question 5", "5.png", "--images")
        self.assertFalse((self.folder / "out").exists())

    def test_a_test_split_is_not_scored(self):
        annotations = self.write("test_v1.0.json", documents({"answers": None}, {"answers": None}))
        rows = self.write("r.json", [{"questionId": n, "answer": ""} for n in (5, 6)])
        self.assert_refused(self.run_script("docvqa.py", "--out", "out", "--annotations", annotations, "--results", rows),
                            "no answers")  # fmt: skip


class Protocols(EvalCase):
    """Against the table of docs/evaluation.md: what each harness asks of each family."""

    def ways(self, name, split, family):
        way = protocols.find_protocol(name, split, family)
        return way.ask(split.items[0]), way.max_tokens, way.flags

    def test_captions(self):
        val = files.read_captions(self.write("captions_val2014.json", captions()))
        test = files.read_captions(self.write("karpathy_test.json", captions()))
        one = "Provide a one-sentence caption for the provided image."
        pixels = ("--min-pixels", "200704", "--max-pixels", "1605632")
        self.assertEqual(self.ways("lmms-eval", val, "llava"), (one, 64, ()))
        self.assertEqual(self.ways("lmms-eval", val, "qwen2_5"), (one, 64, pixels))
        self.assertEqual(self.ways("lmms-eval", test, "internvl"), ("Describe the image briefly.", 64, ()))
        self.assertEqual(self.ways("internvl", test, "internvl"), (one, 30, ("--tiles", "12")))
        self.assertTrue(self.ways("vlmevalkit", val, "qwen3")[0].endswith('prefix like "This image depicts". '))
        self.assertEqual(self.ways("native", val, "llava"), (None, None, ()))
        self.assertNotIn("exact", protocols.find_protocol("native", val, "llava").metrics)

    def test_documents(self):
        val = files.read_documents(self.write("val_v1.0.json", documents({"question": "What {question}?"})))
        short = "What {question}?\nAnswer the question using a single word or phrase."
        self.assertEqual(self.ways("lmms-eval", val, "internvl"), (short, 32, ()))
        self.assertEqual(self.ways("vlmevalkit", val, "internvl"), (short, 4096, ("--tiles", "18")))
        self.assertIn("\nPlease try to answer", self.ways("vlmevalkit", val, "qwen2_5")[0])
        self.assertIn("\nPlease answer concisely", self.ways("vlmevalkit", val, "qwen3")[0])
        self.assertEqual(self.ways("internvl", val, "internvl"), (short, 100, ("--tiles", "18")))
        self.assertEqual(self.ways("native", val, "llava"), ("What {question}?", None, ()))

    def test_families(self):
        for name, family in (("pocket", "llava"), ("pocket-internvl", "internvl"), ("pocket-qwen", "qwen2_5")):
            self.assertEqual(models.find_model(name).family, family)
        self.assertEqual([models.family_of(kind) for kind in ("internvl_chat", "qwen2_vl", "qwen3_vl", "llava_onevision")],
                         ["internvl", "qwen2", "qwen3", "llava"])  # fmt: skip
        with self.assertRaisesRegex(EvaluationError, "--model nobody/nothing"):
            models.find_model("nobody/nothing")


if __name__ == "__main__":
    unittest.main()
