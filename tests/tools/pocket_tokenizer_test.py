"""The two forms of the shipped tokenizer must agree; run by `python3 pocket_tokenizer_test.py`.

Needs the packages tokenizers and sentencepiece, and is skipped without them.
"""

import json
import random
import unittest
from pathlib import Path

try:
    import sentencepiece
    import tokenizers
except ImportError:
    sentencepiece = tokenizers = None

POCKET = Path(__file__).resolve().parents[2] / "tools" / "pocket"
HELDOUT = POCKET / "heldout"


@unittest.skipIf(tokenizers is None, "needs the packages tokenizers and sentencepiece")
class Tokenizer(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = POCKET / "pocket-llava"
        cls.fast = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        cls.slow = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))

    def check(self, text: str) -> None:
        ids = self.fast.encode(text, add_special_tokens=False).ids
        self.assertEqual(ids, self.slow.encode(text), text)
        self.assertEqual(self.fast.decode(ids), text)

    def test_held_out_texts(self):
        coco = json.loads((HELDOUT / "captions_heldout.json").read_text())
        for note in coco["annotations"]:
            self.check(note["caption"])
        for name in ("documents", "questions"):
            for record in json.loads((HELDOUT / f"{name}_heldout.json").read_text())["data"]:
                self.check(f"\n{record['question']} ASSISTANT:")
                for answer in record["answers"]:
                    self.check(answer)

    def test_random_and_foreign_texts(self):
        rng = random.Random(1)
        for _ in range(2000):
            self.check("".join(rng.choices("abcdefghijklmnop rstuvwxyzABEGKU0123:;,.$-/\n", k=40)))
        foreign = ("h\u00e9llo w\u00f6rld \u20ac12", "\u65e5\u672c\u8a9e text", "\U0001f600")
        for text in (*foreign, "two  spaces ", "a\tb\nc\n\n", "a" * 50):
            self.check(text)

    def test_what_must_be_read_is_spelled_out(self):
        def tokens(text: str) -> list[str]:
            return [t for t in self.fast.encode(text, add_special_tokens=False).tokens if t != "\u2581"]

        self.assertEqual(tokens("$12.50"), ["\u2581$", "1", "2", ".", "5", "0"])
        self.assertEqual(tokens("KX-204"), ["\u2581K", "X", "-", "2", "0", "4"])
        for token in self.fast.get_vocab():
            digits = sum(c.isdigit() for c in token)
            self.assertTrue(digits == 0 or token.startswith("<0x") or len(token) == 1, token)

    def test_special_tokens(self):
        ids = self.fast.encode("USER: <image>\nHi</s><pad>").ids
        self.assertEqual(ids[0], 1)
        named = [self.fast.token_to_id(t) for t in ("<unk>", "<s>", "</s>", "<image>", "<pad>")]
        self.assertEqual(named, [0, 1, 2, 766, 767])
        self.assertEqual([ids.count(i) for i in (766, 2, 767)], [1, 1, 1])


if __name__ == "__main__":
    unittest.main()
