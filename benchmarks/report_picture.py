"""Take the picture of docs/running.md: the first screen of a run's report.

python benchmarks/report_picture.py RUN/report.html docs/report.png

Needs Chromium and Playwright (`pip install -e .[browser]`).
"""

import argparse
import shutil
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")
SIZE = {"width": 1180, "height": 800}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("report", type=Path)
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    from playwright.sync_api import sync_playwright

    chromium = next(filter(None, map(shutil.which, NAMES)), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE, color_scheme="light")
        page.goto(arguments.report.absolute().as_uri())
        page.wait_for_selector("#key-charts canvas")
        page.screenshot(path=arguments.picture, animations="disabled")
        browser.close()


if __name__ == "__main__":
    main()
