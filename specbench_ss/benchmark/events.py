"""What a run tells whoever watches it."""

from __future__ import annotations

from typing import Protocol

from specbench_ss.runs.rows import Row


class Events(Protocol):
    """What a run tells whoever watches it. Must be quick: on_tokens is called between the steps of a sample.

    A subclass hears what it overrides, and nothing else.
    """

    def on_start(self, total: int) -> None:
        """Samples still to be made."""
        return

    def on_warm_up(self, label: str) -> None:
        """A method begins to answer a prompt, unmeasured."""
        return

    def on_sample_start(self, label: str, question_id: str) -> None:
        """A method begins to answer."""
        return

    def on_tokens(self, n: int) -> None:
        """n more tokens of the sample at hand."""
        return

    def on_sample(self, row: Row) -> None:
        """A sample is committed."""
        return

    def on_warning(self, text: str) -> None:
        """Something that the user should know; the run goes on."""
        return


class Silent(Events):
    """Hears everything and says nothing."""
