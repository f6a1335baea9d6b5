"""A run that imports what it needs while another one is measured, and begins when that one is over.

    python gate.py fit --config …

is `lit-qrl fit --config …`, which waits after its imports for the file that $RUN_GATE names. Started by `iteration.py`.
"""

import os
import sys
import time
from pathlib import Path


def wait() -> None:
    """Return when the file that $RUN_GATE names is there, or at once without that name."""
    gate = os.environ.get("RUN_GATE")
    while gate and not Path(gate).exists():
        time.sleep(0.02)


if __name__ == "__main__":
    from lit_qrl.cli.main import main, uncollected
    from lit_qrl.run.torch_settings import let_segments_grow

    let_segments_grow()
    with uncollected():
        import lit_qrl.cli.training  # noqa: F401
    wait()
    sys.argv[0] = "lit-qrl"
    main()
