"""A hook of mkdocs: links from pages to files outside of `docs/` lead to the repository."""

from __future__ import annotations

import posixpath
import re
from typing import Any

OUTSIDE = re.compile(r"\]\(((?:\.\./)+[^)#\s]+)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    def absolute(link: re.Match[str]) -> str:
        folder = posixpath.dirname(page.file.src_uri)
        path = posixpath.normpath(posixpath.join("docs", folder, link[1]))
        inside = path == "docs" or path.startswith("docs/")
        return link[0] if inside else f"]({config.extra['repository']}/blob/main/{path}"

    return OUTSIDE.sub(absolute, markdown)
