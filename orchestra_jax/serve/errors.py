"""Errors as OpenAI's API shapes them: a status and `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from typing import Any

_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that is refused or that failed.

    Args:
        status: of the HTTP answer.
        message: a sentence for whoever wrote the client.
        param: the field of the request that is to blame, such as `messages[2].content`.
        code: a word for programs, such as `context_length_exceeded`.
        retry_after_s: seconds after which trying again may help; sent as `Retry-After`.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """More headers of the answer."""
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def bad_request(param: str, message: str, code: str | None = None) -> ApiError:
    """A mistake in a field of the request; the message starts with the field."""
    return ApiError(400, f"{param}: {message}", param=param, code=code)
