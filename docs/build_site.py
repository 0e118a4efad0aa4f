"""Builds the site into site/: the pages of docs/ as they are written, and a reference page per package.

A package's `__init__.pyi` names what it exports; each of those names appears on the package's page, with the signature
and the docstring that the source gives it. Nothing is imported: stubs and source are parsed. A link, an anchor or a
reference that leads nowhere fails the build, and the site that was there stays.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
FILES = "https://github.com/napkin-lm/napkin/blob/main"
# Pages in the root of the repository that are part of the site too.
ROOT_PAGES = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")


def main() -> int:
    """Stage the pages in build/site, have them built there, and put the result in the place of site/."""
    import tomli_w

    stage = ROOT / "build" / "site"
    shutil.rmtree(stage, ignore_errors=True)
    (stage / "pages" / "reference").mkdir(parents=True)
    for page in [*ROOT.glob("docs/*.md"), *(ROOT / name for name in ROOT_PAGES)]:
        (stage / "pages" / page.name).write_text(in_one_folder(page.read_text(encoding="utf-8")), encoding="utf-8")
    shutil.copytree(ROOT / "docs" / "pictures", stage / "pages" / "pictures")
    for name, text in reference_pages(SOURCE).items():
        (stage / "pages" / "reference" / name).write_text(text, encoding="utf-8")
    config = stage / "zensical.toml"
    config.write_text(tomli_w.dumps(site_config(ROOT, SOURCE)), encoding="utf-8")
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "-f", config]
    # The extension that docs/site.toml names is found beside this file.
    built = subprocess.run(command, cwd=stage, env={**os.environ, "PYTHONPATH": str(ROOT / "docs")})
    if built.returncode == 0:
        shutil.rmtree(ROOT / "site", ignore_errors=True)
        (stage / "html").rename(ROOT / "site")
        print("site/index.html")
    return built.returncode


def in_one_folder(text: str) -> str:
    """The page's text with its links rewritten for the site, where docs/ and the root are one folder."""
    # What is not a page of the site is read where the source is.
    text = re.sub(r"\]\((?:\.\./)?((?:benchmarks|src)/[^)]*)\)", rf"]({FILES}/\1)", text)
    return re.sub(r"\]\((?:\.\./|docs/)(?=[^)]*\.md)", "](", text)


def site_config(root: Path, source: Path) -> dict[str, Any]:
    """docs/site.toml, with a reference page per package at the end of its navigation."""
    config = tomllib.loads((root / "docs" / "site.toml").read_text(encoding="utf-8"))
    reference = [{name.removesuffix(".md"): f"reference/{name}"} for name in reference_pages(source)]
    config["project"]["nav"].append({"Reference": reference})
    metadata = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    config["project"]["site_description"] = metadata["description"]
    # With a repo_url each page would ask the repository's host for its stars and releases: a link asks for nothing.
    repository = {"icon": "fontawesome/brands/github", "link": metadata["urls"]["Repository"], "name": "Source"}
    config["project"]["extra"] = {"social": [repository]}
    config["project"] |= {"docs_dir": "pages", "site_dir": "html"}
    python = config["project"]["plugins"]["mkdocstrings"]["handlers"]["python"]
    python["paths"] = [str(source)]
    return config


@dataclass(frozen=True)
class Export:
    """A name that a package's stub exports."""

    name: str
    module: str
    """Where the stub takes it from, in full: `napkin.model.config`; the package itself if the stub declares it."""


def exports_of(package: str, stub: str) -> list[Export]:
    """The names that a stub exports, in its order; `package` is the dotted name of the stub's package."""
    exports = []
    for node in ast.parse(stub).body:
        if isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            exports += [Export(alias.name, module) for alias in node.names if alias.asname == alias.name]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            exports.append(Export(node.target.id, package))
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            exports.append(Export(node.name, package))
    return [export for export in exports if not export.name.startswith("_") or export.name.endswith("__")]


def packages_of(source: Path) -> dict[str, list[Export]]:
    """Each package that has a stub, by dotted name, and what it exports; a package stands before its parts."""
    stubs = {".".join(stub.parent.relative_to(source).parts): stub for stub in source.rglob("__init__.pyi")}
    return {name: exports_of(name, stubs[name].read_text(encoding="utf-8")) for name in sorted(stubs)}


def reference_pages(source: Path) -> dict[str, str]:
    """The text of each reference page, by file name."""
    packages = packages_of(source)
    return {f"{name}.md": page_of(source, name, packages) for name in packages}


def page_of(source: Path, package: str, packages: dict[str, list[Export]]) -> str:
    """A package's page: what it is for, its parts, links to names that its parts describe, its own names in full."""
    parts = [name for name in packages if name.rpartition(".")[0] == package]
    own, described_elsewhere = [], []
    for export in packages[package]:
        home, described = described_by(packages, package, export)
        if f"{export.module}.{export.name}" in packages:
            continue  # one of the parts
        identifier = identifier_of(source, home, described)
        if home == package:
            own.append(f"::: {identifier}")
        else:
            about = summary(docstring_of(module_file(source, described.module), export.name))
            described_elsewhere.append(f"- [`{export.name}`][{identifier}] {about}".rstrip())
    sections = [
        f"# {package} {{#{package}}}",
        docstring_of(module_file(source, package)),
        "## Packages" if parts else "",
        "\n".join(f"- [`{part}`]({part}.md) {summary(docstring_of(module_file(source, part)))}" for part in parts),
        "## Names from other packages" if described_elsewhere else "",
        "\n".join(described_elsewhere),
        *own,
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def described_by(packages: dict[str, list[Export]], package: str, export: Export) -> tuple[str, Export]:
    """The package whose page describes the name, and how it exports it: the deepest one along the imports."""
    if export.module != package:
        for deeper in packages.get(export.module, []):
            if deeper.name == export.name:
                return described_by(packages, export.module, deeper)
    return package, export


def identifier_of(source: Path, package: str, export: Export) -> str:
    """The path under which the name is found, as users import it, unless a module of the package is called the same."""
    public = f"{package}.{export.name}"
    modules = {file.stem for file in source.joinpath(*package.split(".")).iterdir()}
    return f"{export.module}.{export.name}" if export.name in modules else public


def module_file(source: Path, module: str) -> Path:
    """The file that holds a module's code."""
    folder = source.joinpath(*module.split("."))
    return folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")


def docstring_of(file: Path, name: str | None = None) -> str:
    """The docstring of a module, or of one of its classes or functions; empty if it has none."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    if name is None:
        return ast.get_docstring(tree) or ""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return ast.get_docstring(node) or ""
    return ""


def summary(docstring: str) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join(docstring.partition("\n\n")[0].split())


def in_markdown(docstring: str) -> str:
    """A docstring as Markdown: each doctest, from its first `>>>` to the next empty line, is a block of code."""
    paragraphs = docstring.replace("::\n\n", ":\n\n").split("\n\n")
    for index, paragraph in enumerate(paragraphs):
        lines = paragraph.split("\n")
        first = next((i for i, line in enumerate(lines) if line.lstrip().startswith(">>> ")), None)
        if first is not None:
            margin = " " * (len(lines[first]) - len(lines[first].lstrip()))
            lines[first:] = ["", f"{margin}```pycon", *lines[first:], f"{margin}```"]
            paragraphs[index] = "\n".join(lines)
    return "\n\n".join(paragraphs)


if __name__ == "__main__":
    sys.exit(main())
