"""The reward: the product of what `reward_basis` names."""

from enum import Enum
from typing import Any

from tau2.data_model.simulation import RewardInfo, SimulationRun, TerminationReason
from tau2.data_model.tasks import RewardType, Task
from tau2.registry import registry


class EvaluationType(str, Enum):  # noqa: UP042, as in tau2-bench
    ALL = "all"


def evaluate_simulation(
    simulation: SimulationRun, task: Task, evaluation_type: EvaluationType, solo_mode: bool, domain: str
) -> RewardInfo:
    if simulation.termination_reason not in (TerminationReason.AGENT_STOP, TerminationReason.USER_STOP):
        return RewardInfo(reward=0.0)
    criteria = task.evaluation_criteria
    if criteria is None:
        return RewardInfo(reward=1.0)
    if criteria.nl_assertions:
        raise RuntimeError("the evaluator would ask a language model")
    is_met = {
        RewardType.DB: _same_db(simulation, task, solo_mode, domain),
        RewardType.ENV_ASSERTION: _assertions_hold(simulation, task, solo_mode, domain),
        RewardType.COMMUNICATE: _is_told(simulation, criteria.communicate_info or []),
        RewardType.ACTION: _are_called(simulation, criteria.actions or []),
        RewardType.NL_ASSERTION: True,
    }
    return RewardInfo(reward=float(all(is_met[basis] for basis in criteria.reward_basis)))


def _environment(task: Task, messages: list[Any], solo_mode: bool, domain: str) -> Any:
    environment = registry.get_env_constructor(domain)(solo_mode=solo_mode)
    initial = task.initial_state
    environment.set_state(initial and initial.initialization_data, initial and initial.initialization_actions, messages)
    return environment


def _same_db(simulation: SimulationRun, task: Task, solo_mode: bool, domain: str) -> bool:
    golden = _environment(task, (task.initial_state and task.initial_state.message_history) or [], False, domain)
    for action in (task.evaluation_criteria and task.evaluation_criteria.actions) or []:
        golden.call(action.name, action.requestor, action.arguments)
    return _environment(task, simulation.messages, solo_mode, domain).tools.db == golden.tools.db


def _assertions_hold(simulation: SimulationRun, task: Task, solo_mode: bool, domain: str) -> bool:
    environment = _environment(task, simulation.messages, solo_mode, domain)
    assertions = (task.evaluation_criteria and task.evaluation_criteria.env_assertions) or []
    return all(environment.run(assertion) == assertion.assert_value for assertion in assertions)


def _is_told(simulation: SimulationRun, infos: list[str]) -> bool:
    said = [message.content or "" for message in simulation.messages if message.role == "assistant"]
    return all(any(info.lower() in text.lower() for text in said) for info in infos)


def _are_called(simulation: SimulationRun, actions: list[Any]) -> bool:
    calls = [each for message in simulation.messages for each in getattr(message, "tool_calls", None) or ()]
    return all(any((c.name, c.arguments) == (a.name, a.arguments) for c in calls) for a in actions)
