"""What the examples share."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from peer.api.examples import common
from peer.errors import RunError, UserError


def test_keys_of_the_command_line_are_read_as_those_of_the_commands() -> None:
    """A mistake in one was a traceback of the YAML parser."""
    parser = common.options("An example.")
    args = parser.parse_args(["--set", "peer.threads=:", "--set", "inner_lr=1e-3"])
    assert common.settings(args)["settings"] == {"peer.threads": ":", "inner_lr": 1e-3}
    for wrong in ("peer.threads", "peer.threads=[1, ]]"):
        with pytest.raises(UserError, match=r"^--set peer\.threads") as caught:
            common.settings(parser.parse_args(["--set", wrong]))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("error", "code"), [(UserError("no address"), 2), (RunError("lost"), 1)])
def test_an_example_ends_with_the_exit_code_of_the_commands(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wrong use ended with 1, with which a service begins again for ever."""
    with pytest.raises(SystemExit) as ended:
        common.run(Mock(side_effect=error))
    assert ended.value.code == code and capsys.readouterr().err == f"error: {error}\n"
