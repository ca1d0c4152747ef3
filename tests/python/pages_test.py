"""The code of docs/python.md runs as it stands, from top to bottom."""

import contextlib
import io
import json
import os
import re
import shutil
import tempfile
import unittest

from module_case import ROOT, scene


def code_of(page):
    """The indented blocks that are Python, in one."""
    blocks = re.findall(r"(?:^    .*\n|^\n(?=    ))+", page.read_text(), re.MULTILINE)
    python = [block for block in blocks if re.search(r"^    (import kvlm|content =|prompt =|kvlm\.)", block, re.MULTILINE)]
    return ["\n".join(line[4:] for line in block.splitlines()) for block in python]


class Pages(unittest.TestCase):
    def test_python_md(self):
        blocks = code_of(ROOT / "docs/python.md")
        self.assertEqual(len(blocks), 6)
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
        self.assertIn("(simulated)", printed.getvalue())
        self.assertIn("There is one object", printed.getvalue())

    def test_the_notebook(self):
        """examples/rule.ipynb has no outputs, and runs; its plot goes to a file that one may look at."""
        notebook = json.loads((ROOT / "examples/rule.ipynb").read_text())
        cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        self.assertTrue(all(not cell["outputs"] and cell["execution_count"] is None for cell in cells))
        printed, known = io.StringIO(), {}
        os.environ["MPLBACKEND"] = "agg"
        with contextlib.chdir(ROOT / "examples"), contextlib.redirect_stdout(printed):
            for number, cell in enumerate(cells):
                exec(compile("".join(cell["source"]), f"cell {number}", "exec"), known)
        known["plt"].savefig(os.environ.get("KVLM_TEST_PLOT", os.devnull), format="png")
        sizes = [[size for _, size in points] for points in known["found"].values()]
        self.assertEqual(sizes[0], sizes[1])
        self.assertEqual(sizes[1], sizes[2])
        self.assertIn("unusual,keep=0.7 + int4", printed.getvalue())


if __name__ == "__main__":
    unittest.main()
