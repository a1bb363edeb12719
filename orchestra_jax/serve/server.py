"""Runs the application on a socket until it is told to stop."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import uvicorn

from orchestra_jax.serve.app import Service, create_app

GRACE_S = 30
"""Seconds that requests under way get to finish when the server stops."""

_IDLE_S = 75
"""Seconds that idle connections are kept: longer than clients keep them, so that none is closed under a request."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 takes a free one.

    Raises:
        OSError: the address is in use, or is none of this machine.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family, backlog=2048)


def base_url(sock: socket.socket) -> str:
    """What clients call the endpoint."""
    host, port = sock.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def run_server(service: Service, sock: socket.socket, *, grace_s: int = GRACE_S) -> None:
    """Serves until SIGINT or SIGTERM.

    Then no connection is taken any more, and what is under way gets `grace_s` to finish; a second SIGINT does not wait.
    """
    service.worker.start()
    try:
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises the signal again when it is done
            _server(service, grace_s).run(sockets=[sock])
    finally:
        service.worker.close()


@contextlib.contextmanager
def running_server(service: Service, *, grace_s: int = GRACE_S) -> Iterator[str]:
    """A server in a thread on a free port of 127.0.0.1, for tests and notebooks; gives its base URL."""
    sock = listen("127.0.0.1", 0)
    url = base_url(sock)
    server = _server(service, grace_s)
    service.worker.start()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    try:
        yield url
    finally:
        server.should_exit = True
        thread.join(grace_s + 5)
        service.worker.close()


def _server(service: Service, grace_s: int) -> uvicorn.Server:
    config = uvicorn.Config(
        create_app(service),
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        lifespan="off",
        timeout_keep_alive=_IDLE_S,
        timeout_graceful_shutdown=grace_s,
    )
    return uvicorn.Server(config)
