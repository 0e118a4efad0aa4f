"""The chat page: files beside this one, sent as they are, under a policy that lets nothing else in."""

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""No script, style or address but the server's own, none of them inline; the page is in no frame."""


def page_routes() -> list[Route]:
    """A route per file, and `/` for the page."""
    folder = files("napkin.inference.server") / "page"
    routes = []
    for file in sorted(folder.iterdir(), key=lambda each: each.name):
        suffix = "." + file.name.rpartition(".")[2]
        if suffix in _TYPES:
            path = "/" if file.name == "index.html" else f"/{file.name}"
            routes.append(_route(path, file.read_bytes(), _TYPES[suffix]))
    return routes


def _route(path: str, content: bytes, kind: str) -> Route:
    headers = {"content-security-policy": POLICY, "cache-control": "no-cache"}

    async def send(request: Request) -> Response:
        return Response(content, media_type=kind, headers=headers)

    return Route(path, send)
