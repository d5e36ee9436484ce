"""Write docs/pictures/report.png anew: the top of a run's report.html as a browser shows it, in 64 colours.

    make quickstart && .venv/bin/python tools/report_picture.py runs/quickstart

Needs a Chromium on the machine (apt-get install chromium) and Playwright, which `make setup` installs.
"""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "pictures" / "report.png"
VIEW = {"width": 1120, "height": 800}  # pixels: the figures in one row, and the whole loss curve
CLIP = {"x": 24, "y": 24, "width": 1072, "height": 736}  # without the page's margins
SCALE = 1.5  # sharp on dense screens, and still some 40 kB


def main() -> None:
    report = Path(sys.argv[1]).resolve() / "report.html"
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(viewport=VIEW, device_scale_factor=SCALE, color_scheme="light")
        page.goto(report.as_uri())
        page.wait_for_selector("svg, canvas")
        shot = page.screenshot(clip=CLIP)
        browser.close()
    picture = Image.open(io.BytesIO(shot)).convert("RGB").quantize(64, dither=Image.Dither.NONE)
    picture.save(PICTURE, optimize=True)
    print(f"{PICTURE}: {PICTURE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
