"""The name on the Hub of a model that a run comes from, and its licence as its card or configuration states it."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from distill.models.converted import origin_of
from distill.models.load import model_folder
from distill.runs.facts import Published
from distill.runtime.hub import is_hub_reached

UNSAID = "other"  # a licence whose text lies beside the model


def published(path: str | None, revision: str | None = None) -> Published:
    """What is known of the model with this name on the Hub, or in this folder."""
    if path is None:
        return Published()
    card, config = (_file(path, name, revision) for name in ("README.md", "config.json"))
    stated = _license_of_card(card) or _license_of_config(config)
    folder = Path(model_folder(path))
    name = getattr(origin_of(folder), "published", None) if folder.exists() else path
    return Published(name, stated if stated != UNSAID else None)


def _license_of_card(file: Path | None) -> str | None:
    from huggingface_hub import metadata_load

    with suppress(Exception):  # of the file system, of YAML and of huggingface_hub, which have no class in common
        return _text((metadata_load(file) if file is not None else {}) or {})
    return None


def _license_of_config(file: Path | None) -> str | None:
    with suppress(OSError, ValueError, RecursionError):
        return _text(json.loads(file.read_text(encoding="utf-8")) if file is not None else {})
    return None


def _text(fields: Any) -> str | None:
    value = fields.get("license") if isinstance(fields, dict) else None
    return value.strip().lower() or None if isinstance(value, str) else None


def _file(path: str, name: str, revision: str | None) -> Path | None:
    """A file of the model, which is fetched where it lies on the Hub; None where there is none or no network."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    folder = Path(model_folder(path))
    if folder.exists():
        return folder / name
    with suppress(Exception):  # of whichever client huggingface_hub is built on
        cached = try_to_load_from_cache(path, name, revision=revision)
        if isinstance(cached, str):
            return Path(cached)
        if is_hub_reached():
            return Path(hf_hub_download(path, name, revision=revision))
    return None
