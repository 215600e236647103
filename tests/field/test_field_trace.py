"""``ftctl trace`` while requests run: whole rows of the router's choices, as a file."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from ask import ask
from click.testing import CliRunner
from running_ftd import running_ftd

from ftctl.cli import main
from ftd.control.client import Client, Refused
from ftd.control.protocol import Trace

LAYERS, EXPERTS, EACH = 4, 8, 2  # of the script model


@pytest.mark.parametrize("slots", [0, 9])
async def test_a_trace_holds_what_was_computed(tmp_path, slots):
    with running_ftd(expert_slots=slots) as ftd:
        file = tmp_path / "routing.npy"
        call = ["--json", "--socket", str(ftd.socket), "trace", str(file), "--tokens", "40"]
        tracing = asyncio.create_task(asyncio.to_thread(CliRunner().invoke, main, call))
        while not tracing.done():
            await ask(ftd.base, "S14")
        done = tracing.result()
        assert done.exit_code == 0, done.output
        told, routing = json.loads(done.stdout), np.load(file)
        assert (told["tokens"], routing.shape) == (40, (40, LAYERS, EACH))
        assert routing.dtype == np.uint8 and routing.max() < EXPERTS
        assert (routing[..., 0] != routing[..., 1]).all(), "a row chooses no expert twice"
        assert len(np.unique(routing, axis=0)) > 10


def test_a_trace_that_cannot_be_is_refused(tmp_path):
    with running_ftd() as ftd, Client(ftd.socket, timeout_s=30) as client:
        for tokens, timeout_s, words in [
            (10**9, 1.0, r"1,000,000,000 tokens of 8 bytes .* 1 to 8,388,608 are possible"),
            (0, 1.0, "1 to 8,388,608"),
            (8, 0.2, r"no token was computed within 0\.2 s"),
            (8, -1.0, "timeout_s is -1"),
        ]:
            with pytest.raises(Refused, match=words):
                client.call(Trace(tokens, timeout_s))
        nowhere = ["--socket", str(ftd.socket), "trace", str(tmp_path / "no" / "t.npy")]
        done = CliRunner().invoke(main, nowhere)
        assert done.exit_code == 2 and "cannot write into" in done.stderr
