"""The long description: the README without pictures; its links to files of the repository become these files' names."""

import re
from pathlib import Path

from setuptools import setup

README = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
PICTURE = re.compile(r"!\[[^\]]*\]\([^)]*\)\n+")
RELATIVE = re.compile(r"\[([^\]]*)\]\((?!https?://)([^)#]*)[^)]*\)")
FILES = "\nFiles as `docs/performance.md` are those of the repository: no address of a public one is known yet.\n"


if __name__ == "__main__":
    text = RELATIVE.sub(r"\1 (`\2`)", PICTURE.sub("", README)) + FILES
    setup(long_description=text, long_description_content_type="text/markdown")
