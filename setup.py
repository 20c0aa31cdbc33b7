"""The long description: the README, whose links to files of the repository lead nowhere on a package's page."""

import re
from pathlib import Path

from setuptools import setup

README = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
RELATIVE = re.compile(r"!?\[([^\]]*)\]\((?!https?://)[^)]*\)")  # a picture leaves its description


if __name__ == "__main__":
    setup(long_description=RELATIVE.sub(r"\1", README), long_description_content_type="text/markdown")
