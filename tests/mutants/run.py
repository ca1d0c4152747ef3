#!/usr/bin/env python3
"""Whether the tests notice wrong lines: applies every change of mutants.toml, one at a time, builds the
tests that it names, runs them, puts the file back, and says which test failed.

    python3 tests/mutants/run.py [--build build/release] [--only WORDS] [--csv]

Exits with 1 if a mutant survived. Refuses a tree with changes, so that what it puts back is what was
committed. Standard library only; `ninja` and a configured build folder are needed.
"""

import argparse
import csv
import os
import re
import signal
import subprocess
import sys
import tomllib
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("mutants.toml")
COLUMNS = ["mutant", "file", "noticed_by", "more"]  # of docs/data/mutants.csv
TIMEOUT_S = 900  # of one build or test program: a mutant may loop


def mutants():
    with LIST.open("rb") as file:
        return tomllib.load(file)["mutant"]


def mutated(mutant):
    """(path, what is there, what the mutant makes of it)."""
    path = ROOT / mutant["file"]
    text = path.read_text(encoding="utf-8")
    count = text.count(mutant["old"])
    if count != 1:
        raise ValueError(f'{mutant["name"]}: {mutant["file"]} has {count} times {mutant["old"]!r}, '
                         f"expected once; bring {LIST.name} up to date")
    return path, text, text.replace(mutant["old"], mutant["new"])


@contextmanager
def applied(mutant):
    path, before, after = mutated(mutant)
    try:
        path.write_text(after, encoding="utf-8")
        yield
    finally:
        path.write_text(before, encoding="utf-8")


def program_and_filter(test):
    program, _, wanted = test.partition(":")
    return program, wanted or "*"


def build(folder, programs):
    """The compiler's words if it fails."""
    result = subprocess.run(["ninja", "-C", folder, f"-j{os.cpu_count()}", *programs],
                            capture_output=True, text=True, timeout=TIMEOUT_S)
    return result.stdout[-2000:] if result.returncode != 0 else ""


def failures(folder, test):
    """Names of the tests that fail; a program that dies or hangs fails as a whole."""
    program, wanted = program_and_filter(test)
    try:
        result = subprocess.run([Path(folder) / "tests" / program, f"--gtest_filter={wanted}"],
                                capture_output=True, text=True, timeout=TIMEOUT_S, errors="replace")
    except subprocess.TimeoutExpired:
        return [f"{program} (hangs)"]
    if "[==========] 0 tests" in result.stdout:
        raise ValueError(f"{program} has no test {wanted}")
    names = re.findall(r"^\[  FAILED  \] (\S+?)(?:,| \()", result.stdout, re.MULTILINE)
    if result.returncode != 0 and not names:
        names = [f"{program} (ends with {result.returncode})"]
    return list(dict.fromkeys(names))


def summary(names):
    """A few tests by name, one for each suite, and how many more there are."""
    suites = {}
    for name in names:
        suite = name.split("/")[1 if name.count("/") > 1 else 0]
        suites.setdefault(suite.split(".")[0], name)
    shown = [re.sub(r"^[^/.]*/(?=.*/)", "", name) for name in suites.values()][:3]
    return shown, len(names) - len(shown)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=str(ROOT / "build/release"), help="build folder")
    parser.add_argument("--only", default="", help="mutants whose name or file holds these words")
    parser.add_argument("--csv", action="store_true", help="print docs/data/mutants.csv")
    arguments = parser.parse_args()
    changed = subprocess.run(["git", "-C", ROOT, "status", "--porcelain", "--untracked-files=no"],
                             capture_output=True, text=True, check=True).stdout
    if changed:
        sys.exit(f"run.py: the tree has changes, commit them first:\n{changed.rstrip()}")
    chosen = [m for m in mutants() if arguments.only in m["name"] or arguments.only in m["file"]]
    if not chosen:
        sys.exit(f'run.py: no mutant has "{arguments.only}" in its name or file')
    for mutant in chosen:
        mutated(mutant)  # before anything is built
    # An end by a signal puts the file back too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    filters = {}  # of each program, all of them
    for test in sorted({test for mutant in chosen for test in mutant["tests"]}):
        program, wanted = program_and_filter(test)
        filters.setdefault(program, []).append(wanted)
    if words := build(arguments.build, filters):
        sys.exit(f"run.py: the tree does not build:\n{words}")
    for program, wanted in filters.items():
        if names := failures(arguments.build, f"{program}:{':'.join(wanted)}"):
            sys.exit(f"run.py: {', '.join(names)} fail without a mutant")
    table = csv.writer(sys.stdout, lineterminator="\n")
    if arguments.csv:
        table.writerow(COLUMNS)
    survived = 0
    for mutant in chosen:
        names = []
        try:
            with applied(mutant):
                programs = sorted({program_and_filter(test)[0] for test in mutant["tests"]})
                if words := build(arguments.build, programs):
                    sys.exit(f'run.py: {mutant["name"]} does not compile:\n{words}')
                for test in mutant["tests"]:
                    names += failures(arguments.build, test)
        finally:
            sys.stdout.flush()
        survived += not names
        shown, more = summary(names)
        if arguments.csv:
            table.writerow([mutant["name"], mutant["file"], "; ".join(shown), more])
            sys.stdout.flush()
        else:
            noticed = ", ".join(shown) + (f" and {more} more" if more else "") or "nothing"
            print(f'{"killed  " if names else "SURVIVED"} {mutant["name"]}: {noticed}', flush=True)
    build(arguments.build, filters)
    sys.exit(1 if survived else 0)


if __name__ == "__main__":
    os.chdir(ROOT)
    main()
