"""Who may ask, and the headers of every answer.

A page of another site must neither read nor change anything here, whatever it tries:

- DNS rebinding: its name can be made to lead to 127.0.0.1, so that the browser takes our answers for
  its own. The Host header then has that name. Only localhost and addresses are answered; on a LAN
  also this machine's name.
- Requests across sites: a browser sends Origin with everything that writes, and Sec-Fetch-Site with
  everything. Writing needs our own Origin; the API is for our own pages.
- Other machines on a LAN get the site and no runs: those belong to who sits at this one.

Every answer says that it is isolated (COOP, COEP: threads in WebAssembly need it), that no other
site may embed it (CORP), and that nothing outside is loaded (CSP).
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from posttrainllm.server.answers import RefusalError, as_json, as_text

API = "/api/"
READING = {"GET", "HEAD"}

HEADERS = {
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
RUNS_HEADER = "X-Posttrainllm-Runs"
"""Tells a page, with any answer, that this server has runs for it; a static host answers nothing of the kind."""

NOTHING = "default-src 'none'; frame-ancestors 'none'"
"""The policy of what is no page."""

_SCRIPT = re.compile(rb"<script\b([^>]*)>(.*?)</script\s*>", re.DOTALL | re.IGNORECASE)


def page_policy(html: bytes) -> str:
    """Return the Content-Security-Policy of a page: its own scripts, and nothing from outside."""
    digests = [
        f"'sha256-{base64.b64encode(hashlib.sha256(script).digest()).decode()}'"
        for attributes, script in _SCRIPT.findall(html)
        if script and b"src=" not in attributes
    ]
    scripts = " ".join(["'self'", "'wasm-unsafe-eval'", *dict.fromkeys(digests)])
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {scripts}",
            "worker-src 'self'",
            "connect-src 'self'",
            "style-src 'self' 'unsafe-inline'",  # style attributes, which components set
            "img-src 'self' data: blob:",
            "font-src 'self'",
            "manifest-src 'self'",
            "base-uri 'self'",
            "form-action 'self'",
            "frame-ancestors 'none'",
        ]
    )


@dataclass(frozen=True)
class Guard:
    """An ASGI application behind the checks."""

    app: ASGIApp
    open_to_lan: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse what must not be asked, else hand it on; nothing escapes as a traceback."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(raw=message.setdefault("headers", []))
                for name, value in {**HEADERS, "Content-Security-Policy": NOTHING}.items():
                    headers.setdefault(name, value)
                if _is_loopback((scope.get("client") or [""])[0]):
                    headers.setdefault(RUNS_HEADER, "1")
            await send(message)

        try:
            self.check(scope)
            await self.app(scope, receive, send_with_headers)
        except RefusalError as error:
            answer = error.response() if _is_api(scope) else as_text(error.message, error.status)
            await answer(scope, receive, send_with_headers)
        except OSError as error:
            if not started:
                answer = as_json({"error": error.strerror or "the disk failed", "hint": ""}, 500)
                await answer(scope, receive, send_with_headers)
        except Exception as error:
            line = f"play: {scope['method']} {scope['path']!r}: {type(error).__name__}: {error}"
            sys.stderr.write(" ".join(line.split())[:500] + "\n")
            if not started:
                await as_text("this is a mistake in posttrainllm", 500)(
                    scope, receive, send_with_headers
                )

    def check(self, scope: Scope) -> None:
        """Make sure that a request may be answered.

        Raises: RefusalError 400 or 403, in one line.
        """
        asked = Headers(scope=scope)
        hosts = asked.getlist("host")
        if len(hosts) != 1:
            raise RefusalError(400, "a request needs one Host header")
        if not self._is_ours(hosts[0]):
            raise RefusalError(403, f"this server is not {hosts[0][:100]}: use http://127.0.0.1")
        if scope["method"] not in READING:
            if asked.getlist("origin") != [f"http://{hosts[0]}"]:
                raise RefusalError(403, "only this server's own pages may change anything here")
        elif _is_api(scope) and not _is_own_page(asked, hosts[0]):
            raise RefusalError(403, "only this server's own pages may read this")
        if _is_api(scope) and not _is_loopback((scope.get("client") or [""])[0]):
            raise RefusalError(403, "the runs are for the machine that serves them alone")

    def _is_ours(self, host: str) -> bool:
        name = _host_name(host)
        if name is None:
            return False
        if name == "localhost" or _is_loopback(name):
            return True
        if not self.open_to_lan:
            return False
        own = socket.gethostname().lower()
        return _is_address(name) or name in (own, f"{own}.local", own.partition(".")[0])


def _is_api(scope: Scope) -> bool:
    return str(scope["path"]).startswith(API)


def _is_own_page(asked: Mapping[str, str], host: str) -> bool:
    """Whether a request that reads comes from a page of ours, or from no page at all."""
    if asked.get("origin", f"http://{host}") != f"http://{host}":
        return False
    return asked.get("sec-fetch-site", "none") in ("same-origin", "none")


def _host_name(host: str) -> str | None:
    """Return the name in a Host header, in lower case and without port; None when it is none."""
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port
    except ValueError:
        return None
    if parts.hostname is None or parts.netloc != host or "@" in host or parts.path or parts.query:
        return None
    return parts.hostname.lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(name: str) -> bool:
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)
