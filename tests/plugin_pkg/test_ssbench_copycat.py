"""Conformance checks on tiny random models: a failure names what is wrong, with the smallest example."""

from ssbench_copycat import Copycat

from specbench_ss import check_decoder


def test_it_passes_the_checks() -> None:
    check_decoder(Copycat)
