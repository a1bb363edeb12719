"""Arguments of live tools that may stand in a config as plain mappings."""

from collections.abc import Mapping
from typing import Any, TypeVar

_T = TypeVar("_T")


def made(kind: type[_T], value: _T | Mapping[str, Any] | None, where: str) -> _T | None:
    """`value` as a `kind` (Price, Retry, Limiter): a mapping holds its keyword arguments, None stays None.

    Raises:
        ValueError: it is something else, or a key or value is wrong; `where` is named.
    """
    if value is None or isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} must be a {kind.__name__} or a mapping of its fields, not {value!r}")
    try:
        return kind(**value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None
