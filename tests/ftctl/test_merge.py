"""Our part of a client's config goes into the user's, and the rest stays."""

import json
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftctl.merge import Unreadable, merge, merged_text

OURS = {"provider": {"ftd": {"url": "http://127.0.0.1:1"}}}
TABLE = {"model_providers": {"ftd": {"name": "ftd", "base_url": "http://127.0.0.1:1/v1"}}}

trees = st.recursive(
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=3),
    lambda inner: st.dictionaries(st.text(max_size=3), inner | st.integers(), max_size=3),
    max_leaves=8,
)


def covers(tree, part):
    if not isinstance(part, dict):
        return tree == part
    return isinstance(tree, dict) and all(k in tree and covers(tree[k], v) for k, v in part.items())


@given(trees, trees)
def test_ours_is_in_it_and_nothing_else_is_lost(was, ours):
    merged = merge(was, ours)
    assert covers(merged, ours)
    assert merge(merged, ours) == merged
    for key in was.keys() - ours.keys():
        assert merged[key] == was[key]


def test_lists_of_named_things_are_merged_by_their_id():
    was = {"models": [{"id": "a", "x": 1}, {"id": "b"}]}
    assert merge(was, {"models": [{"id": "a", "x": 2}]}) == {
        "models": [{"id": "b"}, {"id": "a", "x": 2}]
    }
    assert merge({"models": [1]}, {"models": [{"id": "a"}]}) == {"models": [{"id": "a"}]}


def test_empty_file():
    assert json.loads(merged_text("a.json", "", OURS)) == OURS
    assert tomllib.loads(merged_text("a.toml", "", TABLE)) == TABLE


def test_what_stands_already_keeps_every_byte():
    text = '// mine\n{"provider":{"ftd":{"url":"http://127.0.0.1:1"},},}'
    assert merged_text("a.jsonc", text, OURS) == text
    toml = '[model_providers.ftd]\nbase_url="http://127.0.0.1:1/v1" # mine\nname="ftd"'
    assert merged_text("config.toml", toml, TABLE) == toml


def test_defaults_fill_only_what_is_missing():
    text = '{"date": 2}'
    assert merged_text("a.json", text, {}, {"date": 1}) == text
    merged = json.loads(merged_text("a.json", text, {"x": 1}, {"date": 1, "version": 1}))
    assert merged == {"version": 1, "date": 2, "x": 1}


def test_json_with_comments_and_trailing_commas():
    text = """\ufeff{
      // a comment with "quotes" and , commas
      "theme": "dark // no comment, ]", /* one
      more, } */
      "provider": {"mine": {"key": "k\\"," },}, // last
    }"""
    assert json.loads(merged_text("a.json", text, OURS)) == {
        "theme": "dark // no comment, ]",
        "provider": {"mine": {"key": 'k",'}, **OURS["provider"]},
    }


@pytest.mark.parametrize("text", ["[1]", "{", '"x"', "{'a': 1}"])
def test_what_is_no_json_object_is_not_touched(text):
    with pytest.raises(Unreadable):
        merged_text("a.json", text, OURS)


USERS = """# my codex
model = "gpt-5"   # the best

[model_providers.ftd]
base_url = "http://127.0.0.1:9/v1"
stream_max_retries = 7

[model_providers.other]  # keep
name = "other"

[tui]
notifications = [
  "a",
]
"""


def test_toml_outside_of_our_table_keeps_every_byte():
    text = merged_text("config.toml", USERS, TABLE)
    ours = TABLE["model_providers"]["ftd"]
    wanted = tomllib.loads(USERS)
    wanted["model_providers"]["ftd"] |= ours
    assert tomllib.loads(text) == wanted
    start, end = USERS.index("[model_providers.ftd]"), USERS.index("[model_providers.other]")
    assert text.startswith(USERS[:start] + USERS[end:])
    assert merged_text("config.toml", text, TABLE) == text


@pytest.mark.parametrize(
    "text", ["model_providers = {ftd = {name = 'x'}}", "model_providers.ftd.name = 'x'", "x ="]
)
def test_toml_in_another_form_is_refused(text):
    with pytest.raises(Unreadable):
        merged_text("config.toml", text, TABLE)
