"""Which installed packages code in the sandbox may import."""

import importlib.metadata
import pathlib
import re
from collections.abc import Sequence


def package_links(packages: Sequence[str]) -> list[tuple[str, str]]:
    """(name to import, real path) of the distributions `packages` and of what they require, as installed here.

    Raises:
        ValueError: a package is not installed, or installed in a way that its files are not known (editable).
    """
    links: dict[str, str] = {}
    to_do, seen = [(name, True) for name in packages], set()
    while to_do:
        name, asked_for = to_do.pop()
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key in seen:
            continue
        seen.add(key)
        try:
            distribution = importlib.metadata.distribution(name)
        except (importlib.metadata.PackageNotFoundError, ValueError):
            if asked_for:
                raise ValueError(
                    f"packages: {name!r} is not installed here; `pip install {name}` or leave it out"
                ) from None
            continue
        found = _files(distribution)
        if asked_for and not found:
            raise ValueError(f"packages: {name!r} has no files here (an editable install?); install it as a wheel")
        links.update(found)
        to_do += [(required, False) for required in _requirements(distribution)]
    return sorted(links.items())


def _files(distribution: importlib.metadata.Distribution) -> dict[str, str]:
    tops = {path.parts[0] for path in distribution.files or () if path.parts[0] not in ("..", "__pycache__", "/")}
    tops -= {top for top in tops if top.endswith(".pth") or top.startswith("__editable__")}
    located = {top: pathlib.Path(str(distribution.locate_file(top))).resolve() for top in tops}
    found = {top: str(path) for top, path in located.items() if path.exists()}
    has_code = any(not top.endswith((".dist-info", ".egg-info")) for top in found)
    return found if has_code else {}


def _requirements(distribution: importlib.metadata.Distribution) -> list[str]:
    """Names of what it requires, extras left out; what a marker rules out is not installed and does no harm."""
    names = []
    for line in distribution.requires or ():
        requirement, _, marker = line.partition(";")
        if "extra" not in marker and (found := re.match(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)", requirement)):
            names.append(found[1])
    return names
