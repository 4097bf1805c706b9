"""docs/compare.png: verdicts and the peak of a step of docs/compare.html, as the README shows them.

.venv/bin/python tests/browser/picture.py            # needs Chromium
"""

import os
import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

DOCS = Path(__file__).parents[2] / "docs"
WIDTH = 1240


def find_chromium() -> str:
    named = (os.environ.get("CHROMIUM"), shutil.which("chromium"), shutil.which("chromium-browser"))
    program = next(filter(None, named), None)
    assert program, "no chromium on the PATH: apt-get install chromium, or set CHROMIUM"
    return program


def main() -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme="light")
        page.goto((DOCS / "compare.html").as_uri())
        page.wait_for_selector("body[data-drawn]")
        # what lies between the two is there for a reader who scrolls, not for a picture
        page.add_style_tag(
            content="nav, #loss, #difference-from-ddp, #memory, #verdicts caption, details { display: none }"
        )
        top = page.query_selector("h1").bounding_box()["y"] - 20
        peak = page.query_selector("#peak-of-a-step").bounding_box()
        clip = {"x": 0, "y": top, "width": WIDTH, "height": peak["y"] + peak["height"] - top + 8}
        page.screenshot(path=DOCS / "compare.png", full_page=True, clip=clip)
        browser.close()


if __name__ == "__main__":
    main()
