"""Results as JSON, kept from job to job: what is there needn't be measured again."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

ALIKE = " | "
"""Between the names of jobs that share an entry of a file."""
LINE = 120
"""Characters of a file's lines, where more than plain values would stand in one."""
RESULTS = Path(__file__).with_name("results")
"""The results that the repository keeps."""


@dataclass
class Records:
    """Results of one machine: stage → job → its figures; times in seconds, sizes in bytes."""

    path: Path
    about: dict[str, Any]
    """The machine, versions and settings."""
    stages: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file that `save` wrote."""
        content = json.loads(path.read_text())
        stages = {
            stage: {job: noted for names, noted in jobs.items() for job in names.split(ALIKE)}
            for stage, jobs in content["stages"].items()
        }
        return cls(path, content["about"], stages)

    @classmethod
    def resume(cls, path: Path, about: dict[str, Any]) -> Self:
        """The records at `path`, if they are of the same machine and code; else none."""
        found = cls.load(path) if path.exists() else None
        return found if found is not None and found.about == about else cls(path, about)

    def save(self) -> None:
        """Write the file, in one piece. Jobs of a stage of which the same is noted share an entry."""
        stages = {stage: _merge_alike(jobs) for stage, jobs in self.stages.items()}
        written = self.path.with_suffix(".part")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        written.write_text(_write({"about": self.about, "stages": stages}) + "\n")
        written.replace(self.path)

    def add(self, stage: str, job: str, **figures: Any) -> None:
        """Note what a job found, and save."""
        self.stages.setdefault(stage, {})[job] = _round(figures)
        self.save()


def _merge_alike(jobs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Jobs by what is noted of them, their names in one."""
    names: dict[str, list[str]] = {}
    for job, noted in jobs.items():
        names.setdefault(json.dumps(noted), []).append(job)
    return {ALIKE.join(alike): jobs[alike[0]] for alike in names.values()}


def _write(value: Any, indent: int = 0) -> str:
    """JSON; a line holds as much as fits, and of plain values all."""
    whole, items = json.dumps(value, ensure_ascii=False), value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict | list) or indent + len(whole) <= LINE:
        return whole
    if not any(isinstance(item, dict | list) for item in items):
        return whole
    names = [f"{json.dumps(name, ensure_ascii=False)}: " for name in value] if isinstance(value, dict) else []
    lines = [f"{name}{_write(item, indent + 1)}" for name, item in zip(names or [""] * len(value), items, strict=True)]
    start, end = "{}" if isinstance(value, dict) else "[]"
    space = "\n" + " " * (indent + 1)
    return f"{start}{space}{f',{space}'.join(lines)}{space[:-1]}{end}"


def _round(value: Any) -> Any:
    """Six digits are more than any figure here deserves."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _round(inner) for key, inner in value.items()}
    return [_round(inner) for inner in value] if isinstance(value, list) else value
