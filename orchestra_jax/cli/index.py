"""`orchestra index`: an index for local search, built from documents."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from orchestra_envs.limits import ToolUnavailableError
from orchestra_envs.live.local_search import BuildReport, build_index

from orchestra_jax.config import ConfigError

_MOST_NAMED = 10


def index_documents(
    documents: str, index: str, *, dense: str | None = None, base_url: str | None = None, api_key_env: str | None = None
) -> None:
    """Builds the index of a folder or file; prints what became of the documents.

    What was left out, or read otherwise than it stands, goes to standard error by kind with the first names; all of
    it stands in the index's report.json.

    Args:
      documents: a folder of text files, or one file (formats: `orchestra_envs.live.passages`).
      index: the folder to write; an index that is there is replaced.
      dense: an embedding model, for dense and hybrid search too.
      base_url: its OpenAI-compatible endpoint; None: OpenAI's.
      api_key_env: the environment variable with the endpoint's key; None: OPENAI_API_KEY.

    Raises:
      ConfigError: the documents, the index or the endpoint are not usable.
    """
    if dense is None and (base_url or api_key_env):
        raise ConfigError("--base-url and --api-key-env belong to an embedding model: name it with --dense MODEL")
    embedder = None
    if dense is not None:
        embedder = {"model": dense, "base_url": base_url, "api_key_env": api_key_env or "OPENAI_API_KEY"}
    try:
        report = build_index(documents, index, embedder=embedder)
    except (ValueError, ImportError, OSError, ToolUnavailableError) as error:
        raise ConfigError(str(error)) from error
    _print_problems(report, index)
    vectors = f", vectors of {dense} ({report.embedding_tokens:,} tokens)" if dense else ""
    print(f"{index}: {report.num_documents:,} documents, {report.num_passages:,} passages{vectors}")


def _print_problems(report: BuildReport, index: str) -> None:
    if not report.problems:
        return
    for is_lost, title in ((True, "left out"), (False, "read, but not as it stands")):
        found = [problem for problem in report.problems if problem.lost == is_lost]
        if not found:
            continue
        print(f"{title}: {len(found):,}", file=sys.stderr)
        for reason, number in Counter(problem.reason for problem in found).most_common(_MOST_NAMED):
            names = [problem.where for problem in found if problem.reason == reason]
            more = ", ..." if number > 3 else ""
            print(f"  {number:,} x {reason}: {', '.join(names[:3])}{more}", file=sys.stderr)
    print(f"all of them: {Path(index)}/build-*/report.json", file=sys.stderr)
