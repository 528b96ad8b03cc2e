"""The base of suites that read their questions from files: limits, categories, editions and downloads, in one place."""

from __future__ import annotations

import os
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from specbench_ss.errors import UserError
from specbench_ss.storage import cache_folder, file_sha256
from specbench_ss.suite import Question, SuiteData, SuiteRequest
from specbench_ss.suites.download import download
from specbench_ss.suites.lab_suite import LabSuite
from specbench_ss.suites.questions import check_categories, check_limit, lab_questions, select
from specbench_ss.suites.rows import is_hub


@dataclass(frozen=True, slots=True)
class Published:
    """A published file whose content is known. url: at a fixed commit. saved_as: its name here, where it is another."""

    url: str
    sha256: str
    saved_as: str = ""

    @property
    def name(self) -> str:
        """Return the file's name here."""
        return self.saved_as or self.url.rpartition("/")[2]

    def is_whole(self, path: Path) -> bool:
        """Say whether this file is there, unchanged."""
        return path.is_file() and file_sha256(path) == self.sha256


class FileSuite(LabSuite):
    """A suite whose questions come from a file: a given one, or a published one that was fetched.

    title: its name in sentences. files: what `fetch` downloads; the first one holds the questions. needs: what --data
    must be, where there is nothing to fetch. default_limit: questions of each category; 0 is all. lab_categories:
    those of the questions for lab models, lab_limit each by default.
    """

    title: ClassVar[str]
    files: ClassVar[tuple[Published, ...]] = ()
    needs: ClassVar[str] = "a JSONL file"
    default_limit: ClassVar[int] = 0
    max_new_tokens: ClassVar[int] = 1024
    lab_categories: ClassVar[tuple[str, ...]] = ()
    lab_limit: ClassVar[int] = 4

    @abstractmethod
    def read(self, data: Path) -> tuple[Question, ...]:
        """Return the questions of a file, a folder or a hub data set. Raises UserError."""

    def notes(self) -> tuple[str, ...]:
        """Return what a reader of the results should know of questions from a file, a sentence each."""
        return ()

    def fetch(self, source: str | None = None) -> Path:
        """Return the published questions, which are downloaded unless they are there.

        source: another URL of the same file, or of the folder that holds the files where there are several.
        """
        if not self.files:
            return super().fetch(source)
        for file in self.files:
            path = self._cached(file)
            if source is not None or not file.is_whole(path):
                download(self._address(file, source), file.sha256, path)
        return self._cached(self.files[0])

    def _address(self, file: Published, source: str | None) -> str:
        given = source or os.environ.get(f"SSBENCH_{self.name.upper()}_URL")
        if given and len(self.files) > 1:
            return f"{given.rstrip('/')}/{file.name}"
        return given or file.url

    def _cached(self, file: Published) -> Path:
        return cache_folder() / self.name / file.name

    def questions_of(self, split: str, request: SuiteRequest) -> SuiteData:
        """Return the questions of given data, else generated ones for lab models and the published ones for others."""
        check_limit(request.limit)
        if request.data is not None:
            return self._from(request.data, request)
        check_categories(request.categories, self.categories, f"suite {self.name!r}")
        if request.lab and self.lab_categories:
            return self._generated(request, split)
        return self._from(self._fetched(), request)

    def _fetched(self) -> Path:
        if not self.files:
            raise UserError(f"suite {self.name!r} needs --data: {self.needs}")
        for file in self.files:
            path = self._cached(file)
            if not path.is_file():
                raise UserError(
                    f"no {self.title} questions yet: run `ssbench suites fetch {self.name}`, or give --data FILE"
                )
            if not file.is_whole(path):
                raise UserError(f"{path} is damaged (wrong sha256): run `ssbench suites fetch {self.name}` again")
        return self._cached(self.files[0])

    def _from(self, data: Path, request: SuiteRequest) -> SuiteData:
        edition, notes = self._edition(data)
        limit = self.default_limit if request.limit is None else request.limit
        chosen = select(self.read(data), request.categories, limit)
        return SuiteData(self.name, edition, chosen, self.max_new_tokens, (*notes, *self.notes()))

    def _edition(self, data: Path) -> tuple[str, tuple[str, ...]]:
        """Return what the edition is called, and what there is to say of it."""
        if is_hub(data):
            return "hub", (f"questions from {data}",)
        file = self.question_file(data)
        if any(published.is_whole(file) for published in self.files[:1]):
            return "official", ()
        return "custom", (f"{file.name} differs from the official {self.title} file",) if self.files else ()

    def question_file(self, data: Path) -> Path:
        """Return the file with the questions: the given one, or in a folder the one with the published name."""
        return data / self.files[0].name if self.files and data.is_dir() else data

    def _generated(self, request: SuiteRequest, split: str) -> SuiteData:
        """Return the lab's questions. They are the same whatever the seed of the run, so that runs can be compared."""
        limit = self.lab_limit if request.limit is None else request.limit
        asked = (name for name in self.lab_categories if name in (request.categories or self.lab_categories))
        questions = tuple(question for name in asked for question in lab_questions(name, split, limit))
        return SuiteData(self.name, "generated", questions, notes=(self.generated_note(),))

    def generated_note(self) -> str:
        """Return what there is to say of generated questions."""
        return f"questions generated by the lab, in place of those of {self.title}"
