"""`orchestra serve`: a policy behind an OpenAI-compatible HTTP endpoint."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Literal

from orchestra_jax.config import ConfigError, ModelSection, TextConfig, load_config

DEFAULT_MAX_TOKENS = 4096
"""Of a conversation, for a policy folder, which does not say what it was trained with; fewer if the model has fewer."""

_INSTALL = "orchestra serve needs starlette and uvicorn: pip install 'orchestra-jax[serve]'"


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
    dtype: Literal["float32", "bfloat16"] = "float32",
    grammar: bool = False,
    warm_up: bool = False,
) -> None:
    """Serves until it is interrupted.

    Args:
        folder: a policy in Hugging Face layout, or a run folder, which means its trained policy.
        host, port: where to listen; port 0 takes a free one, which is printed.
        slots: conversations that sample at once; each has its place in the KV cache.
        max_tokens: of a conversation, prompt and answers; None: what the run was trained with, else 4096.
        max_waiting: turns that wait for a slot; more are refused with 429.
        name: of the model, as clients ask for it; None: the folder's.
        api_key_env: environment variable that holds the key which clients must send; None: no key.
        dtype: of the weights, the computation and the KV cache.
        grammar: tool calls can only be ones of the request's tools, with arguments that fit.
        warm_up: compile everything before listening, so that no request waits for it.

    Raises:
        ConfigError: a folder, a flag or the address is not usable.
    """
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError:
        raise ConfigError(_INSTALL) from None
    for flag, value, least in (
        ("--slots", slots, 1),
        ("--max-tokens", max_tokens, 2),
        ("--max-waiting", max_waiting, 0),
    ):
        if value is not None and value < least:
            raise ConfigError(f"{flag} must be at least {least}, not {value}")
    key = _key(api_key_env)
    _check_grammar(grammar)
    from orchestra_jax.serve.server import base_url, listen, run_server

    try:
        sock = listen(host, port)  # before the weights are read: an address in use is soon told
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--host {host} --port {port}: {error}") from None
    with sock:
        service = _service(Path(folder), slots, max_tokens, max_waiting, name, key, dtype, grammar, warm_up)
        if key is None and host not in ("127.0.0.1", "::1", "localhost"):
            print(f"anyone who reaches {host} can use it: --api-key-env VARIABLE asks for a key", file=sys.stderr)
        print(
            f"{service.name} at {base_url(sock)} ({slots} slots of {service.capacity:,} tokens); Ctrl-C ends it",
            flush=True,
        )
        run_server(service, sock)


def _service(folder, slots, max_tokens, max_waiting, name, key, dtype, grammar, warm_up):
    from orchestra_jax.rollout.policy import load_policy
    from orchestra_jax.sampler.engine import Engine
    from orchestra_jax.serve.app import Service
    from orchestra_jax.serve.worker import EngineThread

    model_folder, trained_tokens = _find_policy(folder)
    policy = load_policy(ModelSection(path=str(model_folder), dtype=dtype), TextConfig(), 0)
    most = policy.config.max_position_embeddings
    capacity = max_tokens or trained_tokens or min(DEFAULT_MAX_TOKENS, most)
    if capacity > most:
        raise ConfigError(f"--max-tokens {capacity}: the model has max_position_embeddings of {most}")

    def make_engine() -> Engine:
        # The seed is fixed, so that a request's own seed gives the same answer after a restart.
        engine = Engine(
            policy.config,
            slots=slots,
            capacity=capacity,
            stop_ids=policy.chat.stop_ids,
            seed=0,
            dtype=policy.params["embed_tokens"].dtype,
        )
        engine.use(policy.params, 0)
        return engine

    worker = EngineThread(make_engine, max_waiting=max_waiting)
    if warm_up:
        assert worker.engine is not None
        times = worker.engine.warm_up(policy.params)
        print(f"compiled {len(times)} shapes in {sum(seconds for _, seconds in times):.1f} s", file=sys.stderr)
    return Service(name or folder.resolve().name, policy.chat, worker, capacity, key, grammar)


def _find_policy(folder: Path) -> tuple[Path, int | None]:
    """The folder with the weights, and for a run the most tokens of its trajectories."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; give a policy in Hugging Face layout, or a run folder")
    if not (folder / "config.yaml").is_file() or (folder / "config.json").is_file():
        return folder, None
    model = folder / "model"
    if not model.is_dir():
        raise ConfigError(f"{folder}: the run has no {model} yet; its training has not finished")
    return model, load_config(folder / "config.yaml").rollout.max_tokens


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    if not variable.isidentifier():  # not shown: it may be the key itself
        raise ConfigError("--api-key-env must be the name of an environment variable, not the key")
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(f"--api-key-env {variable}: the environment variable is not set")
    return key


def _check_grammar(grammar: bool) -> None:
    if grammar:
        try:
            import llguidance  # noqa: F401
        except ImportError:
            raise ConfigError("--grammar needs llguidance: pip install 'orchestra-jax[grammar]'") from None
