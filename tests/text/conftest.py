"""Small tokenizers and chat templates with the structure of the real ones (written here, not copied)."""

import json
from collections import Counter

import jinja2
import pytest
import tokenizers
from tokenizers import pre_tokenizers

from orchestra_jax.text.chat import ChatFormat
from orchestra_jax.text.make_market_tokenizer import learn_merges
from orchestra_jax.text.tokenizer import Tokenizer, load_tokenizer

# Qwen: the system message and the tools share one block; tool results are user messages, neighbours share one.
QWEN_HEAD = """
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- 'You may call functions.\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>\\nCall like this:\\n<tool_call>\\n{"name": N, "arguments": A}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
"""
QWEN_TOOL = """
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
"""
QWEN_CALLS = """
{%- for call in message.tool_calls or [] %}
{{- '\\n' if message.content or not loop.first else '' }}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
"""
QWEN25 = (
    QWEN_HEAD
    + """
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + message.content }}"""
    + QWEN_CALLS
    + "{{- '<|im_end|>\\n' }}"
    + QWEN_TOOL
    + """
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
)
# Qwen3: reasoning stays only after the latest user message, and the last turn gets an empty block if it has none.
QWEN3 = (
    QWEN_HEAD
    + """
{%- set ns = namespace(last=0) %}
{%- for message in messages %}
{%- if message.role == 'user' and not message.content.startswith('<tool_response>') %}
{%- set ns.last = loop.index0 %}
{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
{%- set thought = message.content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set thought = thought if '</think>' in message.content else '' %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and (loop.last or thought) %}
{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
{%- endif %}
{{- content }}"""
    + QWEN_CALLS
    + "{{- '<|im_end|>\\n' }}"
    + QWEN_TOOL
    + """
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
)
# SmolLM2: a default system message, any role is printed by name, no tools.
SMOLLM2 = """{% for message in messages %}{% if loop.first and message['role'] != 'system' %}
{{- '<|im_start|>system\\nYou are small.<|im_end|>\\n' }}{% endif %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
# Llama 3: begins with BOS, trims contents.
LLAMA3 = """{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
# Llama 3.1: prints a date, has its own (other) call format, writes tool results as JSON for a role "ipython".
LLAMA31 = """{{- bos_token }}
{%- set date = date_string if date_string is defined else strftime_now('%d %b %Y') %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + date + '\\n\\n' }}
{%- if messages[0].role == 'system' %}
{{- messages[0].content | trim }}
{%- set messages = messages[1:] %}
{%- endif %}
{{- '<|eot_id|>' }}
{%- for message in messages %}
{%- if message.role == 'tool' or message.role == 'ipython' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
{{- message.content | tojson if message.content is iterable else message.content }}
{{- '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{%- if tools and loop.first %}
{%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
{%- endif %}
{{- message.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

CHATML_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
LLAMA_SPECIAL = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
)

# Like Qwen's and Llama's, it joins line ends to the punctuation before them: a tokenizer that cuts texts and markup
# apart at the wrong places gets other ids than one that sees the whole rendering.
PATTERN = r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
NUM_PLAIN = 384  # ids below this are bytes and merges, the added tokens follow
CORPUS = """user assistant system tool tools call name arguments search answer the The height of Velmora Tower is.
im_start im_end tool_call tool_response think endoftext begin_of_text eot_id start_header_id end_header_id\n\n
What is a? It is.\n"Yes."\n{"name": "search", "arguments": {"query": "to tool"}}\n<|x|>\n</y>\n tool to toolbox.\n\n"""


def make_definition(special: tuple[str, ...], tags: tuple[str, ...] = ()) -> dict:
    """The content of a tokenizer.json: byte-level BPE with the given added tokens."""
    split = pre_tokenizers.Split(tokenizers.Regex(PATTERN), behavior="isolated")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    bpe.decoder = tokenizers.decoders.ByteLevel()
    counts = Counter(piece for piece, _ in bpe.pre_tokenizer.pre_tokenize_str(CORPUS))
    vocab = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = learn_merges(counts, vocab, NUM_PLAIN)
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
            "special": content in special,
        }
        for i, content in enumerate((*special, *tags))
    ]
    return definition


CHATML = make_definition(CHATML_SPECIAL, CHATML_TAGS)
CHATML_NO_TAGS = make_definition(CHATML_SPECIAL)
LLAMA = make_definition(LLAMA_SPECIAL)
# As Llama's file does: a post-processor that puts BOS before every text.
LLAMA["post_processor"] = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<|begin_of_text|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {
        "<|begin_of_text|>": {"id": "<|begin_of_text|>", "ids": [NUM_PLAIN], "tokens": ["<|begin_of_text|>"]}
    },
}
CHATML_CONFIG = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "eos_token_id": [NUM_PLAIN + 2, NUM_PLAIN]}
LLAMA_CONFIG = {
    "bos_token": "<|begin_of_text|>",
    "eos_token": {"content": "<|eot_id|>", "lstrip": False},
    "add_bos_token": True,
}
MODELS = {
    "qwen3": (CHATML, CHATML_CONFIG, QWEN3),
    "qwen2.5": (CHATML, CHATML_CONFIG, QWEN25),
    "smollm2": (CHATML_NO_TAGS, CHATML_CONFIG, SMOLLM2),
    "llama3": (LLAMA, LLAMA_CONFIG, LLAMA3),
    "llama3.1": (LLAMA, LLAMA_CONFIG, LLAMA31),
}
VARIABLES = {"llama3.1": {"date_string": "26 Jul 2024"}}
NAMES = (*MODELS, "market")


def make_tokenizer(name: str) -> Tokenizer:
    if name == "market":
        return load_tokenizer("market")
    definition, config, template = MODELS[name]
    return Tokenizer(definition, {**config, "chat_template": template}, source=name)


@pytest.fixture(scope="session")
def formats() -> dict[str, ChatFormat]:
    return {name: ChatFormat(make_tokenizer(name), variables=VARIABLES.get(name)) for name in NAMES}


@pytest.fixture(scope="session", params=NAMES)
def chat(request, formats) -> ChatFormat:
    return formats[request.param]


class Reference:
    """What Hugging Face's stack does with a conversation: render it as one string, encode that string at once."""

    def __init__(self, name: str):
        folder = load_tokenizer("market").source
        if name == "market":
            self.backend = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
            template = load_tokenizer("market").chat_template
        else:
            definition, _, template = MODELS[name]
            self.backend = tokenizers.Tokenizer.from_str(json.dumps(definition))
        environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        self.template = environment.from_string(template)
        self.variables = {"bos_token": "<|begin_of_text|>", **VARIABLES.get(name, {})}

    def ids(self, messages: list[dict], tools=None, add_generation_prompt: bool = False) -> list[int]:
        text = self.template.render(
            messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **self.variables
        )
        return self.backend.encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="session")
def references() -> dict[str, Reference]:
    return {name: Reference(name) for name in NAMES}


@pytest.fixture
def reference(chat, formats, references) -> Reference:
    return references[next(name for name, format_ in formats.items() if format_ is chat)]


@pytest.fixture
def make_definition_file():
    """The CHATML definition, to change and write to a folder."""
    return lambda: json.loads(json.dumps(CHATML))
