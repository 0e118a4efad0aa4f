"""The one part of the metadata that is computed: the README, with links that also lead somewhere on a package index."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent


def readme_for_an_index() -> str:
    """README.md with each link to a file of the repository made absolute."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.sub(r"\]\((?!https?://|#)", f"]({project['urls']['Repository']}/blob/main/", readme)


if __name__ == "__main__":
    from setuptools import setup

    setup(long_description=readme_for_an_index(), long_description_content_type="text/markdown")
