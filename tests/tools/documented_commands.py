"""Finds what the project's documents and --help tell people to type."""

import re
import subprocess

PROGRAMS = ("vlm-run", "vlm-kv", "vlm-bench", "vlm-serve")

# First words of a command; a path before a name of ours does not matter.
STARTS = re.compile(
    r"(?:[A-Z_]+=\S* +)*"  # variables
    r"(?:(?:\S*/)?(?:vlm-run|vlm-kv|vlm-bench|vlm-serve|[a-z_]+_tests|[a-z_]+_fuzz)"
    r"|(?:\S+/)?[a-z_0-9]+\.(?:sh|py)|(?:\S*/)?python3?|(?:\S*/)?pip|cmake|ctest|cpack|ninja|llama-bench|hf|mpirun|srun"
    r"|apt-get|debootstrap|docker|xargs|for)"
    r"(?= |$)")


def documents(root):
    """The pages that a reader is sent to."""
    return [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").rglob("*.md")),
            *sorted((root / "tools").glob("*/README.md")), *sorted((root / "tests").glob("*/README.md"))]


def blocks(text):
    """Lines of indented and fenced code, without their indent and fences."""
    fenced, block = False, []
    for line in [*text.splitlines(), "end"]:
        if line.startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            block.append(line if fenced else line[4:])
            continue
        elif block and not line:  # code may go on after it
            block.append(line)
            continue
        while block and not block[-1]:
            block.pop()
        if block:
            yield block
            block = []


def transcript(lines):
    """[(command, [line of its output])] of a block that shows commands as "$ COMMAND", each with what it prints. Continued
    lines and a here-document belong to the command."""
    found, end = [], ""  # end: the last line of the here-document that is read, or a backslash
    for line in lines:
        if line.startswith("$ ") and not end:
            found.append((line[2:], []))
        elif end:
            command = found.pop()[0]
            found.append((command[:-1] + line.strip() if end == "\\" else f"{command}\n{line}", []))
            if end != "\\":
                end = end if line != end else ""
                continue
        else:
            if found:
                found[-1][1].append(line)
            continue
        here = re.search(r"<<'(\w+)'$", line)
        end = here[1] if here else "\\" if line.endswith("\\") else ""
    return [(command, output[:-1] if output and not output[-1] else output) for command, output in found]


def transcripts(text):
    """Those of a whole page."""
    return [entry for block in blocks(text) for entry in transcript(block)]


def commands_of_block(lines):
    """One command a line; continued lines and loops are one command. In a block with "$ COMMAND" nothing else is one."""
    shown = transcript(lines)
    if shown:
        yield from (command for command, _ in shown)
        return
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
