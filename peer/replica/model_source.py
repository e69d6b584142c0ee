"""Where the files of ``run.model: auto`` are, and which they are: a folder here, or the Hugging Face hub.

Two peers train one model only when their files say the same, so the digest of these becomes part of the run's:
:func:`pinned` puts it in, and every handshake compares it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import xxhash

from peer.config.model import AutoModel
from peer.config.schema import Config
from peer.errors import UserError

# In config.json without a say in what is computed: which program wrote it, from where, and how it stores weights.
IDLE_KEYS = {"_name_or_path", "transformers_version", "torch_dtype", "dtype"}
WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
# What a tokenizer consists of, whatever its kind: see own_tokenizer.py.
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "spiece.model", "sentencepiece*")


def pinned(config: Config) -> Config:
    """``config`` with the digest of its model's files in it, so that it can be compared with another peer's.

    Raises :class:`UserError` when the files cannot be had, or are not those that ``run.model.digest`` asks for.
    """
    settings = config.run.model
    if not isinstance(settings, AutoModel):
        return config
    found = files_digest(locate(settings), settings)
    if settings.digest not in (None, found):
        raise UserError(
            f"run.model: the files of {settings.source} have the digest {found}, run.model.digest asks for "
            f"{settings.digest}; get the files that the swarm began with, or choose them by run.model.revision"
        )
    model = settings.model_copy(update={"digest": found})
    return config.model_copy(update={"run": config.run.model_copy(update={"model": model})})


def locate(settings: AutoModel) -> Path:
    """The folder with the model's files, after a download where the source is a name on the hub."""
    folder = Path(settings.source).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(f"run.model.source: {folder} has no config.json; name the folder of a Hugging Face model")
        return folder
    if settings.source.startswith((".", "/", "~")) or settings.source.count("/") > 1:
        raise UserError(f"run.model.source: there is no folder {folder}")
    return _download(settings)


def weight_files(folder: Path, settings: AutoModel) -> list[Path]:
    """The safetensors files that a pre-trained model is read from. No others: pickles can run code."""
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


def files_digest(folder: Path, settings: AutoModel) -> str:
    """Of what the configuration says and, for a pre-trained model, of the weights' files."""
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
                while block := stream.read(1 << 22):
                    digest.update(block)
        except OSError as error:
            raise UserError(f"run.model: {file} cannot be read: {error.strerror}") from None
    return digest.hexdigest()


def _download(settings: AutoModel) -> Path:
    """From the hub, or what of it is here already. Every way in which that fails is one line."""
    from huggingface_hub import errors, snapshot_download

    what = f"run.model.source: {settings.source}"
    wanted = ["config.json", "generation_config.json"]
    wanted += ["model*.safetensors", INDEX_FILE, *TOKENIZER_FILES] if settings.pretrained else []
    wanted += ["*.py"] if settings.trust_remote_code else []
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
        raise UserError(f"{what} is neither a folder here nor a name that the Hugging Face hub could have") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        raise UserError(
            f"{what} is not a folder here, not downloaded yet, and the Hugging Face hub cannot be reached; "
            "look at the network, or copy the model and name its folder"
        ) from None
    except OSError as error:
        raise UserError(f"{what} cannot be downloaded: {str(error).splitlines()[0][:200]}") from None
    if not (folder / "config.json").is_file():
        raise UserError(f"{what} has no config.json on the Hugging Face hub: not a model of transformers")
    return folder
