#!/usr/bin/env python3
"""Reads every page, help text and message against the rules of CONTRIBUTING.md, "Words".

Pages: lines of at most 128 characters outside tables; at most 20 words a sentence on average and 40 in any; no word of BANNED;
no page above its LENGTH; all pages that people wrote together at most WORDS words. Help texts and messages, which are the
string literals of the sources that hold a space, and comments of scripts and build files: no word of BANNED.

Runs as a test; `tests/prose_test.py FILE...` lists what is wrong in these files alone. Standard library only.
"""

import ast
import re
import subprocess
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COLUMNS, MEAN, LONGEST, WORDS = 128, 20, 40, 46_000
LENGTH = {"README.md": 110, "docs/results.md": 150, "docs/engineering-notes.md": 300, "docs/glossary.md": 60,
          "docs/architecture.md": 200}
# Printed by vlm-kv list, tools/results/page.py and claims.py; not counted among the words that people wrote.
GENERATED = {"docs/policies.md", "docs/policy-options.md", "docs/results.md", "docs/papers/claims.md"}
SOURCES = ("examples", "kernels", "kvcache", "kvlm", "llm", "runtime", "vision", "tools")
DATA = ("tools/pocket/", "tools/golden/")  # texts that models were trained on, and names of the reference's own

BUILD_FILES = (".sh", ".cmake", "CMakeLists.txt", "Dockerfile", "Dockerfile.cuda", ".ci/run")

# A private or household word, and what the field says.
BANNED = {
    r"lanes?\b(?<!warp lane)(?<!warp lanes)": "KV head",
    r"planes?": "K cache, V cache",
    r"pictures?": "image",
    r"clips?(?!\.jsonl)": "video, or: clipped range",
    r"beside": "with, next to, in the same run as",
    r"behind": "after",
    r"(?:tell|tells|told)": "name the call: pass, upload, report",
    r"(?:lay|lays|laid)": "store, build, arrange",
    r"(?:mend|mends|mended|mending)": "fix",
    r"seldom": "rarely",
    r"nobody": "name the actor",
    r"(?:stands|stood)": "is, remains, applies",
    r"(?:in any|in other|its|whose) company": "batch-invariant; the other sequences of the batch",
    r"unturned|turned (?:by|back|rows|keys|queries)": "rotated",
    r"forced\s+(?:text|tokens|steps|logits|answers?)(?<!teacher-forced text)(?<!teacher-forced tokens)": "teacher-forced",
    r"drafts?": "staging buffer",
    r"pieces?": "split, part",
    r"(?:full|packed|prompt|visual|generated|plain|stored|newest|oldest|dropped|kept|dead|live|f16|text|cached|sink)\s+rows?":
        "tokens, or KV entries",
    r"not decided|undecided": "inconclusive",
    r"chance": "random baseline",
    r"width of a code": "bit width",
    r"(?:slots right|slot accuracy)": "facts",
    r"paints?": "draw",
}
BANNED_RE = re.compile(r"(?<![\w-])(?:" + "|".join(f"(?P<w{i}>{word})" for i, word in enumerate(BANNED))
                       + r")(?![\w-])",
                       re.IGNORECASE)
CURES = list(BANNED.values())
CLIP_TOWER = re.compile(r"\bCLIP\b")

ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|vs|etc|al|eq|fig|sec|no|approx)\.", re.IGNORECASE)
LITERAL = re.compile(r'//[^\n]*|/\*.*?\*/|R"(?P<mark>[^()\\\s]*)\((?P<raw>.*?)\)(?P=mark)"|"(?P<text>(?:\\.|[^"\\\n])*)"'
                     r"|(?<![0-9A-Fa-f])'(?:\\.|[^'\\\n])+'", re.DOTALL)


def tracked(*patterns):
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z", "--", *patterns], cwd=ROOT, check=True,
                            capture_output=True, text=True).stdout
    return sorted(name for name in listed.split("\0") if name and (ROOT / name).is_file())


def without_code(text):
    """The lines of a page with code blocks as empty lines."""
    lines = re.sub(r"^```.*?^```", lambda m: re.sub(r"[^\n]", "", m[0]), text, flags=re.MULTILINE | re.DOTALL).split("\n")
    item = False  # below a list item an indent of four may continue it
    for i, line in enumerate(lines):
        if re.match(r" *(?:[-*]|\d+\.) ", line):
            item = True
        elif line and not line.startswith(" "):
            item = False
        if line.startswith("    ") and not item:
            lines[i] = ""
    return lines


def prose(text):
    """without_code(), with tables, comments and headings as empty lines, too."""
    text = re.sub(r"<!--.*?-->", lambda m: re.sub(r"[^\n]", "", m[0]), text, flags=re.DOTALL)
    return ["" if re.match(r"\s*(?:\||#+ |<)", line) else line for line in without_code(text)]


def plain(line):
    """Without code spans and the targets of links."""
    line = re.sub(r"``.+?``|`[^`]*`", "CODE", line)
    return re.sub(r"!?\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])", r"\1", line)


def paragraphs(text):
    """(first line number, words in one string) of each paragraph and list item."""
    at, words = 0, []
    whole = re.sub(r"`[^`]*`", lambda m: m[0].replace(" ", "_").replace("\n", "\n"), "\n".join(prose(text)))
    for number, line in enumerate([*whole.split("\n"), ""], 1):
        starts = re.match(r"\s*(?:[-*]|\d+\.) ", line)
        if (not line.strip() or starts) and words:
            yield at, " ".join(words)
            words = []
        if line.strip():
            at = at if words else number
            words.append(re.sub(r"^\s*(?:[-*]|\d+\.) |^> ?", "", line).strip())


def sentences(text):
    """(line, number of words) of each sentence."""
    for at, paragraph in paragraphs(text):
        joined = ABBREVIATION.sub(lambda m: m[0].replace(".", ""), plain(paragraph))
        for sentence in re.split(r"(?<=[.!?])[)\"*_]*\s+", joined):
            count = len([word for word in sentence.split() if re.search(r"\w", word)])
            if count:
                yield at, count, sentence


def banned(text, line_of):
    for match in BANNED_RE.finditer(text):
        if not CLIP_TOWER.match(match[0]):
            cure = CURES[next(i for i in range(len(CURES)) if match[f"w{i}"])]
            yield line_of(match.start()), f'"{match[0]}"; write: {cure}'


def page_faults(name, text):
    for number, line in enumerate(text.split("\n"), 1):
        if len(line) > COLUMNS and not line.lstrip().startswith("|"):
            yield f"{name}:{number}: {len(line)} characters, at most {COLUMNS} outside tables"
    counts = []
    for at, count, sentence in sentences(text):
        counts.append(count)
        if count > LONGEST:
            yield f"{name}:{at}: a sentence of {count} words, at most {LONGEST}: {sentence[:60]} ..."
    if counts and sum(counts) / len(counts) > MEAN:
        yield f"{name}:1: {sum(counts) / len(counts):.1f} words a sentence on average, at most {MEAN}"
    shown = re.sub(r"`[^`]*`", lambda m: re.sub(r"[^\n`]", "_", m[0]), "\n".join(without_code(text)))
    shown = "\n".join(map(plain, shown.split("\n")))
    for number, fault in banned(shown, lambda at: shown.count("\n", 0, at) + 1):
        yield f"{name}:{number}: {fault}"
    lines = text.count("\n")
    if lines > LENGTH.get(name, lines):
        yield f"{name}:1: {lines} lines, at most {LENGTH[name]}"


def cpp_faults(name, text):
    """Adjacent literals are one text, so a phrase over two lines is found."""
    for match in LITERAL.finditer(text):
        said = match["raw"] if match["raw"] is not None else match["text"]
        if said and " " in said and not re.match(r'\s*#\s*include', text[text.rfind("\n", 0, match.start()) + 1:match.start()]):
            first = text.count("\n", 0, match.start()) + 1
            for number, fault in banned(said, lambda at: first + said.count("\n", 0, at)):
                yield f"{name}:{number}: {fault}"


def python_faults(name, text):
    tree = ast.parse(text)
    docstrings = {id(node.body[0].value) for node in ast.walk(tree)
                  if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.body and isinstance(node.body[0], ast.Expr)}
    for node in ast.walk(tree):  # a module's docstring is its --help
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value and id(node) not in docstrings:
            said = re.sub(r"`[^`]*`", lambda m: "_" * len(m[0]), node.value)
            for number, fault in banned(said, lambda at: node.lineno + said.count("\n", 0, at)):
                yield f"{name}:{number}: {fault}"


def comment_faults(name, text):
    """Of the comments of a script or a build file."""
    said = "\n".join(match[1] if (match := re.search(r"(?:^|\s)#(?!!)(.*)", line)) else "" for line in text.split("\n"))
    for number, fault in banned(said, lambda at: said.count("\n", 0, at) + 1):
        yield f"{name}:{number}: {fault}"


def faults(name, text):
    if name.endswith(".md"):
        return list(page_faults(name, text))
    if name.endswith(BUILD_FILES):
        return list(comment_faults(name, text))
    if name.endswith(".py"):
        return list(python_faults(name, text))
    return list(cpp_faults(name, text))


def sources():
    return [name for name in tracked(*SOURCES) if name.endswith((".cpp", ".h", ".cu", ".cuh", ".py"))
            and not name.startswith(DATA) and "/test" not in name] + tracked(*("*" + end for end in BUILD_FILES))


def words(text):
    """Of a page, without the tables that a program writes into it and a test compares."""
    return len(re.sub(r"<!--[^>]*made by tools/.*?<!-- end -->", "", text, flags=re.DOTALL).split())


class ThisTree(unittest.TestCase):
    maxDiff = None

    def test_pages(self):
        names = tracked("*.md")
        self.assertGreater(len(names), 10)
        self.assertEqual([], [f for name in names for f in faults(name, (ROOT / name).read_text("utf-8"))])

    def test_help_and_messages(self):
        names = sources()
        self.assertGreater(len(names), 100)
        self.assertEqual([], [f for name in names for f in faults(name, (ROOT / name).read_text("utf-8"))])

    def test_all_pages_together(self):
        total = sum(words((ROOT / name).read_text("utf-8")) for name in tracked("*.md") if name not in GENERATED)
        self.assertLessEqual(total, WORDS)


class Checker(unittest.TestCase):
    """Plants one fault at a time."""

    def test_a_long_line_is_found_and_a_long_table_row_is_legal(self):
        self.assertEqual(faults("a.md", "| " + "x " * 80 + "|\n"), [])
        self.assertEqual(faults("a.md", "x" * 129 + "\n"), ["a.md:1: 129 characters, at most 128 outside tables"])

    def test_a_long_sentence_is_found(self):
        text = "Short.\n\n" + "word " * 20 + "\n" + "word " * 21 + "end.\n" + "One. " * 9 + "\n"
        self.assertEqual(len(faults("a.md", text)), 1)
        self.assertIn("a.md:3: a sentence of 42 words", faults("a.md", text)[0])

    def test_long_sentences_on_average_are_found(self):
        text = "word " * 20 + "end.\n" + "word " * 21 + "end.\n"
        self.assertIn("21.5 words a sentence on average", faults("a.md", text)[0])
        self.assertEqual(faults("a.md", text + "\n- One.\n- Two.\n"), [])

    def test_a_private_word_is_found_in_a_page_a_message_and_a_help(self):
        self.assertEqual(faults("a.md", "A\nplane and a CLIP tower, `a lane`.\n\n    a picture\n"),
                         ['a.md:2: "plane"; write: K cache, V cache'])
        self.assertEqual(faults("a.cpp", '// a lane\nf("no lane here", "lane");\n'), ['a.cpp:2: "lane"; write: KV head'])
        self.assertEqual(faults("a.cpp", 'f("no warp lane here");\n'), [])
        self.assertEqual(faults("a.py", '"""Help of\na picture."""\ndef f():\n    "A picture."\n'),
                         ['a.py:2: "picture"; write: image'])

    def test_a_private_word_is_found_in_a_list_and_in_a_comment(self):
        self.assertEqual(faults("a.md", "- One\n\n    lane.\n"), ['a.md:3: "lane"; write: KV head'])
        self.assertEqual(faults("a.sh", "#!/bin/lane\necho lane # a lane\n"), ['a.sh:2: "lane"; write: KV head'])

    def test_a_long_page_is_found(self):
        self.assertEqual(faults("docs/glossary.md", "A.\n\n" * 31), ["docs/glossary.md:1: 62 lines, at most 60"])

    def test_generated_tables_are_not_counted(self):
        self.assertEqual(words("One two.\n<!-- made by tools/results/models.py -->\n| a | b |\n<!-- end -->\nThree.\n"), 3)

    def test_code_and_links_are_no_words(self):
        text = "See [the " + "page](" + "x" * 60 + ") and `" + "a " * 18 + "b`.\n\n    " + "code " * 20 + "\n\n```\n" + "code " * 20 + "\n```\n"
        self.assertEqual(faults("a.md", text), [])


if __name__ == "__main__":
    if sys.argv[1:]:
        names = [Path(name).resolve().relative_to(ROOT).as_posix() for name in sys.argv[1:]]
        found = [fault for name in names for fault in faults(name, (ROOT / name).read_text("utf-8"))]
        print("\n".join(found) or "nothing found")
        sys.exit(bool(found))
    unittest.main()
