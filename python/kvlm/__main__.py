"""python -m kvlm --rules FILE.py PROGRAM ARGUMENTS: vlm-run or vlm-kv, with policies in Python.

FILE.py makes them with @kvlm.retention and @kvlm.quantizer; --rules may be repeated. Standard output, files and the exit status are
the program's. A run without --chat and --gpus, which need the programs themselves.

    python -m kvlm --rules my.py vlm-kv fidelity --kv "vnorm,keep=0.5" --kv "knorm,keep=0.5" --data captions.jsonl
"""

import argparse
import os
import runpy
import sys

from . import _core

PROGRAMS = ("vlm-kv", "vlm-run")


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser("python -m kvlm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", action="append", metavar="FILE.py", default=[], help="file that makes policies")
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the program")
    asked = parser.parse_args()
    if any(word.split("=")[0] == "--gpus" for word in asked.arguments):
        parser.error("--gpus starts programs, which know no policies in Python; leave it out")
    for file in asked.rules:
        if not os.path.isfile(file):
            parser.error(f"--rules {file} is not a file; give one that makes policies")
        sys.path.insert(0, os.path.dirname(os.path.abspath(file)))  # as Python does for a script
        runpy.run_path(file)
    sys.stdout.flush()
    return _core.run_program([asked.program, *asked.arguments], asked.rules)


if __name__ == "__main__":
    sys.exit(main())
