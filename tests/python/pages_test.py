"""The code of docs/python.md runs as it stands, from top to bottom."""

import contextlib
import io
import os
import re
import shutil
import tempfile
import unittest

from module_case import ROOT, scene


def code_of(page):
    """The indented blocks that are Python, in one."""
    blocks = re.findall(r"(?:^    .*\n|^\n(?=    ))+", page.read_text(), re.MULTILINE)
    python = [block for block in blocks if re.search(r"^    (import kvlm|messages =|kvlm\.)", block, re.MULTILINE)]
    return ["\n".join(line[4:] for line in block.splitlines()) for block in python]


class Pages(unittest.TestCase):
    def test_python_md(self):
        blocks = code_of(ROOT / "docs/python.md")
        self.assertEqual(len(blocks), 4)
        printed = io.StringIO()
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            shutil.copy(scene(1), "a.png")
            shutil.copy(scene(2), "b.png")
            with contextlib.redirect_stdout(printed):
                known = {}
                for block in blocks:
                    exec(compile(block, "docs/python.md", "exec"), known)
                known["model"].close()
        self.assertIn("vnorm,keep=0.3,power=2 + int4", printed.getvalue())
        self.assertIn("There is one object", printed.getvalue())


if __name__ == "__main__":
    unittest.main()
