"""Weights that a table takes in place of a method's own, as the papers trained them, where they come with the model."""

from __future__ import annotations

from dataclasses import dataclass

from specbench_ss.reports.paper.missing_parts import comes_along
from specbench_ss.results.report import Request


@dataclass(frozen=True, slots=True)
class Companion:
    """Weights in a folder of this name beside the model, for a method.

    there, absent: what a table says of its row with these weights, and without them.
    """

    method: str
    folder: str
    there: str = ""
    absent: str = ""

    def asked(self, request: Request) -> str:
        """Return the method as a run asks for it; '' where no such weights came with the model and none are given.

        What the user gives with --set comes first.
        """
        if self._given(request):
            return self.method
        return f"{self.method}[weights={self.folder}]" if comes_along(request.model, self.folder) else ""

    def lacks(self, what: str, request: Request) -> str:
        """Say how to give the weights that are missing; '' where they are not."""
        return "" if self.asked(request) else f"{what} (--set {self.method}.weights=PATH)"

    def note(self, row: str, request: Request) -> str:
        """Return what a table says of its row."""
        if given := self._given(request):
            return f"{row} has the weights {given[-1].partition('=')[2]}, as --set says"
        said = self.there if self.asked(request) else f"{self.absent}: --set {self.method}.weights=PATH gives others"
        return f"{row} {said}"

    def _given(self, request: Request) -> list[str]:
        return [setting for setting in request.settings if setting.startswith(f"{self.method}.weights=")]


NEXT_TOKEN = Companion("ss-shared-ar", "next-token")  # plain decoding of the base with a LoRA on next tokens alone
EQ1 = Companion(
    "ss-shared",
    "ss-shared-eq1",
    "is trained by the 2024 paper's eq. 1: main rows do not see streams",
    "is trained by eq. 3 of the ACL paper, under which main rows see their streams, as the 2024 paper's do not (eq. 1)",
)
APP_DRAFT = Companion(
    "sd",
    "draft-apps",
    "drafts with a model that one LoRA tuned for the three applications together; the paper's draft model has a LoRA "
    "for each of them",
    "drafts with a model that is not tuned for the applications, as the paper's is, by LoRA",
)
