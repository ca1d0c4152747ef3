"""What mkdocs.yml needs beyond docs/: pages that lie elsewhere in the tree, and links that are right on GitHub and on the site.

A link in a page names a file of the tree, as GitHub wants it. On the site it becomes a link to the page of that file, or text
where the file has none. A page that the navigation leaves out is a warning, which --strict makes an error.
"""

import logging
import posixpath
import re
import shutil
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Files of the tree that are pages of the site, and pages that no menu shows.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples.md",
}
UNLISTED = {f"{folder}/README.md": f"{folder.replace('/', '-')}.md"
            for folder in ("tools/eval", "tools/golden", "tools/pocket", "tests/golden")}
CODE = re.compile(r"(^ {0,3}(```|~~~).*?^ {0,3}\2[^\n]*$|(?<!`)(`+)(?!`).+?(?<!`)\3(?!`))", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\](?:\([^()]*\))?)*)\]\(([^()\s]+)\)")
ATTRIBUTE = re.compile(r'\b(src|srcset|href)="([^"]+)"')
ITEM = re.compile(r"(?:[-*+]|1\.) ")
log = logging.getLogger("mkdocs.hooks.kvlm")


def sources():
    """Page of the site to file of the tree, for pages outside docs/."""
    return {page: file for file, page in {**PAGES, **UNLISTED}.items() if (ROOT / file).is_file()}


def resolve(link, source, root=ROOT):
    """Where a link of the tree's file `source` leads on the site, from the site's root: (path or None, fragment). None: to a
    file that is no part of the site. The link itself if it leaves the tree, names a place of its page or nothing at all."""
    path, _, fragment = link.partition("#")
    if not path or re.match(r"[a-z][a-z0-9+.-]*:|/", path):
        return link, ""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if (root / target / "README.md").is_file():
        target = posixpath.join(target, "README.md")
    page = {**PAGES, **UNLISTED}.get(target)
    if page is None and target.startswith("docs/") and not (root / target).is_dir():
        page = target[len("docs/"):]
    if page is None and (root / target).exists():
        return None, ""
    return page or link, fragment and "#" + fragment


def for_site(markdown, source, page, root=ROOT):
    """The text of `source`, whose page is `page`, with its links as the site needs them."""
    def moved(link):
        path, fragment = resolve(link, source, root)
        if path is None or path == link:
            return path
        return posixpath.relpath(path, posixpath.dirname(page) or ".") + fragment

    def link(match):
        inner = LINK.sub(link, match[2])
        path = moved(match[3])
        return inner if path is None else f"{match[1]}[{inner}]({path})"

    def attribute(match):
        path = moved(match[2])
        return match[0] if path is None else f'{match[1]}="{path}"'

    # A link's words may hold code, so code is hidden while links are looked for.
    hidden = []

    def hide(match):
        hidden.append(match[0])
        return f"\0{len(hidden) - 1}\0"

    text = CODE.sub(hide, markdown)
    text = ATTRIBUTE.sub(attribute, LINK.sub(link, text))
    text = "\n".join(spaced(text.split("\n")))
    return re.sub("\0(\\d+)\0", lambda match: hidden[int(match[1])], text)


def spaced(lines):
    """A list that follows a paragraph without a blank line is a list on GitHub; Python's Markdown wants the line."""
    paragraph = False  # the line before is text of a paragraph, not of a list
    for line in lines:
        item = ITEM.match(line)
        if item and paragraph:
            yield ""
        if not line.strip() or line.startswith(("#", "|", "<", ">")):
            paragraph = False
        elif item:
            paragraph = None  # what follows belongs to the item
        elif paragraph is not None and not line.startswith("    "):
            paragraph = True
        yield line


def on_files(files, config):
    from mkdocs.structure.files import File
    copies = Path(tempfile.mkdtemp(prefix="kvlm-site-"))
    config["kvlm_copies"] = str(copies)
    for page, file in {**sources(), "site.css": "tools/docs/site.css"}.items():
        shutil.copy(ROOT / file, copies / page)
        files.append(File(page, str(copies), config["site_dir"], config["use_directory_urls"]))
    return files


def on_nav(nav, config, files):
    from mkdocs.structure.nav import Link
    for file in files.documentation_pages():
        if file.page not in nav.pages and file.src_path not in UNLISTED.values():
            log.warning("%s is in no menu of mkdocs.yml", file.src_path)
    nav.items.append(Link("API", "api/index.html"))
    return nav


def on_page_markdown(markdown, page, config, files):
    source = sources().get(page.file.src_path, "docs/" + page.file.src_path)
    return for_site(markdown, source, page.file.src_path)


def on_post_build(config):
    shutil.rmtree(config["kvlm_copies"], ignore_errors=True)
