"""Makes the tokenizer of the market's tiny policies: ``python -m orchestra_jax.text.make_market_tokenizer``.

Byte-level BPE over what the market says, in 2,048 tokens. Same market, same files. It is made for copying and for
short prompts:

* every number of one to three digits is one token, the same one wherever it stands (never joined with a space),
* tool names, and the fixed parts of a tool call without arguments, are one token each,
* the rest of the vocabulary is merges learned from questions, passages, prompts and answers.

Anything else, any Unicode text, is encoded as bytes.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import Any

import tokenizers
from orchestra_envs.market import corpus
from orchestra_envs.market.env import MarketEnv
from orchestra_envs.market.tasks import TASK_TYPES, make_task
from orchestra_envs.market.tools import TOOL_NAMES
from orchestra_envs.parse import ToolCall, render_call
from tokenizers import models, pre_tokenizers

from orchestra_jax.text.prompt import system_prompt
from orchestra_jax.text.tokenizer import BUILTIN, byte_level

VOCAB_SIZE = 2048
ADDED_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
SPECIAL_TOKENS = ADDED_TOKENS[:3]  # as in Qwen's tokenizers, tags are added but not "special"

CALL_START, CALL_END = '{"name": "', '", "arguments": {}}'
FIXED_PIECES = (
    CALL_START,
    "\n" + CALL_START,
    CALL_END,
    CALL_END + "\n",
    "system\n",
    "user\n",
    "assistant\n",
    "M ",  # in a tool's line of a compact prompt: per million tokens
    "s\n",  # ends such a line, after the seconds
    "Answer:",
    "Answer: ",
)
# How text falls into pieces that merges never cross, the first alternative that fits: the fixed pieces; names such as
# gpt-5-mini and qwen2.5-math-7b; numbers in groups of three digits; words; punctuation; white space.
PIECES = "|".join(
    [
        r'\n?\{"name": "',
        r'", "arguments": \{\}\}\n?',
        r"(?:system|user|assistant)\n",
        r"(?<=\d)(?:M |s\n)",
        r"Answer:(?: (?=\d))?",  # a word keeps its space, to be the token that it is in a passage
        r" ?[a-z]+[0-9.]*(?:-[a-z0-9]+(?:\.[0-9]+)*)+",
        r"\d{1,3}",
        r" ?\p{L}+",
        r" ?[^\s\p{L}\d]+",
        r"\s+",
    ]
)

# Qwen's turns with less around them: a tool's answer costs four tokens beside its text.
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<tool_response>' + message.content + '</tool_response>' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

README = """\
# The market's tokenizer

Byte-level BPE, 2,048 tokens, with a compact Qwen-like chat template. Made from the text of `orchestra/Market-v0` by
`python -m orchestra_jax.text.make_market_tokenizer`; do not edit by hand.
"""


def make_files(texts: Iterable[str], names: Iterable[str]) -> dict[str, str]:
    """The tokenizer folder's files, name -> content, trained on ``texts`` and with one token for each of ``names``.

    Raises:
        ValueError: if the texts are too few to fill the vocabulary.
    """
    numbers = [f"{n:0{width}}" for width in (2, 3) for n in range(10**width)]
    whole = (*FIXED_PIECES, *names, *(f" {name}" for name in names), *numbers)
    counts = Counter(piece for text in texts for piece in _split(text))
    for piece in whole:
        del counts[byte_level(piece)]
    vocab = [byte_level(piece) for piece in whole]
    vocab += sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(vocab))
    merges = learn_merges(counts, vocab, VOCAB_SIZE - len(ADDED_TOKENS))
    definition = _definition(vocab, merges)
    return {
        "tokenizer.json": json.dumps(definition, ensure_ascii=False, indent=0) + "\n",
        "tokenizer_config.json": json.dumps(_config(), ensure_ascii=False, indent=2) + "\n",
        "README.md": README,
    }


def learn_merges(counts: Mapping[str, int], vocab: list[str], size: int) -> list[tuple[str, str]]:
    """Byte-pair encoding (Sennrich et al. 2016): joins the most frequent pair of neighbours until vocab is full.

    Of equally frequent pairs the alphabetically first is taken, so the result depends on the counts alone.

    Args:
        counts: how often each piece of text occurs, in byte-level spelling.
        vocab: the tokens there are; new ones are appended until it has ``size``.
        size: the wanted length of ``vocab``.

    Returns:
        The pairs, in the order in which they are to be joined.
    """
    pieces = {piece: list(piece) for piece in counts}
    pair_counts: Counter[tuple[str, str]] = Counter()
    for piece, symbols in pieces.items():
        for pair in pairwise(symbols):
            pair_counts[pair] += counts[piece]
    known, merges = set(vocab), []
    while len(vocab) < size:
        best = min(pair_counts, key=lambda pair: (-pair_counts[pair], pair), default=None)
        if best is None or pair_counts[best] == 0:
            raise ValueError(f"too little text: {len(vocab)} tokens where {size} are wanted")
        merges.append(best)
        if (token := "".join(best)) not in known:
            vocab.append(token)
            known.add(token)
        for piece, symbols in pieces.items():
            if token in piece:
                pair_counts.subtract({pair: n * counts[piece] for pair, n in Counter(pairwise(symbols)).items()})
                pieces[piece] = _join(symbols, best)
                pair_counts.update({pair: n * counts[piece] for pair, n in Counter(pairwise(pieces[piece])).items()})
    return merges


def _join(symbols: list[str], pair: tuple[str, str]) -> list[str]:
    joined: list[str] = []
    for symbol in symbols:
        if joined and (joined[-1], symbol) == pair:
            joined[-1] += symbol
        else:
            joined.append(symbol)
    return joined


def _split(text: str) -> list[str]:
    return [piece for piece, _ in _pre_tokenizer().pre_tokenize_str(text)]


@cache
def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(tokenizers.Regex(PIECES), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _definition(vocab: list[str], merges: list[tuple[str, str]]) -> dict[str, Any]:
    bpe = tokenizers.Tokenizer(models.BPE(ignore_merges=True))  # a piece that is in the vocabulary is one token
    bpe.pre_tokenizer = _pre_tokenizer()
    bpe.decoder = tokenizers.decoders.ByteLevel()
    definition = json.loads(bpe.to_str())
    definition["model"] |= {"vocab": {token: i for i, token in enumerate(vocab)}, "merges": merges}
    definition["added_tokens"] = [
        {
            "id": len(vocab) + i,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": content in SPECIAL_TOKENS,
        }
        for i, content in enumerate(ADDED_TOKENS)
    ]
    return definition


def _config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "chat_template": CHAT_TEMPLATE,
    }


def market_texts(num_tasks: int = 600) -> Iterator[str]:
    """What policies read and write in the market's train split: facts, questions, answers, prompts, tool results."""
    yield from corpus.passages()
    for task_type in TASK_TYPES:
        for index in range(num_tasks):
            task = make_task("train", task_type, index)
            yield f"{task.question}\n\n"
            yield f"Answer: {task.answer}"
    env = MarketEnv(preference="random", randomize_tools=True, price_spread=4.0)
    for seed in range(num_tasks):
        observation, info = env.reset(seed=seed)
        yield observation
        # The preference's words stand here once more: the vocabulary was made when prompts repeated them, and another
        # vocabulary would be another policy.
        yield system_prompt(info, "compact")[0] + json.loads(info["preference_json"])["text"]
        names = [tool["function"]["name"] for tool in json.loads(info["tools_json"])]
        yield env.step(render_call(ToolCall(names[seed % len(names)], {})))[0]
        yield env.step("")[0]  # the observation that an unreadable turn gets


def main() -> None:
    """Writes the built-in market tokenizer anew."""
    folder = BUILTIN["market"]
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in make_files(market_texts(), TOOL_NAMES).items():
        (folder / name).write_text(content, "utf-8")


if __name__ == "__main__":
    main()
