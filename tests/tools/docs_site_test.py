#!/usr/bin/env python3
"""The site's own code, without mkdocs: links of the tree become links of the site, and faults of a built site are found."""

import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools/docs"))
import build  # noqa: E402
import hooks  # noqa: E402


class Links(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.root = Path(folder.name)
        for name in ("README.md", "LICENSE", "docs/faq.md", "docs/images/a.svg", "docs/data/a.csv", "docs/papers/README.md",
                     "docs/papers/vidkv.md", "examples/README.md", "examples/a.cpp"):
            (cls.root / name).parent.mkdir(parents=True, exist_ok=True)
            (cls.root / name).touch()

    def check(self, source, page, text, expected):
        self.assertEqual(hooks.for_site(text, source, page, self.root), expected)

    def test_of_the_readme_into_docs(self):
        self.check("README.md", "index.md", "[a](docs/faq.md#x), ![b](docs/images/a.svg), [c](docs/papers)",
                   "[a](faq.md#x), ![b](images/a.svg), [c](papers/README.md)")

    def test_of_a_page_to_pages_outside_docs(self):
        self.check("docs/papers/vidkv.md", "papers/vidkv.md", "[a](../../README.md#x), [b](README.md#y), [c](../faq.md), [d](../../examples/)",
                   "[a](../index.md#x), [b](README.md#y), [c](../faq.md), [d](../examples.md)")

    def test_to_files_and_folders_without_a_page_are_text(self):
        self.check("docs/faq.md", "faq.md", "[the `LICENSE`](../LICENSE), [code](../examples/a.cpp), [data](data)",
                   "the `LICENSE`, code, data")

    def test_to_other_places_stay(self):
        text = "[a](https://x.org/docs/faq.md), [b](#there), [c](nowhere.md), [d](data/a.csv), [m](mailto:a@x.org)"
        self.check("docs/faq.md", "faq.md", text, text)

    def test_an_image_in_a_link(self):
        self.check("README.md", "index.md", "[![a](docs/images/a.svg)](docs/faq.md)", "[![a](images/a.svg)](faq.md)")

    def test_in_html(self):
        self.check("README.md", "index.md", '<img src="docs/images/a.svg"><a href="docs/faq.md">', '<img src="images/a.svg"><a href="faq.md">')

    def test_in_code_stay(self):
        text = "```\n[a](docs/faq.md)\n```\nand `[a](docs/faq.md)`"
        self.check("README.md", "index.md", text, text)

    def test_a_list_after_a_paragraph_gets_a_blank_line(self):
        self.check("README.md", "index.md", "Words:\n- a\n  b\n- c\n\n- d\n2. x", "Words:\n\n- a\n  b\n- c\n\n- d\n2. x")


class Faults(unittest.TestCase):
    def faults(self, **files):
        with tempfile.TemporaryDirectory() as name:
            for page, text in files.items():
                (Path(name) / page.replace("_", ".")).write_text(text)
            return list(build.faults(Path(name)))

    def test_a_sound_site_has_none(self):
        self.assertEqual(self.faults(a_html='<a href="b.html#x">', b_html='<p id="x"><a href="https://x.org"><a href="#x">'), [])

    def test_links_that_lead_nowhere(self):
        self.assertEqual(self.faults(a_html='<a href="c.html"><a href="#y"><a href="b.html#z"><a href="/b.html">', b_html=""),
                         ["a.html links to c.html, which is not there", "a.html links to #y, and that page has no such place",
                          "a.html links to b.html#z, and that page has no such place",
                          "a.html links to /b.html, which is not there"])

    def test_what_is_fetched(self):
        self.assertEqual(self.faults(a_html='<script src="https://x.org/a.js"></script><link rel="canonical" href="https://x.org/">',
                                     b_css="a { background: url(https://x.org/a.png) }"),
                         ["a.html fetches https://x.org/a.js", "b.css fetches https://x.org/a.png"])


class Headers(unittest.TestCase):
    def test_are_those_that_the_public_ones_include(self):
        headers = build.public_headers()
        for header in ("kvlm/kvlm.h", "kvlm/policy.h", "kvcache/retention.h", "kernels/base/error.h"):
            self.assertIn(header, headers)
        self.assertFalse([header for header in headers if header.startswith(("tools/", "tests/"))])


if __name__ == "__main__":
    unittest.main()
