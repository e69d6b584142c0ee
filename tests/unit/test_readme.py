"""The README says what the code does: its commands parse, its files exist, its loop is the loop."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path

import pytest

from dht_bootstrap.cli import _parser as bootstrap_parser
from peer import settings
from peer.cli import _parser as peer_parser

ROOT = Path(__file__).parents[2]
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
        settings.load([ROOT / file for file in args.config], args.overrides, environment={})


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
    quoted = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert quoted
    source = (ROOT / "peer" / "trainer.py").read_text()
    assert textwrap.indent(quoted[1].strip(), "        ") in source


def test_the_environment_variables_are_all_named() -> None:
    for name in {**settings.ENVIRONMENT, **dict.fromkeys(settings.OTHER_VARIABLES)}:
        assert name in README
