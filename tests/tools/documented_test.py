#!/usr/bin/env python3
"""Everything that the documents and --help tell people to type works, and does what it says.

Every command of README.md, docs/ and tools/*/README.md and every example of every --help is run (documented_cases.py), small
where it is large, and so is every option and subcommand; what comes out is checked, not only the status. A command that no
case knows, an option that no case uses, and a case for a command that is documented no more, fail.

KVLM_BUILD is the build folder; KVLM_TEST_ONLY=REGEX runs the commands that it matches, KVLM_TEST_TIMES=1 tells how long each
takes. Standard library only.
"""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("KVLM_BUILD", ROOT / "build/release")).resolve()
POCKET = ROOT / "tools/pocket"
sys.path.insert(0, str(Path(__file__).resolve().parent))
import documented_cases as cases  # noqa: E402
import documented_commands as commands  # noqa: E402

TIMEOUT_S = 300


def setUpModule():
    if os.environ.get("KVLM_SANITIZE"):
        raise unittest.SkipTest("tens of times slower; the release build runs it")
    for program in commands.PROGRAMS:
        if not (BUILD / "tools" / program).is_file():
            raise unittest.SkipTest(f"{BUILD} has no {program}")
    os.environ["PATH"] = f"{BUILD}/tools:{os.environ['PATH']}"


def first_records(name, count):
    lines = (POCKET / "heldout" / f"{name}.jsonl").read_text().splitlines()[:count]
    return [json.loads(line) for line in lines]


class Workshop:
    """A folder in which the documents' file names mean something: photo.jpg, a.png, a.mp4, captions.jsonl, in.jsonl; a Hugging
    Face cache with the model that --help names; and the tree's own folders. Nothing is written to the tree."""

    def __init__(self, folder):
        self.folder = folder
        heldout = POCKET / "heldout"
        for name in ("photo.jpg", "cat.png", "a.png"):  # a format is told from the bytes
            (folder / name).symlink_to(heldout / "scenes/scene_000.png")
        (folder / "b.png").symlink_to(heldout / "scenes/scene_001.png")
        (folder / "wide.png").symlink_to(ROOT / "tests/golden/llava_gqa/image1.png")
        (folder / "a.mp4").symlink_to(ROOT / "tests/vision/data/video/lossless.webp")  # read without FFmpeg
        (folder / "golden").symlink_to(ROOT / "tests/golden")
        (folder / "build").mkdir()
        (folder / "build/release").symlink_to(BUILD)
        (folder / "docs").mkdir()
        (folder / "tools").symlink_to(ROOT / "tools")
        for name, bundled in (("llava-hf--llava-1.5-7b-hf", "llava"), ("OpenGVLab--InternVL3-1B", "internvl"),
                              ("Qwen--Qwen2.5-VL-3B-Instruct", "qwen")):
            hub = folder / f"hub/models--{name}/snapshots"
            hub.mkdir(parents=True)
            (hub / "0123abcd").symlink_to(POCKET / f"pocket-{bundled}")
        (folder / "photos").mkdir()
        for name in ("scene_000.png", "scene_001.png"):
            (folder / "photos" / name).symlink_to(heldout / "scenes" / name)

        def write(path, records):
            path.parent.mkdir(exist_ok=True)
            kind = "video" if "video" in records[0] else "image"
            path.write_text("".join(json.dumps({**record, kind: str(heldout / record[kind])}) + "\n"
                                    for record in records))
        write(folder / "captions.jsonl", first_records("captions", 1))
        write(folder / "in.jsonl", first_records("captions", 2))
        (folder / "keys.txt").write_text("me secret\n")
        (folder / "videos.jsonl").write_text('{"id": 1, "video": "a.mp4"}\n')
        for name in ("captions", "documents", "questions", "clips"):
            write(folder / f"few/{name}.jsonl", first_records(name, 3))

        reference = json.loads((POCKET / "reference/greedy_fp32.json").read_text())
        self.facts = {
            "root": ROOT,
            "caption": next(r["text"].strip() for r in reference if r["image"] == "scenes/scene_000.png"),
            "count": "seven",
            "matplotlib": importlib.util.find_spec("matplotlib") is not None,
        }
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(("KVLM_", "HF_", "XDG_"))}
        self.environment |= {"HF_HUB_CACHE": str(folder / "hub"), "HOME": str(folder),
                             "PYTHONDONTWRITEBYTECODE": "1"}

    def run(self, case):
        result = subprocess.run(["bash", "-c", case.line()], cwd=self.folder, env=self.environment, input=case.stdin,
                                capture_output=True, text=True, timeout=TIMEOUT_S)
        return cases.Outcome(result.returncode, result.stdout, result.stderr, self.folder, self.facts)

    def faults(self, case):
        """What is wrong with a command's outcome, as sentences."""
        outcome = self.run(case)
        # A plot without matplotlib is refused, one with it is made.
        expected = 1 if "--plot" in case.line() and not self.facts["matplotlib"] else case.status
        if case.needs and importlib.util.find_spec(case.needs) is None:
            cured = outcome.status == 1 and f"no {case.needs}; run" in outcome.err
            return [] if cured else [f"without {case.needs}: status {outcome.status}: {outcome.err[-1500:]}"]
        found = [] if outcome.status == expected else [f"status {outcome.status}, expected {expected}"]
        for check in case.checks:
            try:
                wrong = check(outcome)
            except Exception as error:  # a row or file that is not there
                wrong = f"{type(error).__name__}: {error}"
            if wrong:
                found.append(str(wrong))
        if found:
            found.append(f"ran: {case.line()}\nstdout: {outcome.out[-1500:]}\nstderr: {outcome.err[-1500:]}")
        return found


def names(command):
    """(program, subcommand or "", words) of each of our programs that a command starts."""
    for part in re.split(r"&&|;|\bdo\b", command):
        words = shlex.split(part)
        while words and re.match(r"[A-Z_]+=", words[0]):
            words = words[1:]
        if words[:1] == ["timeout"]:
            words = words[5:]  # of documented_cases.py's _served()
        program = Path(words[0]).name if words else ""
        if program in commands.PROGRAMS:
            has_subcommand = program not in ("vlm-run", "vlm-serve") and len(words) > 1 and not words[1].startswith("-")
            yield program, words[1] if has_subcommand else "", words[1:]


def helps():
    """{(program, subcommand): --help}."""
    texts = {}
    for program in commands.PROGRAMS:
        texts[program, ""] = commands.help_of(program)
        for name in commands.subcommands(texts[program, ""]):
            texts[program, name] = commands.help_of(program, name)
    return texts


def documented():
    """{command: where} of all documents and every --help."""
    found = commands.documented(ROOT)
    for (program, subcommand), text in helps().items():
        for command in commands.examples(text):
            found.setdefault(command, f"{program} {subcommand} --help".replace("  ", " "))
    return found


def rule_of(command):
    """The Case of a documented command, the reason why it is not run, or None."""
    for case in cases.DOCUMENTED:
        if case.command == command:
            return case
    if command in cases.ELSEWHERE:
        return cases.ELSEWHERE[command]
    for pattern, make in cases.RULES:
        if re.fullmatch(pattern, command):
            return make(command)
    return None


def is_a_name(command, options):
    """`vlm-kv explain`, `vlm-kv fidelity --json`: a program, its subcommand and an option, as one speaks of them."""
    program, *rest = command.split()
    subcommand = rest.pop(0) if rest and not rest[0].startswith("-") else ""
    return (program, subcommand) in options and (not rest or rest[1:] == [] and rest[0] in options[program, subcommand])


class Documented(unittest.TestCase):
    maxDiff = None

    def test_every_documented_command_has_a_case(self):
        found = documented()
        self.assertGreater(len(found), 20)
        known = {key: {name for option in commands.options(text) for name in option} for key, text in helps().items()}
        for command, where in found.items():
            with self.subTest(command=command):
                if not is_a_name(command, known):
                    self.assertIsNotNone(rule_of(command), f"{where} has a command that documented_cases.py does not "
                                         f"know; add it to DOCUMENTED, or to ELSEWHERE with a reason: {command}")

    def test_every_case_is_still_documented(self):
        found = documented()
        for command in [*(case.command for case in cases.DOCUMENTED), *cases.ELSEWHERE]:
            self.assertIn(command, found, "no document has it any more: remove it, or move it to OPTIONS")

    def test_every_option_is_used(self):
        used = {}
        made = [rule for rule in map(rule_of, documented()) if isinstance(rule, cases.Case)]
        for case in [*made, *cases.OPTIONS]:
            for program, subcommand, words in names(case.line()):
                used.setdefault((program, subcommand), set()).update(
                    word.split("=")[0] for word in words if word.startswith("-"))
        for key, text in helps().items():
            options = commands.options(text)
            self.assertTrue(options, key)
            for option in options:
                if option == ("-h", "--help"):
                    option = (*option, "--help")
                self.assertTrue(set(option) & used.get(key, set()),
                                f"no case of documented_cases.py uses {'/'.join(option)} of {' '.join(key)}: add one")

    def test_what_comes_out(self):
        found = [rule_of(command) for command in documented()]
        order = {id(case): i for i, case in enumerate(cases.DOCUMENTED)}
        runs = [*sorted((case for case in found if isinstance(case, cases.Case)),
                        key=lambda case: order.get(id(case), len(order))), *cases.OPTIONS]
        with tempfile.TemporaryDirectory(prefix="kvlm-documented-") as folder:
            workshop = Workshop(Path(folder))
            for case in filter(lambda case: re.search(os.environ.get("KVLM_TEST_ONLY", ""), case.command), runs):
                with self.subTest(command=case.command):
                    start = time.monotonic()
                    faults = workshop.faults(case)
                    if os.environ.get("KVLM_TEST_TIMES"):
                        print(f"{time.monotonic() - start:6.1f} s  {case.command}", file=sys.stderr)
                    self.assertFalse(faults, "\n".join(faults))


class Demo(unittest.TestCase):
    @unittest.skipUnless(BUILD == ROOT / "build/release", "tools/demo.sh runs build/release")
    def test_it_captions_a_bundled_picture(self):
        with tempfile.TemporaryDirectory() as folder:
            cmake = Path(folder, "cmake")  # everything is built
            cmake.write_text("#!/bin/sh\nexit 0\n")
            cmake.chmod(0o755)
            result = subprocess.run([ROOT / "tools/demo.sh"], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                                    timeout=TIMEOUT_S, env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"})
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("There are seven objects", result.stdout)


class Checker(unittest.TestCase):
    """The finding of commands, on pages that are easy to get wrong."""

    def found(self, text):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "README.md").write_text(text)
            Path(folder, "CONTRIBUTING.md").write_text("")
            return list(commands.documented(Path(folder)))

    def test_blocks_inline_code_and_what_is_neither(self):
        self.assertEqual(self.found("Run\n\n    vlm-run --image a.png   # a caption\n    not a command\n\nor `vlm-kv\nlist --json`, "
                                    "`vlm-kv` and `--kv f16`.\n"), ["vlm-run --image a.png", "vlm-kv list --json"])

    def test_continued_lines_and_loops_are_one_command(self):
        self.assertEqual(self.found("    vlm-bench kernels \\\n        -t 1\n    for x in a b; do\n        vlm-run -p $x\n    done\n"),
                         ["vlm-bench kernels -t 1", "for x in a b; do vlm-run -p $x; done"])

    def test_fences_and_paths(self):
        self.assertEqual(self.found("```sh\nbuild/x/tools/vlm-run -p hi\nKVLM_X=1 tools/test.sh\n```\ntext `a b`\n"),
                         ["build/x/tools/vlm-run -p hi", "KVLM_X=1 tools/test.sh"])

    def test_commands_with_what_they_print(self):
        page = ("x\n\n    $ vlm-run -p a \\\n          -q\n    vlm-run says so\n\n    more\n    $ python3 - <<'EOF'\n    a = 1\n    EOF\n"
                "    1\n\ny\n")
        shown = [("vlm-run -p a -q", ["vlm-run says so", "", "more"]), ("python3 - <<'EOF'\na = 1\nEOF", ["1"])]
        self.assertEqual(commands.transcripts(page), shown)
        self.assertEqual(self.found(page), [command for command, _ in shown])

    def test_options_of_a_help(self):
        text = "x\n\nOptions:\n  -h,--help    Print\n  --kv TEXT=f16 Policy,\n               -m is not one\n\nExamples:\n  vlm-kv a  what\n"
        self.assertEqual(commands.options(text), [("-h", "--help"), ("--kv",)])
        self.assertEqual(commands.examples(text), ["vlm-kv a"])


if __name__ == "__main__":
    unittest.main()
