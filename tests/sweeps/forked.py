"""`python forked.py N -m MODULE ...`: N processes of a program with torchrun's variables, forked
where torch is imported. One that fails ends the others."""

import os
import runpy
import signal
import socket
import sys
import traceback

import torch._dynamo  # noqa: F401 (a run of two processes needs it)
import toy_run  # noqa: F401

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    PORT = free.getsockname()[1]
RANKS = int(sys.argv[1])
started = []
for rank in range(RANKS):
    started.append(os.fork())
    if started[-1] == 0:
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS,
               "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT}  # fmt: skip
        os.environ.update({name: str(value) for name, value in own.items()})
        sys.argv = sys.argv[3:]
        code = 0
        try:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        except SystemExit as end:
            code = int(bool(end.code))
        except BaseException:
            code = 1
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)  # to take torch down again would take as long as the run

failed = False
while started:
    pid, status = os.wait()
    started.remove(pid)
    if status and not failed:
        failed = True
        for other in started:
            os.kill(other, signal.SIGTERM)
sys.exit(failed)
