#!/usr/bin/env python3
"""Runs the steps of a Dockerfile in chroots, in order, where no container daemon is. For maintainers; ctest does not run it.

    tests/package/dockerfile.py Dockerfile --base FOLDER --work FOLDER [--then COMMAND]

--base is a bare system that every FROM starts from (debootstrap --variant=minbase bookworm FOLDER), --work a folder on the
same file system for the stages; --then runs in the last stage, as its user. Needs root. Knows what our files use: FROM, COPY,
RUN (with bind mounts of other stages), WORKDIR, ARG, ENV, USER and CMD; anything else is refused.
"""

import argparse
import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def instructions(text):
    """(word, rest) of each instruction; continued lines are joined."""
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE)
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if line.strip():
            yield tuple(line.strip().split(maxsplit=1))


def context(folder):
    """The files that COPY sees: those of the tree that .dockerignore does not name."""
    ignored = [line.strip().rstrip("/") for line in (folder / ".dockerignore").read_text().splitlines()
               if line.strip() and not line.startswith("#")]
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        parents = [name, *(p.as_posix() for p in Path(name).parents)]
        if path.is_file() and not any(fnmatch.fnmatch(part, pattern) for part in parents for pattern in ignored):
            yield name


class Stage:
    def __init__(self, root, base):
        self.root, self.variables, self.user, self.cwd, self.mounts = root, {}, None, "/", []
        subprocess.run(["cp", "-a", base, root], check=True)
        shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
        self.mount("-t", "proc", "proc", root / "proc")
        self.mount("--bind", "/dev", root / "dev")

    def mount(self, *words):
        subprocess.run(["mount", *map(str, words)], check=True)
        self.mounts.append(words[-1])

    def unmount(self, keep=0):
        while len(self.mounts) > keep:
            subprocess.run(["umount", "--lazy", str(self.mounts.pop())], check=True)  # a child may be ending

    def run(self, command):
        user = ["--userspec", self.user] if self.user else []
        home = f"/home/{self.user}" if self.user else "/root"
        words = ["chroot", *user, self.root, "env", "-i", f"PATH={PATH}", f"HOME={home}",
                 *(f"{name}={value}" for name, value in self.variables.items()),
                 "sh", "-c", f"cd {shlex.quote(self.cwd)} && {command}"]
        start = time.monotonic()
        before = os.times()
        status = subprocess.run([str(word) for word in words], stdin=subprocess.DEVNULL).returncode
        after = os.times()
        cpu = after.children_user + after.children_system - before.children_user - before.children_system
        print(f"-- {time.monotonic() - start:.0f} s, {cpu:.0f} s of CPU, exit status {status}", flush=True)
        if status:
            raise SystemExit(f"dockerfile.py: failed: {command}")


def step(stage, stages, word, rest):
    if word == "COPY":
        source, target = rest.split()
        for name in context(ROOT) if source == "." else [source]:
            to = stage.root / target.lstrip("/") / (name if source == "." else "")
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to)
    elif word == "RUN":
        held = len(stage.mounts)
        for mount in re.findall(r"--mount=(\S+)", rest):
            given = dict(pair.split("=") for pair in mount.split(","))
            assert given["type"] == "bind", mount
            stage.mount("--bind", stages[given["from"]].root / given["source"].lstrip("/"),
                        stage.root / given["target"].lstrip("/"))
        stage.run(re.sub(r"--mount=\S+\s*", "", rest))
        stage.unmount(keep=held)
    elif word in ("ARG", "ENV"):
        name, value = rest.split("=", 1)
        stage.variables[name] = re.sub(r"\$(\w+)", lambda m: stage.variables[m[1]], value)
    elif word == "WORKDIR":
        stage.cwd = rest
        (stage.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
    elif word == "USER":
        stage.user = rest
    elif word == "CMD":
        stage.run(shlex.join(json.loads(rest)))
    else:
        raise SystemExit(f"dockerfile.py: {word} is unknown")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--then", help="a command for the last stage")
    options = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("dockerfile.py: run it as root: it makes chroots")
    options.work.mkdir(parents=True)
    stages, stage = {}, None
    try:
        for word, rest in instructions(options.file.read_text()):
            print(f"== {word} {rest}", flush=True)
            if word == "FROM":
                name = rest.split(" AS ")[1] if " AS " in rest else f"{len(stages)}"
                stages[name] = stage = Stage(options.work / name, options.base)
            else:
                step(stage, stages, word, rest)
        if options.then:
            print(f"== {options.then}", flush=True)
            stage.run(options.then)
    finally:
        for stage in stages.values():
            stage.unmount()
    print("== passed", flush=True)


if __name__ == "__main__":
    main()
