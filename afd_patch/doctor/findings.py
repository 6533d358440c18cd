"""What the doctor says: findings in sections, as text and as JSON. Knows nothing about what is looked at."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

#: ``ok``: as it should be. ``note``: worth knowing, nothing to do. ``problem``: a role would not run, or run wrongly.
Level = Literal["ok", "note", "problem"]

#: Raised when a field of the JSON changes its meaning or goes away; new fields do not raise it.
JSON_VERSION = 1

_WIDTH = len("problem")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: ``subject`` names it, ``text`` says what is the case, ``fix`` the way out."""

    level: Level
    subject: str
    text: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.subject}: {self.text}" + (f"; {self.fix}" if self.fix else "")


@dataclass
class Section:
    """Findings about one matter. With a ``summary``, the text shows it in the place of what is in order."""

    title: str
    findings: list[Finding] = field(default_factory=list)
    summary: str = ""

    def ok(self, subject: str, text: str) -> None:
        self.findings.append(Finding("ok", subject, text))

    def note(self, subject: str, text: str, fix: str = "") -> None:
        self.findings.append(Finding("note", subject, text, fix))

    def problem(self, subject: str, text: str, fix: str = "") -> None:
        self.findings.append(Finding("problem", subject, text, fix))

    def count(self, level: Level) -> int:
        return sum(finding.level == level for finding in self.findings)

    def render(self, verbose: bool) -> list[str]:
        shown = [f for f in self.findings if verbose or not self.summary or f.level != "ok"]
        lines = [f"  {finding.level:{_WIDTH}}  {finding}" for finding in shown]
        if self.summary and not verbose and self.count("ok"):
            lines.insert(0, f"  {'ok':{_WIDTH}}  {self.summary}")
        return [self.title, *lines] if lines else []


@dataclass
class Report:
    """Everything of one run."""

    vllm_version: str | None
    vllm_tree: str | None
    sections: list[Section] = field(default_factory=list)
    explanation: dict[str, Any] | None = None

    def count(self, level: Level) -> int:
        return sum(section.count(level) for section in self.sections)

    @property
    def sound(self) -> bool:
        return not self.count("problem")

    @property
    def exit_code(self) -> int:
        return 0 if self.sound else 1

    def verdict(self) -> str:
        problems, notes = self.count("problem"), self.count("note")
        if problems:
            return f"{problems} problem{'s' * (problems > 1)} found, {notes} note{'s' * (notes != 1)}"
        return f"sound: no problem found, {notes} note{'s' * (notes != 1)}"

    def render(self, verbose: bool = False) -> str:
        lines = [f"vLLM {self.vllm_version or 'of unknown version'}: {self.vllm_tree or 'not found'}"]
        for section in self.sections:
            lines += section.render(verbose)
        if self.explanation is not None:
            lines += ["", *self.explanation["text"], ""]
        return "\n".join([*lines, self.verdict()])

    def to_json(self, seconds: float) -> dict[str, Any]:
        explanation = self.explanation and {k: v for k, v in self.explanation.items() if k != "text"}
        return {
            "version": JSON_VERSION,
            "sound": self.sound,
            "verdict": self.verdict(),
            "vllm": {"version": self.vllm_version, "tree": self.vllm_tree},
            "counts": {level: self.count(level) for level in ("ok", "note", "problem")},
            "findings": [{"section": s.title, **asdict(f)} for s in self.sections for f in s.findings],
            "explanation": explanation,
            "seconds": round(seconds, 2),
        }
