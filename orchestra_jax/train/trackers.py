"""Weights & Biases and Trackio, where a config asks for them (`trackers: [wandb, trackio]`).

A tracker is told of rows by a thread of its own, so that a slow one holds nobody up, and one that fails is left behind
with a warning: the run goes on, and metrics.jsonl has everything. A resumed run goes on in the same tracker run; steps
that are done again give the same numbers and are not told a second time.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import netrc
import os
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, Protocol
from urllib.parse import urlparse

from orchestra_jax.config import ConfigError

log = logging.getLogger(__name__)

TrackerName = Literal["wandb", "trackio"]

TRACKING_FOLDER = "tracking"
"""In a run's folder: which tracker runs are its, how far each was told, and what W&B keeps on disk."""

DEFAULT_PROJECT = "orchestra-jax"
CLOSE_TIMEOUT_S = 60.0
"""How long a run waits at its end for a tracker to have sent what it was told."""


class TrackerRun(Protocol):
    """A run of a tracker, begun or gone on with."""

    def log(self, index: int, phase: str, step: int, numbers: Mapping[str, float]) -> None:
        """One step's numbers; `index` counts the rows of all phases, over resumes too."""

    def finish(self, failed: bool) -> None:
        """The end; `failed` if the run was interrupted or broke."""


def open_trackers(names: Sequence[TrackerName], folder: Path, config: Mapping[str, Any]) -> tuple[Follower, ...]:
    """One follower for each tracker.

    Args:
      names: which.
      folder: the run's; its name is the tracker run's.
      config: told to the tracker when a run is begun.

    Raises:
      ConfigError: a tracker's package is not installed.
    """
    for name in names:
        if (
            spec := importlib.util.find_spec(name)
        ) is None or spec.origin is None:  # None: a folder of that name, no package
            raise ConfigError(f"trackers: {name} is not installed: pip install 'orchestra-jax[{name}]'")
    return tuple(Follower(name, folder, dict(config), _OPENERS[name]) for name in dict.fromkeys(names))


Opener = Callable[[Path, str, dict[str, Any]], TrackerRun]
"""(run folder, id of the tracker run, config) -> the tracker run."""


class Follower:
    """A tracker and the thread that tells it.

    Args:
      name: of the tracker.
      folder: the run's.
      config: the run's, as plain data.
      opener: begins the tracker run, or goes on with it; called by the thread.
      close_timeout_s: see `CLOSE_TIMEOUT_S`.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        config: dict[str, Any],
        opener: Opener,
        close_timeout_s: float = CLOSE_TIMEOUT_S,
    ) -> None:
        self.name = name
        self.num_untold = 0
        """Rows that the tracker never got, since it failed."""
        self._open = lambda run_id: opener(folder, run_id, config)
        self._state = folder / TRACKING_FOLDER / f"{name}.json"
        self._close_timeout_s = close_timeout_s
        self._rows: SimpleQueue[tuple[str, int, dict[str, float]] | None] = SimpleQueue()
        self._failed = False  # the run, not the tracker
        self._thread: threading.Thread | None = None

    def tell(self, phase: str, step: int, numbers: Mapping[str, float]) -> None:
        """Passes a step on; never waits and never raises."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"tracker-{self.name}", daemon=True)
            self._thread.start()
        self._rows.put((phase, step, dict(numbers)))

    def close(self, *, failed: bool = False) -> None:
        """Ends the tracker run, and waits for that, but not for ever."""
        if self._thread is None:
            return
        self._failed = failed
        self._rows.put(None)
        self._thread.join(self._close_timeout_s)
        if self._thread.is_alive():
            log.warning("tracker %s: still sending after %g s; not waited for", self.name, self._close_timeout_s)
        elif self.num_untold:
            log.warning("tracker %s: %d steps never reached it; metrics.jsonl has them", self.name, self.num_untold)

    def _work(self) -> None:
        run: TrackerRun | None = None
        broken = False
        told: dict[str, int] = {}
        while (row := self._rows.get()) is not None:
            phase, step, numbers = row
            if broken:
                self.num_untold += 1
                continue
            try:
                if run is None:
                    run_id, told = self._read_state()
                    run = self._open(run_id)
                if step > told.get(phase, 0):
                    run.log(sum(told.values()), phase, step, numbers)
                    told[phase] = step
                    self._write_state(run_id, told)
            except Exception as error:
                broken = True
                self.num_untold += 1
                log.warning(
                    "tracker %s failed, and is left out from %s step %d on: %s: %s",
                    *(self.name, phase, step, type(error).__name__, error),
                )
        if run is not None:
            try:
                run.finish(self._failed)
            except Exception as error:
                log.warning("tracker %s failed at its end: %s: %s", self.name, type(error).__name__, error)

    def _read_state(self) -> tuple[str, dict[str, int]]:
        """The id of the tracker run, and the last step of each phase that it was told; a new id at first."""
        try:
            state = json.loads(self._state.read_text(encoding="utf-8"))
            return str(state["run_id"]), {str(phase): int(step) for phase, step in state["told"].items()}
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError, AttributeError):
            log.warning("%s cannot be read: tracker %s begins a new run", self._state, self.name)
        run_id = uuid.uuid4().hex[:12]
        self._write_state(run_id, {})
        return run_id, {}

    def _write_state(self, run_id: str, told: Mapping[str, int]) -> None:
        self._state.parent.mkdir(parents=True, exist_ok=True)
        staging = self._state.with_suffix(".tmp")
        staging.write_text(json.dumps({"run_id": run_id, "told": told}), encoding="utf-8")
        staging.replace(self._state)


def tracked_name(phase: str, name: str) -> str:
    """A metric's name where all phases share one space of names: `sft/time/update_s`; training's stay as they are."""
    return name if phase == "train" or name.startswith(f"{phase}/") else f"{phase}/{name}"


# ----------------------------------------------------------------------------------------------------------
# Weights & Biases
# ----------------------------------------------------------------------------------------------------------


class _WandbRun:
    def __init__(self, folder: Path, run_id: str, config: dict[str, Any]) -> None:
        import wandb

        tracking = folder / TRACKING_FOLDER
        tracking.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", DEFAULT_PROJECT),
            name=os.environ.get("WANDB_NAME", folder.resolve().name),
            id=run_id,
            resume="allow",
            dir=str(tracking),
            config=config,
            mode=_wandb_mode(),
            # No questions, no captured output, no copy of anybody's source tree.
            settings=wandb.Settings(silent=True, console="off", disable_git=True, save_code=False),
        )
        self._known: set[str] = set()

    def log(self, index: int, phase: str, step: int, numbers: Mapping[str, float]) -> None:
        axis = f"{phase}/step"
        values = {tracked_name(phase, name): value for name, value in numbers.items()}
        for name in (axis, *values):
            if name not in self._known:
                self._known.add(name)
                self._run.define_metric(name, **({} if name == axis else {"step_metric": axis}))
        self._run.log({axis: step, **values}, step=index)

    def finish(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


def _wandb_mode() -> Any:
    """`WANDB_MODE` if set; else online with a key and offline without one, where W&B would ask for it and wait."""
    if mode := os.environ.get("WANDB_MODE"):
        return mode
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return "online"
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        known = netrc.netrc(os.environ.get("NETRC")).hosts
    except (OSError, netrc.NetrcParseError):
        known = {}
    if host in known:
        return "online"
    log.warning("tracker wandb: no WANDB_API_KEY, so it writes to disk only; `wandb sync` sends it later")
    return "offline"


# ----------------------------------------------------------------------------------------------------------
# Trackio
# ----------------------------------------------------------------------------------------------------------


class _TrackioRun:
    def __init__(self, folder: Path, run_id: str, config: dict[str, Any]) -> None:
        import trackio

        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", DEFAULT_PROJECT),
            name=f"{folder.resolve().name}-{run_id}",  # Trackio knows runs by name alone
            config=config,
            resume="allow",
            embed=False,
        )

    def log(self, index: int, phase: str, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({tracked_name(phase, name): value for name, value in numbers.items()}, step=step)

    def finish(self, failed: bool) -> None:
        self._run.finish()


_OPENERS: dict[str, Opener] = {"wandb": _WandbRun, "trackio": _TrackioRun}
