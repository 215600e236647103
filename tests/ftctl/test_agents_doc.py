"""docs/agents.md says of every client what the table says."""

import re
from pathlib import Path

from ftctl.agents import AGENTS

DOC = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()


def test_needs_stand_in_the_table():
    rows = {}
    for line in DOC.split("## Needs")[1].split("## By hand")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 6:
            rows[cells[0]] = cells
    for agent in AGENTS.values():
        _, install, apis, first, needed, _ = rows[agent.title]
        assert re.search(r"`(.*)`", install)[1] == agent.install.split(" (")[0]
        assert apis == ", ".join(agent.apis)
        assert first == f"{agent.first_request_tokens:,}"
        assert needed == f"{agent.min_context_tokens:,}"


def test_each_client_can_be_set_up_by_hand():
    for agent in AGENTS.values():
        assert f"### {agent.title}\n" in DOC
