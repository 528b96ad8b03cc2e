"""What suites share that have generated questions for the project's own models, and others for all other models."""

from __future__ import annotations

from abc import abstractmethod

from specbench_ss.runs.suite import Question, Suite, SuiteData, SuiteRequest
from specbench_ss.suites.scorers import score_turn


class LabSuite(Suite):
    """A suite whose questions for lab models are generated, in as many splits as are asked for."""

    def load(self, request: SuiteRequest) -> SuiteData:
        """The questions that are evaluated: generated ones for lab models unless a file is given."""
        return self.questions_of("eval", request)

    def calibration(self, request: SuiteRequest) -> SuiteData:
        """For lab models, generated questions that nothing else asks."""
        generated = request.lab and request.data is None
        return self.questions_of("calibration", request) if generated else super().calibration(request)

    @abstractmethod
    def questions_of(self, split: str, request: SuiteRequest) -> SuiteData:
        """What is asked for; split: which generated questions, "eval" or "calibration". Raises UserError as `load`."""

    def score(self, question: Question, turn: int, answer: str) -> float | None:
        """By the question's metric, against the references of the turn."""
        return score_turn(question, turn, answer)
