"""Embeddings from an OpenAI-compatible endpoint, stored as one array, searched by brute force.

    embedder = Embedder("text-embedding-3-small")                              # key from OPENAI_API_KEY
    embedder = Embedder("bge-small", base_url="http://127.0.0.1:8080/v1")      # a server of your own, no key needed
    vectors, num_tokens = await embed(embedder, ["a text", "another"])         # [2, d], of length 1

Needs openai: `pip install 'orchestra-jax[live]'`. A local peer: `llama-server --embeddings -m MODEL.gguf`, `vllm serve
MODEL`, or the test server `tests/envs/servers/openai_server.py`.

Brute force over 100,000 vectors of 256 float32 numbers takes 3 ms on one core (float16: 40 ms, half the disk), so it
does for a few million; beyond that use a vector database as a tool of your own.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
import os
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from orchestra_envs.limits import Retry, ToolUnavailableError
from orchestra_envs.live.options import install_hint
from orchestra_envs.loop import run_on_loop

BUILD_RETRY = Retry(max_attempts=6, base_delay_s=0.5, max_delay_s=30.0)
"""Of each batch while an index is built."""

_ROWS_AT_ONCE = 16384


@dataclass(frozen=True)
class Embedder:
    """A model behind an endpoint that answers POST /embeddings.

    Args:
        model: its name at the endpoint.
        base_url: for example "http://127.0.0.1:8080/v1"; None: OpenAI's, or what OPENAI_BASE_URL says.
        api_key_env: the environment variable that holds the key, read at each call. Where base_url is given it may be
            unset: servers of one's own want no key.
        query_prefix: put before each query ("query: ", or an instruction), as some models want.
        passage_prefix: put before each passage.
        batch_size: passages in a request.
        max_concurrency: requests at once while an index is built.
        request_timeout_s: of one request.

    Raises:
        ValueError: a field is not usable.
    """

    model: str
    base_url: str | None = None
    api_key_env: str = "OPENAI_API_KEY"
    query_prefix: str = ""
    passage_prefix: str = ""
    batch_size: int = 64
    max_concurrency: int = 4
    request_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ValueError(f"Embedder.model must be the name of a model, not {self.model!r}")
        if self.base_url is not None and not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"Embedder.base_url must begin with http:// or https://, not {self.base_url!r}")
        for name in ("batch_size", "max_concurrency"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"Embedder.{name} must be a whole number of at least 1, not {value!r}")
        if not 0 < self.request_timeout_s < math.inf:
            raise ValueError(f"Embedder.request_timeout_s must be a number above 0, not {self.request_timeout_s!r}")


async def embed(embedder: Embedder, texts: list[str]) -> tuple[np.ndarray, int | None]:
    """The vectors of `texts` (float32, [texts, dimensions], each of length 1 or 0) and the tokens they took.

    One request, no retries; the tokens are None if the endpoint does not tell.

    Raises:
        ToolUnavailableError: the endpoint failed or its answer is not usable. The key is in no message.
    """
    openai = import_openai()
    client = _client(embedder)
    try:
        answer = await client.embeddings.create(
            input=texts, model=embedder.model, encoding_format="float", timeout=embedder.request_timeout_s
        )
        return _vectors(answer, len(texts)), _num_tokens(answer)
    except openai.APIStatusError as error:
        status = error.status_code
        message = f"the embedding endpoint answered {status}: {error.message}"
        transient = status in (408, 409, 425, 429) or status >= 500
        raise _unavailable(client, message, transient, _retry_after_s(error.response.headers)) from None
    except openai.APITimeoutError:
        message = f"the embedding endpoint did not answer within {embedder.request_timeout_s:g} s"
        raise ToolUnavailableError(message) from None
    except openai.APIConnectionError as error:
        raise _unavailable(client, f"no connection to the embedding endpoint ({error.__cause__ or error})") from None
    except (openai.OpenAIError, ValueError, TypeError, AttributeError, KeyError) as error:
        message = f"the answer of the embedding endpoint is not usable ({type(error).__name__}: {error})"
        raise _unavailable(client, message) from None


def write_vectors(
    path: Path, texts: Iterable[str], num_texts: int, embedder: Embedder, dtype: Literal["float32", "float16"]
) -> tuple[int, int]:
    """Embeds `num_texts` passages into the array file `path`, [texts, dimensions]; dimensions and tokens.

    Raises:
        ToolUnavailableError: a batch failed `BUILD_RETRY.max_attempts` times, or in a way that will not pass.
    """
    prefixed = (embedder.passage_prefix + text for text in texts)
    stored: np.memmap | None = None
    start = num_tokens = 0
    while group := list(itertools.islice(prefixed, embedder.batch_size * embedder.max_concurrency)):
        vectors, tokens = run_on_loop(_embed_group(embedder, group))
        if stored is None:
            shape = (num_texts, vectors.shape[1])
            stored = np.lib.format.open_memmap(path, mode="w+", dtype=np.dtype(dtype), shape=shape)
        if vectors.shape[1] != stored.shape[1]:
            raise ToolUnavailableError(
                f"the embedding endpoint gave vectors of {stored.shape[1]} and of {vectors.shape[1]} numbers",
                transient=False,
            )
        stored[start : start + len(group)] = vectors
        start, num_tokens = start + len(group), num_tokens + tokens
    if stored is None or start != num_texts:
        raise ValueError(f"{num_texts} texts were announced, {start} came")
    stored.flush()
    return stored.shape[1], num_tokens


def nearest(vectors: np.ndarray, query: np.ndarray, top_k: int) -> list[tuple[int, float]]:
    """Rows of `vectors` [n, d] with the largest products with `query` [d], best first; equal ones by row."""
    chunks = range(0, len(vectors), _ROWS_AT_ONCE)
    scores = np.concatenate([np.asarray(vectors[i : i + _ROWS_AT_ONCE], np.float32) @ query for i in chunks])
    return best_of(scores, top_k)


def best_of(scores: np.ndarray, top_k: int) -> list[tuple[int, float]]:
    """Positions and values of the `top_k` largest scores [n], best first; equal ones by position."""
    if top_k < len(scores):
        least = np.partition(scores, len(scores) - top_k)[len(scores) - top_k]
        candidates = np.flatnonzero(scores >= least)
    else:
        candidates = np.arange(len(scores))
    order = candidates[np.argsort(-scores[candidates], kind="stable")][:top_k]
    return [(int(i), float(scores[i])) for i in order]


async def _embed_group(embedder: Embedder, texts: list[str]) -> tuple[np.ndarray, int]:
    batches = [texts[i : i + embedder.batch_size] for i in range(0, len(texts), embedder.batch_size)]
    tasks = [asyncio.ensure_future(BUILD_RETRY.run(functools.partial(embed, embedder, batch))) for batch in batches]
    try:
        results = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    if len({vectors.shape[1] for vectors, _ in results}) > 1:
        raise ToolUnavailableError("the embedding endpoint gave vectors of different lengths", transient=False)
    return np.concatenate([vectors for vectors, _ in results]), sum(tokens or 0 for _, tokens in results)


def _vectors(answer: Any, num_texts: int) -> np.ndarray:
    rows = sorted(answer.data, key=lambda row: row.index)
    if [row.index for row in rows] != list(range(num_texts)):
        raise ValueError(f"{len(rows)} vectors for {num_texts} texts")
    vectors = np.asarray([row.embedding for row in rows], dtype=np.float32)
    if vectors.ndim != 2 or not vectors.shape[1] or not np.isfinite(vectors).all():
        raise ValueError("the vectors are of unequal length, empty or not finite")
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.where(norms > 0, norms, 1)


def _num_tokens(answer: Any) -> int | None:
    tokens = getattr(getattr(answer, "usage", None), "prompt_tokens", None)
    return tokens if isinstance(tokens, int) and not isinstance(tokens, bool) and tokens >= 0 else None


def _unavailable(
    client: Any, message: str, transient: bool = True, retry_after_s: float | None = None
) -> ToolUnavailableError:
    message = message.replace(client.api_key, "***")
    message = message if len(message) <= 300 else f"{message[:300]}..."
    return ToolUnavailableError(message, transient=transient, retry_after_s=retry_after_s)


def _retry_after_s(headers: Any) -> float | None:
    try:
        seconds = float(headers.get("retry-after"))
    except (TypeError, ValueError):
        return None
    return seconds if 0 <= seconds < math.inf else None


_clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str | None, str], Any]] = (
    weakref.WeakKeyDictionary()
)


def _client(embedder: Embedder) -> Any:
    """The client of the running loop, one for each address and key."""
    key = os.environ.get(embedder.api_key_env, "").strip()
    if not key and embedder.base_url is None:
        message = f"there is no key: set the environment variable {embedder.api_key_env}"
        raise ToolUnavailableError(message, transient=False)
    clients = _clients.setdefault(asyncio.get_running_loop(), {})
    address = embedder.base_url, key or "no-key"
    if address not in clients:
        clients[address] = import_openai().AsyncOpenAI(base_url=address[0], api_key=address[1], max_retries=0)
    return clients[address]


def import_openai() -> Any:
    """The openai package; ImportError with what to install if it is missing."""
    try:
        import openai
    except ImportError:
        raise ImportError(f"dense search needs openai: {install_hint('live')}") from None
    return openai
