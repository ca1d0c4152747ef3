#!/usr/bin/env python3
"""Runs the programs at a terminal, as a person does: phases, Ctrl+C in each of them, and a chat.

The terminal is a pseudo terminal of 40 columns. Phases are those of a released shape cut to two
layers, which take seconds; the chat is with a tiny golden checkpoint. How long Ctrl+C may take is
limited generously: a busy machine is no failure. KVLM_BUILD is the build folder.
"""

import fcntl
import os
import pty
import re
import select
import shutil
import signal
import struct
import sys
import tempfile
import termios
import time
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(os.environ.get("KVLM_BUILD", ROOT / "build/release")) / "tools/vlm-run"
MODEL = ROOT / "tests/golden/llava_gqa"
PICTURE = MODEL / "image0.png"
SLOW = ["-m", "synthetic:llava-tinyllama-1.1b,layers=2", "-t", "1", "--image", PICTURE, "-p", "hi"]
COLUMNS = 40
TIMEOUT_S = 300
OBEYED_S = 30


def setUpModule():
    if not PROGRAM.is_file():
        raise unittest.SkipTest(f"{PROGRAM} is not built")


class Terminal:
    """A program with a terminal for its stdin, stdout and stderr."""

    def __init__(self, *arguments, columns=COLUMNS, size=None, folder=ROOT, program=PROGRAM, **environment):
        self.text = ""
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.environ.update(TERM="xterm", **environment)
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", *(size or (24, columns)), 0, 0))
            os.execv(program, [str(program), *map(str, arguments)])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.fd)

    def read(self, timeout_s):
        """Takes what there is; False at the end."""
        if not select.select([self.fd], [], [], timeout_s)[0]:
            return True
        try:
            data = os.read(self.fd, 65536)
        except OSError:  # how a pseudo terminal says that nobody writes any more
            return False
        self.text += data.decode(errors="replace")
        return bool(data)

    def wait_for(self, pattern, since=0):
        """Reads until the pattern is seen; returns where it ends."""
        end = time.monotonic() + TIMEOUT_S
        while time.monotonic() < end:
            found = re.compile(pattern).search(self.text, since)
            if found:
                return found.end()
            if not self.read(1):
                break
        raise AssertionError(f"{pattern!r} not seen in {self.text[since:]!r}")

    def type(self, text):
        os.write(self.fd, text.encode())

    def wait_until_it_reads(self):
        """Until the program catches Ctrl+C and sleeps, before it shows anything."""
        end = time.monotonic() + TIMEOUT_S
        while time.monotonic() < end:
            status = Path(f"/proc/{self.pid}/status").read_text()
            caught = int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16)
            if "Name:\tvlm-" in status and caught >> signal.SIGINT - 1 & 1 and "State:\tS" in status:
                return
            time.sleep(0.01)
        raise AssertionError("does not read")

    def status(self):
        """Reads to the end; the exit status."""
        end = time.monotonic() + TIMEOUT_S
        while self.read(1):
            if time.monotonic() > end:
                raise AssertionError(f"still running: {self.text!r}")
        status = os.waitpid(self.pid, 0)[1]
        self.pid = 0
        return os.waitstatus_to_exitcode(status)


def drawn_lines(text):
    """What was drawn between two moves to the start of a line."""
    plain = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)
    return re.split(r"[\r\n]+", plain)


class PhasesTest(unittest.TestCase):
    def test_every_phase_is_shown_and_fits(self):
        with Terminal(*SLOW, "-n", "2") as terminal:
            self.assertEqual(terminal.status(), 0)
            before_answer = terminal.text[:terminal.text.index("model ")]
        for phase in ("loading", "vision", "prefill"):
            shown = [line for line in drawn_lines(before_answer) if line.startswith(phase)]
            self.assertGreater(len(shown), 1, phase)
            for line in shown:
                self.assertRegex(line, rf"^{phase} \[#*\.*\] \d+ %(, \d+ s left)?$")
                self.assertLess(len(line), COLUMNS)

    def test_quiet_shows_nothing(self):
        with Terminal(*SLOW, "-n", "2", "-q") as terminal:
            self.assertEqual(terminal.status(), 0)
            self.assertNotRegex(terminal.text, r"loading|vision|prefill|\x1b")

    def test_the_terminals_width_of_now_counts(self):
        with Terminal(*SLOW, "-n", "2", columns=100) as terminal:
            terminal.wait_for(r"loading \[[#.]{28}\]")
            fcntl.ioctl(terminal.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 30, 0, 0))
            start = terminal.wait_for(r"vision [^\r]*\r")
            self.assertEqual(terminal.status(), 0)
            shown = terminal.text[start:terminal.text.index("model ")]
            for line in drawn_lines(shown):
                self.assertLess(len(line), 30)

    def test_ctrl_c_is_obeyed_in_every_phase(self):
        for phase in (r"loading \[", r"vision \[", r"prefill \["):
            with self.subTest(phase), Terminal(*SLOW, "-n", "2") as terminal:
                terminal.wait_for(phase)
                start = time.monotonic()
                terminal.type("\x03")
                self.assertEqual(terminal.status(), 130)
                took = time.monotonic() - start
                print(f"{phase[:-3]}: Ctrl+C obeyed in {took:.2f} s", file=sys.stderr)
                self.assertLess(took, OBEYED_S)
                # What came after the interrupt is not more of the phase.
                self.assertNotIn("100 %", terminal.text)

    def test_ctrl_c_is_obeyed_while_standard_input_is_awaited(self):
        for arguments in (("--image", "-"), ("-p", "-"), ("--batch", "-", "--out", "-")):
            with self.subTest(arguments), Terminal("-m", MODEL, *arguments) as terminal:
                terminal.wait_until_it_reads()
                terminal.type("\x03")
                self.assertEqual(terminal.status(), 130)
                self.assertRegex(terminal.text, "vlm-run: interrupted|batch: 0 records done")  # the first one is enough

    def test_ctrl_c_is_obeyed_while_it_answers(self):
        with Terminal("-m", MODEL, "--image", PICTURE, "-n", "400", "-t", "1", "--json",
                      "--repeat-penalty", "1.5") as terminal:
            time.sleep(0.2)
            terminal.type("\x03")
            self.assertIn(terminal.status(), (0, 130))  # 0: it was done before

    def test_a_batch_shows_its_bar_at_once(self):
        with tempfile.TemporaryDirectory() as folder:
            records = Path(folder) / "in.jsonl"
            records.write_text("".join(f'{{"id": {i}, "image": "{PICTURE}", "prompt": "hi"}}\n'
                                       for i in range(3)))
            out = Path(folder) / "out.jsonl"
            with Terminal(*SLOW[:4], "--batch", records, "--out", out, "-n", "2",
                          "--batch-size", "3") as terminal:
                terminal.wait_for(r"batch \[\.*\] 0/3")
                terminal.wait_for(r"0/3, vision \d+ %")
                terminal.type("\x03")
                self.assertEqual(terminal.status(), 130)
                for line in drawn_lines(terminal.text):
                    if line.startswith("batch ["):
                        # The terminal itself shows the key.
                        self.assertLess(len(line.removesuffix("^C")), COLUMNS)
            self.assertEqual(out.read_text(), "")  # a record that was given up is not written


class ChatTest(unittest.TestCase):
    PROMPT = r"(^|\n|\r)> "

    def chat(self, *arguments, **options):
        return Terminal("-m", MODEL, "--chat", "-n", "3", *arguments, **{"columns": 80, **options})

    def ask(self, terminal, text):
        """Types a line; returns where its echo ends, once the prompt is there again."""
        at = len(terminal.text)
        terminal.type(text + "\r")
        at = terminal.wait_for(r"\n", at)
        terminal.wait_for(r"> ", at)
        return at

    def test_keys_and_history(self):
        with self.chat() as terminal:
            terminal.wait_for(r"> ")
            self.ask(terminal, "/image")
            self.assertIn("/image needs the FILE", terminal.text)
            start = len(terminal.text)
            terminal.type("\x1b[A")  # Up
            terminal.wait_for(r"/image", start)
            terminal.type("\x15/imgae x\r")  # ^U takes it away
            terminal.wait_for(r"did you mean /image\?")
            terminal.wait_for(r"> $")
            at = self.ask(terminal, "/cler\x1b[Da")  # Left, then the letter that is missing
            self.assertNotIn("not a command", terminal.text[at:])
            terminal.type("\x04")  # Ctrl+D
            self.assertEqual(terminal.status(), 0)

    def test_tab_completes_files_and_a_picture_is_confirmed(self):
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(PICTURE, Path(folder) / "my cat.png")
            with self.chat(folder=folder) as terminal:
                terminal.wait_for(r"> ")
                terminal.type("/im\tmy\t\r")
                terminal.wait_for(r"image 1: my cat\.png, \d+ x \d+")
                at = terminal.wait_for(r"> $")
                self.ask(terminal, "/image ~/my cat.png".replace("~", folder))
                terminal.wait_for(r"image 2: ", at)
                terminal.type("/quit\r")
                self.assertEqual(terminal.status(), 0)

    def test_letters_of_every_script_arrive_whole(self):
        with self.chat() as terminal:
            terminal.wait_for(r"> ")
            terminal.type("/été\r")
            terminal.wait_for(r"vlm-run: /été is not a command")
            terminal.type("/quit\r")
            self.assertEqual(terminal.status(), 0)

    def test_ctrl_c_clears_the_line_and_a_second_one_leaves(self):
        with self.chat() as terminal:
            terminal.wait_for(r"> ")
            terminal.type("half a quest")
            terminal.wait_for(r"half a quest")
            terminal.type("\x03")
            at = terminal.wait_for(r"Ctrl\+C again[^\n]*\n")
            terminal.wait_for(r"> $", at)
            self.ask(terminal, "/clear")  # which makes the next Ctrl+C the first again
            at = len(terminal.text)
            terminal.type("\x03")
            at = terminal.wait_for(r"Ctrl\+C again[^\n]*\n", at)
            terminal.wait_for(r"> $", at)
            terminal.type("\x03")
            self.assertEqual(terminal.status(), 130)

    def test_ctrl_c_stops_the_answer_and_the_chat_goes_on(self):
        with Terminal("-m", SLOW[1], "-t", "1", "--chat", "-n", "2", columns=80) as terminal:
            terminal.wait_for(r"> $")
            self.ask(terminal, f"/image {PICTURE}")
            at = len(terminal.text)
            terminal.type("what is it\r")
            terminal.wait_for(r"vision \[", at)
            terminal.type("\x03")
            at = terminal.wait_for(r"stopped[^\n]*\n", at)
            at = terminal.wait_for(r"> $", at)
            terminal.type("and now\r")
            at = terminal.wait_for(r"prefill \[", at)
            terminal.wait_for(r"> $", at)
            terminal.type("/quit\r")
            self.assertEqual(terminal.status(), 0)


    PASTE = "\x1b[200~", "\x1b[201~"

    def test_pasted_lines_are_one_question(self):
        start, end = self.PASTE
        with self.chat("-q") as terminal:
            terminal.wait_for(r"> $")
            at = len(terminal.text)
            terminal.type(start + "what is it?\rand where?\rand why?\r" + end)
            terminal.wait_for(r"and why\?", at)
            time.sleep(0.5)
            terminal.read(0.1)
            self.assertFalse(terminal.text.endswith("> "))  # it waits for Enter
            at = len(terminal.text)
            terminal.type("\r")
            at = terminal.wait_for(r"> $", at)
            terminal.type("\x1b[A\r")  # Up: all of it again
            at = terminal.wait_for(r"and why\?", at)
            terminal.wait_for(r"> $", at)
            terminal.type("quit\r")
            self.assertEqual(terminal.status(), 0)
            self.assertIn("\x1b[?2004l", terminal.text)

    def test_pasted_commands_are_obeyed_one_by_one(self):
        start, end = self.PASTE
        with self.chat() as terminal:
            terminal.wait_for(r"> $")
            at = len(terminal.text)
            terminal.type(start + f"/image {PICTURE}\r/help\rwhat is it?\ror not?" + end + "\r")
            at = terminal.wait_for(r"image 1: ", at)
            at = terminal.wait_for(r"starts over, without images", at)
            terminal.wait_for(r"> $", at)
            terminal.type("\x04")
            self.assertEqual(terminal.status(), 0)

    def test_controls_in_what_is_pasted_do_nothing(self):
        start, end = self.PASTE
        with self.chat("-q") as terminal:
            terminal.wait_for(r"> $")
            at = len(terminal.text)
            terminal.type(start + "/he\x04\x1b[A\x15lp" + end)
            terminal.wait_for(r"/he\[Alp", at)
            terminal.type("\x15/quit\r")
            self.assertEqual(terminal.status(), 0)

    def test_a_question_between_quotes(self):
        with self.chat("-q") as terminal:
            terminal.wait_for(r"> $")
            terminal.type('"""what is\r')
            terminal.wait_for(r"\.\.\. $")
            at = len(terminal.text)
            terminal.type('/clear"""\r')
            at = terminal.wait_for(r"\n", at)
            terminal.wait_for(r"> $", at)
            terminal.type("exit\r")
            self.assertEqual(terminal.status(), 0)

    def test_a_terminal_of_any_size(self):
        for rows, columns in ((65535, 65535), (1, 65535), (65535, 1)):
            with self.subTest(rows=rows, columns=columns), self.chat("-q", size=(rows, columns)) as terminal:
                terminal.wait_for(r"> ")
                terminal.type("/quit\r")
                self.assertEqual(terminal.status(), 0)

    def test_ctrl_c_before_the_first_word_leaves_no_figures(self):
        with Terminal(*SLOW, "-n", "2") as terminal:
            terminal.wait_for(r"vision \[")
            terminal.type("\x03")
            self.assertEqual(terminal.status(), 130)
            self.assertIn("vlm-run: interrupted", terminal.text)
            self.assertNotIn("0 tokens", terminal.text)


class OtherProgramsTest(unittest.TestCase):
    def test_fidelity_keeps_the_records_that_were_done(self):
        data = ROOT / "tools/pocket/heldout/captions.jsonl"
        with Terminal("fidelity", "--kv", "int4", "--data", data, "-t", "1", "-n", "30", "--json",
                      columns=80, program=PROGRAM.with_name("vlm-kv")) as terminal:
            terminal.wait_for(r"fidelity \[[#.]+\] 1/")
            terminal.type("\x03")
            self.assertEqual(terminal.status(), 130)
            self.assertRegex(terminal.text, r'"records":[1-9]')

    def test_a_measurement_that_is_given_up_shows_nothing_half_done(self):
        with Terminal("latency", "-m", SLOW[1], "-t", "1", "--kv", "f16", "--repeats", "1",
                      program=PROGRAM.with_name("vlm-bench")) as terminal:
            terminal.wait_for(r"latency f16 \[")
            start = time.monotonic()
            terminal.type("\x03")
            self.assertEqual(terminal.status(), 130)
            self.assertLess(time.monotonic() - start, OBEYED_S)
            self.assertNotIn("decode_of_roof", terminal.text)


if __name__ == "__main__":
    unittest.main()
