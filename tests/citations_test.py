#!/usr/bin/env python3
"""What sources and pages cite is in the repository: pages by their path, sections by their heading.

A comment cites a section as `docs/formulas.md, "Remap"`; more sections of the same page follow as
`and "Shared codes"` or `, "Shared codes"`. Pages link to each other and to headings as Markdown does. Every component of a
paper (docs/papers/) is said to be faithful or to depart, and from what.
"""

import re
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("cmake", "docs", "kernels", "kvcache", "kvlm", "llm", "runtime", "tests", "tools", "vision")
CODE = {".h", ".cpp", ".cu", ".cuh", ".py", ".sh", ".cmake", ".txt"}
CPP = {".h", ".cpp", ".cu", ".cuh"}

# Working papers by number, which readers of the repository do not have.
FOREIGN = re.compile(r"\b[Ss]pecs \d[\d.]*|\b(?:design|conventions|kv-policies)\.md\b(?: [\d.]+)?"
                     r"|\bdecision D\d+|\b[Tt]he specification\b")
PAGE = re.compile(r"[\w./-]*\w\.md\b")
SECTIONS = re.compile(r'(docs/[\w-]+\.md)((?:(?:,| and|, and) "[^"]+")+)')
LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]+))?\)")
STANDING = re.compile(r"faithful\b|departs(?: by default)?: \S")  # of a component of a paper
BREAK = re.compile(r"\n[ \t]*(?:///?<?|#|\*)?[ \t]*")  # of a line, in a comment or in prose


def headings(page):
    """The headings of a page's text, and the anchors that Markdown makes of them."""
    text = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    names = [match[1].strip() for match in re.finditer(r"^#+ (.*)$", text, re.MULTILINE)]
    names += re.findall(r"^\*\*([^*]+)\.\*\*", text, re.MULTILINE)  # a bold word that begins a paragraph
    anchors = [re.sub(r"[^\w\- ]", "", name.replace("`", "")).lower().replace(" ", "-") for name in names]
    return set(names), set(anchors)


class Tree:
    def __init__(self, root):
        self.root = Path(root)
        self.text = {}
        found = [*self.root.glob("*.md"), *self.root.glob("CMakeLists.txt")]
        for folder in FOLDERS:
            found += (self.root / folder).rglob("*")
        for path in sorted(found):
            if path.suffix in CODE | {".md"} and path.is_file():
                self.text[path.relative_to(self.root).as_posix()] = path.read_text("utf-8", "replace")

    def page(self, name):
        path = self.root / name
        return path.read_text("utf-8") if path.is_file() else None

    def violations(self):
        """Everything that is cited and not there, as "path:line: sentence"."""
        here = Path(__file__).resolve().relative_to(ROOT).as_posix()
        return [f"{path}:{text.count(chr(10), 0, at) + 1}: {sentence}"
                for path, text in self.text.items() if path != here
                for at, sentence in sorted([*self.foreign(path, text), *self.pages(path, text),
                                            *self.sections(text), *self.links(path, text),
                                            *self.standings(path, text)])]

    def standings(self, path, text):
        if not path.startswith("docs/papers/"):
            return
        for table in re.finditer(r"^\| (?:component|rule) \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE):
            for row in re.finditer(r"^\| (.*?) \|.*\| (.*) \|$", table[1], re.MULTILINE):
                if not STANDING.match(row[2]):
                    yield table.start(1) + row.start(), f'"{row[1]}" is neither faithful nor departs, with the reason'

    def foreign(self, path, text):
        for match in FOREIGN.finditer(text):
            yield match.start(), f'"{match[0]}" is in no file of the repository'

    def pages(self, path, text):
        whole = Path(path).suffix in CPP
        for match in PAGE.finditer(text):
            # vlm-kv prints docs/policies.md, whose links begin where it lies.
            places = (self.root / match[0], self.root / "docs" / match[0])
            if (whole or match[0].startswith("docs/")) and not any(place.is_file() for place in places):
                if not FOREIGN.match(match[0]):
                    yield match.start(), f"{match[0]} does not exist"

    def sections(self, text):
        flat, at = [], []  # the text with broken lines joined, and where each character was
        last = 0
        for match in BREAK.finditer(text):
            flat.append(text[last:match.start()] + " ")
            at += [*range(last, match.start()), match.start()]
            last = match.end()
        flat.append(text[last:])
        at += range(last, len(text))
        for match in SECTIONS.finditer("".join(flat)):
            page = self.page(match[1])
            for name in re.findall(r'"([^"]+)"', match[2]):
                if page is not None and name not in headings(page)[0]:
                    yield at[match.start()], f'{match[1]} has no section "{name}"'

    def links(self, path, text):
        if not path.endswith(".md"):
            return
        for match in LINK.finditer(text):
            target, anchor = match[1], match[2]
            if "://" in target or target.startswith("mailto:"):
                continue
            there = (self.root / path).parent / target if target else self.root / path
            if not there.exists():
                yield match.start(), f"links to {target}, which does not exist"
            elif anchor and there.suffix == ".md" and anchor not in headings(there.read_text("utf-8"))[1]:
                yield match.start(), f"links to {target}#{anchor}, which is no heading"


class ThisTree(unittest.TestCase):
    maxDiff = None

    def test_cites_what_it_has(self):
        tree = Tree(ROOT)
        self.assertGreater(len(tree.text), 100, "found no sources")
        self.assertEqual([], tree.violations())


class Checker(unittest.TestCase):
    """Plants one citation at a time."""

    PAGES = {"docs/a.md": "# A\n\n## Life of a row\n\n**Shrink.** Words.\n"}

    def found(self, files):
        with tempfile.TemporaryDirectory() as root:
            for path, text in {**self.PAGES, **files}.items():
                file = Path(root, path)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, "utf-8")
            return Tree(root).violations()

    def test_a_section_that_exists_may_be_cited_over_two_lines(self):
        self.assertEqual([], self.found({
            "kvcache/b.h": '/// As (docs/a.md, "Life of a\n/// row" and "Shrink") has it (README.md).\n',
            "README.md": "[rows](docs/a.md#life-of-a-row), [all](docs/a.md), [web](https://a.b/c.md#d)\n"}))

    def test_a_section_that_does_not_exist_is_found(self):
        found = self.found({"kvcache/b.h": '\n/// As docs/a.md,\n/// "Shrink" and "Death of a row".\n'})
        self.assertEqual(found, ['kvcache/b.h:2: docs/a.md has no section "Death of a row"'])

    def test_a_page_that_does_not_exist_is_found(self):
        self.assertEqual(self.found({"llm/b.py": '"""docs/b.md, "A", and report.md."""\n',
                                     "llm/b.h": "/// notes.md\n"}),
                         ["llm/b.h:1: notes.md does not exist", "llm/b.py:1: docs/b.md does not exist"])

    def test_a_paper_that_is_not_here_is_found(self):
        for words in ("specs 10.4", "Specs 3", "design.md", "decision D2", "the specification"):
            with self.subTest(words=words):
                found = self.found({"tools/b.cpp": f"int a;  // {words}\n", "docs/c.md": f"By {words}.\n"})
                self.assertEqual([f.split(" ")[0] for f in found], ["docs/c.md:1:", "tools/b.cpp:1:"])

    def test_specs_in_other_senses_are_legal(self):
        self.assertEqual([], self.found({"tools/b.cpp": "// 67 specs, specs[0], specs: 5\n"}))

    def test_a_component_without_a_standing_is_found(self):
        head = "| component | paper | here | |\n|---|---|---|---|\n"
        rows = "| a | 1 | `a` | faithful |\n| b | 2 | - | departs |\n| c | 3 | - | departs: why |\n| d | 4 | `d` | see a |\n"
        found = self.found({"docs/papers/p.md": f"# P\n\n{head}{rows}\n| other |\n|---|\n| d |\n"})
        self.assertEqual(found, ['docs/papers/p.md:6: "b" is neither faithful nor departs, with the reason',
                                 'docs/papers/p.md:8: "d" is neither faithful nor departs, with the reason'])

    def test_a_link_to_nothing_is_found(self):
        found = self.found({"docs/c.md": "[a](a.md#death-of-a-row) [b](b.md) [c](#none)\n"})
        self.assertEqual(found, ["docs/c.md:1: links to a.md#death-of-a-row, which is no heading",
                                 "docs/c.md:1: links to b.md, which does not exist",
                                 "docs/c.md:1: links to #none, which is no heading"])


if __name__ == "__main__":
    unittest.main()
