"""Jars from Maven Central that tests use, as `make jars` fetches them."""
import os
from pathlib import Path


def directory() -> Path:
    return Path(os.environ.get('RELSTORE_JARS') or Path(__file__).resolve().parents[4] / 'var' / 'jars')


def jar(name: str) -> Path | None:
    """Return the jar of this name, whatever its version; None: it is not there."""
    return max(directory().glob(f'{name}-*.jar'), default=None)
