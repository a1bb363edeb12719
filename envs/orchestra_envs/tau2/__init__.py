"""`orchestra/Tau2-v0`: the customer-service tasks of tau2-bench, with its databases, its user and its evaluator.

    env = orchestra_envs.make("orchestra/Tau2-v0", domain="retail", split="train", nl_judge="ignore",
                              user={"model": "qwen3", "base_url": "http://127.0.0.1:8000/v1", "api_key_env": None},
                              experts=[{"model": "gpt-5"}, {"model": "gpt-5-mini"}])
    observation, info = env.reset(seed=0)     # the customer's first words; info["instructions"] holds the policy text

tau2-bench is not on the package index (the `tau2` there is about magnetic relaxation). With Python 3.12 or 3.13::

    git clone https://github.com/sierra-research/tau2-bench
    pip install ./tau2-bench 'orchestra-jax[live]'
    export TAU2_DATA_DIR=$PWD/tau2-bench/data

The domains that ToolScale adds come the same way: put the `tau2` folder of a checkout of ToolOrchestra on PYTHONPATH
instead, set TAU2_DATA_DIR to its `data` and REPO_PATH to its root, and give the tasks by `tasks="path/to/tasks.json"`.

A local peer for the user: any OpenAI-compatible server, such as `vllm serve Qwen/Qwen3-8B --port 8000` with
`--enable-auto-tool-choice --tool-call-parser hermes` (in telecom the user has tools, too).
"""

from orchestra_envs.tau2.env import Tau2Env

__all__ = ["Tau2Env"]
