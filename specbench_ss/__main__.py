"""`python -m specbench_ss` is `ssbench`."""

import sys

from specbench_ss.cli import main

if __name__ == "__main__":
    sys.exit(main())
