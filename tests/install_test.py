#!/usr/bin/env python3
"""Installs the build, moves it, and uses it as somebody without the checkout would: the programs find their models and
scripts, the man pages are complete, and another project finds the package and captions a picture with it.

KVLM_BUILD is the build folder.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = Path(os.environ.get("KVLM_BUILD", ROOT / "build/release"))
PROGRAMS = ("vlm-run", "vlm-kv", "vlm-bench", "vlm-serve")
SCENE = "pocket/heldout/scenes/scene_000.png"
TIMEOUT_S = 170

# Of the project's own targets; another project's are not compiled with them.
PRIVATE_FLAGS = ("-Werror", "-Wconversion", "-Wshadow", "-Wold-style-cast")


def setUpModule():
    if os.environ.get("KVLM_SANITIZE"):
        raise unittest.SkipTest("what is installed is a release build")
    if not (BUILD / "CMakeCache.txt").is_file():
        raise unittest.SkipTest(f"{BUILD} is not a build folder")


def run(*command, **options):
    options.setdefault("env", {k: v for k, v in os.environ.items() if k != "KVLM_HOME"})
    return subprocess.run([str(word) for word in command], stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=TIMEOUT_S, **options)


def succeed(*command, **options):
    result = run(*command, **options)
    assert result.returncode == 0, f"{command}: {result.stdout[-2000:]}{result.stderr[-4000:]}"
    return result.stdout


def expected_caption(reference="greedy_fp32.json"):
    """What transformers says of SCENE."""
    entries = json.loads((ROOT / "tools/pocket/reference" / reference).read_text())
    return next(entry["text"].strip() for entry in entries
                if entry.get("image") == "scenes/scene_000.png")


def compile_flags(build, source):
    commands = json.loads((build / "compile_commands.json").read_text())
    return next(entry["command"] for entry in commands if entry["file"].endswith(source))


class Installed(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = Path(folder.name)
        succeed("cmake", "--install", BUILD, "--prefix", cls.folder / "first")
        cls.prefix = cls.folder / "moved prefix"  # it can be moved, and its path may hold a blank
        (cls.folder / "first").rename(cls.prefix)
        cls.data = cls.prefix / "share/kvlm"

    def test_a_caption(self):
        out = succeed(self.prefix / "bin/vlm-run", "-q", "--image", self.data / SCENE)
        self.assertEqual(out.strip(), expected_caption())

    def test_every_bundled_model_is_there(self):
        for family in ("internvl", "qwen"):
            out = succeed(self.prefix / "bin/vlm-run", "-q", "-m", f"pocket-{family}", "--image", self.data / SCENE)
            self.assertEqual(out.strip(), expected_caption(f"greedy_fp32_{family}.json"))
        out = succeed(self.prefix / "bin/vlm-run", "-q", "-m", "pocket-qwen", "--video",
                      self.data / "pocket/heldout/clips/clip_100.webp",
                      "-p", "How many objects move?")
        self.assertEqual(out.strip(), "one")

    def test_models_are_those_of_the_prefix(self):
        model = self.data / "pocket/pocket-llava"
        hidden = self.folder / "hidden"
        model.rename(hidden)
        try:
            result = run(self.prefix / "bin/vlm-run", "-p", "hello")
        finally:
            hidden.rename(model)
        self.assertEqual(result.returncode, 1)
        self.assertIn(f"not at {model}; there are pocket-internvl, pocket-qwen", result.stderr)

    def test_a_program_alone_takes_the_models_of_kvlm_home(self):
        alone = self.folder / "alone"
        shutil.copy(self.prefix / "bin/vlm-run", alone)
        for home, status in ((self.data, 0), (self.folder / "nowhere", 1)):
            result = run(alone, "-q", "--image", self.data / SCENE,
                         env={**os.environ, "KVLM_HOME": str(home)})
            self.assertEqual(result.returncode, status, result.stderr)
            if status == 0:
                self.assertEqual(result.stdout.strip(), expected_caption())
            else:
                self.assertIn(f"not at {home}/pocket/pocket-llava; set KVLM_HOME", result.stderr)

    def test_scripts_are_those_of_the_prefix(self):
        python = self.folder / "bin/python3"  # stands in for one with matplotlib
        python.parent.mkdir()
        python.write_text('#!/bin/sh\n[ "$1" = -c ] || echo "$*" >>"$SEEN"\n')
        python.chmod(0o755)
        seen = self.folder / "seen"
        models_alone = self.folder / "models"
        models_alone.mkdir()
        (models_alone / "pocket").symlink_to(self.data / "pocket")
        for home in (self.data, models_alone):
            seen.unlink(missing_ok=True)
            succeed(self.prefix / "bin/vlm-kv", "fidelity", "--kv", "uniform,keep=0.5", "--records", "1", "-n", "2",
                    "--data", self.data / "pocket/heldout/captions.jsonl", "--plot", self.folder / "plots",
                    env={**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}", "SEEN": str(seen),
                         "KVLM_HOME": str(home)})
            for line in seen.read_text().splitlines():  # -B: nothing is written next to the scripts
                self.assertEqual(line.split(f"{self.data}/")[0].strip(), "-B", line)
                self.assertIn("kv/plot.py", line)

    def test_scripts_find_the_modules_that_they_import(self):
        for script in (self.data / "kv").glob("*.py"):
            for module in re.findall(r"^ *(?:from|import) (\w+)", script.read_text(), re.MULTILINE):
                if (ROOT / f"tools/kv/{module}.py").is_file():
                    self.assertTrue((script.parent / f"{module}.py").is_file(), f"{script.name} imports {module}")
        usage = run(sys.executable, "-B", self.data / "kv/plot.py", "x")  # imports, then refuses
        self.assertEqual(usage.returncode, 2, usage.stderr)

    def test_every_program_and_subcommand_has_a_man_page(self):
        if shutil.which("help2man") is None:
            self.skipTest("help2man is not installed")
        pages = {path.name for path in (self.prefix / "share/man/man1").iterdir()}
        expected = set()
        for program in PROGRAMS:
            text = succeed(self.prefix / "bin" / program, "--help")
            listed = re.search(r"^Subcommands:\n(.*?)\n\n", text, re.MULTILINE | re.DOTALL)
            names = re.findall(r"^  ([a-z][a-z-]*)", listed[1], re.MULTILINE) if listed else []
            expected |= {f"{program}.1", *(f"{program}-{name}.1" for name in names)}
        self.assertEqual(pages, expected)
        page = (self.prefix / "share/man/man1/vlm-kv-explain.1").read_text()
        for words in (".TH VLM-KV-EXPLAIN ", "\\-\\-visual", "Tokens of the prompt", "EXAMPLES"):
            self.assertIn(words, page)

    def test_man_pages_have_what_help_lacks_and_are_whole(self):
        if shutil.which("help2man") is None or shutil.which("man") is None:
            self.skipTest("help2man or man is not installed")
        for page in sorted((self.prefix / "share/man/man1").iterdir()):
            text = succeed("man", "--warnings", "-l", page, env={**os.environ, "MANWIDTH": "200", "MAN_KEEP_FORMATTING": ""})
            sections = dict(re.findall(r"^([A-Z][A-Z ]+)\n(.*?)(?=^[A-Z]|\Z)", text, re.MULTILINE | re.DOTALL))
            program = page.stem.split("-")
            out = succeed(self.prefix / "bin" / "-".join(program[:2]), *program[2:], "--help")
            summary = " ".join(re.split(r"\n\n|\nUsage:", out)[0].split()).removeprefix(f"{page.stem}: ").rstrip(".")
            self.assertEqual(" ".join(sections["NAME"].split()), f"{page.stem} - {summary}")
            examples = re.search(r"^Examples:\n(.*?)(?:\n\n|\Z)", out, re.MULTILINE | re.DOTALL)
            for line in examples[1].splitlines() if examples else []:
                self.assertIn(line.strip(), sections["EXAMPLES"])  # one command a line, as it is typed
            for name, word in (("FILES", "share/kvlm/pocket"), ("ENVIRONMENT", "KVLM_HOME"), ("EXIT STATUS", "130")):
                self.assertIn(word, sections[name], page.name)

    def test_completion_is_where_shells_look(self):
        for program in PROGRAMS:
            self.assertTrue((self.prefix / f"share/fish/vendor_completions.d/{program}.fish").is_file())
            text = (self.prefix / "share/bash-completion/completions" / program).read_text()
            self.assertIn(f" {program}", re.search(r"^complete .*$", text, re.MULTILINE)[0] + " ")

    def test_the_example_captions_a_picture(self):
        build = self.folder / "example"
        succeed("cmake", "-G", "Ninja", "-S", ROOT / "examples", "-B", build, "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON",
                f"-DCMAKE_PREFIX_PATH={self.prefix}", "-DCMAKE_CXX_FLAGS=-Wall -Wextra -Werror")
        succeed("cmake", "--build", build)
        out = succeed(build / "caption", self.data / "pocket/pocket-llava", self.data / SCENE)
        self.assertEqual(out.strip(), expected_caption())
        refused = run(build / "caption", self.folder / "nowhere", self.data / SCENE)
        self.assertEqual(refused.returncode, 1)
        self.assertIn("there is no such folder", refused.stderr)
        for flag in ("-Wconversion", "-Wshadow", "-Wold-style-cast"):
            self.assertNotIn(flag, compile_flags(build, "caption.cpp"))

    def test_no_installed_file_names_the_checkout(self):
        for path in self.prefix.rglob("*"):
            if path.is_file() and path.suffix in (".cmake", ".h", ".1", ".py"):
                self.assertNotIn(str(ROOT), path.read_text(), path)


class Subproject(unittest.TestCase):
    def test_warnings_and_tests_stay_private(self):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "CMakeLists.txt").write_text(
                "cmake_minimum_required(VERSION 3.25)\nproject(other CXX C)\n"
                "set(CMAKE_EXPORT_COMPILE_COMMANDS ON)\n"
                f"add_subdirectory({ROOT} kvlm)\nadd_executable(other other.cpp)\n"
                "target_link_libraries(other PRIVATE kvlm::kvlm)\n"
                f"get_property(tests DIRECTORY {ROOT} PROPERTY TESTS)\n"
                'message(STATUS "build type \\"${CMAKE_BUILD_TYPE}\\", tests \\"${tests}\\"")\n')
            (folder / "other.cpp").write_text("#include <kvlm/kvlm.h>\nint main() {}\n")
            out = succeed("cmake", "-S", folder, "-B", folder / "build", "-G", "Ninja")
            self.assertIn('build type "", tests ""', out)
            command = compile_flags(folder / "build", "other.cpp")
            for flag in PRIVATE_FLAGS:
                self.assertNotIn(flag, command)
            self.assertIn("-Wconversion", compile_flags(folder / "build", "kvcache/spec/spec.cpp"))
            targets = succeed("ninja", "-C", folder / "build", "-t", "targets", "all")
            self.assertNotIn("tests/", targets)
            self.assertNotIn("vlm-run", targets)
            commands = json.loads((folder / "build/compile_commands.json").read_text())
            other = next(entry for entry in commands if entry["file"].endswith("other.cpp"))
            subprocess.run(other["command"] + " -fsyntax-only", shell=True, check=True,
                           cwd=other["directory"], timeout=TIMEOUT_S)


if __name__ == "__main__":
    unittest.main()
