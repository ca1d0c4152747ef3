"""Finds what the project's documents and --help tell people to type."""

import re
import subprocess

PROGRAMS = ("vlm-run", "vlm-kv", "vlm-bench")

# First words of a command; a path before a name of ours does not matter.
STARTS = re.compile(
    r"(?:[A-Z_]+=\S* +)*"  # variables
    r"(?:(?:\S*/)?(?:vlm-run|vlm-kv|vlm-bench|[a-z_]+_tests|[a-z_]+_fuzz)"
    r"|(?:\S+/)?[a-z_0-9]+\.(?:sh|py)|(?:\S*/)?python3?|(?:\S*/)?pip|cmake|ctest|ninja|llama-bench|hf|for)"
    r"(?= |$)")


def documents(root):
    """The pages that a reader is sent to."""
    return [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").rglob("*.md")),
            *sorted((root / "tools").glob("*/README.md")), *sorted((root / "tests").glob("*/README.md"))]


def blocks(text):
    """Lines of indented and fenced code, without their indent and fences."""
    fenced, block = False, []
    for line in [*text.splitlines(), ""]:
        if line.startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            block.append(line if fenced else line[4:])
            continue
        if block:
            yield block
            block = []


def commands_of_block(lines):
    """One command a line; continued lines and loops are one command."""
    text = re.sub(r"\\\n\s*", "", "\n".join(lines))
    text = re.sub(r"^(for [^\n]*; do)\n(.*?)\ndone$",
                  lambda loop: f"{loop[1]} {'; '.join(map(str.strip, loop[2].splitlines()))}; done",
                  text, flags=re.MULTILINE | re.DOTALL)
    for line in text.split("\n"):
        command = re.sub(r"\s+# .*$", "", line).strip()
        if STARTS.match(command):
            yield command


def commands_of_text(text):
    """Inline code that is more than a name: `vlm-kv list --json`."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^    .*$", "", text, flags=re.MULTILINE)
    for span in re.findall(r"`([^`]+)`", text):
        command = " ".join(span.split())
        if " " in command and STARTS.match(command):
            yield command


def documented(root):
    """{command: where it stands first} of every document."""
    found = {}
    for page in documents(root):
        text = page.read_text("utf-8")
        commands = [c for block in blocks(text) for c in commands_of_block(block)]
        for command in [*commands, *commands_of_text(text)]:
            found.setdefault(command, page.relative_to(root).as_posix())
    return found


def help_of(program, *subcommand):
    return subprocess.run([program, *subcommand, "--help"], check=True, capture_output=True,
                          text=True, timeout=60).stdout


def section(text, title):
    """The lines below "Title:" up to the next empty line."""
    match = re.search(rf"^{title}:\n(.*?)(?:\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
    return match[1].splitlines() if match else []


def subcommands(text):
    return [line.split()[0] for line in section(text, "Subcommands") if re.match(r"  [a-z]", line)]


def options(text):
    """Each option as the tuple of its names: ("-m", "--model")."""
    lines = [line for line in section(text, "Options") if re.match(r"  -", line)]
    return [tuple(line.split()[0].split(",")) for line in lines]


def examples(text):
    """The commands under "Examples:", without what is said of them."""
    return [re.split(r"\s{2,}", line.strip())[0] for line in section(text, "Examples")
            if line.strip().startswith(PROGRAMS)]
