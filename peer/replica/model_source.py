"""The files of ``run.model: auto``: a local folder, or a download from the Hugging Face hub."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import xxhash

from peer.config.fields import expanded
from peer.config.model import AutoModel
from peer.config.schema import Config
from peer.errors import UserError
from peer.hub.answers import library_errors
from peer.hub.size import download_size
from peer.logs import fields, get_logger

log = get_logger("model")

# Keys of config.json without an effect on the computation: program, origin and storage of the weights.
IDLE_KEYS = {"_name_or_path", "transformers_version", "torch_dtype", "dtype"}
GENERATION_FILE = "generation_config.json"
WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
# The files of tokenizers of all kinds; see pretrained_tokenizer.py.
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "spiece.model", "sentencepiece*")


def pinned(config: Config) -> Config:
    """``config`` with the digest of its model's files: it becomes part of the run's, which peers compare.

    Raises :class:`UserError` if the files are missing or have another digest than ``run.model.digest``.
    """
    settings = config.run.model
    if not isinstance(settings, AutoModel):
        return config
    found = files_digest(locate(settings), settings)
    if settings.digest not in (None, found):
        raise UserError(
            f"run.model: the files of {settings.source} have the digest {found}, run.model.digest is "
            f"{settings.digest}; get the files that the swarm uses, or set run.model.revision"
        )
    model = settings.model_copy(update={"digest": found})
    return config.model_copy(update={"run": config.run.model_copy(update={"model": model})})


def locate(settings: AutoModel) -> Path:
    """The folder of the model's files. A model of the hub is downloaded.

    Raises :class:`UserError`, or :class:`peer.errors.RunError` if the hub does not answer.
    """
    folder = expanded(settings.source)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(f"run.model.source: {folder} has no config.json; name the folder of a Hugging Face model")
        return folder
    if settings.source.startswith((".", "/", "~")) or settings.source.count("/") > 1:
        raise UserError(f"run.model.source: there is no folder {folder}")
    return _download(settings)


def weight_files(folder: Path, settings: AutoModel) -> list[Path]:
    """The safetensors files of a pre-trained model. Other formats are refused: a pickle can run code."""
    if (folder / WEIGHTS_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    try:
        names = set(json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))["weight_map"].values())
    except FileNotFoundError:
        raise UserError(
            f"run.model: {settings.source} has no {WEIGHTS_FILE}; pre-trained weights are read from safetensors only"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"run.model: {folder / INDEX_FILE} cannot be read: {error}") from None
    missing = sorted(name for name in names if not (folder / name).is_file())
    if missing:
        raise UserError(f"run.model: {settings.source} lacks {missing[0]}, which its {INDEX_FILE} names")
    return [folder / name for name in sorted(names)]


def generation_settings(settings: AutoModel) -> dict[str, Any]:
    """How a pre-trained source generates: its end tokens, its sampling. As transformers, it takes them from config.json
    where no file of their own says so. They are read from files because an outline has none of the source's.
    """
    from transformers import GenerationConfig

    folder = locate(settings)
    with suppress(OSError, ValueError, RecursionError):
        if isinstance(content := json.loads((folder / GENERATION_FILE).read_text(encoding="utf-8")), dict):
            return content
    # not AutoConfig: it drops the sampling that an older config.json has
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    found: dict[str, Any] = json.loads(GenerationConfig.from_model_config(config).to_json_string(ignore_metadata=True))
    return found


def files_digest(folder: Path, settings: AutoModel) -> str:
    """The digest of the configuration and, for a pre-trained model, of the weights' files."""
    path = folder / "config.json"
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        kept = {key: value for key, value in content.items() if key not in IDLE_KEYS}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise UserError(f"run.model: {path} cannot be read: {error}") from None
    digest = xxhash.xxh3_128(json.dumps(kept, sort_keys=True).encode())
    for file in weight_files(folder, settings) if settings.pretrained else ():
        digest.update(file.name.encode())
        try:
            with file.open("rb") as stream:
                hashlib.file_digest(stream, lambda: digest)  # updates it
        except OSError as error:
            raise UserError(f"run.model: {file} cannot be read: {error.strerror}") from None
    return digest.hexdigest()


@lru_cache(4)  # a program asks for its model's files several times
def _download(settings: AutoModel) -> Path:
    """Download the model from the hub, or use its local copy. Every error is one line."""
    from huggingface_hub import errors, snapshot_download

    what = f"run.model.source: {settings.source}"
    wanted = ["config.json", GENERATION_FILE]
    wanted += ["model*.safetensors", INDEX_FILE, *TOKENIZER_FILES] if settings.pretrained else []
    wanted += ["*.py"] if settings.trust_remote_code else []
    size = download_size(settings.source, settings.revision, tuple(wanted))
    if size:
        log.info("the model is downloaded: %s", fields(source=settings.source, size=size))
    advice = "; correct this, or copy the model and name its folder"
    with library_errors(f"{what} is no local folder and cannot be downloaded", advice):
        try:
            folder = Path(snapshot_download(settings.source, revision=settings.revision, allow_patterns=wanted))
        except errors.GatedRepoError:
            raise UserError(
                f"{what} is gated: accept its terms on its page, then set HF_TOKEN to a token that may read it"
            ) from None
        except errors.RepositoryNotFoundError:
            raise UserError(
                f"{what} is neither a folder here nor a model on the Hugging Face hub "
                "(a private one needs HF_TOKEN in the environment)"
            ) from None
        except errors.RevisionNotFoundError:
            raise UserError(f"{what} has no revision {settings.revision}; see run.model.revision") from None
        except errors.HFValidationError:
            raise UserError(
                f"{what} is neither a folder here nor a name that the Hugging Face hub could have"
            ) from None
    if not (folder / "config.json").is_file():
        raise UserError(f"{what} has no config.json on the Hugging Face hub: not a model of transformers")
    return folder
