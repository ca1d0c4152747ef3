"""What pycocoevalcap alone makes of standard files, for comparison with results.json; Java is needed, too."""

import json
import shutil
import subprocess
import sys
import unittest
from pathlib import Path

from eval_case import EvalCase, environment, python_with_scorers


class WithPackages(EvalCase):
    """Tests that call pycocoevalcap, in an interpreter that has it."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        if python_with_scorers() is None:
            raise unittest.SkipTest("pycocoevalcap is not here; tools/eval/setup.sh installs it")
        if shutil.which("java") is None:
            raise unittest.SkipTest("there is no java; Debian's default-jre-headless has it")

    def direct(self, name, annotations, results):
        """Corpus scores and those of the images, by this file's function `name`."""
        done = subprocess.run([python_with_scorers(), Path(__file__), name, str(annotations), str(results)], text=True,
                              capture_output=True, env=environment() | {"LC_ALL": "C.UTF-8"})  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout.splitlines()[-1])

    def compare(self, found, corpus, items):
        """A row of results.json against direct(): the same scores of the same images to 1e-6."""
        for name, value in corpus.items():
            self.assertAlmostEqual(found["scores"][name], value, delta=1e-6, msg=name)
        self.assertEqual(set(found["scores"]), set(corpus))
        for key, values in items.items():
            for name, value in values.items():
                self.assertAlmostEqual(found["items"][key][name], value, delta=1e-6, msg=f"{key} {name}")
        self.assertEqual(set(found["items"]), set(items))


def print_coco(annotations, results):
    """COCOEvalCap as its example has it, over the images that have results; without SPICE, which downloads."""
    from unittest import mock

    from pycocoevalcap import eval as package
    from pycocotools.coco import COCO

    class NoSpice:
        def method(self):
            return "none"

        def compute_score(self, references, texts):
            return 0, [0] * len(texts)

    coco = COCO(annotations)
    with mock.patch.object(package, "Spice", NoSpice):
        read = coco.loadRes(results)
        run = package.COCOEvalCap(coco, read)
        run.params["image_id"] = read.getImgIds()
        run.evaluate()
    names = {f"Bleu_{n}": f"BLEU-{n}" for n in range(1, 5)} | {name: name for name in ("METEOR", "ROUGE_L", "CIDEr")}
    items = {image: {names[k]: float(v) for k, v in of.items() if k in names} for image, of in run.imgToEval.items()}
    print(json.dumps([{names[k]: float(v) for k, v in run.eval.items() if k in names}, items]))


def print_raw(annotations, results):
    """The package's scorers on the strings of the files, times 100, over the images that have results."""
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.rouge.rouge import Rouge

    data = json.loads(Path(annotations).read_text())
    references = {image["id"]: [] for image in data["images"]}
    for note in data["annotations"]:
        references[note["image_id"]].append(note["caption"])
    texts = {row["image_id"]: [row["caption"]] for row in json.loads(Path(results).read_text())}
    references = {key: of for key, of in references.items() if key in texts}
    texts = {key: texts[key] for key in references}
    corpus, items = {}, {key: {} for key in references}
    for scorer, names in ((Bleu(4), [f"BLEU-{n}" for n in range(1, 5)]), (Rouge(), ["ROUGE_L"]), (Cider(), ["CIDEr"])):
        whole, each = scorer.compute_score(references, texts)
        for name, value, values in zip(names, whole if len(names) > 1 else [whole], each if len(names) > 1 else [each]):
            corpus[f"raw {name}"] = 100 * float(value)
            for key, one in zip(references, values):
                items[key][f"raw {name}"] = 100 * float(one)
    print(json.dumps([corpus, items]))


if __name__ == "__main__":
    {"print_coco": print_coco, "print_raw": print_raw}[sys.argv[1]](*sys.argv[2:])
