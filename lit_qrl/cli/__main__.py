"""`python -m lit_qrl.cli` is `lit-qrl`."""

import os
import sys

if sys.path and sys.path[0] == os.getcwd() and not sys.flags.safe_path:
    sys.path.append(sys.path.pop(0))  # Python puts the working directory first, where a torch.py would be torch

from lit_qrl.cli.main import main

main()
