"""A suite goes by one name: its folder's."""

from __future__ import annotations

import pytest

from quanteval.config import compose, make_plan
from quanteval.errors import ConfigError


def test_a_suite_under_another_name_is_refused():
    with pytest.raises(ConfigError, match=r'task\.pydoc: name "other" must be "pydoc"'):
        make_plan(compose(["engine=fake", "task=[pydoc]", "task.pydoc.name=other"]))
    plan = make_plan(compose(["engine=fake", "task=[pydoc]"]))
    assert list(plan.tasks) == ["pydoc"]
