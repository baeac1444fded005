"""Writes `docs/images/`: the pages of `flywheel web` that the documentation shows, on a recorded run of
`make demo-agent`.

`python -m scripts.screenshots` (or `make screenshots`) needs Chromium. The images are reduced to 64 colours, so that
they stay small.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from tests.web.conftest import NO_BROWSER, PROGRAMS, serving
from tests.web.recorded_state import unpack

FOLDER = Path(__file__).parent.parent / "docs" / "images"
PAGES = {"overview": "/", "criteria": "/criteria", "task": "/tasks", "gate": "/gate/r0001"}
DARK = {"task"}
"""Those that are shown dark as well, where the reader's browser is."""
SIZE = (1200, 760)
COLOURS = 64


def main() -> int:
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        print(NO_BROWSER, file=sys.stderr)
        return 1
    FOLDER.mkdir(exist_ok=True)
    # The sandbox needs another user than root.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        config = unpack(Path(folder), complete=False)
        browser = playwright.chromium.launch(executable_path=program, args=arguments)
        with serving(config) as address:
            for scheme in ("light", "dark"):
                context = browser.new_context(
                    color_scheme=scheme,
                    viewport={"width": SIZE[0], "height": SIZE[1]},
                    reduced_motion="reduce",
                )
                page = context.new_page()
                for name, path in PAGES.items():
                    if scheme == "dark" and name not in DARK:
                        continue
                    page.goto(address + path)
                    if name == "task":
                        page.locator("main table tbody a").first.click()
                    page.wait_for_load_state("load")
                    page.wait_for_timeout(500)  # curves are drawn
                    image = Image.open(io.BytesIO(page.screenshot()))
                    reduced = image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
                    reduced.save(FOLDER / f"{name}-{scheme}.png", optimize=True)
                context.close()
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
