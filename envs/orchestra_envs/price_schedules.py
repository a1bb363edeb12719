"""Price lists of several providers, for randomised prices.

`PUBLISHED_SCHEDULES` is {provider: {model: (input, output)}} in US dollars per million tokens. Sources: "toolorchestra"
is the table that ToolOrchestra (arXiv 2511.21689) shows its policy, after Together's list of 2025. "deepinfra" is the
list in the documentation of Lava's gateway, read in December 2026; as in the paper (appendix H) it is the schedule kept
for the test. All others are the tables of genai-prices 0.2.3 (October 2026; those of nebius, hyperbolic and nscale as
Hugging Face's router gives them). They are copied and not looked up, so that a seed means the same prices for ever; for
what a call costs today see `orchestra_envs.prices`.
"""

import re

# Models are named as `canonical_model` writes them. A schedule leaves out what its provider does not sell.
PUBLISHED_SCHEDULES: dict[str, dict[str, tuple[float, float]]] = {
    "toolorchestra": {
        "gpt-5": (1.25, 10.0),
        "gpt-5-mini": (0.25, 2.0),
        "qwen3-32b": (0.8, 0.8),
        "qwen2.5-coder-32b": (0.8, 0.8),
        "qwen2.5-math-72b": (0.9, 0.9),
        "qwen2.5-math-7b": (0.2, 0.2),
        "llama-3.3-70b": (0.9, 0.9),
    },
    "together": {
        "llama-3.3-70b": (0.88, 0.88),
        "llama-3.1-70b": (0.88, 0.88),
        "llama-3.1-8b": (0.18, 0.18),
        "qwen2.5-7b": (0.3, 0.3),
        "qwen3-235b-a22b": (0.2, 0.6),
        "deepseek-r1": (3.0, 7.0),
        "deepseek-v3": (1.25, 1.25),
        "gpt-oss-120b": (0.15, 0.6),
        "gpt-oss-20b": (0.05, 0.2),
    },
    "fireworks": {
        "llama-3.1-8b": (0.2, 0.2),
        "qwen3-235b-a22b": (0.22, 0.88),
        "deepseek-r1": (3.0, 8.0),
        "deepseek-v3": (0.9, 0.9),
        "gemma-3-27b": (0.1, 0.1),
        "gpt-oss-120b": (0.15, 0.6),
        "gpt-oss-20b": (0.07, 0.3),
    },
    "novita": {
        "llama-3.3-70b": (0.135, 0.4),
        "llama-3.1-70b": (0.34, 0.39),
        "llama-3.1-8b": (0.02, 0.05),
        "qwen2.5-72b": (0.38, 0.4),
        "qwen3-32b": (0.1, 0.45),
        "qwen3-235b-a22b": (0.2, 0.8),
        "deepseek-r1": (0.7, 2.5),
        "deepseek-v3": (0.4, 1.3),
        "deepseek-r1-distill-llama-70b": (0.8, 0.8),
        "gemma-3-27b": (0.119, 0.2),
        "gpt-oss-120b": (0.05, 0.25),
        "gpt-oss-20b": (0.04, 0.15),
    },
    "cloudflare": {
        "llama-3.3-70b": (0.293, 2.253),
        "llama-3.1-8b": (0.282, 0.827),
        "qwen2.5-coder-32b": (0.66, 1.0),
        "deepseek-r1-distill-qwen-32b": (0.497, 4.881),
        "gpt-oss-120b": (0.35, 0.75),
        "gpt-oss-20b": (0.2, 0.3),
    },
    "nebius": {
        "llama-3.3-70b": (0.25, 0.75),
        "llama-3.1-8b": (0.03, 0.09),
        "qwen3-32b": (0.1, 0.3),
        "qwen3-235b-a22b": (0.2, 0.6),
        "deepseek-r1": (0.8, 2.4),
        "deepseek-v3": (0.75, 2.25),
        "gemma-3-27b": (0.2, 0.6),
        "nemotron-ultra-253b": (0.6, 1.8),
        "gpt-oss-120b": (0.15, 0.6),
    },
    "hyperbolic": {
        "llama-3.3-70b": (0.4, 0.4),
        "qwen3-235b-a22b": (2.0, 2.0),
        "deepseek-r1": (2.0, 2.0),
        "deepseek-v3": (1.25, 1.25),
        "gpt-oss-120b": (0.3, 0.3),
        "gpt-oss-20b": (0.1, 0.1),
    },
    "nscale": {
        "llama-3.3-70b": (0.4, 0.4),
        "llama-3.1-8b": (0.06, 0.06),
        "qwen2.5-coder-32b": (0.06, 0.2),
        "qwen3-32b": (0.08, 0.25),
        "qwen3-235b-a22b": (0.2, 0.6),
        "deepseek-r1-distill-llama-70b": (0.75, 0.75),
        "deepseek-r1-distill-qwen-32b": (0.3, 0.3),
        "gpt-oss-120b": (0.1, 0.4),
        "gpt-oss-20b": (0.05, 0.2),
    },
    "groq": {
        "llama-3.3-70b": (0.59, 0.79),
        "llama-3.1-8b": (0.05, 0.08),
        "qwen3-32b": (0.29, 0.59),
        "deepseek-r1-distill-llama-70b": (0.75, 0.99),
        "gpt-oss-120b": (0.15, 0.6),
        "gpt-oss-20b": (0.075, 0.3),
    },
    "deepinfra": {
        "llama-3.3-70b": (0.23, 0.4),
        "llama-3.1-70b": (0.23, 0.4),
        "qwen2.5-72b": (0.12, 0.39),
        "qwen3-32b": (0.1, 0.3),
        "qwen3-235b-a22b": (0.13, 0.6),
        "deepseek-r1": (0.7, 2.4),
        "deepseek-v3": (0.38, 0.89),
        "deepseek-r1-distill-llama-70b": (0.2, 0.6),
        "deepseek-r1-distill-qwen-32b": (0.27, 0.27),
        "gemma-3-27b": (0.1, 0.19),
    },
}

_SUFFIX = re.compile(r"-(instruct|turbo|it|chat|fp8|bf16|awq|versatile|instant|v1|\d{4})$")


def canonical_model(name: str) -> str:
    """The name of a model as the price schedules write it: "meta-llama/Llama-3.3-70B-Instruct" is "llama-3.3-70b"."""
    name = name.lower().rpartition("/")[2].removeprefix("meta-")
    while (shorter := _SUFFIX.sub("", name)) != name:
        name = shorter
    return re.sub(r"^llama-?3[._]1-nemotron", "nemotron", name)
