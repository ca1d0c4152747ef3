"""tools/eval/budgets.py: the table of four tasks at several budgets, tiny, started again and with a set of one's own."""

import csv
import json
import unittest

from eval_case import HELDOUT, WithModel

import budgets  # noqa: E402  (of tools/eval)
from results import Result  # noqa: E402

COMMAND = ("budgets.py", "--out", "out", "--limit", 2, "--fidelity", 0, "--device", "cpu", "--threads", 1, "--batch-size", 2,
           "--rule", "random", "--budgets", "0.2")  # fmt: skip


class Table(unittest.TestCase):
    def test_a_score_by_hand(self):
        def rows(*values):
            return {key: Result("m", "-", "chartqa", "val", "native", {"0": {}}, {"relaxed accuracy": value, "human": 0.0})
                    for key, value in zip(((None, "f16"), (0.05, "h2o")), values)}  # fmt: skip

        table = budgets.table({"docvqa": rows(1.0, 0.5), "vizwiz": rows(0.5, 0.5)})
        self.assertIn("| all | `f16` | 1.0000 | 0.5000 | 100.0 % |", table)
        self.assertIn("| 5 % | `h2o` | 0.5000 | 0.5000 | 75.0 % |", table)

    def test_a_rule_that_keeps_more_than_was_asked(self):
        """SnapKV's window of 64 tokens, at a budget of a tenth."""
        scores = {"relaxed accuracy": 1.0}
        for stored, shown in ((1.7, "10 %"), (4.0, "10 % (25 % stored)"), (None, "10 %")):
            rows = {(level, rule): Result("m", "-", "chartqa", "val", "native", {"0": {}}, scores, stored_bits=bits)
                    for level, rule, bits in ((None, "f16", 16.0), (0.1, "snapkv", stored))}  # fmt: skip
            self.assertIn(f"| {shown} | `snapkv` | 1.0000 | 100.0 % |", budgets.table({"chartqa": rows}))


class Run(WithModel):
    def test_four_tasks_and_again(self):
        out = self.run_well(*COMMAND)
        self.assertEqual(out, (self.folder / "out/budgets.md").read_text())
        self.assertIn("| all | `f16` | 1.0000 | 1.0000 | 1.0000 | 1.0000 | 100.0 % |", out)
        self.assertRegex(out, r"\| 20 % \| `random` \| ")
        rows = list(csv.DictReader((self.folder / "out/budgets.csv").read_text().splitlines()))
        self.assertEqual([(row["task"], row["kept"], row["rule"]) for row in rows],
                         [(task, kept, rule) for task in ("DocVQA", "ChartQA", "TextVQA", "VizWiz")
                          for kept, rule in (("1", "f16"), ("0.2", "random"))])  # fmt: skip
        answers = {path: path.read_bytes() for path in self.folder.rglob("answers.jsonl")}
        self.assertEqual(self.run_well(*COMMAND), out)
        self.assertEqual({path: path.read_bytes() for path in self.folder.rglob("answers.jsonl")}, answers)

    def test_answers_of_one_token(self):
        """Fidelity starts at a text's second token, so answers of one token have none."""
        status, _, err = self.run_script(*COMMAND, "--fidelity", 2, "--model", "pocket-qwen")
        self.assertEqual(status, 1, err)
        self.assertIn("nothing was compared: every text has one token", err)
        self.assertIn("; --fidelity 0 leaves out KL, top-1 and stored bits", err)
        self.assertIn("budgets.py: textvqa failed", err)

    def test_a_set_of_one_s_own(self):
        data = json.loads((HELDOUT / "documents_heldout.json").read_text())["data"][:1]
        rows = [{"imgname": row["image"], "query": row["question"], "label": row["answers"][0]} for row in data]
        own = ("--set", f"chartqa={self.write('test_human.json', rows)}", "--images", f"chartqa={HELDOUT}", "--protocol", "native")
        out = self.run_well(*COMMAND, *own)
        self.run_well(*COMMAND[:-2], "--bits", "8,4", "--fidelity", 2, *own)
        rows = list(csv.DictReader((self.folder / "out/budgets.csv").read_text().splitlines()))
        self.assertEqual([(row["bits"], row["rule"]) for row in rows], [("16", "f16"), ("8.0", "random"), ("4.0", "random")])
        for row in rows:
            self.assertAlmostEqual(float(row["stored_bits"]), float(row["bits"]), delta=0.2)
        self.assertIn("| kept | rule | ChartQA (relaxed accuracy) | mean of f16's |", out)
        for wrong in (("--set", "chart=x"), ("--set", "chartqa"), ("--budgets", "2"), ("--bits", "4")):
            status, _, err = self.run_script(*COMMAND, *wrong)
            self.assertEqual((status, "Traceback" in err), (2, False), err)


if __name__ == "__main__":
    unittest.main()
