"""An example of every kind that settings are made of, which tests of all kinds draw from.

Every kind that is registered has to be here: `tests/method/test_registry.py` says which is not.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from sharpdraft.method.policies import Constant, FixedSlope, LayerSlopes
from sharpdraft.method.settings import DraftSettings, FixedLength, Window

positive = st.floats(0.01, 1e6)
caps = st.floats(1, 1e3)


@st.composite
def fixed_slopes(draw: st.DrawFn) -> FixedSlope:
    top_k = draw(st.integers(1, 200))
    return FixedSlope(top_k + draw(st.integers(1, 5000)), draw(positive), top_k, draw(caps))


@st.composite
def layer_slopes(draw: st.DrawFn) -> LayerSlopes:
    top_k = draw(st.integers(1, 200))
    slopes = tuple(draw(st.lists(positive | st.integers(1, 9), min_size=1, max_size=6)))
    return LayerSlopes(top_k + draw(st.integers(1, 5000)), slopes, top_k, draw(caps))


STRATEGIES: dict[str, st.SearchStrategy[Any]] = {
    "fixed_slope": fixed_slopes(),
    "constant": st.builds(Constant, positive | st.integers(1, 3)),
    "layer_slopes": layer_slopes(),
    "window": st.builds(Window, st.integers(1, 10**6), st.integers(0, 100)),
    "fixed": st.builds(FixedLength, st.integers(1, 64)),
}

scales = st.one_of(STRATEGIES["fixed_slope"], STRATEGIES["constant"], STRATEGIES["layer_slopes"])
draft_settings = st.builds(
    DraftSettings,
    st.none() | scales,
    st.none() | STRATEGIES["window"],
    st.none() | STRATEGIES["fixed"],
)
