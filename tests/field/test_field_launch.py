"""``ftctl launch`` with a client that does what its config says, against a real ftd."""

import json
import os
import subprocess
import sys

from running_ftd import running_ftd

# takes its words from models.json as pi does, says what it got, and ends with 7
CLIENT = f"""#!{sys.executable}
import json, os, pathlib, sys, urllib.request
told = json.loads(pathlib.Path(os.environ["HOME"], ".pi/agent/models.json").read_text())
ftd = told["providers"]["ftd"]
asked = [{{"role": "user", "content": sys.argv[-1]}}]
body = {{"model": ftd["models"][0]["id"], "messages": asked}}
request = urllib.request.Request(
    ftd["baseUrl"] + "/chat/completions",
    json.dumps(body).encode(),
    {{"Authorization": "Bearer " + ftd["apiKey"]}},
)
with urllib.request.urlopen(request) as reply:
    print(json.load(reply)["choices"][0]["message"]["content"])
print(sys.argv[1:], os.environ.get("OPENAI_API_KEY"))
sys.exit(7)
"""


def test_launched_client_talks_to_this_ftd(tmp_path):
    binary = tmp_path / "bin" / "pi"
    binary.parent.mkdir()
    binary.write_text(CLIENT)
    binary.chmod(0o755)
    keys = tmp_path / "keys"
    keys.write_text("sk-local\n")
    environ = {
        "HOME": str(tmp_path),
        "PATH": f"{binary.parent}{os.pathsep}{os.environ['PATH']}",
        "OPENAI_API_KEY": "sk-of-a-cloud",
    }
    with running_ftd(context=32768, kv_tokens=32768, api_key_file=keys) as ftd:
        words = [sys.executable, "-m", "ftctl.cli", "--socket", str(ftd.socket), "launch", "pi"]

        def launch(*more):
            command = [*words, *more, "--", "-p", "S10"]
            return subprocess.run(command, check=False, capture_output=True, text=True, env=environ)

        planned = launch("--dry-run", "--json")
        assert not (tmp_path / ".pi").exists()
        done = launch()
    facts = json.loads(planned.stdout)
    assert facts["url"] == ftd.base and facts["context_tokens"] == 32768
    assert facts["cleared"] == ["OPENAI_API_KEY"] and "sk-local" not in planned.stdout
    assert done.returncode == 7, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "Hello from script ten."
    assert lines[1] == "['--provider', 'ftd', '--model', 'script-model', '-p', 'S10'] None"
    assert "wrote" in done.stderr and "models.json" in done.stderr
