"""Protection of a local server: addresses that only programs of this machine reach, and checks of a request's
origin."""

import contextlib
import ipaddress
import re
import socket
from collections.abc import Callable, Sequence

from starlette.types import Message, Send

from napkin.errors import NapkinError

Headers = list[tuple[bytes, bytes]]
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_AUTHORITY = re.compile(r"(?:(?P<name>[A-Za-z0-9._-]+)|\[(?P<address>[0-9A-Fa-f:.]+)\])(?::[0-9]{0,5})?", re.ASCII)
"""RFC 9110, 4.2 and 7.2: a name or an address, and a port; without user information."""

SAFE_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
]
"""Headers of every answer: browsers must not guess its type, and other sites can neither load it nor learn about it."""


def with_headers(send: Send, further: Callable[[Headers], Headers] = lambda given: []) -> Send:
    """The `send` of an ASGI application that adds these headers to an answer, and what `further` says of its own."""

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            given = [*message["headers"]]
            message["headers"] = [*given, *SAFE_HEADERS, *further(given)]
        await send(message)

    return send_with_headers


def is_loopback(host: str) -> bool:
    """True where only programs of this machine can connect to an address."""
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def refusal_of_source(headers: Sequence[tuple[bytes, bytes]], hosts: frozenset[str]) -> tuple[int, str] | None:
    """The status and the reason to refuse what a web page elsewhere may have sent; None for a request of the server's
    own page or of a program. `hosts` are the names by which the server is known."""
    given = {
        name: [value.decode("latin-1") for each, value in headers if each == name] for name in (b"host", b"origin")
    }
    if len(given[b"host"]) != 1 or host_name(given[b"host"][0]) not in hosts:
        # A page elsewhere may have a name that leads to this machine.
        return 421, "the server is not known by this name: use its address"
    own = {f"{scheme}://{given[b'host'][0]}".lower() for scheme in ("http", "https")}
    if not own.issuperset(map(str.lower, given[b"origin"])):
        return 403, "the request comes from a web page elsewhere: use the server's own page"
    return None


def is_of_own_page(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    """True where a browser says that a page of the server has sent a request, which `refusal_of_source` has let in: by
    Sec-Fetch-Site, or by Origin in browsers that do not have it."""
    given = dict(headers)
    site = given.get(b"sec-fetch-site")
    return site == b"same-origin" if site is not None else b"origin" in given


def host_name(authority: str) -> str | None:
    """The name or address of a Host header, in small letters and without brackets; None where it is malformed.

    >>> host_name("LocalHost:8000"), host_name("[0:0::1]:80"), host_name("[::1].evil.com"), host_name("::1@evil.com")
    ('localhost', '::1', None, None)
    """
    match = _AUTHORITY.fullmatch(authority)
    if match is None:
        return None
    if match["name"] is not None:
        return match["name"].lower()
    try:
        return ipaddress.IPv6Address(match["address"]).compressed
    except ValueError:
        return None


def names_of(host: str) -> frozenset[str]:
    """The names by which a server that listens on `host` is known."""
    return LOCAL_NAMES | {host_name(f"[{host}]" if ":" in host else host) or host.lower()}


def listening_socket(host: str, port: int, *, backlog: int) -> socket.socket:
    """A socket that listens; port 0 is a free one. Raises NapkinError where the address cannot be used."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=backlog)
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise NapkinError(f"{host} port {port} cannot be used ({reason}): choose another --host or --port") from None


def address_of(listening: socket.socket) -> str:
    """The address for a browser."""
    name, port = listening.getsockname()[:2]
    return f"http://{f'[{name}]' if ':' in name else name}:{port}"
