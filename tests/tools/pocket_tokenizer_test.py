"""The tokenizers of the bundled models; run by `python3 pocket_tokenizer_test.py`.

Needs the package tokenizers, sentencepiece for pocket-llava's second form, and jinja2 for the chat templates; what lacks
its package is skipped.
"""

import json
import random
import re
import sys
import unittest
from pathlib import Path

try:
    import jinja2
except ImportError:
    jinja2 = None
try:
    import tokenizers
except ImportError:
    tokenizers = None
try:
    import sentencepiece
except ImportError:
    sentencepiece = None

POCKET = Path(__file__).resolve().parents[2] / "tools" / "pocket"
HELDOUT = POCKET / "heldout"
CAPTION = "There is one object: a red ring marked K in row 1, column 2."


def held_out_questions() -> list[dict]:
    found = []
    for name in ("documents", "questions", "clips"):
        found += json.loads((HELDOUT / f"{name}_heldout.json").read_text())["data"]
    return found


def held_out_texts() -> list[str]:
    coco = json.loads((HELDOUT / "captions_heldout.json").read_text())
    asked = held_out_questions()
    texts = [note["caption"] for note in coco["annotations"]]
    return texts + [record["question"] for record in asked] + [text for record in asked for text in record["answers"]]


def foreign_texts() -> list[str]:
    rng = random.Random(1)
    texts = ["".join(rng.choices("abcdefghijklmnop rstuvwxyzABEGKU0123:;,.$-/\n", k=40)) for _ in range(2000)]
    foreign = ("h\u00e9llo w\u00f6rld \u20ac12", "\u65e5\u672c\u8a9e text", "\U0001f600")
    return [*texts, *foreign, "two  spaces ", "a\tb\nc\n\n", "a" * 50]


@unittest.skipIf(tokenizers is None, "needs the package tokenizers")
class Tokenizers(unittest.TestCase):
    def load(self, model: str):
        return tokenizers.Tokenizer.from_file(str(POCKET / model / "tokenizer.json"))

    @unittest.skipIf(sentencepiece is None, "needs the package sentencepiece")
    def test_the_two_forms_of_llavas_agree(self):
        fast = self.load("pocket-llava")
        slow = sentencepiece.SentencePieceProcessor(model_file=str(POCKET / "pocket-llava/tokenizer.model"))
        asked = [f"\n{record['question']} ASSISTANT:" for record in held_out_questions()]
        for text in (*held_out_texts(), *asked, *foreign_texts()):
            ids = fast.encode(text, add_special_tokens=False).ids
            self.assertEqual(ids, slow.encode(text), text)
            self.assertEqual(fast.decode(ids), text)

    def test_texts_come_back(self):
        for model in ("pocket-internvl", "pocket-qwen"):
            fast = self.load(model)
            for text in (*held_out_texts(), *foreign_texts()):
                self.assertEqual(fast.decode(fast.encode(text).ids), text)

    def test_what_must_be_read_is_spelled_out(self):
        for model, space in (("pocket-llava", "\u2581"), ("pocket-internvl", "\u0120"), ("pocket-qwen", "\u0120")):
            fast = self.load(model)

            def tokens(text: str) -> list[str]:
                found = [t.removeprefix(space) for t in fast.encode(text, add_special_tokens=False).tokens]
                return [t for t in found if t]

            self.assertEqual(tokens("$12.50"), ["$", "1", "2", ".", "5", "0"])
            self.assertEqual(tokens("KX-204"), ["K", "X", "-", "2", "0", "4"])
            for token in fast.get_vocab():
                digits = sum(c.isdigit() for c in token)
                self.assertTrue(digits == 0 or token.startswith("<0x") or len(token) == 1, token)

    def test_special_tokens(self):
        ids = self.load("pocket-llava").encode("USER: <image>\nHi</s><pad>").ids
        self.assertEqual(ids[0], 1)
        self.assertEqual([ids.count(i) for i in (766, 2, 767)], [1, 1, 1])
        for model, named in (
            ("pocket-llava", {"<unk>": 0, "<s>": 1, "</s>": 2, "<image>": 766, "<pad>": 767}),
            ("pocket-internvl", {"<|endoftext|>": 752, "<|im_end|>": 754, "<IMG_CONTEXT>": 757, "<video>": 758}),
            ("pocket-qwen", {"<|endoftext|>": 752, "<|im_end|>": 754, "<|image_pad|>": 758, "<|video_pad|>": 759}),
        ):
            fast = self.load(model)
            settings = json.loads((POCKET / model / "tokenizer_config.json").read_text())["added_tokens_decoder"]
            for token, i in named.items():
                self.assertEqual(fast.token_to_id(token), i)
                self.assertEqual(fast.encode(token, add_special_tokens=False).ids, [i])
                self.assertEqual(settings[str(i)]["content"], token)

    @unittest.skipIf(jinja2 is None, "needs the package jinja2")
    def test_talks_are_taught_as_the_templates_write_them(self):
        sys.path.insert(0, str(POCKET))
        import conversations

        turns = [("Describe the image.", CAPTION), ("Which letter is on the red ring?", "K")]
        messages = []
        for ask, answer in turns:
            picture = [] if messages else [{"type": "image"}]
            messages.append({"role": "user", "content": [*picture, {"type": "text", "text": ask}]})
            messages.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
        parted_by_a_space = next(random.Random(s) for s in range(9) if random.Random(s).random() >= 0.5)
        for family, visual in (("llava", "<image>"), ("internvl", "<IMG_CONTEXT>"), ("qwen", "<|image_pad|>")):
            folder = POCKET / f"pocket-{family}"
            template = re.sub(r"{% (end)?generation %}", "", (folder / "chat_template.jinja").read_text())
            text = jinja2.Template(template).render(messages=messages).rstrip()
            if family == "internvl":  # its processor puts them there
                text = text.replace(visual, f"<img>{visual}</img>")
            encode, fast = conversations.encoder(folder, family), self.load(folder.name)
            ids, labels = conversations.conversation(encode, turns, parted_by_a_space)
            self.assertEqual([*encode.prefix, fast.token_to_id(visual), *ids], fast.encode(text).ids, family)
            taught = [label for label in labels if label != conversations.IGNORE]
            expected = [[*encode(answer), encode.end] for _, answer in turns]
            self.assertEqual(taught, [i for answer in expected for i in answer])


if __name__ == "__main__":
    unittest.main()
