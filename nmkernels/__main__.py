"""``python -m nmkernels VERB``: see ``nmkernels.cli``."""

import os
import sys
import traceback

from .cli import main

if __name__ == "__main__":
    if "RANK" not in os.environ:
        raise SystemExit(main())
    # one of several processes: the threads of a process group may abort an interpreter that takes itself down (gloo, torch 2.13.0,
    # 2026-11), or keep it alive after an error, while the others wait
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
