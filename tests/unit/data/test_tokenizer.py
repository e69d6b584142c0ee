"""Tokenizers: the embedded one and Hugging Face's, what they make of text files, and models that do not fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.config.data import JsonlData, StdlibData, TextData, TokenizerConfig
from peer.config.digest import digest
from peer.config.schema import LlamaModel, RunConfig
from peer.data import corpus
from peer.data.sources import text
from peer.data.sources.documents import Split
from peer.data.tokenizer import Bytes, fingerprint, framed, load, unframed
from peer.errors import UserError
from peer.process import LoopContext
from peer.replica import model
from peer.training import replica
from tests.unit.data.harness import bpe, jsonl, texts

SMALL = LlamaModel(hidden_size=8, intermediate_size=16, layers=1, heads=1)


def decoded(folder: Path, ids: list[int]) -> str:
    from transformers import AutoTokenizer

    return str(AutoTokenizer.from_pretrained(folder).decode(ids, skip_special_tokens=False))


def test_a_tokenizer_from_a_folder_gives_the_text_back_with_its_own_end_behind_it(tmp_path: Path) -> None:
    settings = bpe(tmp_path / "tok")
    jsonl(tmp_path / "a.jsonl", texts(200))
    data = JsonlData(name="jsonl", train=(f"{tmp_path}/a.jsonl",), tokenizer=settings, sequence_length=16)
    ids = corpus.load(data).validation
    said = decoded(tmp_path / "tok", ids.tolist()).split("<|end|>")
    assert len(said) >= 2 and set(said[:-1]) <= set(texts(200))
    assert len(ids) < sum(map(len, said[:-1])) / 1.5  # it has merges


def test_a_document_begins_as_the_exported_tokenizer_begins_a_text(tmp_path: Path) -> None:
    """The folder gave the model a first token that it had never seen."""
    from transformers import AutoTokenizer

    own = bpe(tmp_path / "tok", start="<|begin|>")
    tokenizer = load(own)
    tokenizer.save(tmp_path / "exported")  # type: ignore[attr-defined]
    exported = AutoTokenizer.from_pretrained(tmp_path / "exported")
    jsonl(tmp_path / "a.jsonl", texts())
    said = " ".join(texts(40))
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(said)
    rows = JsonlData(name="jsonl", train=(f"{tmp_path}/a.jsonl",), tokenizer=own, sequence_length=16)
    file = TextData(name="text", train=(f"{tmp_path}/a.txt",), validation=(f"{tmp_path}/b.txt",), tokenizer=own)
    for found, known in ((corpus.load(rows).train, texts()), (corpus.load(file).train, [said])):
        documents = [it.tolist() for it in found.in_order()] if isinstance(found, Split) else [found.tolist()]
        assert documents and all(ids[-1] == tokenizer.end for ids in documents)
        expected = [exported(text).input_ids for text in known]
        assert expected[0][0] == exported.convert_tokens_to_ids("<|begin|>")
        assert all(ids[:-1] in expected for ids in documents)
    assert load(bpe(tmp_path / "plain")).start == Bytes().start == ()


def test_rows_of_token_ids_get_what_they_lack_and_are_held_out_alike(tmp_path: Path) -> None:
    tokenizer = load(bpe(tmp_path, start="<|begin|>"))
    bare = tokenizer.encode(["a peer"])[0]
    start, end = np.array(tokenizer.start, bare.dtype), np.array([tokenizer.end], bare.dtype)
    whole = [*tokenizer.start, *bare.tolist(), tokenizer.end]
    for ids in (bare, np.append(bare, end), np.append(start, bare), np.array(whole, bare.dtype)):
        assert framed(ids, tokenizer).tolist() == whole
        assert unframed(ids, tokenizer).tolist() == bare.tolist()
    for only in (start, end, bare[:0]):
        assert framed(only, tokenizer).tolist() == [*tokenizer.start, tokenizer.end]


def test_a_tokenizer_json_alone_needs_to_be_told_its_end(tmp_path: Path) -> None:
    whole = bpe(tmp_path)
    alone = TokenizerConfig(name="small", vocabulary=300, path=tmp_path / "tokenizer.json")
    with pytest.raises(UserError, match=r"run\.data\.tokenizer\.end: small has no end-of-text token"):
        load(alone)
    with pytest.raises(UserError, match="has no token '</s>'"):
        load(alone.model_copy(update={"end": "</s>"}))
    assert load(alone.model_copy(update={"end": "<|end|>"})).end == load(whole).end


def test_the_fingerprint_is_that_of_what_it_does_and_not_of_its_files(tmp_path: Path) -> None:
    import json

    own = bpe(tmp_path / "one")
    alone = TokenizerConfig(name="it", vocabulary=400, path=tmp_path / "one" / "tokenizer.json", end="<|end|>")
    assert fingerprint(load(own)) == fingerprint(load(alone)) != fingerprint(Bytes())
    whole = json.loads(alone.path.read_text()) if alone.path else {}
    whole["pre_tokenizer"]["add_prefix_space"] = True  # the same tokens
    (tmp_path / "two.json").write_text(json.dumps(whole))
    assert fingerprint(load(own)) != fingerprint(load(alone.model_copy(update={"path": tmp_path / "two.json"})))


def test_a_vocabulary_that_is_too_small_is_a_line_with_the_right_number(tmp_path: Path) -> None:
    own = bpe(tmp_path)
    with pytest.raises(UserError, match="small has 300 tokens; set it to 300 or more"):
        load(own.model_copy(update={"vocabulary": 257}))
    assert load(own.model_copy(update={"vocabulary": 304})).vocabulary == 304
    with pytest.raises(UserError, match=r"run\.data\.tokenizer\.path: .*nowhere does not exist"):
        load(own.model_copy(update={"path": tmp_path / "nowhere"}))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"cannot load .*empty") as caught:
        load(own.model_copy(update={"path": tmp_path / "empty"}))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("wrong", [{"vocabulary": 100}, {"end": "x"}, {"path": "/x"}])
def test_the_embedded_one_has_nothing_to_set(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="the tokenizer bytes has 257 tokens"):
        TokenizerConfig.model_validate(wrong)


def test_name_and_size_are_in_the_digest_and_the_place_is_not() -> None:
    def of(**more: object) -> str:
        return digest(RunConfig(data=StdlibData(tokenizer=TokenizerConfig(name="x", **{"vocabulary": 300, **more}))))

    assert of(path=Path("/a")) == of(path=Path("/b"))
    assert len({of(), of(vocabulary=301), of(end="</s>"), digest(RunConfig())}) == 4


def test_the_model_follows_the_tokenizer_and_one_that_does_not_fit_is_a_line() -> None:
    def run(shape: LlamaModel, vocabulary: int) -> RunConfig:
        return RunConfig(model=shape, data=StdlibData(tokenizer=TokenizerConfig(name="x", vocabulary=vocabulary)))

    network = model.build(run(SMALL, 300))
    assert network.get_input_embeddings().weight.shape[0] == 300  # type: ignore[operator,union-attr]
    fixed = SMALL.model_copy(update={"vocabulary": 300})
    with pytest.raises(UserError, match=r"run\.model\.vocabulary has 300 tokens, the data's tokenizer 301"):
        model.build(run(fixed, 301))


def test_local_text_by_a_tokenizer_is_the_whole_text(tmp_path: Path) -> None:
    own = bpe(tmp_path / "tok")
    whole = "".join(f"{line} é€🙂\n" for line in texts(4000))
    (tmp_path / "a.txt").write_text(whole, encoding="utf-8")
    (tmp_path / "b.txt").write_text(whole)
    data = TextData(name="text", train=(f"{tmp_path}/a.txt",), validation=(f"{tmp_path}/b.txt",), tokenizer=own)
    found = corpus.load(data)
    assert decoded(tmp_path / "tok", found.train.tolist()).replace("<|end|>", "") == whole
    assert found.train.dtype == np.uint16
    (tmp_path / "a.txt").write_bytes(b"right\n" * 5 + b"\xff wrong")
    with pytest.raises(UserError, match=r"a\.txt byte 31: is not UTF-8 text"):
        corpus.load(data)


@settings(max_examples=60)
@given(st.text(alphabet="ab\né€🙂", max_size=400), st.integers(8, 40))
def test_pieces_are_the_file_each_a_text(tmp_path_factory: pytest.TempPathFactory, said: str, size: int) -> None:
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text(said, encoding="utf-8")
    usual, text.PIECE_BYTES = text.PIECE_BYTES, size
    try:
        pieces = list(text.pieces(path))
    finally:
        text.PIECE_BYTES = usual
    assert "".join(piece.decode("utf-8") for piece in pieces) == said
    assert all(0 < len(piece) <= size for piece in pieces)


def test_a_special_token_in_a_text_does_not_end_it(tmp_path: Path) -> None:
    own = load(bpe(tmp_path))
    ids = own.encode(["so <|end|> it"])[0]
    assert own.end not in ids
    assert decoded(tmp_path, ids.tolist()) == "so <|end|> it"


@given(st.text(max_size=50))
def test_bytes_are_utf_8(said: str) -> None:
    try:
        expected = said.encode()
    except UnicodeEncodeError:
        return
    assert Bytes().encode([said])[0].tolist() == list(expected)


def test_a_replica_of_a_run_with_another_tokenizer_has_its_vocabulary(tmp_path: Path) -> None:
    import torch

    from peer.config.schema import Config

    own = bpe(tmp_path / "tok", 320)
    jsonl(tmp_path / "a.jsonl", texts())
    data = JsonlData(name="jsonl", train=(f"{tmp_path}/a.jsonl",), tokenizer=own, sequence_length=16, shuffle=8)
    config = Config(run=RunConfig(data=data, model=SMALL, batch_size=2))
    found = corpus.load(data)
    state = replica.replica(config, found.train, stream=1, device=torch.device("cpu"), context=LoopContext())
    report = state.inner.run(state.stream.take(3))
    assert report.first_loss == pytest.approx(np.log(320), abs=0.3)
    saved = state.scalars()
    assert saved["position"] == 3 and saved["cursor"]["place"][0] == 0
