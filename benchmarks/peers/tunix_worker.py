"""Tunix's sampler and its agentic rollout on JAX, run by the Python of an environment with google-tunix.

Two kinds of requests:

* `{"kind": "generate", "prompts": [[ids]], "new_tokens": [n], "most": n, "cache": n, "shape": {...}}`: one static
  batch by `tunix.generate.sampler.Sampler`;
* `{"kind": "agentic", "plan": {...}, "cache": n, "shape": {...}}`: the trajectories of `benchmarks.multi_turn` by
  `RolloutOrchestrator` and `TrajectoryCollectEngine` over `VanillaRollout`, put together as `AgenticRLLearner` does:
  a thread for each trajectory, every turn's whole history generated from anew, alone.

Its random weights know no end of a turn, so that the worker ends turns where the benchmark wants it: it lowers the
sampler's own count of steps, which is no new shape, as an end-of-sequence token would. Shapes are Tunix's: prompts
padded to a power of two, buffers for the most new tokens that there may be.
"""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from flax import nnx
from serve import serve
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.llama3.model import Llama3, ModelConfig
from tunix.rl.agentic.agents.agent_types import Action, Step
from tunix.rl.agentic.agents.base_agent import ConversationAgentBase
from tunix.rl.agentic.environments.base_environment import BaseTaskEnv, EnvStepResult
from tunix.rl.agentic.pipeline.rollout_orchestrator import RolloutOrchestrator
from tunix.rl.agentic.trajectory.trajectory_collect_engine import TrajectoryCollectEngine
from tunix.rl.agentic.utils import RolloutSyncLock
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.rl.rollout.vanilla_rollout import VanillaRollout

models: dict[str, Llama3] = {}
rollouts: dict[tuple[str, int], VanillaRollout] = {}
wanted = threading.local()  # .tokens: how many the thread's next call is to sample


class Ids:
    """A tokenizer of texts that are numbers."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str) -> list[int]:
        """The numbers."""
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        """The numbers, what is out of the vocabulary left out."""
        return " ".join(str(int(i)) for i in ids if i < self.vocab_size)

    def bos_id(self) -> int:
        """None."""
        return 0

    def eos_id(self) -> int:
        """One that is never sampled."""
        return self.vocab_size

    def pad_id(self) -> int:
        """In no prompt."""
        return 0


def rollout_of(shape: dict[str, Any], cache: int) -> VanillaRollout:
    """Tunix's rollout worker of a Llama of these sizes with random float32 weights."""
    key = str(shape)
    if key not in models:
        config = ModelConfig(
            num_layers=shape["num_layers"],
            vocab_size=shape["vocab_size"],
            embed_dim=shape["hidden_size"],
            hidden_dim=shape["intermediate_size"],
            num_heads=shape["num_heads"],
            head_dim=shape["head_dim"],
            num_kv_heads=shape["num_kv_heads"],
            rope_theta=100_000,
            norm_eps=1e-5,
            weight_tying=True,
        )
        models[key] = Llama3(config, rngs=nnx.Rngs(0))
    if (key, cache) not in rollouts:
        sizes = CacheConfig(cache, shape["num_layers"], shape["num_kv_heads"], shape["head_dim"])
        rollout = VanillaRollout(models[key], Ids(shape["vocab_size"]), sizes)
        _end_where_wanted(rollout._sampler, shape["vocab_size"])
        rollouts[key, cache] = rollout
    return rollouts[key, cache]


def _end_where_wanted(sampler: Sampler, end: int) -> None:
    decode = sampler._compiled_decode_fn

    def decode_some(params: Any, state: Any) -> Any:
        last = int(state.num_input_tokens) + wanted.tokens
        state = decode(params, state.replace(total_sampling_steps=last))
        if last < state.token_buffer.shape[1]:
            state = state.replace(token_buffer=state.token_buffer.at[:, last].set(end))
        return state

    sampler._compiled_decode_fn = decode_some


def sample(rollout: VanillaRollout, texts: list[str], tokens: int, most: int) -> Any:
    """What the rollout worker gives for these prompts, `tokens` of each.

    Raises:
        RuntimeError: it gave another number.
    """
    wanted.tokens = tokens
    config = RolloutConfig(max_tokens_to_generate=most, max_prompt_length=1, temperature=1.0, top_p=1.0)
    out = rollout.generate(texts, config)
    got = {len(row) for row in out.tokens}
    if got != {tokens}:
        raise RuntimeError(f"Tunix gave {sorted(got)} tokens, not {tokens}")
    return out


def generate(request: dict[str, Any]) -> dict[str, Any]:
    """One static batch."""
    rollout = rollout_of(request["shape"], request["cache"])
    texts = [" ".join(map(str, prompt)) for prompt in request["prompts"]]
    start = time.perf_counter()
    sample(rollout, texts, max(request["new_tokens"]), request["most"])
    return {"seconds": time.perf_counter() - start, "tokens": sum(request["new_tokens"])}


class Agent(ConversationAgentBase):
    """Hands a turn's text on as its action."""

    def update_from_model(self, response: str, **kwargs: Any) -> Action:
        """See there."""
        self.chat_completions.append({"role": "assistant", "content": response})
        action = Action(action=response)
        step = Step(chat_completions=list(self.chat_completions), action=action, model_response=response)
        self.trajectory.steps.append(step)
        return action


class Environment(BaseTaskEnv):
    """One trajectory of the plan: every turn but the last waits for its tool."""

    def __init__(self, index: int, plan: dict[str, Any], no_tools: bool) -> None:
        super().__init__({"index": index}, max_steps=len(plan["lengths"][index]), pair_index=index)
        self.prompt = plan["prompts"][index]
        self.lengths, self.tool_s = plan["lengths"][index], plan["tool_s"][index]
        self.observations, self.no_tools = plan["observations"][index], no_tools

    def _initial_observation(self) -> str:
        return " ".join(map(str, self.prompt))

    def _step_impl(self, action: Any) -> EnvStepResult:
        number = self.step_count - 1
        if not self.no_tools and self.step_count < self.max_steps:
            time.sleep(self.tool_s[number])
        return EnvStepResult(" ".join(map(str, self.observations[number])), 0.0, False, {})


def agentic(request: dict[str, Any]) -> dict[str, Any]:
    """All trajectories of a plan."""
    plan, rollout = request["plan"], rollout_of(request["shape"], request["cache"])
    most, number = request["most"], len(plan["prompts"])
    counts: list[int] = []

    def model_call(messages: list[dict[str, str]], env: Environment, **kwargs: Any) -> Any:
        text = " ".join(message["content"] for message in messages if message["content"])
        tokens = env.lengths[env.step_count]
        counts.append(tokens)
        return sample(rollout, [text], tokens, most)

    async def run() -> int:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(number + 1))
        orchestrator = RolloutOrchestrator(
            rollout_sync_lock=RolloutSyncLock(),
            engine_cls=TrajectoryCollectEngine,
            engine_kwargs={"model_call": model_call, "timeout": 3600.0},
            max_concurrency=number,
        )
        pairs = [(Agent(""), Environment(i, plan, request["no_tools"])) for i in range(number)]
        producer = asyncio.create_task(
            orchestrator.run_producers_from_stream(pairs, group_size=1, collect_mode="Trajectory")
        )
        await asyncio.sleep(0)  # it must have begun
        done = 0
        async for batch in orchestrator.yield_batches(1):
            done += len(batch)
            if done == number:
                break
        await producer
        return done

    start = time.perf_counter()
    done = asyncio.run(run())
    seconds = time.perf_counter() - start
    if done != number or sum(counts) != sum(map(sum, plan["lengths"])):
        raise RuntimeError(f"{done} of {number} trajectories ended, with {sum(counts)} tokens")
    return {"seconds": seconds, "tokens": sum(counts)}


def handle(request: dict[str, Any]) -> dict[str, Any]:
    """Does what is asked, under a mesh of one device as Tunix wants it."""
    with jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2):
        return {"generate": generate, "agentic": agentic}[request["kind"]](request)


if __name__ == "__main__":
    serve(["google-tunix", "jax", "flax"], handle)
