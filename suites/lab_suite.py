"""The base of suites that generate questions for the project's own models and ask others of all other models."""

from __future__ import annotations

from abc import abstractmethod

from specbench_ss.suite import Question, Suite, SuiteData, SuiteRequest
from specbench_ss.suites.scorers import score_turn


class LabSuite(Suite):
    """A suite whose questions for lab models are generated, in as many splits as are asked for."""

    def load(self, request: SuiteRequest) -> SuiteData:
        """Return the questions that are evaluated. For lab models they are generated unless a file is given."""
        return self.questions_of("eval", request)

    def calibration(self, request: SuiteRequest) -> SuiteData:
        """Return questions to choose options on. For lab models these are generated ones that no evaluation asks."""
        generated = request.lab and request.data is None
        return self.questions_of("calibration", request) if generated else super().calibration(request)

    @abstractmethod
    def questions_of(self, split: str, request: SuiteRequest) -> SuiteData:
        """Return the questions that are asked for. Raises UserError as `load` does.

        split: which generated questions to take, "eval" or "calibration".
        """

    def score(self, question: Question, turn: int, answer: str) -> float | None:
        """Score an answer with the question's metric, against the references of the turn."""
        return score_turn(question, turn, answer)
