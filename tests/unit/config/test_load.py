"""From YAML, environment and --set to a checked configuration, and what a mistake looks like."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from peer.config import load as settings
from peer.config.data import TextData
from peer.config.digest import canonical, digest
from peer.config.fields import bytes_a_second
from peer.config.methods import DiLoCoConfig, LocalConfig, NoLoCoConfig
from peer.config.schema import Config, ExchangeConfig, PeerConfig, RunConfig
from peer.errors import UserError

FOLDER = Path(__file__).parents[3] / "configs"
CONFIGS, PAPER = sorted(FOLDER.rglob("*.yaml")), FOLDER / "paper.yaml"


def load(text: str, tmp_path: Path, *overrides: str, **environment: str) -> Config:
    file = tmp_path / "run.yaml"
    file.write_text(text, encoding="utf-8")
    return settings.load(file, overrides, environment)


def mistake(text: str, tmp_path: Path, *overrides: str, **environment: str) -> str:
    with pytest.raises(UserError) as caught:
        load(text, tmp_path, *overrides, **environment)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_every_config_of_the_repository_loads(file: Path) -> None:
    assert settings.load(file, environment={}).run.steps > 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("run: {inner: {learning_rat: 1}}", "run.inner.learning_rat: unknown key, did you mean learning_rate?"),
        ("run: {outer: {name: local, alpha: 0.5}}", "run.outer.alpha: unknown key"),
        (
            "run: {exchange: {timeout: 600}}",
            "run.exchange.timeout: unknown key, choose from: overlap, codec, stall, m",
        ),
        ("run: {outer: {name: noloco, lr: 0.5}}", "choose from: name, alpha, beta, gamma"),
        ("run: {data: {name: text, train: [1]}}", "run.data.train.0: input should be a valid string"),
        ("run: {data: {name: text, train: {a: b}}}", "run.data.train: input should be"),
        ("run: {data: {name: text, train: 1}}", "run.data.train: input should be"),
        ("peer: {network: {hots: 1}}", "peer.network.hots: unknown key, did you mean host?"),
        ("run: {inner: {beta1: .nan}}", "run.inner.beta1: input should be a finite number"),
        ("run: {steps: many}", "run.steps: input should be a valid integer"),
        ("run: {steps: 1.5}", "run.steps"),
        ('peer: {name: "a\\nb"}', "peer.name: string should match pattern"),  # others would refuse its record
        ('peer: {name: "a\\e[2J"}', "peer.name: string should match pattern"),
        ('run: {name: "\\u202Ea"}', "run.name: string should match pattern"),
        (f"peer: {{name: {'a' * 65}}}", "peer.name: string should match pattern"),
        ("peer: {metrics: {announce: gpu.example.org:9464}}", "peer.metrics.announce: string should match pattern"),
        ("peer: {metrics: {announce: 10.0.0.7:80}}", "peer.metrics.announce: string should match pattern"),
        ("run: {steps: 0}", "run.steps: input should be greater than 0"),
        (
            "run: {outer: {name: nolocoo}}",
            "run.outer.name: 'nolocoo' is not known, choose one of: noloco, diloco, decoupled, local",
        ),
        ("run: {outer: {alpha: 0.5}}", "run.outer.name is missing, choose one of: noloco"),
        ("run: {outer: {x: 1}}", "run.outer.name is missing, choose one of: noloco, diloco, decoupled, local"),
        ("run: {outer: {name: [x]}}", "run.outer.name"),
        ("run: {outer: {name: noloco, a: 1, noloco: {a: 1}}}", "run.outer.a: unknown key"),  # the union's tag is no key
        ("run: {outer: {name: noloco, noloco: {a: 1}}}", "run.outer.noloco: unknown key"),
        ("run: {data: {folder: c4}}", "run.data.name is missing, choose one of: c4"),
        ("run: {data: {name: text}}", "run.data.train: field required"),
        ("run: {outer: {name: noloco, alpha: 0.5, gamma: 1.5}}", "run.outer: gamma 1.5 makes the replicas diverge"),
        ("run: {outer: {name: noloco, alpha: 0.5, gamma: 1.5}}", "0 < gamma < 2(1 - alpha^2) = 1.5"),
        ("run: {outer: {name: noloco, alpha: 0.9, gamma: 0.4}}", "2(1 - alpha^2) = 0.38"),
        ("run: {model: {hidden_size: 10, heads: 3}}", "not a multiple of heads"),
        ("run: {model: {hidden_size: 100, heads: 4}}", "run.model: hidden_size 100 over heads 4 is odd"),
        ("run: {batch_size: 8}\npeer: {micro_batch: 3}", "not a multiple of peer.micro_batch"),
        ("run: {steps: 1}\nrun: {steps: 2}", "the key 'run' is given twice"),
        ("run: [1, 2]", "run"),
        ("just words", "expected the sections run: and peer:"),
        ("run: {steps: [}", "line 1"),
        ("run: {name: no/slash}", "run.name"),
        ("peer: {device: tpu}", "peer.device"),
        ("extra: 1", "extra: unknown key, choose from: run, peer"),
        ("run: {a.b: 1}", "unknown key"),  # the dot is part of the key, not a way down
        ('run: {"a\\nb": 1}', "unknown key"),
        ("run: {seed: -1}", "run.seed"),  # numpy and torch take no such seed
        (
            "peer: {network: {max_upload: 20}}",
            "peer.network.max_upload: a rate is a number with kbit, mbit or gbit",
        ),
        ("peer: {network: {max_upload: 20}}", "did you mean 20mbit?"),
        ("peer: {network: {max_upload: 20000000}}", "did you mean 20mbit?"),
        ("peer: {network: {max_upload: 20 Mbps}}", "did you mean 20mbit?"),
        ("peer: {network: {max_download: 2.5MB/s}}", "did you mean 20mbit?"),
        ("peer: {network: {max_download: 800kbps}}", "did you mean 0.8mbit?"),
        ("peer: {network: {max_download: 1 Gbit/s}}", "did you mean 1000mbit?"),
        ("peer: {network: {max_download: fast}}", "such as 20mbit (given: 'fast')"),
        ("peer: {network: {max_download: -1mbit}}", "such as 20mbit"),
        ("peer: {network: {max_download: 100kbit}}", "at least 500kbit"),
        ("run: {steps: !!bool many}", "not valid YAML"),
        ('run: {steps: !!int ""}', "not valid YAML"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key(text: str, says: str, tmp_path: Path) -> None:
    assert says in mistake(text, tmp_path)


def test_yaml_means_what_people_mean(tmp_path: Path) -> None:
    config = load("run: {name: no, inner: {learning_rate: 3e-4, weight_decay: 1}}", tmp_path)
    assert config.run.inner.learning_rate == 3e-4
    assert config.run.name == "no"
    assert config.run.inner.weight_decay == 1.0


def test_one_string_is_a_list_of_one(tmp_path: Path) -> None:
    text = "run: {data: {name: text, train: books/*.txt}, evaluation: {sets: {more: a.txt}}}\npeer: {trackers: wandb}"
    config = load(text, tmp_path, "peer.initial_peers=/ip4/127.0.0.1/tcp/1/p2p/Qm")
    assert isinstance(config.run.data, TextData)
    assert config.run.data.train == ("books/*.txt",) and config.run.evaluation.sets == {"more": ("a.txt",)}
    assert (config.peer.trackers, config.peer.initial_peers) == (("wandb",), ("/ip4/127.0.0.1/tcp/1/p2p/Qm",))
    assert load(settings.dump(config), tmp_path) == config


@pytest.mark.parametrize(
    ("given", "found"), [("*.txt", ("*.txt",)), ("[ab]*.txt", ("[ab]*.txt",)), ("[a, '*.txt']", ("a", "*.txt"))]
)
def test_what_yaml_cannot_read_is_a_text_after_set(given: str, found: tuple[str, ...], tmp_path: Path) -> None:
    """A pattern of files was refused as an alias."""
    data = load("run: {data: {name: text, train: x}}", tmp_path, f"run.data.train={given}").run.data
    assert isinstance(data, TextData) and data.train == found


def test_a_mistake_in_a_list_or_a_section_after_set_is_one_line(tmp_path: Path) -> None:
    said = mistake("", tmp_path, "run.outer={name: noloco, name: diloco}")
    assert "--set run.outer={name: noloco, name: diloco}: line 1 the key 'name' is given twice" in said
    assert "--set run.data.train=[*.txt]: line 1" in mistake("", tmp_path, "run.data.train=[*.txt]")
    assert "run.steps: input should be a valid integer" in mistake("", tmp_path, "run.steps=*")
    assert "run.outer: input should be a valid dictionary" in mistake("", tmp_path, "run.outer={name: diloco")


def test_a_limit_is_kept_as_it_was_written_and_has_the_units_of_tc(tmp_path: Path) -> None:
    config = load("peer: {network: {max_upload: 20mbit, max_download: 1.5gbit}}", tmp_path)
    assert load(settings.dump(config), tmp_path) == config
    network = config.peer.network
    assert [bytes_a_second(it) for it in (network.max_upload, network.max_download)] == [2.5e6, 1.875e8]
    assert bytes_a_second("512kbit") == 64e3 and bytes_a_second(Config().peer.network.max_upload) is None


def test_set_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    text = "run: {steps: 7}\npeer: {name: from-file}"
    assert load("", tmp_path).run.steps == Config().run.steps
    assert load(text, tmp_path).peer.name == "from-file"
    assert load(text, tmp_path, NOLOCO_PEER_NAME="from-env").peer.name == "from-env"
    assert load(text, tmp_path, "peer.name=from-set", NOLOCO_PEER_NAME="from-env").peer.name == "from-set"
    assert load(text, tmp_path, NOLOCO_INITIAL_PEERS="/a,/b /c").peer.initial_peers == ("/a", "/b", "/c")


def test_later_files_win_key_by_key(tmp_path: Path) -> None:
    texts = (
        "run: {steps: 10, inner_steps: 5, outer: {name: noloco, beta: 0.6}}\npeer:\n",
        "run: {steps: 20, outer: {alpha: 0.4}}",
        "",
    )
    files = [tmp_path / f"{index}.yaml" for index in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text, encoding="utf-8")
    run = settings.load(files, environment={}).run
    assert (run.steps, run.inner_steps) == (20, 5)
    assert run.outer == NoLoCoConfig(name="noloco", alpha=0.4, beta=0.6)
    files[2].write_text("run: {stesp: 5}", encoding="utf-8")
    with pytest.raises(UserError, match=r"2\.yaml: run\.stesp: unknown key, did you mean steps\?"):
        settings.load(files, environment={})


def test_the_paper_s_form_goes_after_every_file_of_the_repository() -> None:
    for file in CONFIGS:
        run = settings.load([file, PAPER], environment={}).run
        assert (run.inner_steps, run.outer) == (50, NoLoCoConfig(alpha=0.5, beta=0.7, gamma=0.7)), file
        assert (run.exchange.overlap, run.exchange.codec) == (False, "none"), file


def test_only_another_method_replaces_the_settings_of_the_one_before(tmp_path: Path) -> None:
    files = [tmp_path / "one.yaml", tmp_path / "two.yaml"]
    files[0].write_text("run: {name: one, outer: {name: noloco, beta: 0.6}, data: {name: stdlib, sequence_length: 7}}")
    files[1].write_text("run: {name: two, outer: {name: diloco}, data: {name: text, train: [a]}}")
    run = settings.load(files, environment={}).run
    assert run.outer == DiLoCoConfig(name="diloco")
    assert run.data.sequence_length == 7
    files[1].write_text("run: {outer: {alpha: 0.4}}")
    assert settings.load(files, environment={}).run.outer == NoLoCoConfig(alpha=0.4, beta=0.6)
    for name, beta in (("diloco", None), ("noloco", 0.6)):
        outer = settings.load(files[:1], [f"run.outer.name={name}"], environment={}).run.outer
        assert outer.name == name and getattr(outer, "beta", None) == beta


def test_a_setting_that_is_given_with_the_name_of_its_method_stays_in_either_order(tmp_path: Path) -> None:
    """The name dropped it in silence when it came second."""
    given = ["run.outer.name=diloco", "run.outer.momentum=0.75"]
    for overrides in (given, given[::-1]):
        outer = load("run: {outer: {name: noloco, beta: 0.6}}", tmp_path, *overrides).run.outer
        assert outer == DiLoCoConfig(name="diloco", momentum=0.75)


def test_overlap_is_a_default_of_noloco_alone_and_a_codec_of_diloco_too(tmp_path: Path) -> None:
    def exchange(text: str, *overrides: str) -> tuple[bool, str, float]:
        found = load(text, tmp_path, *overrides).run.exchange
        return found.overlap, found.codec, found.stall

    default = ExchangeConfig()
    assert default.overlap and default.codec != "none"
    assert exchange("run: {exchange: {stall: 3}}") == (True, default.codec, 3.0)
    assert exchange("run: {exchange: {codec: none}}") == (True, "none", 10.0)
    assert exchange("run: {exchange: {codec: none}}", "run.outer.name=diloco") == (False, "none", 10.0)
    for method in ("diloco", "decoupled", "local"):
        codec = default.codec if method == "diloco" else "none"
        assert exchange("run: {exchange: {stall: 3}}", f"run.outer.name={method}") == (False, codec, 3.0)
    for method in ("decoupled", "local"):
        said = mistake("run: {exchange: {codec: fp16}}", tmp_path, f"run.outer.name={method}")
        assert f"exchange.codec fp16 is not for {method}, which takes none" in said
    for codec in ("fp16", "int4", "int2"):
        assert exchange(f"run: {{exchange: {{codec: {codec}}}}}", "run.outer.name=diloco") == (False, codec, 10.0)
    assert "exchange.codec int2 is not for noloco" in mistake("run: {exchange: {codec: int2}}", tmp_path)
    assert exchange("run: {exchange: {overlap: false, codec: none}}", "run.outer.name=local") == (False, "none", 10.0)
    assert mistake("run: {exchange: 3}", tmp_path, "run.outer.name=local").startswith(
        f"{tmp_path}/run.yaml: run.exchange:"
    )


def test_the_digest_is_of_the_overlap_and_the_codec_that_are_used(tmp_path: Path) -> None:
    for method in ("noloco", "diloco"):
        run = load("", tmp_path, f"run.outer.name={method}").run
        given = load(settings.dump(Config(run=run)), tmp_path).run
        assert given.exchange.model_fields_set >= {"overlap", "codec"}
        assert given == run and digest(given) == digest(run)
        assert f'"codec":"{run.exchange.codec}"' in canonical(run)


def test_an_unknown_variable_is_refused_with_the_nearest(tmp_path: Path) -> None:
    assert "did you mean NOLOCO_INITIAL_PEERS?" in mistake("", tmp_path, NOLOCO_INITIAL_PEER="/a")


def test_set_needs_a_key_and_reaches_only_into_sections(tmp_path: Path) -> None:
    assert "section.key=value" in mistake("", tmp_path, "run.steps")
    assert "is a value, not a section" in mistake("run: {steps: 3}", tmp_path, "run.steps.more=3")


def test_choosing_a_variant_by_set(tmp_path: Path) -> None:
    assert isinstance(load("", tmp_path, "run.outer.name=local").run.outer, LocalConfig)
    assert load("", tmp_path, "run.outer={name: noloco, beta: 0.6}").run.outer == NoLoCoConfig(beta=0.6)


def test_gamma_outside_the_papers_range_is_only_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("noloco"), "propagate", True)  # logs.setup of another test turns it off
    with caplog.at_level(logging.WARNING, "noloco.config"):
        load("run: {outer: {name: noloco, gamma: 0.7}}", tmp_path)
        assert caplog.text == ""
        assert load("run: {outer: {name: noloco, alpha: 0.5, gamma: 0.3}}", tmp_path).run.outer == NoLoCoConfig(
            alpha=0.5, gamma=0.3
        )
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("noloco.config", logging.WARNING)
    assert "run.outer.gamma 0.3 is outside the paper's range 0.5 < gamma < 1.5" in record.getMessage()


@pytest.mark.parametrize(
    ("momentum", "peers"), [(0.5, 0), (0.501, 8), (0.51, 5), (0.53, 4), (0.6, 3), (0.61803, 3), (0.61804, 2), (0.9, 2)]
)
def test_a_momentum_that_may_grow_is_warned_of_with_the_number_of_peers(
    momentum: float, peers: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("noloco"), "propagate", True)
    with caplog.at_level(logging.WARNING, "noloco.config"):
        load(f"run: {{outer: {{name: decoupled, momentum: {momentum}}}}}", tmp_path)
        assert caplog.text == ""
        load(f"run: {{outer: {{name: decoupled, momentum: {momentum}, variant: add}}}}", tmp_path)
    assert (f"among {peers} peers or more; set variant: replace" in caplog.text) == (peers > 0)
    assert not peers or sum(momentum**power for power in range(1, peers + 1)) >= 1
    assert not peers or sum(momentum**power for power in range(1, peers)) < 1


def test_missing_file_and_text_that_is_not_utf8(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the configuration"):
        settings.load(tmp_path / "none.yaml", environment={})
    (tmp_path / "latin.yaml").write_bytes(b"run: {name: \xff\xfe}")
    with pytest.raises(UserError, match="not UTF-8"):
        settings.load(tmp_path / "latin.yaml", environment={})


def test_what_show_config_prints_loads_to_the_same(tmp_path: Path) -> None:
    config = load("run: {data: {name: text, train: ['a/*.txt']}, outer: {name: local}}", tmp_path, "peer.threads=3")
    assert load(settings.dump(config), tmp_path) == config


@examples(max_examples=50)
@example("1e3")  # a commit's digest looks like this now and then
@given(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,8}", fullmatch=True))
def test_a_name_that_looks_like_something_else_survives_show_config(
    tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    config = Config(run=RunConfig(name=name), peer=PeerConfig(name=name))
    assert load(settings.dump(config), tmp_path_factory.getbasetemp()) == config


KEYS = st.sampled_from(
    ["run", "peer", "steps", "outer", "name", "data", "inner", "network", "train", "host", "x", "a.b", "a\nb", ""]
)
TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("noloco"),
    lambda inner: st.dictionaries(KEYS, inner, max_size=4) | st.lists(inner, max_size=3),
    max_leaves=12,
)


WORDS = [
    *("run", "peer", ": ", "- ", "\n", "  ", "{", "}", "[", "]", ", ", "? ", "x", "1", '""', "&a ", "*a", "<<", "!x "),
    *("!!int ", "!!bool ", "!!float ", "!!timestamp ", "!!binary ", "!!set ", "---", "%", "0x", "1e", "2024-13-01"),
]


@given(TREES.map(yaml.safe_dump) | st.text(max_size=60) | st.lists(st.sampled_from(WORDS), max_size=12).map("".join))
def test_whatever_the_file_says_the_answer_is_a_config_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    file = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    file.write_text(text, encoding="utf-8", errors="surrogatepass")
    try:
        settings.load(file, environment={})
    except UserError as error:
        assert len(str(error).splitlines()) == 1


def test_a_home_that_nobody_has_is_one_line() -> None:
    with pytest.raises(UserError, match=r"peer\.identity.*there is no home directory for ~nobody-of-that-name/key"):
        settings.load(None, ["peer.identity=~nobody-of-that-name/key"], environment={})
