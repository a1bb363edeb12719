"""`orchestra serve`: a policy behind an OpenAI-compatible HTTP endpoint."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from orchestra_jax.config import ConfigError

if TYPE_CHECKING:
    from orchestra_jax.sampler.engine import Engine
    from orchestra_jax.serve.app import Service

DEFAULT_MAX_TOKENS = 4096
"""Of a conversation, for a policy folder, which does not say what it was trained with; fewer if the model has fewer."""

ROUND_STEPS = 8
"""Tokens of a round: fewer than in training, so that streams come smoothly and cancelled turns end soon."""


def serve(
    folder: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    slots: int = 8,
    max_tokens: int | None = None,
    max_waiting: int = 256,
    name: str | None = None,
    api_key_env: str | None = None,
    dtype: Literal["float32", "bfloat16"] | None = None,
    grammar: bool = False,
    warm_up: bool = False,
) -> None:
    """Serves until it is interrupted.

    Args:
        folder: a policy in Hugging Face layout, or a run folder, which means its trained policy.
        host, port: where to listen; port 0 takes a free one. The URL is printed.
        slots: conversations that sample at once; each has its place in the KV cache.
        max_tokens: of a conversation, prompt and answers; None: what the run was trained with, else 4096.
        max_waiting: turns that wait for a slot; more are refused with 429.
        name: of the model, as clients ask for it; None: the folder's.
        api_key_env: environment variable that holds the key which clients must send; None: no key.
        dtype: of weights and computation; None: as the run was trained, else float32 on CPU, bfloat16 elsewhere.
        grammar: tool calls can only be ones of the request's tools, with arguments that fit.
        warm_up: compile everything before listening, so that no request waits for it; lists what, and the seconds.

    Raises:
        ConfigError: a folder, a flag or the address is not usable, or a package is missing.
    """
    for flag, value, least in (
        ("--slots", slots, 1),
        ("--max-tokens", max_tokens, 2),
        ("--max-waiting", max_waiting, 0),
    ):
        if value is not None and value < least:
            raise ConfigError(f"{flag} must be at least {least}, not {value}")
    key = _key(api_key_env)
    _check_packages(grammar)
    if not 0 <= port <= 65535:  # the system's resolver would take the remainder
        raise ConfigError(f"--port {port}: must be between 0 and 65535")
    from orchestra_jax.serve.server import base_url, listen, run_server

    try:
        sock = listen(host, port)  # before the weights are read: an address in use is soon told
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--host {host} --port {port}: {error}") from None
    with sock:
        service = _load(folder, slots, max_tokens, max_waiting, name, key, dtype, grammar)
        if warm_up:
            _warm_up(service)
        if key is None and host not in ("127.0.0.1", "::1", "localhost"):
            print(f"anyone who reaches {host} can use it: --api-key-env VARIABLE asks for a key", file=sys.stderr)
        size = f"{slots} slots of {service.capacity:,} tokens"
        print(f"{service.name} at {base_url(sock)} ({size}); Ctrl-C ends it", flush=True)
        run_server(service, sock)


def _load(
    folder: str,
    slots: int,
    max_tokens: int | None,
    max_waiting: int,
    name: str | None,
    key: str | None,
    dtype: str | None,
    grammar: bool,
) -> Service:
    import jax
    import jax.numpy as jnp

    from orchestra_jax.rollout.policy import load_policy
    from orchestra_jax.sampler.engine import Engine
    from orchestra_jax.serve.app import Service
    from orchestra_jax.serve.worker import EngineThread
    from orchestra_jax.solve.source import read_source

    source = read_source(folder)
    model = source.model if dtype is None else source.model.model_copy(update={"dtype": dtype})
    policy = load_policy(model, source.text, 0)
    most = policy.config.max_position_embeddings
    capacity = max_tokens or (source.run.rollout.max_tokens if source.run else min(DEFAULT_MAX_TOKENS, most))
    if capacity > most:
        raise ConfigError(f"--max-tokens {capacity}: the model holds at most {most} (max_position_embeddings)")
    # XLA on CPU reads a bfloat16 cache at half the speed of a float32 one.
    cache_dtype = jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else model.dtype)

    def make_engine() -> Engine:
        engine = Engine(
            policy.config,
            slots=slots,
            capacity=capacity,
            stop_ids=policy.chat.stop_ids,
            seed=0,  # fixed: a request with a seed of its own has the same answer after a restart
            dtype=cache_dtype,
            steps=ROUND_STEPS,
            token_bytes=policy.chat.tokenizer.token_bytes,
        )
        engine.use(policy.params, 0)
        return engine

    worker = EngineThread(make_engine, max_waiting=max_waiting)
    return Service(name or Path(folder).resolve().name, policy.chat, worker, capacity, key, grammar)


def _warm_up(service: Service) -> None:
    engine: Engine | None = service.worker.engine
    assert engine is not None
    times = engine.warm_up()
    for shape, seconds in times:
        print(f"  {shape}: {seconds:.2f} s", file=sys.stderr)
    print(f"compiled {len(times)} programs in {sum(seconds for _, seconds in times):.1f} s", file=sys.stderr)


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    if not variable.isidentifier():  # not shown: it may be the key itself
        raise ConfigError("--api-key-env must be the name of an environment variable, not the key")
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(f"--api-key-env {variable}: the environment variable is not set")
    return key


def _check_packages(grammar: bool) -> None:
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError:
        raise ConfigError("orchestra serve needs starlette and uvicorn: pip install 'orchestra-jax[serve]'") from None
    if not grammar:
        return
    try:
        import llguidance  # noqa: F401
    except ImportError:
        raise ConfigError("--grammar needs llguidance: pip install 'orchestra-jax[grammar]'") from None
