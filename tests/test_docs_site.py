"""The site has every page and every public name; the generator itself runs in `make docs`."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from build_site import ROOT, ROOT_PAGES, SOURCE, in_markdown, in_one_folder, reference_pages, site_config

REFERENCE = reference_pages(SOURCE)
IDENTIFIERS = [name for page in REFERENCE.values() for name in re.findall(r"^::: (\S+)$", page, re.MULTILINE)]


def package_of(page: str) -> ModuleType:
    return importlib.import_module(page.removesuffix(".md"))


def imported(path: str) -> Any:
    """What a dotted path leads to, all but its last part being modules."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def files_in(nav: list[Any]) -> Iterator[str]:
    for entry in nav:
        for target in entry.values():
            yield from files_in(target) if isinstance(target, list) else [target]


def test_every_package_with_public_names_has_a_page() -> None:
    stubs = {stub.parent.relative_to(SOURCE) for stub in SOURCE.rglob("__init__.pyi")}
    assert {f"{'.'.join(stub.parts)}.md" for stub in stubs} == set(REFERENCE)
    assert len(REFERENCE) > 10


@pytest.mark.parametrize("page", sorted(REFERENCE))
def test_every_name_that_a_package_exports_is_on_its_page(page: str) -> None:
    package, text = package_of(page), REFERENCE[page]
    paths = re.findall(r"(?:^::: |\]\[)([\w.]+)", text, re.MULTILINE)
    shown = {path.rpartition(".")[2]: path for path in paths}
    for name in package.__all__:
        if f"{package.__name__}.{name}.md" in REFERENCE:
            assert f"({package.__name__}.{name}.md)" in text
        else:
            assert imported(shown[name]) is getattr(package, name)


def test_a_name_is_described_once_and_links_lead_to_where_it_is() -> None:
    assert len(set(IDENTIFIERS)) == len(IDENTIFIERS)
    for page in REFERENCE.values():
        assert set(re.findall(r"\]\[(\S+)\]", page)) <= set(IDENTIFIERS)


def test_the_navigation_has_every_page() -> None:
    written = {page.name for page in ROOT.glob("docs/*.md")} | set(ROOT_PAGES)
    in_nav = list(files_in(site_config(ROOT, SOURCE)["project"]["nav"]))
    assert sorted(in_nav) == sorted([*written, *(f"reference/{name}" for name in REFERENCE)])


def test_names_are_found_however_a_stub_takes_them(tmp_path: Path) -> None:
    files = {
        "house/__init__.py": '"""A house."""\n',
        "house/__init__.pyi": "from . import attic as attic\nfrom . import door as door\n"
        "from .attic import box as box\nfrom .door import Door as Door\n"
        "from .door import _key\nfrom .window import window as window\nfrom .door import Hinge\n__version__: str\n",
        "house/door.py": 'class Door:\n    """Opens,\n    and closes."""\n',
        "house/window.py": "def window(): ...\n",
        "house/attic/__init__.py": '"""Under the roof."""\n',
        "house/attic/__init__.pyi": "from .boxes import box as box\nfrom house.door import Door as Door\n",
        "house/attic/boxes.py": 'def box():\n    """A box.\n\n    More of it.\n    """\n',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert reference_pages(tmp_path) == {
        "house.md": "# house {#house}\n\nA house.\n\n"
        "## Packages\n\n- [`house.attic`](house.attic.md) Under the roof.\n\n"
        "## Names from other packages\n\n- [`box`][house.attic.box] A box.\n\n"
        "::: house.door\n\n::: house.Door\n\n::: house.window.window\n\n::: house.__version__\n",
        "house.attic.md": "# house.attic {#house.attic}\n\nUnder the roof.\n\n"
        "::: house.attic.box\n\n::: house.attic.Door\n",
    }


def test_links_between_the_folders_are_links_within_the_site() -> None:
    text = "[a](docs/a.md) [b](../B.md#c) [d](d.md) [e](https://x.org/docs/e.md)"
    assert in_one_folder(text) == "[a](a.md) [b](B.md#c) [d](d.md) [e](https://x.org/docs/e.md)"


def test_a_doctest_becomes_a_block_of_code() -> None:
    docstring = "Adds.\n\nFor example:\n    >>> add(1, 2)\n    3\n\nNo more, as in::\n\n    add()"
    assert in_markdown(docstring) == (
        "Adds.\n\nFor example:\n\n    ```pycon\n    >>> add(1, 2)\n    3\n    ```\n\nNo more, as in:\n\n    add()"
    )


@pytest.mark.thorough
def test_no_docstring_has_brackets_that_a_page_would_take_for_a_reference() -> None:
    """`x[i][j]` outside of code is a link to j, which leads nowhere."""
    found = []
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            text = getattr(getattr(node, "value", None), "value", None)
            if isinstance(node, ast.Expr) and isinstance(text, str):
                prose = re.sub(r"```.*?```|`[^`]*`", "", in_markdown(text), flags=re.DOTALL)
                found += [(file.name, *match) for match in re.findall(r"(\S*\])(\[\S*)", prose)]
    assert found == []


def test_the_gallery_shows_every_picture_and_all_are_small() -> None:
    pictures = {f"pictures/{file.name}": file.stat().st_size for file in (ROOT / "docs" / "pictures").iterdir()}
    shown = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8"))
    assert sorted(shown) == sorted(pictures)
    assert max(pictures.values()) < 150_000
    assert sum(pictures.values()) < 2_000_000


def test_the_front_page_leads_to_every_page() -> None:
    linked = re.findall(r"\]\((?:\.\./)?([\w.-]+\.md)", (ROOT / "docs" / "index.md").read_text(encoding="utf-8"))
    pages = {page.name for page in ROOT.glob("docs/*.md")} | set(ROOT_PAGES)
    assert pages - set(linked) == {"index.md"}


def test_no_page_asks_another_host_for_a_picture_or_a_script() -> None:
    for page in ROOT.glob("docs/*.md"):
        text = page.read_text(encoding="utf-8")
        assert re.findall(r"!\[[^\]]*\]\(https?:|<(?:script|img|link|iframe)[^>]*https?:", text) == [], page


def test_the_theme_is_not_given_a_repository_to_ask_for() -> None:
    """With a repo_url its script asks the repository's host for stars and releases from every page."""
    project = site_config(ROOT, SOURCE)["project"]
    assert not {"repo_url", "repo_name", "edit_uri"} & set(project)
    assert project["theme"]["font"] is False
    assert project["extra"]["social"][0]["link"].startswith("https://")
