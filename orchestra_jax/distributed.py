"""Several processes, one run: joining them, and agreeing on what each of them alone knows.

`join` must come before JAX is used. Afterwards every process runs the same program. What only one of them can know (a
file that exists, a signal that came, an episode that it played) goes round by `gather_objects` or `from_writer` before
anything is decided by it: processes that decide differently wait for each other for ever. The first process is the
writer; the others touch no file that all share.
"""

from __future__ import annotations

import atexit
import faulthandler
import glob
import importlib.util
import itertools
import logging
import os
import pickle
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TypeVar

import numpy as np

from orchestra_jax.config import ConfigError

T = TypeVar("T")

log = logging.getLogger(__name__)

VARIABLES = ("ORCHESTRA_COORDINATOR", "ORCHESTRA_NUM_PROCESSES", "ORCHESTRA_PROCESS_ID")
"""Environment variables of an explicit set-up: the first process' HOST:PORT, how many there are, which one this is."""

HEARTBEAT_VARIABLE = "ORCHESTRA_HEARTBEAT_S"
HEARTBEAT_S = 60
"""A process that was not heard of for so long is given up, and the run with it."""

JOIN_S = 600
"""How long processes wait for each other at the start: machines of a pod come up minutes apart."""

ALIVE_KEYS = "orchestra/alive"
ENDED = "ended"

LOST_PEER = (
    "another process of this run failed, was killed or cannot be reached; this one ends too. "
    "The same command on all hosts goes on from the last checkpoint"
)
LOST_PEER_EXIT = 1


def join(coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None) -> bool:
    """Joins the processes of a run; to be called before JAX is used.

    Where to find the others is told by the arguments, or else by the environment variables `VARIABLES`, or else by the
    machine: TPU metadata (several slices included), SLURM, Open MPI, or an indexed Kubernetes job (with the package
    `kubernetes`). Where none of them speaks of several processes, the run is a single one.

    Returns:
      Whether there are several processes.

    Raises:
      ConfigError: the set-up is incomplete or the others cannot be reached.
    """
    explicit = _explicit(coordinator, num_processes, process_id, os.environ)
    if explicit is None and not (found := _cluster(os.environ)):
        return False
    jax = _jax()
    # Collectives between processes on CPU; other platforms have their own.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    heartbeat_s = _heartbeat_s()
    where: dict[str, Any] = {}
    if explicit is not None:
        where = dict(zip(("coordinator_address", "num_processes", "process_id"), explicit, strict=True))
        where["cluster_detection_method"] = "deactivate"
    try:
        jax.distributed.initialize(
            **where,
            initialization_timeout=JOIN_S,
            # After ours, whose message says what to do; JAX's ends the process with a stack trace.
            heartbeat_timeout_seconds=heartbeat_s + 15,
            shutdown_timeout_seconds=60,
        )
    except (RuntimeError, ValueError) as error:
        if explicit is None and found == "TPU" and "should be defined" in str(error):
            return False  # a TPU machine that knows of no others
        how = f"coordinator {explicit[0]}" if explicit else found
        raise ConfigError(f"the processes of the run cannot be joined ({how}): {error}") from None
    if jax.process_count() == 1:
        return False
    _watch(heartbeat_s)
    return True


def _watch(heartbeat_s: int) -> None:
    """Starts a thread that ends this process if another one is not heard of for `heartbeat_s`.

    Needed where no collective is under way that would fail: while episodes wait for tools, say. The processes tell each
    other that they live through JAX's coordination service.
    """
    from jax._src import distributed as jax_distributed  # its client has no public name

    client, me = jax_distributed.global_state.client, _jax().process_index()
    if client is None or not hasattr(client, "key_value_dir_get"):
        return
    ended = threading.Event()

    def tell(text: str) -> None:
        client.key_value_set(f"{ALIVE_KEYS}/{me}", text, allow_overwrite=True)

    def watch() -> None:
        seen: dict[str, tuple[str, float]] = {}
        for beat in itertools.count():
            # If this thread itself cannot run any more (a call that keeps the interpreter's lock while it waits for a
            # lost process), a clock outside Python ends the process and says where it stood.
            faulthandler.dump_traceback_later(3 * heartbeat_s, exit=True)
            try:
                tell(str(beat))
                told = client.key_value_dir_get(ALIVE_KEYS)
            except Exception as error:  # whatever it is, the others cannot be heard any more
                if ended.is_set():
                    return
                give_up(RuntimeError(f"the first process cannot be reached: {error}"))
            now = time.monotonic()
            for key, text in told:
                if text != seen.get(key, ("", 0.0))[0]:
                    seen[key] = (text, now)
                elif text != ENDED and now - seen[key][1] > heartbeat_s and not ended.is_set():
                    process = key.rpartition("/")[2]
                    give_up(RuntimeError(f"nothing was heard of process {process} for {heartbeat_s} s"))
            if ended.wait(heartbeat_s / 6):
                return

    def end() -> None:
        ended.set()
        faulthandler.cancel_dump_traceback_later()
        with suppress(Exception):
            tell(ENDED)

    # Before JAX's own end, which is registered already: the last registered comes first.
    atexit.register(end)
    threading.Thread(target=watch, name="watch-processes", daemon=True).start()


def _explicit(
    coordinator: str | None, num_processes: int | None, process_id: int | None, environment: Mapping[str, str]
) -> tuple[str, int, int] | None:
    """Coordinator, number and index of the processes as they were told; None if they were not.

    Raises:
      ConfigError: a part is missing or is no such thing.
    """
    given: list[Any] = [coordinator, num_processes, process_id]
    values = [environment.get(name) if value is None else value for name, value in zip(VARIABLES, given)]
    if all(value is None or value == "" for value in values):
        return None
    names = ("--coordinator", "--num-processes", "--process-id")
    if missing := [f"{n} (or {v})" for n, v, value in zip(names, VARIABLES, values) if value in (None, "")]:
        raise ConfigError(f"a run of several processes needs {' and '.join(missing)} too")
    address, count, index = values
    if not re.fullmatch(r"[^\s:]+:[0-9]{1,5}|\[[0-9a-fA-F:]+\]:[0-9]{1,5}", str(address)):
        raise ConfigError(f"--coordinator {address!r} must be HOST:PORT of the first process")
    try:
        total, own = int(str(count)), int(str(index))
    except ValueError:
        raise ConfigError(f"--num-processes {count!r} and --process-id {index!r} must be whole numbers") from None
    if not 0 <= own < total:
        raise ConfigError(f"--process-id {own} must be at least 0 and below --num-processes {total}")
    return str(address), total, own


def _cluster(environment: Mapping[str, str]) -> str | None:
    """Who on this machine knows of other processes: the name of what JAX will ask, or None."""
    if environment.get("JAX_PLATFORMS", "").split(",")[0] not in ("cpu", "cuda", "gpu"):
        has_chips = bool(glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*"))
        if has_chips and importlib.util.find_spec("libtpu") is not None:
            return "TPU"
    slurm = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
    if all(name in environment for name in slurm) and environment["SLURM_NTASKS"] not in ("", "1"):
        return "SLURM"
    if environment.get("OMPI_COMM_WORLD_SIZE", "1") != "1":
        return "Open MPI"
    if "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment:
        if importlib.util.find_spec("kubernetes") is not None:
            return "Kubernetes"
        log.warning(
            "this is a pod of an indexed Kubernetes job: for several processes set %s, or pip install kubernetes",
            ", ".join(VARIABLES),
        )
    return None


def _heartbeat_s() -> int:
    text = os.environ.get(HEARTBEAT_VARIABLE, str(HEARTBEAT_S))
    if not re.fullmatch("[1-9][0-9]*", text):
        raise ConfigError(f"{HEARTBEAT_VARIABLE} must be a whole number of seconds, not {text!r}")
    return int(text)


@contextmanager
def ends_for_all() -> Iterator[None]:
    """A part of the program that all processes of a run leave in the same way.

    A mistake of the user's and an interrupt are agreed upon before they are raised. Any other error, where there are
    several processes, ends this one at once (`give_up`), and thereby the others: their collectives fail, or its
    heartbeat is missed.
    """
    try:
        yield
    except (ConfigError, KeyboardInterrupt):
        raise
    except Exception as error:
        if _jax().process_count() == 1:
            raise
        log.info("the error in full:", exc_info=True)
        give_up(error)


def give_up(error: BaseException) -> NoReturn:
    """Ends this process at once after an error that concerns all of them; the others are not waited for.

    The ordinary end of a program would wait for the others at a barrier that they may never reach.
    """
    text = " ".join(str(error).split())[:300]
    if not isinstance(error, _jax().errors.JaxRuntimeError) and not re.search("Gloo|process", text):
        traceback.print_exception(error)
    print(f"orchestra: {LOST_PEER} ({type(error).__name__}: {text})", file=sys.stderr, flush=True)
    if is_writer():
        # JAX's coordination service lives here: the others are to find out themselves before it is gone.
        time.sleep(_heartbeat_s() / 6 + 2)
    os._exit(LOST_PEER_EXIT)


def _jax() -> Any:
    """JAX, imported late: whether there are several processes is known before it is needed."""
    import jax

    return jax


def is_writer() -> bool:
    """Whether this process writes the files of the run."""
    return _jax().process_index() == 0


def gather_objects(value: Any) -> list[Any]:
    """What each process calls this with, in the order of the processes, on all of them.

    Values are pickled: they come from processes of the same program.
    """
    if _jax().process_count() == 1:
        return [value]
    data = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = _allgather(np.array([data.size], np.int64)).reshape(-1)
    # Few distinct lengths, because each is a program to compile.
    padded = np.zeros(1 << int(sizes.max() - 1).bit_length(), np.uint8)
    padded[: data.size] = data
    return [pickle.loads(row[:size].tobytes()) for row, size in zip(_allgather(padded), sizes, strict=True)]


def _allgather(values: np.ndarray) -> np.ndarray:
    """[processes, ...] from each process' array of one shape; bytes, so that 64-bit numbers keep their width."""
    from jax.experimental import multihost_utils

    raw = np.ascontiguousarray(values).view(np.uint8)
    gathered = np.asarray(multihost_utils.process_allgather(raw))
    return gathered.view(values.dtype)


def from_writer(value: T) -> T:
    """The first process' value, on all of them."""
    if _jax().process_count() == 1:
        return value
    return gather_objects(value if is_writer() else None)[0]


def on_writer(function: Callable[[], T], what: str = "writing") -> T | None:
    """Runs a function on the first process only; returns (None elsewhere) when it is done, on all of them.

    Raises:
      RuntimeError: it failed, told on the other processes. The first one raises what was raised.
    """
    result, error = None, None
    if is_writer():
        try:
            result = function()
        except Exception as failure:
            error = failure
    all_succeeded(error, what)
    return result


def all_succeeded(error: Exception | None, what: str) -> None:
    """Raises on all processes if one of them comes with an error; nobody is left waiting.

    Raises:
      ConfigError: another process found a mistake of the user's.
      RuntimeError: another process failed; where this one did, its own error.
    """
    told = gather_objects(None if error is None else (isinstance(error, ConfigError), f"{error}", type(error).__name__))
    if error is not None:
        raise error
    for process, found in enumerate(told):
        if found is not None:
            mistake, text, kind = found
            if mistake:
                raise ConfigError(f"process {process}: {text}")
            raise RuntimeError(f"{what} failed on process {process}: {kind}: {text}")


def together(function: Callable[[], T], what: str) -> T:
    """Runs a function on every process; if it fails on one, all of them raise. See `all_succeeded`."""
    result: T | None = None
    error: Exception | None = None
    try:
        result = function()
    except Exception as failure:
        error = failure
    all_succeeded(error, what)
    return result  # type: ignore[return-value]  # there was no error, so there is a result
