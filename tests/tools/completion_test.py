#!/usr/bin/env python3
"""What bash, zsh and fish offer after Tab for the three programs (tools/completion/).

KVLM_BUILD is the build folder.
"""

import os
import pty
import shutil
import subprocess
import tempfile
import time
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("KVLM_BUILD", ROOT / "build/release"))

# Words as bash gives them, then what it prints of them; the last word is the one being completed.
SCRIPT = """
source "$1"
shift
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
__kvlm "$1" "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


def setUpModule():
    if not (BUILD / "tools/vlm-run").is_file():
        raise unittest.SkipTest(f"{BUILD} has no programs")


def completed(*words, folder=ROOT):
    result = subprocess.run(
        ["bash", "-c", SCRIPT, "bash", ROOT / "tools/completion/kvlm.bash", *words], cwd=folder,
        env={**os.environ, "PATH": f"{BUILD / 'tools'}:{os.environ['PATH']}"}, timeout=60,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    assert result.stderr == "", result.stderr
    return set(result.stdout.split("\n")) - {""}


class Completion(unittest.TestCase):
    def test_options(self):
        options = completed("vlm-run", "-")
        self.assertLessEqual({"-m", "--model", "--image", "--kv", "--batch", "-q", "--help"}, options)
        self.assertEqual(completed("vlm-run", "--image-b"), {"--image-backend"})

    def test_options_of_a_subcommand(self):
        self.assertEqual(completed("vlm-kv", "explain", "--vis"), {"--visual"})
        self.assertEqual(completed("vlm-kv", "list", "--vis"), set())
        self.assertEqual(completed("vlm-bench", "kernels", "--only", "x", "--ro"), {"--rows"})

    def test_subcommands(self):
        self.assertLessEqual({"list", "explain", "fidelity", "profile", "values"}, completed("vlm-kv", ""))
        self.assertEqual(completed("vlm-bench", "th"), {"throughput"})

    def test_policies(self):
        known = completed("vlm-run", "--kv", "")
        self.assertLessEqual({"f16", "kivi", "prefixkv", "h2o", "calibquant"}, known)
        self.assertEqual(completed("vlm-run", "--kv", "calib"), {"calibquant"})
        self.assertEqual(completed("vlm-kv", "explain", "calib"), {"calibquant"})

    def test_inside_a_spec(self):
        self.assertEqual(completed("vlm-run", "--kv", "snapkv+ki"), {"snapkv+kivi"})
        self.assertEqual(completed("vlm-run", "--kv", "kivi,bi"), {"kivi,bits="})
        self.assertEqual(completed("vlm-run", "--kv", "=", "kivi,resi"), {"kivi,residual="})
        self.assertEqual(completed("vlm-kv", "fidelity", "--kv", "kivi,bits", "=", "2,gr"), {"2,group="})
        self.assertEqual(completed("vlm-kv", "explain", "prefixkv,keep", "=", "0.5+cal"), {"0.5+calibquant"})
        self.assertEqual(completed("vlm-kv", "explain", "uniform,evict", "=", "sc"), {"score"})
        self.assertEqual(completed("vlm-kv", "explain", "visual", "=", "calib"), {"calibquant"})
        self.assertLessEqual({"kivi,bits=", "kivi,scope=", "kivi,group="}, completed("vlm-run", "--kv", "kivi,"))
        self.assertEqual(completed("vlm-run", "--kv", "nonsense,bi"), set())
        self.assertEqual(completed("vlm-kv", "list", "calib"), {"calibquant"})

    def test_values(self):
        self.assertEqual(completed("vlm-run", "--dtype", "b"), {"bf16"})
        self.assertEqual(completed("vlm-run", "--dtype", "=", "b"), {"bf16"})
        self.assertEqual(completed("vlm-kv", "list", "--markdown", "o"), {"overview", "options"})
        self.assertEqual(completed("vlm-run", "--image-backend", "="), {"auto", "torchvision", "pil"})
        self.assertIn("cuda", completed("vlm-bench", "latency", "--device", "c"))
        bundled = {"pocket", "pocket-llava", "pocket-internvl", "pocket-qwen"}
        self.assertEqual(completed("vlm-run", "-m", "poc"), bundled)

    def test_files(self):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "my cat.png").touch()
            self.assertEqual(completed("vlm-run", "--image", "my", folder=folder), {"my cat.png"})
            self.assertEqual(completed("vlm-run", "--video", "my", folder=folder), {"my cat.png"})
            self.assertEqual(completed("vlm-kv", "fidelity", "--data", "my", folder=folder), {"my cat.png"})


# What is typed before Tab, and what zsh makes of it; fish offers it.
TYPED = (
    ("vlm-kv expl", "vlm-kv explain"), ("vlm-run --image-b", "vlm-run --image-backend"), ("vlm-run --dtype b", "vlm-run --dtype bf16"),
    ("vlm-run --dtype=b", "vlm-run --dtype=bf16"), ("vlm-run --kv snapkv+ki", "vlm-run --kv snapkv+kivi"),
    ("vlm-run --kv kivi,bi", "vlm-run --kv kivi,bits="), ("vlm-run --kv=kivi,bits=2,gr", "vlm-run --kv=kivi,bits=2,group="),
    ("vlm-kv explain uniform,evict=sc", "vlm-kv explain uniform,evict=score"), ("vlm-run --image my", "vlm-run --image my_cat.png"),
)
ZSH = """
autoload -U compinit bashcompinit; compinit -u -D; bashcompinit; source {}/tools/completion/kvlm.bash
show() {{ print -r -- "$BUFFER" >line.part; mv line.part line; BUFFER= }}; zle -N show; bindkey '^X' show; bindkey '^I' complete-word
touch ready
"""


class OtherShells(unittest.TestCase):
    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        (self.folder / "my_cat.png").touch()
        self.environment = {**os.environ, "PATH": f"{BUILD / 'tools'}:{os.environ['PATH']}", "HOME": str(self.folder), "TERM": "dumb"}

    def require(self, shell):
        if not shutil.which(shell):
            self.skipTest(f"{shell} is not installed")

    def fish(self, file, line):
        done = subprocess.run(["fish", "--no-config", "-c", f"source {file}; complete -C '{line}'"], cwd=self.folder, timeout=60,
                              env=self.environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
        self.assertEqual(done.stderr, "")
        return {offer.split("\t")[0] for offer in done.stdout.splitlines()}

    def test_fish(self):
        self.require("fish")
        for typed, expected in TYPED:
            self.assertEqual(self.fish(ROOT / "tools/completion/kvlm.fish", typed), {expected.split()[-1]}, typed)

    def test_fish_where_it_is_installed(self):
        self.require("fish")
        for name, place in (("kvlm.bash", "bash-completion/completions/vlm-run"), ("kvlm.fish", "fish/vendor_completions.d/vlm-kv.fish")):
            (self.folder / place).parent.mkdir(parents=True)
            shutil.copy(ROOT / "tools/completion" / name, self.folder / place)
        self.assertEqual(self.fish(self.folder / "fish/vendor_completions.d/vlm-kv.fish", "vlm-kv expl"), {"explain"})

    def wait_for(self, path):
        end = time.monotonic() + 60
        while not path.exists():
            self.assertLess(time.monotonic(), end, f"no {path.name}")
            time.sleep(0.02)
        text = path.read_text()
        path.unlink()
        return text

    def test_zsh(self):
        self.require("zsh")
        terminal, side = pty.openpty()
        zsh = subprocess.Popen(["zsh", "-f", "-i"], cwd=self.folder, env=self.environment, stdin=side, stdout=side, stderr=side,
                               start_new_session=True)  # fmt: skip
        try:
            os.write(terminal, ZSH.format(ROOT).encode())
            self.wait_for(self.folder / "ready")
            for typed, expected in TYPED:
                os.write(terminal, f"{typed}\t\x18".encode())
                self.assertEqual(self.wait_for(self.folder / "line"), expected + "\n")
        finally:
            zsh.kill()
            zsh.wait()
            os.close(terminal)
            os.close(side)


if __name__ == "__main__":
    unittest.main()
