"""A page of the studio as one document: its styles and scripts in it, and its questions as messages to the notebook."""

import json
import re
from importlib.resources import files

from napkin.studio.page_files import ASSETS
from napkin.studio.plans import rules_script

_IMPORT = re.compile(r'^import \{([^}]*)\} from "/assets/([\w.-]+)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (const|class|function) (\w+)", re.MULTILINE)
_GROUP = re.compile(r"^export \{([^}]*)\};?$", re.MULTILINE)
_LOADED = re.compile(
    r'^<(?:link rel="stylesheet" href|script(?: type="module")? src)="/assets/([\w.-]+)">.*\n', re.MULTILINE
)


def document(page: str, state: str = "") -> str:
    """The page with everything that it loads inlined; `state` is the part of the address after its #.

    Modules become functions that return what they export, in the order of what they import, so that their names stay
    apart. The page's own address is not there: it is replaced by one that has the state.
    """
    loaded = _LOADED.findall(page)
    scripts = [name for name in loaded if name.endswith(".js")]
    modules = [name for name in scripts if _is_module(name)]
    styles = "".join(f"<style>{_text(name)}</style>" for name in loaded if name.endswith(".css"))
    plain = "".join(f"<script>{_script(_text(name))}</script>" for name in scripts if name not in modules)
    address = f"const location = {{ hash: {json.dumps('#' + state)}, pathname: '', origin: '' }};"
    bridge = (files("napkin.notebook") / "bridge.js").read_text(encoding="utf-8")
    history = "const history = { replaceState() {} };"
    script = "\n".join([bridge, address, history, "const modules = {};", *_functions_of(modules)])
    page = _LOADED.sub("", page).replace("</head>", f"{styles}{plain}</head>", 1)
    return page.replace("</body>", f'<script type="module">{_script(script)}</script></body>', 1)


def _functions_of(modules: list[str]) -> list[str]:
    """Each module and those that it imports, once, callees first."""
    written: dict[str, str] = {}

    def write(name: str) -> None:
        if name in written:
            return
        text = _text(name)
        for _, other in _IMPORT.findall(text):
            write(other)
        names = [found for _, found in _EXPORT.findall(text)]
        names += [each.strip() for group in _GROUP.findall(text) for each in group.split(",") if each.strip()]
        text = _IMPORT.sub(lambda found: f"const {{{found[1].replace(' as ', ': ')}}} = modules[{found[2]!r}];", text)
        text = _GROUP.sub("", _EXPORT.sub(r"\1 \2", text))
        written[name] = f"modules[{name!r}] = await (async () => {{\n{text}\nreturn {{ {', '.join(names)} }};\n}})();"

    for each in modules:
        write(each)
    return list(written.values())


def _is_module(name: str) -> bool:
    text = _text(name)
    return bool(_IMPORT.search(text) or _EXPORT.search(text))


def _text(name: str) -> str:
    return rules_script() if name == "rules.js" else ASSETS[name].read_text(encoding="utf-8")


def _script(text: str) -> str:
    """A script that no text in it can end."""
    return text.replace("</", "<\\/")
