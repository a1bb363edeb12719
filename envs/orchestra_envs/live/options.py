"""What live tools share: arguments that may stand in a config as plain mappings, and how to install what is missing."""

from collections.abc import Mapping
from typing import Any, TypeVar

_T = TypeVar("_T")


def install_hint(extra: str) -> str:
    """How to install an extra: with the trainer, or with the environments alone."""
    return f"pip install 'orchestra-jax[{extra}]' (or './envs[{extra}]' for the environments alone)"


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
