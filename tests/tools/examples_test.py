#!/usr/bin/env python3
"""Installs the build into a folder, builds examples/ against it and runs every command of examples/README.md, whose output must
be what the page shows. Standard library only.

KVLM_BUILD is the build folder.
"""

import os
import re
import shlex
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("KVLM_BUILD", ROOT / "build/release")).resolve()
PAGE = (ROOT / "examples/README.md").read_text("utf-8")
MODEL = "tools/pocket/pocket-llava"
SCENE = "tools/pocket/heldout/scenes/scene_001.png"
QUESTION = "tools/pocket/heldout/questions/question_001.png"
TIMEOUT_S = 240  # on a busy machine; 40 seconds of two quiet cores


def setUpModule():
    if os.environ.get("KVLM_SANITIZE"):
        raise unittest.SkipTest("what is installed is a release build")
    if not (BUILD / "CMakeCache.txt").is_file():
        raise unittest.SkipTest(f"{BUILD} is not a build folder")
    with_programs = "KVLM_PROGRAMS:BOOL=ON" in (BUILD / "CMakeCache.txt").read_text()
    if with_programs and not all((BUILD / "tools" / name).is_file() for name in ("vlm-run", "vlm-kv", "vlm-bench")):
        raise unittest.SkipTest(f"{BUILD} has no programs")


def documented():
    """(command, output) of the page's blocks."""
    blocks = re.findall(r"^    \$ (.*)\n((?:    .*\n)+)", PAGE, re.MULTILINE)
    return [(command, re.sub(r"^    ", "", output, flags=re.MULTILINE)) for command, output in blocks]


class Examples(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = Path(folder.name)
        cls.check("cmake", "--install", BUILD, "--prefix", cls.folder / "prefix")
        cls.check("cmake", "-G", "Ninja", "-S", ROOT / "examples", "-B", cls.folder / "build",
                  f"-DCMAKE_PREFIX_PATH={cls.folder}/prefix", "-DCMAKE_CXX_FLAGS=-Wall -Wextra -Werror")
        cls.check("cmake", "--build", cls.folder / "build", "-j", "2")
        cls.images = cls.folder / "images"
        cls.images.mkdir()
        for number in (1, 7):
            shutil.copy(ROOT / f"tools/pocket/heldout/scenes/scene_00{number}.png", cls.images)

    @staticmethod
    def run_in_tree(*command):
        return subprocess.run([str(word) for word in command], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              timeout=TIMEOUT_S)

    @classmethod
    def check(cls, *command):
        result = cls.run_in_tree(*command)
        assert result.returncode == 0, f"{command}: {result.stdout[-2000:]}{result.stderr[-4000:]}"
        return result.stdout

    def program(self, name):
        return self.folder / "build" / name

    def test_the_page_shows_what_the_programs_print(self):
        cases = documented()
        self.assertEqual(len(cases), 4)
        for command, output in cases:
            with self.subTest(command):
                meant = {"MODEL": MODEL, "SCENE": SCENE, "QUESTION": QUESTION, "FOLDER": self.images}
                program, *words = shlex.split(command)
                words = [meant.get(word, word) for word in words]
                self.assertEqual(self.check(self.program(program.removeprefix("build/examples/")), *words), output)

    def test_a_registered_rule_is_checked_as_those_that_are_built_in(self):
        for spec, message in (("mynrm", "did you mean mynorm?"), ("mynorm,keep=x", "has no keep=x"),
                              ("mynorm + knorm", "two retention rules"),
                              ("mynorm + int4 + share=codes", "did you mean mynorm,head_shared=on?")):
            result = self.run_in_tree(self.program("custom_policy/custom_policy"), MODEL, SCENE, spec)
            self.assertEqual(result.returncode, 1)
            self.assertIn(message, result.stderr)

    def test_every_program_says_what_is_wrong(self):
        for name in ("caption", "batch", "chat", "custom_policy/custom_policy"):
            with self.subTest(name):
                usage = self.run_in_tree(self.program(name))
                self.assertEqual(usage.returncode, 1)
                self.assertIn(": give CHECKPOINT ", usage.stderr)
                nowhere = self.run_in_tree(self.program(name), self.folder / "nowhere", SCENE, "What?")
                self.assertEqual(nowhere.returncode, 1)
                self.assertRegex(nowhere.stderr, r"\A\w+: [^\n]+\n\Z")


if __name__ == "__main__":
    unittest.main()
