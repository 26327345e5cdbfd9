"""``python -m nmkernels VERB``: see ``nmkernels.cli``."""

import os
import sys
import traceback

from .cli import main

if __name__ == "__main__":
    if "RANK" not in os.environ:
        raise SystemExit(main())
    # one of several ranks: threads of a process group may abort the interpreter while it exits, or keep it alive after an error while
    # the other ranks wait (gloo, torch 2.13.0, 2026-11)
    status: object = 1
    try:
        status = main()
    except SystemExit as stop:
        status = stop.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else 1)
