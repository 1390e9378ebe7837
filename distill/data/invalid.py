"""What of a text is invalid, counted, and the line that ends a run where that is too much."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from distill.config.settings import CorpusConfig, Missing
from distill.data.document import Document
from distill.data.lines import InvalidFile, InvalidRecord, LeftOut
from distill.data.sources import Source
from distill.runtime.errors import SettingError
from distill.runtime.progress import counted

MEND = "mend or remove it, or set corpus.invalid_files=skip"
MAX_NAMED = 10  # of files, and of invalid records


@dataclass
class Invalid:
    """Counts of a text, or of a part of it; what `sources.read` calls with everything that cannot be read."""

    skipped: list[str] = field(default_factory=list)  # `name: reason` of every file that could not be read
    records: int = 0  # or lines, of plain text; good and bad ones
    bad: int = 0  # invalid ones, left out
    first_bad: list[str] = field(default_factory=list)  # `name: reason` of the first of them
    left_out: Counter[str] = field(default_factory=Counter)  # sound records, or parts of them, by why they are not used
    blame: str = ""  # the first reason that a setting causes, unless other records are fine

    def __call__(self, error: InvalidFile | InvalidRecord | LeftOut) -> None:
        if isinstance(error, InvalidFile):
            self.skipped.append(str(error))
            return
        if isinstance(error, LeftOut):
            self.left_out[error.reason] += 1
            return
        self.records += 1
        self.bad += 1
        self.first_bad = [*self.first_bad, str(error)][:MAX_NAMED]
        if error.setting and not self.blame:
            self.blame = error.reason

    def fine(self, document: Document, source: Source) -> None:
        """Counts a document that was read."""
        self.records += document.text.count("\n") + 1 if source.by_lines else 1

    @classmethod
    def together(cls, parts: Iterable["Invalid"]) -> "Invalid":
        """What was read in several parts, in their order."""
        parts = list(parts)
        return cls(
            skipped=[line for part in parts for line in part.skipped],
            records=sum(part.records for part in parts),
            bad=sum(part.bad for part in parts),
            first_bad=[line for part in parts for line in part.first_bad][:MAX_NAMED],
            left_out=sum((part.left_out for part in parts), Counter[str]()),
            blame=next((part.blame for part in parts if part.blame), ""),
        )

    @property
    def fraction_bad(self) -> float:
        """The invalid ones among the records, from 0 to 1."""
        return self.bad / max(self.records, 1)

    def lines(self) -> list[str]:
        """For the log and the report; none where all could be read."""
        report = [f"skipped {line}" for line in self.skipped[:MAX_NAMED]]
        if self.skipped:
            report.append(f"skipped {len(self.skipped):,} of the files: they could not be read")
        report += [f"left out: {line}" for line in self.left_out_lines()]
        return report + ([self.bad_line()] if self.bad else [])

    def left_out_lines(self) -> list[str]:
        """Why sound records, or parts of them, are not used, and of how many that is so."""
        return [f"{counted(count, 'record')}: {reason}" for reason, count in self.left_out.items()]

    def bad_line(self) -> str:
        """How many records were left out, and why the first one was."""
        of_all = f"{self.bad:,} of {counted(self.records, 'record')} ({self.fraction_bad:.2%})"
        return f"left out {of_all}, first {self.first_bad[0]}"

    def require_fields(self) -> None:
        """Raises SettingError where a setting names a field that no record of a source has; call it for each source."""
        if self.blame and self.bad == self.records:
            none = f"none of {self.records:,} records can be used" if self.records > 1 else "there is no other record"
            raise SettingError(f"{self.blame}; {none}: name one of its fields, or give another path")

    def check(self, path: str, setting: str, corpus: CorpusConfig) -> None:
        """Raises SettingError where more could not be read than the settings allow.

        Args:
            path: of the text, as the user gave it.
            setting: what error lines call the text, such as `corpus`.
        """
        prefix = f"{setting}.path={path}"
        strict = corpus.invalid_files is Missing.stop
        if self.skipped and strict:
            raise SettingError(self.skipped[0], setting=f"{setting}.path", value=path, cure=MEND)
        if self.bad and strict:
            raise SettingError(self.first_bad[0], setting=f"{setting}.path", value=path, cure=MEND)
        if self.skipped and self.records == self.bad:
            raise SettingError(
                f"{prefix}: none of its files can be read, first {self.skipped[0]}; mend them, set {setting}.kind, or "
                "give another path"
            )
        if self.fraction_bad > corpus.max_invalid:
            raise SettingError(
                f"{prefix}: {self.bad:,} of {self.records:,} records ({self.fraction_bad:.1%}) are invalid, more than "
                f"corpus.max_invalid={corpus.max_invalid:g} allows; first {self.first_bad[0]}; mend them, set "
                f"{setting}.encoding or {setting}.kind, or raise corpus.max_invalid"
            )
