"""One thread a process while testing: spinning threads of several processes starve each other on few cores."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
