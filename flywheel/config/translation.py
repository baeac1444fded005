"""What becomes of a configuration of another program: one translation, for commands that read it and for one that
writes Flywheel's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from flywheel.config import agentjet, sage, trinity
from flywheel.config.agentjet import AGENTJET, MARKERS, ProjectRoot
from flywheel.config.foreign import Row, check, fit_engines, settings_in, without_keys
from flywheel.config.sage import ROOTS, SAGE, served
from flywheel.config.section import merged, value_at
from flywheel.config.trinity import TRINITY, is_trinitys

TUNER: Final = "Trinity-RFT"


@dataclass(frozen=True, slots=True)
class Translation:
    """What becomes of another program's file."""

    program: str
    """`AgentJet`, `ASTuner`, `SAGE` or `Trinity-RFT`; empty for Flywheel's own file."""
    page: str
    """Its page of `flywheel docs`."""
    rows: Sequence[Row] = ()
    """What becomes of each key, and what the program assumes (without a place). They have no API keys. A refused row
    without a value is a setting that is missing, and its `use` the key of Flywheel's to fill in."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """All settings of the rows and of the file's own sections, as Flywheel's own file has them. For a file of
    Trinity-RFT's, those that `flywheel.tune` reads."""
    rubrics: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Rubrics that the settings name, by the relative names of their files."""
    project: ProjectRoot | None = None
    """Where relative paths start; None where it is the folder of the file."""

    @property
    def refused(self) -> list[Row]:
        return [row for row in self.rows if row.outcome == "refused"]

    def check(self, attempted: str, name: str) -> None:
        """Log one line with the keys of a file `name` without effect. Raises ConfigError, which names all refused
        keys."""
        check(self.rows, attempted, name, self.page)

    def settings_in(self, file: Path | None) -> Mapping[str, Any]:
        """The settings where no rubric is written: it is read from `file` itself."""
        if not self.rubrics or file is None:
            return self.settings
        return merged(self.settings, {"filter": {"rubric": str(file)}})


def translate(raw: Mapping[str, Any], file: Path | None, *, fits: bool = True) -> Translation:
    """What becomes of a configuration, whose interpolations are resolved, in a `file`; with `fits`, AgentJet's
    engines are as few as this machine has GPUs for."""
    if is_trinitys(raw):
        rows, own = trinity.rows_of(raw)
        settings = merged(settings_in(rows), own)
        return Translation(TUNER, TRINITY.page, [*map(without_keys, rows), *trinity.missing(settings)], settings)
    is_sages = MARKERS.isdisjoint(map(str, raw))
    of_sage, own = sage.rows_of(raw, alone=is_sages)
    rubrics = sage.rubrics_in(raw) if any(row.use == "filter.rubric" for row in of_sage) else {}
    rows = [*([] if is_sages else agentjet.rows_of(own, file)), *of_sage]
    rows += served(rows, raw)
    made = settings_in(rows)
    if is_sages:
        program, page = ("SAGE", SAGE.page) if rows else ("", "configuration")
        return Translation(program, page, [*map(without_keys, rows)], merged(made, own), rubrics)
    if fits and not value_at(own, "ray.address"):
        fit_engines(made.setdefault("rollout", {}), rows, str(file or "the file"))
    settings, assumed = agentjet.settings_of(own, made)
    project = agentjet.project_root(rows, settings, file) if file is not None else None
    program, rows = "ASTuner" if ROOTS[1] in raw else "AgentJet", [*map(without_keys, (*rows, *assumed))]
    return Translation(program, AGENTJET.page, rows, settings, rubrics, project)
