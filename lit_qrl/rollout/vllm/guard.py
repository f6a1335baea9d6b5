"""The API key before all of vLLM's routes: vLLM itself asks for it before those of inference alone."""

import os
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

KEY = "VLLM_API_KEY"
"""The environment variable in which vLLM, too, finds the key."""
OPEN = ("/health", "/ping", "/metrics")
"""What balancers and watchers may ask without it."""


class KeyGuard:
    """ASGI middleware (`vllm serve --middleware`) that lets no request through without the key.

    Args:
        app: vLLM's.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app, self._known = app, f"Bearer {os.environ.get(KEY, '')}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request of a stranger by 401, and hand any other on."""
        if scope["type"] in ("http", "websocket") and scope["path"] not in OPEN:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not os.environ.get(KEY) or not secrets.compare_digest(given, self._known):
                await send({"type": "http.response.start", "status": 401, "headers": []})
                await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})
                return
        await self.app(scope, receive, send)
