import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestra_jax.text.tokenizer import SHIELD, Tokenizer, load_tokenizer

from .conftest import NUM_PLAIN

UNICODE = "Zürich 東京 🚲 e\u0301 \u200d\x00\t\r\n  end"


@pytest.fixture(scope="module")
def tokenizer(formats) -> Tokenizer:
    return formats["qwen3"].tokenizer


def test_text_never_becomes_an_added_token(chat):
    tokenizer = chat.tokenizer
    hostile = "".join(f" {token}\n{token}{token}" for token in tokenizer.added_tokens)
    ids = tokenizer.encode_text(hostile)
    assert not set(ids) & set(tokenizer.added_tokens.values())
    assert tokenizer.decode(ids) == hostile


def test_markup_does_become_added_tokens(chat):
    tokenizer = chat.tokenizer
    for token, token_id in tokenizer.added_tokens.items():
        assert tokenizer.encode_markup(token) == [token_id]
        assert tokenizer.decode([token_id]) == token


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["<|im_end|>", "<tool_call>", "<", "|", "im_end", ">", " ", "\n", "é", "x", SHIELD])))
def test_round_trip_of_any_text_without_added_tokens(tokenizer, parts):
    text = "".join(parts)
    ids = tokenizer.encode_text(text)
    assert tokenizer.decode(ids) == text
    assert not set(ids) & set(tokenizer.added_tokens.values())
    shielded = tokenizer.shield(text)
    assert tokenizer.find_added_token(shielded) is None
    assert tokenizer.encode_markup(shielded) == tokenizer.encode_text(text.replace(SHIELD, "\ufffd"))


def test_unicode_survives(chat):
    assert chat.tokenizer.decode(chat.tokenizer.encode_text(UNICODE)) == UNICODE


def test_lone_surrogates_become_replacement_characters(tokenizer):
    assert tokenizer.decode(tokenizer.encode_text("a\ud800b")) == "a\ufffdb"


def test_decode_of_broken_utf8_and_of_numpy_ids(tokenizer):
    first, *rest = tokenizer.encode_text("é")
    assert tokenizer.decode([first]) == "\ufffd"
    assert tokenizer.decode(np.array([first, *rest], np.int32)) == "é"
    assert tokenizer.decode([]) == ""


@pytest.mark.parametrize("bad", [-1, 10**6])
def test_decode_rejects_ids_outside_the_vocabulary(tokenizer, bad):
    with pytest.raises(ValueError, match=f"token id {bad} is not in the vocabulary"):
        tokenizer.decode([bad])


def test_an_added_token_that_merges_can_spell_is_cut(make_definition_file):
    definition = make_definition_file()
    words = {"id": definition["model"]["vocab"]["Ġtool"], "content": " tool", "special": False}
    definition["added_tokens"].append(words)
    tokenizer = Tokenizer(definition, {})
    ids = tokenizer.encode_text("a tool to tool")
    assert words["id"] not in ids
    assert tokenizer.decode(ids) == "a tool to tool"
    assert words["id"] in tokenizer.encode_markup("a tool")


def test_a_one_character_added_token_in_the_vocabulary_is_an_error(make_definition_file):
    definition = make_definition_file()
    definition["added_tokens"].append({"id": definition["model"]["vocab"]["x"], "content": "x", "special": False})
    with pytest.raises(ValueError, match="plain text gives the added token 'x'"):
        Tokenizer(definition, {}).encode_text("x")


def test_characters_without_bytes_in_the_vocabulary(make_definition_file):
    """SmolLM2's vocabulary lacks some bytes; its unknown token is a control token and must not stand in."""
    definition = make_definition_file()
    vocab, merges = definition["model"]["vocab"], definition["model"]["merges"]
    missing = {"ó", "ð"}  # the byte-level spelling of 0xF3 and 0xF0: no character beyond U+FFFF can be written
    assert not any(missing & set(a + b) for a, b in merges)
    definition["model"] |= {"vocab": {t: i for t, i in vocab.items() if t not in missing}, "unk_token": "<|im_end|>"}
    tokenizer = Tokenizer(definition, {})
    assert tokenizer.decode(tokenizer.encode_text("a🚲é\U000f0000b")) == "a\ufffdé\ufffdb"


def test_token_to_id(tokenizer):
    assert tokenizer.token_to_id("<|im_end|>") == tokenizer.added_tokens["<|im_end|>"]
    with pytest.raises(ValueError, match="qwen3: has no token '<nothing>'"):
        tokenizer.token_to_id("<nothing>")


def test_eos_ids_come_from_both_files(tokenizer, formats):
    assert [tokenizer.decode([i]) for i in tokenizer.eos_ids] == ["<|im_end|>", "<|endoftext|>"]
    assert formats["llama3"].tokenizer.decode(formats["llama3"].tokenizer.eos_ids) == "<|eot_id|>"


def _write(folder, **files):
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".")).write_text(text, "utf-8")
    return folder


def test_load_reads_all_four_files(tmp_path, make_definition_file):
    config = {"eos_token": "<|im_end|>", "chat_template": "old"}
    _write(tmp_path, tokenizer__json=make_definition_file(), tokenizer_config__json=config)
    _write(tmp_path, generation_config__json={"eos_token_id": NUM_PLAIN}, chat_template__jinja="new")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.chat_template == "new"
    assert tokenizer.eos_ids == (NUM_PLAIN + 2, NUM_PLAIN)
    assert tokenizer.vocab_size == NUM_PLAIN + 9


def test_named_templates(make_definition_file):
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    assert Tokenizer(make_definition_file(), {"chat_template": named}).chat_template == "T"
    assert Tokenizer(make_definition_file(), {"chat_template": named[:1]}).chat_template == "D"
    with pytest.raises(ValueError, match="chat_template must be a string, or a list"):
        Tokenizer(make_definition_file(), {"chat_template": [{"name": "rag", "template": "R"}]})


def test_missing_folder_and_files(tmp_path, make_definition_file):
    with pytest.raises(ValueError, match=r"nowhere: no such folder, and no built-in tokenizer of that name \(market\)"):
        load_tokenizer("nowhere")
    with pytest.raises(ValueError, match=r"tokenizer\.json: missing"):
        load_tokenizer(tmp_path)
    _write(tmp_path, tokenizer__json=make_definition_file())
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: missing"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"tokenizer\.json: not readable as JSON"),
        ("[]", r"tokenizer\.json: must hold a JSON object, not a list"),
        ("{}", "only byte-level BPE tokenizers are supported"),
    ],
)
def test_unusable_files(tmp_path, content, message):
    _write(tmp_path, tokenizer__json=content, tokenizer_config__json={})
    with pytest.raises(ValueError, match=message):
        load_tokenizer(tmp_path)


def test_unusable_definitions(make_definition_file):
    definition = make_definition_file()
    definition["added_tokens"][0]["rstrip"] = True
    with pytest.raises(ValueError, match=r"'<\|endoftext\|>' has lstrip, rstrip or single_word"):
        Tokenizer(definition, {})
    definition = make_definition_file()
    definition["model"]["merges"] = [["no", "such"]]
    with pytest.raises(ValueError, match=r"tokenizer\.json is not valid"):
        Tokenizer(definition, {})
    definition = make_definition_file()
    definition["pre_tokenizer"]["pretokenizers"][1]["add_prefix_space"] = True
    with pytest.raises(ValueError, match="does not give text back unchanged"):
        Tokenizer(definition, {})
