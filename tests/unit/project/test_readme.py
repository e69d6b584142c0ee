"""What the README.md files say is what the code does: commands parse, links lead somewhere, the loop is the loop."""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import shlex
from pathlib import Path

import pytest

from dht_bootstrap.cli import _parser as bootstrap_parser
from peer import OuterLoop, __version__
from peer.commands.cli import _parser as peer_parser
from peer.config import load

ROOT = Path(__file__).parents[3]
FOLDERS = ("configs", "dht_bootstrap", "docker", "peer", "tests")
READMES = [ROOT / "README.md", *sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("README.md"))]
TEXTS = {file: file.read_text(encoding="utf-8") for file in READMES}
README = TEXTS[ROOT / "README.md"]
SHELL = [
    line
    for text in TEXTS.values()
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    for line in block.splitlines()
    if line.strip() and not line.startswith("#")
]
RANKS = re.compile(r"^torchrun --standalone --nproc-per-node \d+ -m peer ")
# programs of the machine; those of docker and of the clouds are checked in tests/docker
OTHERS = ("echo", "pip", "prometheus", "sed", "aws", "gcloud", "kubectl", "runpodctl", "sbatch", "sudo", "vastai")
LINES, WORDS = 250, 2500  # of README.md, the first thing that a newcomer reads
PACKAGES = sorted(file.parent for file in (ROOT / "peer").rglob("__init__.py"))
OLD_NAMES = r"\b(attendees?|conven\w+|crossing|grudges?|lobby|mesh|strangers?|twins?)\b"


def name(file: Path) -> str:
    return str(file.relative_to(ROOT))


def targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def section(text: str, heading: str) -> str:
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def slugs(text: str) -> set[str]:
    """The anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("line", dict.fromkeys(SHELL))
def test_a_command_parses_and_what_it_names_is_there(line: str) -> None:
    program, *arguments = shlex.split(RANKS.sub("noloco-peer ", line))
    while re.match(r"[A-Z_]+=", program):
        program, *arguments = arguments
    if program == "noloco-bootstrap":
        bootstrap_parser().parse_args(arguments)
    elif program == "noloco-peer":
        args = peer_parser().parse_args(arguments)
        if getattr(args, "config", None) is not None:
            load.load([ROOT / file for file in args.config], args.overrides, environment={})
        if args.command == "train":
            assert args.initial_peers, "an invitation names no address: such a peer begins a swarm of its own"
    elif program == "make":
        assert {word for word in arguments if "=" not in word} <= targets()
    elif program in ("python", ".venv/bin/python"):
        assert arguments[0] == "-m"  # which module is checked below
    elif program == "docker":
        assert arguments[0] in ("build", "compose", "run")
    else:
        assert program in OTHERS


@pytest.mark.parametrize("file", READMES, ids=name)
def test_programs_and_make_targets_in_a_text_exist(file: Path) -> None:
    modules = re.findall(r"python -m ([\w.]+)", TEXTS[file]) + re.findall(r"`(tests\.benchmarks\.\w+)`", TEXTS[file])
    for module in modules:
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
    assert set(re.findall(r"`make ([\w-]+)", TEXTS[file])) <= targets()


def test_there_are_commands() -> None:
    assert sum(line.startswith("noloco-") for line in SHELL) >= 25
    assert any(RANKS.match(line) for line in SHELL)


def test_the_table_of_commands_has_all_of_them() -> None:
    commands = next(it for it in peer_parser()._actions if isinstance(it, argparse._SubParsersAction))
    assert set(re.findall(r"^\| `noloco-peer ([\w-]+)` \|", README, re.MULTILINE)) == set(commands.choices)


@pytest.mark.parametrize("file", READMES, ids=name)
def test_every_link_into_the_repository_leads_somewhere(file: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", TEXTS[file]):
        path, _, anchor = link.partition("#")
        target = (file.parent / path).resolve() if path else file
        assert target.exists(), link
        if anchor:
            assert anchor in slugs(target.read_text(encoding="utf-8")), link


def test_the_loop_is_the_one_in_the_trainer() -> None:
    """Statement by statement; comments are the README's own."""
    quoted = re.findall(r"```python\n(.*?)```", section(README, "How it works"), re.DOTALL)
    assert len(quoted) == 1
    wanted = [ast.dump(statement) for statement in ast.parse(quoted[0]).body]
    source = (ROOT / "peer" / "training" / "trainer.py").read_text(encoding="utf-8")
    methods = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    bodies = [[ast.dump(it) for it in method.body[ast.get_docstring(method) is not None :]] for method in methods]
    assert wanted in bodies


def test_the_calls_of_a_loop_of_ones_own_are_there() -> None:
    """Every name and keyword in the table."""
    text = TEXTS[ROOT / "peer" / "api" / "README.md"]
    for attribute in set(re.findall(r"`outer\.(\w+)", text)):
        assert hasattr(OuterLoop, attribute), attribute
    start = text.partition("| `OuterLoop.start")[2].partition("\n")[0]
    keywords = set(inspect.signature(OuterLoop.start).parameters) - {"model"}
    assert keywords == set(re.findall(r"`(\w+)", start)) - {"noloco", "diloco", "decoupled", "local"}


def test_the_environment_variables_are_all_named() -> None:
    for variable in {**load.ENVIRONMENT, **dict.fromkeys(load.OTHER_VARIABLES)}:
        assert variable in TEXTS[ROOT / "configs" / "README.md"]


def test_the_first_page_is_short() -> None:
    assert README.count("\n") <= LINES
    assert len(README.split()) <= WORDS


def test_the_tree_has_every_package_and_file_of_peer() -> None:
    tree = section(README, "The packages")
    packages = {it.name for it in PACKAGES if it.parent == ROOT / "peer"}
    assert set(re.findall(r"^  (\w+)/", tree, re.MULTILINE)) == packages
    for file in (ROOT / "peer").glob("[!_]*.py"):
        assert file.name in tree


@pytest.mark.parametrize("package", PACKAGES, ids=name)
def test_a_package_has_a_readme_or_one_above_names_it(package: Path) -> None:
    above = [it / "README.md" for it in package.parents if it.is_relative_to(ROOT / "peer")]
    assert (package / "README.md") in TEXTS or any(f"{package.name}/" in TEXTS.get(file, "") for file in above)


def test_what_a_comment_says_is_in_a_readme_is_there() -> None:
    headings = [line.lstrip("# ") for text in TEXTS.values() for line in text.splitlines() if line.startswith("#")]
    for file in (ROOT / "peer").rglob("*.py"):
        for named in re.findall(r'README, "([^"]+)"', file.read_text(encoding="utf-8")):
            assert any(heading.startswith(named) for heading in headings), f"{file}: {named}"


@pytest.mark.parametrize("file", READMES, ids=name)
def test_a_text_uses_the_terms_of_the_code(file: Path) -> None:
    assert not re.findall(OLD_NAMES, TEXTS[file], re.IGNORECASE)


def test_the_changes_of_this_version_are_listed() -> None:
    assert f"\n## {__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
