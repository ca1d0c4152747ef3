#!/usr/bin/env python3
"""Reads the sources against the rules that a compiler cannot see (CONTRIBUTING.md, "Layout").

    tools -> runtime -> vision ----------------> kernels        arrows = "may include"
                     -> llm ------> kvcache ---> kernels        kernels/base is vocabulary of all
    kvlm/kvlm.h and kvlm/policy.h, the headers of other projects, are above runtime and below nothing

Runs as a test; `tests/layering_test.py --report` also lists the sources without a mirror test.
"""

import re
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# What a folder may include, itself apart. The longest matching folder of a file counts.
MAY_INCLUDE = {
    "kernels/base": set(),
    "kernels": {"kernels/base"},
    "kvcache": {"kernels"},
    "vision": {"kernels"},
    "llm": {"kvcache", "kernels"},
    "runtime": {"vision", "llm", "kvcache", "kernels"},
    "kvlm": {"runtime", "vision", "llm", "kvcache", "kernels"},
    "tools": {"runtime", "vision", "llm", "kvcache", "kernels"},
    "tests": {"tools", "runtime", "vision", "llm", "kvcache", "kernels"},
}
# The same among the folders of kernels/cuda. The decode table describes what attention reads and sizes its launches, so that
# these two know each other.
CUDA_MAY_INCLUDE = {
    "device": set(),
    "model": {"device"},
    "dense": {"device"},
    "product": {"device", "model", "dense"},
    "importance": {"device", "dense"},
    "pack": {"device", "model"},
    "attend": {"device", "table"},
    "table": {"device", "pack", "attend"},
}
FOLDERS = sorted({folder.split("/")[0] for folder in MAY_INCLUDE})
LIBRARY = [folder for folder in FOLDERS if folder not in ("tools", "tests")]
SUFFIXES = {".h", ".cpp", ".cu", ".cuh"}

CUDA_HEADER = re.compile(
    r"(cuda|cublas|cufft|curand|nvtx|nvml|nccl|device_launch_parameters|cooperative_groups|mma\.h|"
    r"cub/|thrust/|cute/|cutlass/|vector_types\.h|math_constants\.h)")
# Free functions and names that talk to the process, not to the caller.
PROCESS_CALL = re.compile(
    r"(?<![\w.>:])(?:std::|::)?(?P<name>(?:secure_)?getenv|setenv|putenv|v?f?printf|f?puts|f?putc|"
    r"putchar|perror|_?exit|_Exit|quick_exit|abort|terminate|system|popen|fmt::print(?:ln)?)\s*\(|"
    r"(?<![\w.>:])(?P<stream>std::(?:cout|cerr|clog|cin)|stdout|stderr)\b")

TOKEN = re.compile(
    r'(?P<comment>//(?:\\\n|[^\n])*|/\*.*?\*/)'
    r'|(?P<raw>R"(?P<mark>[^()\\\s]*)\(.*?\)(?P=mark)")'
    r'|(?P<string>"(?:\\.|[^"\\\n])*")'
    r"|(?P<char>(?<![0-9A-Fa-f])'(?:\\.|[^'\\\n])+')", re.DOTALL)
# Above this many lines a reader wants to be told first what is there.
HEAD_LINES = 150
BEFORE_HEAD = re.compile(r"(?:inline )?namespace\b.*\{|using .*;|(?:HWY|KVLM)_\w+\(\);?|// (?:clang-format|NOLINT).*")
# Files that have none yet and are being rewritten.
WITHOUT_HEAD = {"kvcache/plan/layouts.cpp", "kvcache/policy_cache.cpp", "kvcache/retention/common.cpp",
                "kvcache/retention/prefix_fit.cpp", "kvcache/retention/prefixkv.cpp"}
# A policy is one file; elsewhere these alone may name it, which docs/add-a-policy.md names all.
POLICY_ROOMS = ("kvcache/quantizers/", "kvcache/retention/")
POLICY_LISTS = {"kvcache/spec/policies.h", "kvcache/spec/registry.cpp"}  # of their entries
POLICY_WORDS = {
    "kvcache/plan/conflicts.cpp",  # what cannot stand together, with its cure
    "kvcache/spec/spec.cpp",  # names of other engines, by which a user finds ours
    "runtime/policy_profile.cpp",  # constants that are fitted to a checkpoint
}
POLICY_ENTRY = re.compile(r"\b(?:quantizers|retention)::(\w+)")
ORDER = re.compile(r"^// [^\n]*each file needs only those before it: ([^.]*)\.", re.MULTILINE)
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"\n]*)"|<([^>\n]*)>)', re.MULTILINE)


def blank(text, strings):
    """The text with comments, and on request strings, as spaces; lines stay as they are."""
    def spaces(match):
        keep = not strings and match.lastgroup != "comment"
        return match[0] if keep else re.sub(r"[^\n]", " ", match[0])
    return TOKEN.sub(spaces, text)


def folder_of(path):
    """The entry of MAY_INCLUDE that a root-relative path belongs to, or None."""
    matches = [folder for folder in MAY_INCLUDE if path.startswith(folder + "/")]
    return max(matches, key=len, default=None)


class Tree:
    """The C++ and CUDA sources below a root, by root-relative path."""

    def __init__(self, root):
        self.root = Path(root)
        self.text = {}
        for folder in FOLDERS:
            for path in sorted((self.root / folder).rglob("*")):
                if path.suffix in SUFFIXES and path.is_file():
                    self.text[path.relative_to(self.root).as_posix()] = path.read_text("utf-8")

    def includes(self, path):
        """(line, header, quoted) of every include."""
        code = blank(self.text[path], strings=False)
        for match in INCLUDE.finditer(code):
            line = code.count("\n", 0, match.start()) + 1
            yield line, match[1] if match[1] is not None else match[2], match[1] is not None

    def violations(self):
        """Every broken rule, as "path:line: sentence"."""
        return sorted([*self.broken_includes(), *self.cycles(), *self.out_of_order(),
                       *self.process_calls(), *self.unguarded_headers(), *self.unlisted_sources(),
                       *self.without_head(), *self.policies_elsewhere()])

    def broken_includes(self):
        for path in self.text:
            here = folder_of(path)
            in_cuda = "/cuda/" in path or path.endswith((".cu", ".cuh"))
            for line, header, quoted in self.includes(path):
                where = f"{path}:{line}"
                ours = header.split("/")[0] in FOLDERS and "/" in header
                if CUDA_HEADER.match(header) and not in_cuda:
                    yield f"{where}: CUDA header <{header}> outside a cuda/ folder"
                elif quoted and not ours and not header.startswith("hwy/"):  # Highway's idiom
                    yield (f'{where}: "{header}" is not relative to the root; a library\'s header '
                           "is written <...>")
                elif ours and not quoted:
                    yield f'{where}: <{header}> is ours and written "{header}"'
                elif ours and not (self.root / header).is_file():
                    yield f'{where}: "{header}" does not exist'
                elif ours:
                    there = folder_of(header)
                    allowed = MAY_INCLUDE[here]
                    if there != here and not {there, there.split("/")[0]} & allowed:
                        yield f'{where}: {here} must not include "{header}"'
                    if path.startswith("kernels/cuda/") and header.startswith("kernels/cuda/"):
                        of, other = path.split("/")[2], header.split("/")[2]
                        if of != other and other not in CUDA_MAY_INCLUDE.get(of, set()):
                            yield f'{where}: kernels/cuda/{of} must not include "{header}"'

    def cycles(self):
        edges = {path: [header for _, header, quoted in self.includes(path)
                        if quoted and header in self.text and header != path]
                 for path in self.text}
        done, trail = set(), []

        def visit(path):
            if path in trail:
                ring = trail[trail.index(path):]
                yield f"{min(ring)}:1: includes itself through {' -> '.join([*ring, path])}"
            elif path not in done:
                trail.append(path)
                for header in edges[path]:
                    yield from visit(header)
                trail.pop()
                done.add(path)

        for path in edges:
            yield from visit(path)

    def out_of_order(self):
        """Headers that say in which order files, each with its source, build on each other."""
        needs = {}
        for path in self.text:
            needs.setdefault(path.rsplit(".", 1)[0], set()).update(
                header.rsplit(".", 1)[0] for _, header, quoted in self.includes(path)
                if quoted and header in self.text)
        said = {}
        for path, text in self.text.items():
            match = ORDER.search(text)
            if not match:
                continue
            folder = path.rsplit("/", 1)[0]
            words = re.sub(r"\n// |[,;]| and of the plan:", " ", match[1]).split()
            here = path.rsplit(".", 1)[0]
            order = [f"{folder}/{word.strip('[]')}" for word in words]
            if [f"{folder}/{word[1:-1]}" for word in words if word.startswith("[")] != [here]:
                yield f"{path}:1: its order of files does not mark this one alone with [ ]"
            if said.setdefault(folder, order) != order:
                yield f"{path}:1: its order of files is not that of the others"
            seen, left = {here}, [here]
            while left:
                for there in needs.get(left.pop(), set()) - seen:
                    seen.add(there)
                    left.append(there)
            after = order[order.index(here) + 1:] if here in order else []
            for there in sorted(seen.intersection(after)):
                yield f"{path}:1: {here} needs {there}, which comes after it"

    def process_calls(self):
        for path, text in self.text.items():
            if path.split("/")[0] in LIBRARY:
                code = blank(text, strings=True)
                for match in PROCESS_CALL.finditer(code):
                    line = code.count("\n", 0, match.start()) + 1
                    yield f"{path}:{line}: {match['name'] or match['stream']} outside tools/"

    def unguarded_headers(self):
        """An -inl.h of Highway's namespace is included once per instruction set: its toggle guards it."""
        for path, text in self.text.items():
            code = blank(text, strings=False)
            if path.endswith("-inl.h") and "HWY_NAMESPACE" in code:
                if "== defined(HWY_TARGET_TOGGLE)" not in code:
                    yield f"{path}:1: no guard that toggles with HWY_TARGET_TOGGLE"
                continue
            if path.endswith((".h", ".cuh")) and not re.search(
                    r"^#pragma once$", blank(text, strings=False), re.MULTILINE):
                yield f"{path}:1: no #pragma once"

    def unlisted_sources(self):
        for path in self.text:
            if not path.endswith((".cpp", ".cu")) or path.startswith("tests/"):
                continue
            folder = (self.root / path).parent
            while not (folder / "CMakeLists.txt").is_file() and folder != self.root:
                folder = folder.parent
            lists = folder / "CMakeLists.txt"
            words = re.sub(r"#.*", "", lists.read_text("utf-8")).replace("(", " ").replace(")", " ")
            name = (self.root / path).relative_to(folder).as_posix()
            if name not in words.split():
                yield f"{path}:1: not listed in {lists.relative_to(self.root)}"

    def without_head(self):
        """Long sources need a comment before the code; in a header a docstring will do."""
        for path, text in self.text.items():
            if path.startswith("tests/") or path in WITHOUT_HEAD or text.count("\n") <= HEAD_LINES:
                continue
            code = re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", "", text, flags=re.MULTILINE)
            lines = (line.strip() for line in code.split("\n"))
            first = next((line for line in lines if line and not BEFORE_HEAD.fullmatch(line)), "")
            head = first.startswith("//") and not first.startswith("// ---")
            if not head or (first.startswith("///") and not path.endswith((".h", ".cuh"))):
                yield f"{path}:1: over {HEAD_LINES} lines and no comment at its head"

    def policies_elsewhere(self):
        """Policies that other files know; in the cache also options that are theirs alone."""
        here = {path: blank(text, strings=False) for path, text in self.text.items()
                if path.startswith(POLICY_ROOMS)}
        names = {name for code in here.values() for name in re.findall(r'\.name = "(\w+)"', code)}
        key = re.compile(r'(?:\.key = |\w+_option\()"(\w+)"')
        shared = [code for path, code in here.items() if path.endswith("/common.h")]
        shared.append(blank(self.text.get("kvcache/spec/policy.cpp", ""), strings=False))
        options = {name for code in here.values() for name in key.findall(code)}
        options -= set(key.findall("".join(shared)))
        for path, text in self.text.items():
            if path in here or path.split("/")[0] not in ("kvcache", "llm", "vision", "runtime", "kvlm"):
                continue
            code = blank(text, strings=False)
            if path not in POLICY_LISTS:
                for match in POLICY_ENTRY.finditer(code):
                    line = code.count("\n", 0, match.start()) + 1
                    yield f"{path}:{line}: the policy {match[1]} outside its file and the registry"
            for match in TOKEN.finditer(code) if path not in POLICY_WORDS else ():
                if match.lastgroup not in ("string", "raw", "mark"):
                    continue
                said = match[0][match[0].index('"') + 1:-1].lstrip("(")
                first = re.match(r"\w+(?![\w ])|$", said)
                word = first[0] if first else ""
                if word not in names and not (path.startswith("kvcache/") and said in options):
                    continue
                line = code.count("\n", 0, match.start()) + 1
                yield f"{path}:{line}: {word or said} of a policy outside its file"

    def without_mirror(self):
        """Sources whose folder has tests but which have no mirror test of their own."""
        for path in self.text:
            mirror = self.root / "tests" / path
            # cpu/, cuda/ and no_cuda/ are tested through the operation's own file.
            through = [mirror.parent, mirror.parent.parent]
            tests = [test for folder in through for test in folder.glob(f"{mirror.stem}*_test.*")]
            if (path.endswith(".cpp") and path.split("/")[0] != "tests" and mirror.parent.is_dir()
                    and not tests):
                yield path


class ThisTree(unittest.TestCase):
    maxDiff = None

    def test_keeps_the_rules(self):
        tree = Tree(ROOT)
        self.assertGreater(len(tree.text), 10, "found no sources")
        self.assertEqual([], tree.violations())


class Checker(unittest.TestCase):
    """Plants one violation at a time and sees it found, and what is legal left alone."""

    def found(self, files):
        with tempfile.TemporaryDirectory() as root:
            listed = {}
            for path, text in files.items():
                file = Path(root, path)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, "utf-8")
                listed.setdefault(path.split("/")[0], []).append(path.split("/", 1)[-1])
            for folder, names in listed.items():
                lists = Path(root, folder, "CMakeLists.txt")
                if folder in FOLDERS and not lists.exists():
                    lists.write_text(f"kvlm_library(kvlm_{folder} {' '.join(names)})\n", "utf-8")
            return Tree(root).violations()

    def header(self, *includes):
        return "#pragma once\n" + "".join(f"#include {name}\n" for name in includes)

    def test_an_include_along_the_arrows_is_legal(self):
        self.assertEqual([], self.found({
            "kernels/base/tensor.h": self.header("<vector>"),
            "kernels/gemm.h": self.header('"kernels/base/tensor.h"'),
            "kernels/cpu/gemm.cpp": '#include "kernels/gemm.h"\n#include "hwy/highway.h"\n',
            "kvcache/spec/spec.h": self.header('"kernels/base/tensor.h"'),
            "llm/decoder.h": self.header('"kvcache/spec/spec.h"', '"kernels/gemm.h"'),
            "vision/encoder.h": self.header('"kernels/gemm.h"'),
            "runtime/family.h": self.header('"llm/decoder.h"', '"vision/encoder.h"'),
            "tools/vlm_run.cpp": '#include "runtime/family.h"\nint main() { printf("x"); }\n',
            "tests/kvcache/spec_test.cpp": '#include "runtime/family.h"\n',
        }))

    def test_an_include_against_the_arrows_is_found(self):
        for here, there in [("kernels/base/a.h", "kernels/b.h"), ("kernels/a.h", "kvcache/b.h"),
                            ("kvcache/a.h", "llm/b.h"), ("llm/a.h", "vision/b.h"),
                            ("vision/a.h", "llm/b.h"), ("vision/a.h", "kvcache/b.h"),
                            ("llm/a.h", "runtime/b.h"), ("runtime/a.h", "tools/b.h"),
                            ("tools/a.h", "tests/b.h"), ("kernels/cuda/device/a.h", "kernels/cuda/model/b.h"),
                            ("kernels/cuda/attend/a.h", "kernels/cuda/pack/b.h")]:
            with self.subTest(here=here, there=there):
                found = self.found({here: self.header(f'"{there}"'), there: self.header()})
                self.assertEqual(len(found), 1, found)
                self.assertIn(f'must not include "{there}"', found[0])
                self.assertTrue(found[0].startswith(f"{here}:2: "), found)

    def test_an_include_that_is_not_root_relative_is_found(self):
        found = self.found({"kvcache/a.h": self.header(), "kvcache/b.h": self.header('"a.h"'),
                            "kvcache/c.h": self.header('"../kvcache/a.h"'),
                            "kvcache/d.h": self.header("<kvcache/a.h>"),
                            "kvcache/e.h": self.header('"fmt/format.h"')})
        self.assertEqual([f.split(":")[0] for f in found], [f"kvcache/{x}.h" for x in "bcde"])

    def test_a_missing_file_is_found(self):
        found = self.found({"kvcache/a.h": self.header('"kernels/gone.h"')})
        self.assertEqual(found, ['kvcache/a.h:2: "kernels/gone.h" does not exist'])

    def test_a_cuda_header_outside_cuda_is_found(self):
        found = self.found({"kernels/a.cpp": "#include <cuda_runtime.h>\n",
                            "kernels/base/b.h": self.header("<cuda_fp16.h>"),
                            "kernels/cuda/c.cu": "#include <cuda_runtime.h>\n",
                            "kernels/cuda/d.h": self.header("<cublasLt.h>"),
                            "kvcache/instances/e.cu": "#include <mma.h>\n"})
        self.assertEqual([f.split(":")[0] for f in found], ["kernels/a.cpp", "kernels/base/b.h"])

    def test_a_cycle_is_found(self):
        found = self.found({"llm/a.h": self.header('"llm/b.h"'),
                            "llm/b.h": self.header('"llm/a.h"')})
        self.assertEqual(
            found, ["llm/a.h:1: includes itself through llm/a.h -> llm/b.h -> llm/a.h"])

    def test_a_file_that_needs_a_later_one_is_found(self):
        def listed(order, *includes):
            return (f"#pragma once\n// In a row, each file needs only those before it: {order}.\n"
                    + self.header(*includes))
        files = {"kvcache/a.h": listed("[a], b,\n// c"),
                 "kvcache/b.h": listed("a, [b],\n// c", '"kvcache/a.h"'),
                 "kvcache/c.h": listed("a, b,\n// [c]"),
                 "kvcache/c.cpp": '#include "kvcache/b.h"\n',
                 "kvcache/other.h": self.header('"kvcache/c.h"')}
        self.assertEqual([], self.found(files))
        later = "kvcache/a needs kvcache/{}, which comes after it"
        for source, wrong in [('"kvcache/b.h"', ["b"]), ('"kvcache/other.h"', ["b", "c"])]:
            found = self.found({**files, "kvcache/a.cpp": f"#include {source}\n"})
            self.assertEqual([f for f in found if f.startswith("kvcache/a.h")],
                             [f"kvcache/a.h:1: {later.format(word)}" for word in wrong])
        self.assertIn("does not mark", self.found({**files, "kvcache/a.h": listed("a, [b], c")})[0])
        self.assertIn("not that of", self.found({**files, "kvcache/c.h": listed("b, a, [c]")})[0])

    def test_talking_to_the_process_below_tools_is_found(self):
        for call in ['getenv("HOME");', 'std::getenv("HOME");', 'printf("x");', 'std::printf("x");',
                     "std::cout << 1;", "std::cerr << 1;", "exit(1);", "std::exit(1);",
                     "::abort();", "std::abort ();", 'fmt::print("x");', 'fprintf(f, "x");',
                     "fputs(x, stderr);"]:
            with self.subTest(call=call):
                found = self.found({"llm/a.cpp": f"void f() {{\n  {call}\n}}\n"})
                self.assertTrue(found and found[0].startswith("llm/a.cpp:2: "), found)
                self.assertEqual([], self.found({"tools/a.cpp": f"void f() {{ {call} }}\n"}))

    def test_harmless_look_alikes_are_legal(self):
        self.assertEqual([], self.found({"llm/a.cpp": r"""
            // exit(1) and std::cerr in a comment
            /* #include "tools/gone.h"
               abort() */
            const char* text = "call \"exit(1)\" // or printf(";
            const char* raw = R"x(abort() " ")x";
            const char quote = '"'; int big = 1'000'000;
            void f(Loop& loop) { loop.exit(1); loop->abort(); Loop::exit(2); my_exit(1); }
            void g(char* b) { snprintf(b, 1, "x"); }
            """}))

    def test_a_header_without_pragma_once_is_found(self):
        found = self.found({"llm/a.h": "// #pragma once\n", "tests/b.h": "struct B {};\n"})
        self.assertEqual(found, ["llm/a.h:1: no #pragma once", "tests/b.h:1: no #pragma once"])

    def test_a_header_per_instruction_set_has_a_toggling_guard(self):
        toggle = "#if defined(KVLM_A_INL_H_) == defined(HWY_TARGET_TOGGLE)\n#endif\n"
        every = "namespace kvlm::cpu::HWY_NAMESPACE {}\n"
        found = self.found({"kernels/cpu/a-inl.h": toggle + every,
                            "kernels/cpu/b-inl.h": "#pragma once\n" + every,
                            "kernels/cpu/c-inl.h": "#pragma once\nnamespace kvlm::cpu::one_set {}\n",
                            "kernels/cpu/d-inl.h": "namespace kvlm::cpu::one_set {}\n"})
        self.assertEqual(found,
                         ["kernels/cpu/b-inl.h:1: no guard that toggles with HWY_TARGET_TOGGLE",
                          "kernels/cpu/d-inl.h:1: no #pragma once"])

    def test_a_source_that_is_not_built_is_found(self):
        lists = "kvlm_library(k a.cpp # b.cpp\n  cuda/c.cu)\n"
        found = self.found({"kernels/CMakeLists.txt": lists,
                            "kernels/a.cpp": "", "kernels/b.cpp": "", "kernels/cuda/c.cu": "",
                            "kernels/cpu/a.cpp": ""})
        self.assertEqual(found, ["kernels/b.cpp:1: not listed in kernels/CMakeLists.txt",
                                 "kernels/cpu/a.cpp:1: not listed in kernels/CMakeLists.txt"])

    def test_a_policy_outside_its_file_is_found(self):
        files = {"kvcache/retention/h2o.cpp":
                     'const PolicyInfo h2o{.name = "h2o", .options = {{.key = "colmean"},\n'
                     '    shrink_option("eta_k", 1)}};\n',
                 "kvcache/spec/policy.cpp": 'OptionInfo{.key = "keep"};\n',
                 "kvcache/retention/common.h": '#pragma once\nOptionInfo{.key = "keep"};\n',
                 "kvcache/spec/policies.h": "#pragma once\n// retention::h2o\n",
                 "kvcache/spec/registry.cpp": "&retention::h2o,\n",
                 "kvcache/plan/conflicts.cpp": 'f("colmean");\n',
                 "kvcache/engine/a.cpp": '// "h2o" in words, and its retention::h2o\nf("keep");\n',
                 "llm/a.cpp": 'f("colmean"), f("h2o is no name here");\n',
                 "kernels/a.cpp": 'f("h2o");\n'}
        listed = {"kvcache/CMakeLists.txt": " ".join(
            path.split("/", 1)[1] for path in files if path.startswith("kvcache/"))}
        self.assertEqual([], self.found({**files, **listed}))
        for code, sentence in [("&retention::h2o;", "the policy h2o outside its file"),
                               ('name == "h2o";', "h2o of a policy outside"),
                               ('f("h2o,keep=0.5");', "h2o of a policy outside"),
                               ('f(R"(h2o)");', "h2o of a policy outside"),
                               ('text("eta_k");', "eta_k of a policy outside"),
                               ('text("colmean");', "colmean of a policy outside")]:
            found = self.found({**files, **listed, "kvcache/engine/a.cpp": f"\n{code}\n"})
            self.assertEqual(len(found), 1, found)
            self.assertIn(f"kvcache/engine/a.cpp:2: {sentence}", found[0])

    def test_the_page_names_who_may_name_a_policy(self):
        page = (ROOT / "docs/add-a-policy.md").read_text("utf-8")
        self.assertEqual([], [path for path in sorted(POLICY_LISTS | POLICY_WORDS) if path not in page])

    def test_a_long_source_without_a_head_is_found(self):
        body = "#include <vector>\n#define A \\\n  b\n\n{}namespace kvlm {{\n\n{}" + "int i;\n" * 150 + "}}\n"
        told, inside, bare, doc = (body.format(*words) for words in (
            ("// What it does.\n", ""), ("", "// What it does.\n"), ("", ""), ("", "/// Of i.\n")))
        guard = "#pragma once\n"
        self.assertEqual([], self.found({"llm/a.cpp": told, "llm/b.cpp": inside, "llm/c.h": guard + doc,
                                         "tests/llm/a_test.cpp": bare}))
        found = self.found({"llm/a.cpp": bare, "llm/b.cpp": doc, "llm/c.h": guard + bare})
        self.assertEqual(found, [f"{path}:1: over 150 lines and no comment at its head"
                                 for path in ("llm/a.cpp", "llm/b.cpp", "llm/c.h")])


if __name__ == "__main__":
    if sys.argv[1:] == ["--report"]:
        print("\n".join(f"{path}: no mirror test" for path in Tree(ROOT).without_mirror()))
        sys.argv.pop()
    unittest.main()
