"""Hashes of the contents of files and folders, by which records identify inputs."""

import hashlib
from pathlib import Path

from lpes_jax.errors import UserError


def content_sha256(path: Path, flag: str = "") -> str:
    """A hash of a file, or of a folder's files with their names. Raises UserError, beginning with `flag`, if unreadable."""
    digest = hashlib.sha256()
    try:
        for file in sorted(found for found in path.rglob("*") if found.is_file()) if path.is_dir() else [path]:
            with file.open("rb") as contents:
                file_digest = hashlib.file_digest(contents, "sha256")
            if not path.is_dir():
                return file_digest.hexdigest()
            digest.update(f"{file.relative_to(path).as_posix()} {file_digest.hexdigest()}\n".encode())
    except OSError as error:
        raise UserError(f"{flag}{path}: cannot be read ({error.strerror})") from error
    return digest.hexdigest()
