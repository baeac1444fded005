"""A hook of mkdocs: links from pages to files outside of `docs/` lead to the repository, and the site has the pages
as Markdown, too, which `llms.txt` links."""

from __future__ import annotations

import posixpath
import re
import shutil
from pathlib import Path
from typing import Any

OUTSIDE = re.compile(r"\]\(((?:\.\./)+[^)#\s]+)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    def absolute(link: re.Match[str]) -> str:
        folder = posixpath.dirname(page.file.src_uri)
        path = posixpath.normpath(posixpath.join("docs", folder, link[1]))
        inside = path == "docs" or path.startswith("docs/")
        return link[0] if inside else f"]({config.extra['repository']}/blob/main/{path}"

    return OUTSIDE.sub(absolute, markdown)


def on_post_build(*, config: Any) -> None:
    docs, site = Path(config.docs_dir), Path(config.site_dir)
    for page in docs.rglob("*.md"):
        place = site / page.relative_to(docs)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(page, place)
