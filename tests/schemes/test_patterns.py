"""Layer patterns: what fits what, and a pattern that fits nothing is said."""

from __future__ import annotations

import pytest

from quanteval.errors import ConfigError
from quanteval.schemes.patterns import chosen, expand, linear_names, matches

NAME = "model.layers.10.mlp.down_proj"


@pytest.mark.parametrize(
    ("pattern", "fits"),
    [
        ("down_proj", True),
        (NAME, True),
        ("layers.10", True),
        ("mlp", True),
        ("layers.1", False),
        ("proj", False),
        ("*.mlp.*", True),
        ("model.layers.1?.*", True),
        ("model.layers.?.*", False),
        (r"re:model\.layers\.(9|10)\..*", True),
        (r"re:layers\.10", False),
        ("lm_head", False),
    ],
)
def test_a_pattern_is_parts_of_a_name_a_glob_or_an_expression(pattern, fits):
    assert matches(NAME, (pattern,)) is fits
    assert matches(NAME, ("nothing", pattern)) is fits
    assert not matches(NAME, ())


def test_layers_are_named_in_the_order_of_the_model(tiny_source):
    names = linear_names(tiny_source)
    assert len(names) == 15
    assert names[-1] == "lm_head"
    left = expand(tiny_source, ("layers.0", "lm_head"))
    assert len(left) == 8
    assert chosen(tiny_source, ("layers.0", "lm_head")) == [n for n in names if n not in left]
    assert chosen(tiny_source, ()) == names


@pytest.mark.parametrize("pattern", ["lm-head", "layers.7", "re:down_proj"])
def test_a_pattern_that_fits_no_layer_is_an_error(tiny_source, pattern):
    with pytest.raises(ConfigError, match="fits no linear layer"):
        expand(tiny_source, ("lm_head", pattern))


def test_a_broken_expression_is_named():
    with pytest.raises(ConfigError, match=r're:\(" is no regular expression'):
        matches(NAME, ("re:(",))
