"""The real daemon with a scripted model: ``run_scripted.py SOCKET SCENE``."""

import sys
import threading
from collections import deque
from dataclasses import replace
from pathlib import Path

from scripted_models import Script, ScriptedModels

from ftd import daemon
from ftd.config import Config, HttpAddress
from ftd.errors import CheckpointError, EngineFailed, FtdError
from ftd.lifecycle import succession
from ftd.text.textmodel import TextModel


class Models(ScriptedModels):
    """Engines of scene ``fails`` break as soon as they have served three tokens of a request."""

    def check(self, *args):
        return replace(super().check(*args), vocab=4096)  # as the demo model's

    def open_text(self, source):
        return TextModel(Path(sys.modules["ftd"].__file__).parent / "demo")

    def load(self, *args):
        loaded = super().load(*args)
        if SCENE == "fails":
            push = loaded.engine.push_hook
            loaded.engine.push_hook = lambda ticket: (push(ticket), self.sabotage(loaded, ticket))
        return loaded

    def sabotage(self, loaded, ticket):
        if ticket.produced == 3:
            loaded.engine.fail(EngineFailed("a step failed: out of memory"))


SCENES = {
    "ready": Script(engine={"step_s": 0.002}),
    "slow": Script(engine={"step_s": 0.05}),
    "loading": Script(gate=threading.Event()),
    "stuck": Script(stuck_s=60.0),
    "hangs": Script(engine={"close_s": 60.0}),
    "fails": Script(engine={"step_s": 0.002}),
    "refused": Script(refusal=CheckpointError("shard 2 is missing", hint="download it again")),
    "broken": Script(failures=deque([OSError("disk on fire")])),
}

socket, SCENE, port = sys.argv[1:]
succession.FIRST_DELAY_S = 0.01
if SCENE == "hangs":
    daemon.EXIT_WITHIN_S = 0.5
config = Config(
    model="a",
    socket=Path(socket),
    http=HttpAddress("127.0.0.1", int(port)),
    log_format="json",
    drain_timeout=1.0,
    hold=0.1 if SCENE == "loading" else 60.0,
)
try:
    code = daemon.run(config, Models(a=SCENES[SCENE], b=Script(beside=False, piece_s=0.05)))
except FtdError as error:
    print(f"ftd: error: {error}", file=sys.stderr)
    code = 1
for thread in threading.enumerate():
    if thread.name.startswith(("ftd-text", "ftd-work")):
        thread.join(1)  # told to end, and not waited for, by the daemon; a stuck one stays
threads = [t.name for t in threading.enumerate()]
threads = [name for name in threads if name not in ("MainThread", "ftd-exit-guard")]
print("threads left:", threads, file=sys.stderr)
sys.exit(code)
