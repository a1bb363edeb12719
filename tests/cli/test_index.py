"""`orchestra index`: what is built, what is told of the documents, and the user's mistakes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from orchestra_envs.live.local_search import open_index, search

from orchestra_jax.cli.index import index_documents
from orchestra_jax.config import ConfigError
from tests.envs.servers.search_server import EmbeddingServer, Fault


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "a.txt").write_text("The barn owl hunts at night.")
    (folder / "b.md").write_text("# Bread\n\nFlour, water and salt.")
    return folder


def test_builds_an_index_that_can_be_searched(documents, tmp_path, capsys):
    index_documents(str(documents), str(tmp_path / "index"))
    output = capsys.readouterr()
    assert output.out == f"{tmp_path / 'index'}: 2 documents, 2 passages\n"
    assert output.err == ""
    index = open_index(tmp_path / "index")
    ((number, _),) = search(index, "flour", 3)
    assert index.passage(number).id == "b.md#0"


def test_what_was_left_out_is_counted_and_named(documents, tmp_path, capsys):
    for number in range(5):
        (documents / f"picture{number}.png").write_bytes(b"\x89PNG")
    (documents / "empty.txt").write_text("")
    (documents / "latin.txt").write_bytes("café".encode("latin-1"))
    index_documents(str(documents), str(tmp_path / "index"))
    output = capsys.readouterr()
    assert output.out.endswith(": 3 documents, 3 passages\n")
    assert "left out: 6" in output.err
    assert "5 x .png: not a known text format: picture0.png, picture1.png, picture2.png, ..." in output.err
    assert "1 x empty: empty.txt" in output.err
    assert "1 x not UTF-8; read as Windows-1252: latin.txt" in output.err
    assert "report.json" in output.err


def test_with_an_embedding_model(documents, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("MY_KEY", "sk-mine")
    with EmbeddingServer() as server:
        index_documents(
            str(documents), str(tmp_path / "index"), dense="small", base_url=f"{server.url}/v1", api_key_env="MY_KEY"
        )
        assert server.requests[0][1]["Authorization"] == "Bearer sk-mine"
        assert "vectors of small (12 tokens)" in capsys.readouterr().out
        server.faults.append(Fault(status=401))
        with pytest.raises(ConfigError, match="answered 401"):
            index_documents(str(documents), str(tmp_path / "index"), dense="small", base_url=f"{server.url}/v1")
    assert open_index(tmp_path / "index").manifest["dense"]["model"] == "small"


def test_without_openai_the_error_says_what_to_install(documents, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ConfigError, match=r"pip install 'orchestra-jax\[live\]'"):
        index_documents(str(documents), str(tmp_path / "index"), dense="small")
    assert not (tmp_path / "index").exists()


def test_mistakes_are_config_errors(documents, tmp_path):
    with pytest.raises(ConfigError, match="no file or folder"):
        index_documents(str(tmp_path / "nowhere"), str(tmp_path / "index"))
    with pytest.raises(ConfigError, match="--dense"):
        index_documents(str(documents), str(tmp_path / "index"), base_url="http://127.0.0.1:1/v1")
    with pytest.raises(ConfigError, match="other things in it"):
        index_documents(str(documents), str(documents))
    with pytest.raises(ConfigError, match="base_url"):
        index_documents(str(documents), str(tmp_path / "index"), dense="small", base_url="127.0.0.1")
    (documents / "a.txt").unlink()
    (documents / "b.md").unlink()
    with pytest.raises(ConfigError, match="no words to index"):
        index_documents(str(documents), str(tmp_path / "index"))
