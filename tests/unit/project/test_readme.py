"""The README says what the code does: its commands parse, its files exist, its loop is the loop."""

from __future__ import annotations

import inspect
import re
import shlex
import textwrap
from pathlib import Path

import pytest

from dht_bootstrap.cli import _parser as bootstrap_parser
from peer import OuterLoop
from peer.commands.cli import _parser as peer_parser
from peer.config import load

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SHELL = [line for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL) for line in block.splitlines()]
RANKS = re.compile(r"torchrun --standalone --nproc-per-node \d+ -m peer ")
COMMANDS = [line for line in (RANKS.sub("noloco-peer ", line) for line in SHELL) if line.startswith("noloco-")]


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_parses_and_its_settings_are_known(line: str) -> None:
    program, *arguments = shlex.split(line)
    if program == "noloco-bootstrap":
        bootstrap_parser().parse_args(arguments)
        return
    args = peer_parser().parse_args(arguments)
    if getattr(args, "config", None) is not None:
        load.load([ROOT / file for file in args.config], args.overrides, environment={})


def test_there_are_commands_and_make_targets() -> None:
    assert len(COMMANDS) >= 4
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make (\w+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_every_link_into_the_repository_leads_somewhere() -> None:
    links = re.findall(r"\]\((?!http)([^)]+)\)", README)
    assert len(links) > 15
    for link in links:
        assert (ROOT / link).exists() or (ROOT / "peer" / link).exists(), link


def test_the_loop_is_the_one_in_the_trainer() -> None:
    section = README.partition("\n## The loop\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    for quoted, name in zip(blocks, ("trainer.py", "blocking.py"), strict=True):
        source = (ROOT / "peer" / "training" / name).read_text()
        assert textwrap.indent(quoted.strip(), "        ") in source


def test_the_calls_of_a_loop_of_ones_own_are_there() -> None:
    """Every name and keyword in the section's table."""
    section = README.partition("\n## Your own training loop\n")[2].partition("\n## ")[0]
    for name in set(re.findall(r"`outer\.(\w+)", section)):
        assert hasattr(OuterLoop, name), name
    start = section.partition("| `OuterLoop.start")[2].partition("\n")[0]
    keywords = set(inspect.signature(OuterLoop.start).parameters) - {"model"}
    assert keywords == set(re.findall(r"`(\w+)", start)) - {"noloco", "diloco", "decoupled", "local"}


def test_the_environment_variables_are_all_named() -> None:
    for name in {**load.ENVIRONMENT, **dict.fromkeys(load.OTHER_VARIABLES)}:
        assert name in README
