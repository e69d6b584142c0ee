"""The size of a model of the hub is said before it is downloaded, and once. A hub that is down may come back."""

from __future__ import annotations

import logging

import pytest

from peer.config.model import AutoModel
from peer.errors import RunError
from peer.replica import model_source
from tests.unit.hub.server import Hub, Repository

FILES = {"config.json": b"{}", "model.safetensors": bytes(1_500_000), "pytorch_model.bin": bytes(9_000_000)}


@pytest.mark.parametrize(("pretrained", "size"), [(True, "1.5 MB in 2 files"), (False, "2 bytes in 1 file")])
def test_a_download_is_announced(hub: Hub, caplog: pytest.LogCaptureFixture, pretrained: bool, size: str) -> None:
    caplog.set_level(logging.INFO, "noloco")
    hub.repositories["me/model"] = Repository(private=True, files=dict(FILES), commits=["first"])
    model_source._download.cache_clear()
    settings = AutoModel(name="auto", source="me/model", pretrained=pretrained)
    folder = model_source.locate(settings)
    asked = len(hub.requests)
    assert model_source.locate(settings) == folder and len(hub.requests) == asked  # a program asks the hub once
    assert caplog.messages == [f"the model is downloaded: source=me/model size={size}"]
    assert (folder / "config.json").is_file() and not (folder / "pytorch_model.bin").exists()
    sizes = [it for it in hub.requests if it.startswith("GET /api/models/me/model")]
    downloads = [it for it in hub.requests if "/resolve/" in it]
    assert hub.requests.index(sizes[0]) < hub.requests.index(downloads[0])
    model_source._download.cache_clear()


def test_a_peer_may_try_again_when_the_hub_is_down(hub: Hub) -> None:
    hub.broken = "/api/"
    with pytest.raises(RunError, match=r"^run\.model\.source: me/model is no local folder .* answer: .*start again"):
        model_source.locate(AutoModel(name="auto", source="me/model"))
