"""Identity of a checkpoint or a LoRA adapter: engines share KV only if they run the same weights.

Fine-tuned copies of a model have the same configuration, tensor names and sizes, so a piece of every tensor
is part of the digest. A 7 B checkpoint takes some hundred small reads.
"""

import hashlib
import json
import re
import struct
import zipfile
from pathlib import Path
from typing import Any

SAMPLE_BYTES = 256
# Written by whoever saved the checkpoint; says nothing about its weights.
_IGNORED_CONFIG_KEYS = ("_name_or_path", "transformers_version")
_MAX_HEADER_BYTES = 100 << 20  # the format's own limit
_CONFIGS = ("config.json", "adapter_config.json")
# One of them is in every repository that an engine can load.
_CACHED_FILES = (*_CONFIGS, "params.json")


def weights_identity(model_path: str) -> str | None:
    """What to put into the namespace for the checkpoint at `model_path`; None when it cannot be identified.

    A Hugging Face cache directory (.../snapshots/<commit>) is named by its commit, so that all engines that
    pulled one revision agree. Any other directory is digested: its config and every .safetensors file, or, of
    an adapter that torch has saved, its adapter_model.bin. ValueError for files that are not what they seem.
    """
    directory = Path(model_path)
    if not directory.is_dir():
        return None
    commit = re.search(r"/snapshots/([0-9a-f]{40})/?$", str(directory.absolute()))
    if commit:
        return f"commit:{commit[1]}"
    files = sorted(directory.glob("*.safetensors"))
    saved_by_torch = directory / "adapter_model.bin"
    if not files and not saved_by_torch.is_file():
        return None
    digest = hashlib.sha256()
    for name in _CONFIGS:
        digest.update(_canonical_config(directory / name))
    for file in files:
        _digest_safetensors(digest, file)
    if not files:
        _digest_torch(digest, saved_by_torch)
    return f"sha256:{digest.hexdigest()[:32]}"


def model_directory(name: str, revision: str | None = None, cache_dir: str | None = None) -> Path | None:
    """Where a checkpoint or an adapter lies: at `name` itself, or the snapshot of that repository in Hugging
    Face's cache, from which an engine has just loaded it. Asks no server."""
    if (directory := Path(name).expanduser()).is_dir():
        return directory
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    for file in _CACHED_FILES:
        try:
            found = try_to_load_from_cache(name, file, cache_dir=cache_dir, revision=revision)
        except ValueError:  # not the name of a repository
            return None
        if isinstance(found, str):
            return Path(found).parent
    return None


def _canonical_config(file: Path) -> bytes:
    if not file.is_file():
        return b""
    config: Any = json.loads(file.read_text())
    if isinstance(config, dict):
        config = {key: value for key, value in config.items() if key not in _IGNORED_CONFIG_KEYS}
    return json.dumps(config, sort_keys=True).encode()


def _digest_safetensors(digest: Any, file: Path) -> None:
    """Header plus SAMPLE_BYTES from the middle of each tensor (safetensors: u64 length | JSON | data)."""
    with file.open("rb") as stream:
        (header_bytes,) = struct.unpack("<Q", stream.read(8))
        if header_bytes > _MAX_HEADER_BYTES:
            raise ValueError(f"{file}: not a safetensors file (header of {header_bytes} bytes)")
        header = json.loads(stream.read(header_bytes))
        header.pop("__metadata__", None)
        digest.update(json.dumps(header, sort_keys=True).encode())
        for name in sorted(header, key=lambda name: int(header[name]["data_offsets"][0])):
            begin, end = header[name]["data_offsets"]
            middle = begin + max(0, (end - begin - SAMPLE_BYTES) // 2)
            stream.seek(8 + header_bytes + middle)
            digest.update(stream.read(min(SAMPLE_BYTES, end - middle)))


def _digest_torch(digest: Any, file: Path) -> None:
    """Such a file is a zip archive, whose directory has a checksum of every tensor."""
    try:
        with zipfile.ZipFile(file) as archive:
            for member in archive.infolist():
                # The archive's own name, which is that of the file, stands first.
                _, _, name = member.filename.partition("/")
                digest.update(f"{name} {member.file_size} {member.CRC:08x}\n".encode())
    except zipfile.BadZipFile as error:
        raise ValueError(f"{file}: not a file that torch has saved: {error}") from error
