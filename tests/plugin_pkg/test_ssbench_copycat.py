"""The laws of decoding, on tiny random models: what is wrong is named, with the smallest example."""

from ssbench_copycat import Copycat

from specbench_ss import check_decoder


def test_it_obeys_the_laws() -> None:
    check_decoder(Copycat)
