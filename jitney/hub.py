"""Models of a Hugging Face hub, where there is one: config, tokenizer and safetensors of the Llama family.

huggingface_hub is an optional extra and imported only here, when it is needed.
"""

from __future__ import annotations

import json
from pathlib import Path

from jitney.errors import Away, Conflict, InvalidRequest, JitneyError
from jitney.model_store import Progress, locked, write_json

FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "*.jinja",
)
MARKER = ".jitney-complete.json"
TIMEOUT_S = 20.0


def fetch_from_hub(name: str, cache_dir: Path, report: Progress) -> Path:
    """The folder `CACHE/models/ORG/NAME`, complete. Raises Away, InvalidRequest (another family) or Conflict."""
    folder = cache_dir / "models" / name
    if _hub_complete(folder):
        return folder
    try:
        import huggingface_hub
        from huggingface_hub import errors as hub_errors
    except ImportError as error:
        raise Away(
            f"fetching {name} from a hub needs the package huggingface_hub: pip install 'jitney[hub]'",
            field="model",
            value=name,
        ) from error
    report(f"downloading {name}", 0, 0)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            _remove_changed(folder)
            commit = huggingface_hub.HfApi().model_info(name, timeout=TIMEOUT_S).sha
            huggingface_hub.hf_hub_download(name, "config.json", revision=commit, local_dir=folder)
            _refuse_other_families(name, folder)
            huggingface_hub.snapshot_download(name, revision=commit, local_dir=folder, allow_patterns=list(FILES))
            if not list(folder.glob("*.safetensors")):
                raise InvalidRequest(f"{name} has no safetensors files", field="model", value=name)
            _mark_hub(folder)
    except JitneyError:
        raise
    except hub_errors.RepositoryNotFoundError as error:
        raise Away(f"the hub has no model {name} that is open to you", field="model", value=name) from error
    except Exception as error:  # The HTTP library, and so its errors, differ between versions of huggingface_hub.
        raise Away(f"cannot fetch {name} from the hub: {_first_line(error)}", field="model", value=name) from error
    return folder


def _refuse_other_families(name: str, folder: Path) -> None:
    try:
        family = str(json.loads((folder / "config.json").read_text()).get("model_type", ""))
    except ValueError as error:
        raise Conflict(f"config.json of {name} is not JSON: {error}", field="model", value=name) from error
    if family != "llama":
        raise InvalidRequest(
            f'{name} is of the family "{family}"; Jitney runs "llama" models',
            field="model_type",
            limit="llama",
            value=family,
        )


def _hub_files(folder: Path) -> dict[str, int]:
    found = [path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")]
    return {path.name: path.stat().st_size for path in sorted(found)}


def _mark_hub(folder: Path) -> None:
    write_json(folder / MARKER, _hub_files(folder))


def _marked_hub_files(folder: Path) -> dict[str, int]:
    """What was complete once; empty if nothing was."""
    try:
        return {str(file): int(size) for file, size in json.loads((folder / MARKER).read_text()).items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _hub_complete(folder: Path) -> bool:
    """All that was fetched is still there, at its size."""
    marked = _marked_hub_files(folder)
    return bool(marked) and marked.items() <= _hub_files(folder).items()


def _remove_changed(folder: Path) -> None:
    """Files that are not as they were fetched: the hub's own library would take them for good."""
    for file, size in _marked_hub_files(folder).items():
        path = folder / file
        if path.is_file() and path.stat().st_size != size:
            path.unlink()


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
