#!/usr/bin/env python3
"""Builds the site and the API's pages into build/site, and checks them: every link leads somewhere, nothing is fetched.

    tools/docs/build.py

Needs mkdocs, its Material theme and doxygen (tools/setup.sh --docs). A warning of either fails. To read the site with its
search: python3 -m http.server -d build/site
"""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build/site"
PUBLIC = ("kvlm/kvlm.h", "kvlm/policy.h")
INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
FETCHED = {("link", "href"), ("script", "src"), ("img", "src"), ("source", "srcset"), ("iframe", "src")}


def public_headers(root=ROOT):
    """The headers of other projects and all of the tree that they include, sorted."""
    found, waiting = set(), list(PUBLIC)
    while waiting:
        header = waiting.pop()
        if header not in found and (root / header).is_file():
            found.add(header)
            waiting += INCLUDE.findall((root / header).read_text("utf-8"))
    return sorted(found)


class Page(HTMLParser):
    """What a page has that can be linked to, what it links to, and what a browser fetches for it."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.fetched = set(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.ids |= {attributes[key] for key in ("id", "name") if attributes.get(key)}
        if tag == "a" and attributes.get("href"):
            self.links.append(attributes["href"])
        canonical = tag == "link" and attributes.get("rel") == "canonical"
        self.fetched += [value for key, value in attrs if (tag, key) in FETCHED and value and not canonical]


def faults(site):
    """What is wrong with the pages of a folder."""
    pages = {path: Page(path.read_text("utf-8", "replace")) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        name = path.relative_to(site)
        for url in page.fetched + page.links:
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                if url in page.fetched and parts.scheme not in ("data", "javascript"):
                    yield f"{name} fetches {url}"
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if parts.path.startswith("/") or not target.is_file():
                yield f"{name} links to {url}, which is not there"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
                yield f"{name} links to {url}, and that page has no such place"
    for path in site.rglob("*.css"):
        for url in re.findall(r"url\(['\"]?(https?:[^)'\"]+)", path.read_text("utf-8", "replace")):
            yield f"{path.relative_to(site)} fetches {url}"


def main():
    mkdocs = subprocess.run(["mkdocs", "build", "--strict"], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if mkdocs.returncode != 0:
        print(mkdocs.stderr, end="", file=sys.stderr)
        mkdocs.check_returncode()
    (SITE / "404.html").unlink()  # its links hold at the root of a server alone
    (SITE / "api").mkdir()
    doxyfile = (ROOT / "tools/docs/Doxyfile").read_text("utf-8")
    inputs = " ".join(["tools/docs/api.md", *public_headers()])
    subprocess.run(["doxygen", "-"], cwd=ROOT, check=True, text=True, input=f"{doxyfile}\nINPUT = {inputs}\n")
    found = list(faults(SITE))
    print(*found, sep="\n", end="\n" if found else "", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as error:
        sys.exit(f"build.py: {error.cmd[0]} failed")
    except FileNotFoundError as error:
        sys.exit(f"build.py: {error.filename} is not there; tools/setup.sh --docs installs it")
