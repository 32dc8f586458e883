"""`python -m torchgraft`, the same as the command `graft`.
Commands live in `torchgraft.cli`.
"""

import sys

from torchgraft.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
