"""IFEval's checks of whether an answer follows its instructions: those that lm-evaluation-harness ships.

Their packages (langdetect, immutabledict, nltk) and nltk's tables of sentences are not part of quanteval, and
nothing is downloaded: without them the suite is refused before anything is generated.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from quanteval.errors import UnsupportedError
from quanteval.tasks.answers import Judged

PACKAGES = ("lm_eval", "langdetect", "immutabledict", "nltk")


@lru_cache(maxsize=1)
def checker() -> Any:
    """Return lm-evaluation-harness's module of checks. UnsupportedError names what is missing."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UnsupportedError(
            f'IFEval\'s checks need the package "{missing[0]}": pip install "lm_eval[ifeval]"'
        )
    nltk, langdetect = (importlib.import_module(name) for name in ("nltk", "langdetect"))
    try:
        # Before the checks are imported: they would fetch these tables themselves.
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        raise UnsupportedError(
            "IFEval's checks need nltk's tables \"punkt_tab\": python -m nltk.downloader punkt_tab"
        ) from None
    # Language detection draws random numbers; without a seed an answer's score could change.
    langdetect.DetectorFactory.seed = 0
    return importlib.import_module("lm_eval.tasks.ifeval.utils")


def follows(output: str, row: Mapping[str, Any], *, loose: bool = False) -> list[bool]:
    """Return, for each instruction of a row, whether an answer follows it.

    `loose` also tries the answer without its first line, its last line and its asterisks.
    """
    module = checker()
    options = [dict(each) for each in row["kwargs"]]
    asked = module.InputExample(
        key=row["id"],
        instruction_id_list=list(row["instruction_id_list"]),
        prompt=row["prompt"],
        kwargs=options,
    )
    test = (
        module.test_instruction_following_loose
        if loose
        else module.test_instruction_following_strict
    )
    return [bool(each) for each in test(asked, output).follow_instruction_list]


def follows_all(output: str, row: Mapping[str, Any], *, loose: bool = False) -> float:
    """Return 1.0 when an answer follows all instructions of its row, else 0.0."""
    return float(all(follows(output, row, loose=loose)))


@dataclass(frozen=True)
class Instructions:
    """Judges answers by IFEval's checks: right when all instructions are followed (prompt-level accuracy).

    The score's numbers hold how many instructions there were and how many were followed.
    """

    mode: Literal["strict", "loose"] = "strict"

    def fingerprint(self) -> dict[str, Any]:
        """The mode and the versions that decide. UnsupportedError when the checks cannot be run."""
        checker()
        versions = {name: importlib.metadata.version(name) for name in ("lm_eval", "langdetect")}
        return {"answer": "Instructions", "mode": self.mode, **versions}

    def judge(self, output: str, row: Mapping[str, Any], targets: Sequence[str]) -> Judged:
        """Check each instruction; a check that fails to run makes the answer an error."""
        try:
            followed = follows(output, row, loose=self.mode == "loose")
        except UnsupportedError:
            raise
        except Exception as error:  # The checks' own: whatever they raise concerns this answer.
            line = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            return Judged(0.0, "error", detail=line)
        numbers = {"instructions": float(len(followed)), "followed": float(sum(followed))}
        missed = [
            name for name, ok in zip(row["instruction_id_list"], followed, strict=True) if not ok
        ]
        right = not missed
        return Judged(
            float(right),
            "right" if right else "wrong",
            detail="" if right else f"not followed: {', '.join(missed)}",
            numbers=numbers,
        )
