"""`python forked.py N -m MODULE ...`: N processes of a program with torchrun's variables, forked
where torch is imported if they train. One that fails ends the others."""

import os
import runpy
import signal
import sys

ranks, failed, started = int(sys.argv[1]), False, []
together = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
if ".real" in sys.argv[-1]:
    import torch._dynamo  # noqa: F401 (a run of two processes needs it)
    import toy_run  # noqa: F401 (for its experiment)

    from tests.processes import meeting

    together, store = meeting(ranks)

for rank in range(ranks):
    started.append(os.fork())
    if started[-1] == 0:
        os.environ.update(together, RANK=str(rank), LOCAL_RANK=str(rank))
        sys.argv = sys.argv[3:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        sys.stdout.flush()
        os._exit(0)  # to take torch down would take as long as the run
while started:
    pid, status = os.wait()
    started.remove(pid)
    for other in started if status and not failed else ():
        os.kill(other, signal.SIGTERM)
    failed = failed or status != 0
sys.exit(failed)
