"""Arms by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sharpdraft.decode.session import Arm
from sharpdraft.errors import SharpDraftError
from sharpdraft.lab.arms import AR, arms_of
from sharpdraft.method.policies import Constant, FixedSlope
from sharpdraft.method.settings import DraftSettings, FixedLength, Window

BASE = DraftSettings(FixedSlope(100))


def test_arms_by_name() -> None:
    names = ("ar", "frozen", "sharpdraft", "sharpdraft@64", "fixed@1.2", "window@512")
    assert arms_of(names, {"": BASE}) == (
        Arm("ar"),
        Arm("frozen", ""),
        Arm("sharpdraft", "", BASE),
        Arm("sharpdraft@64", "", DraftSettings(FixedSlope(64))),
        Arm("fixed@1.2", "", DraftSettings(Constant(1.2))),
        Arm("window@512", "", DraftSettings(view=Window(512))),
    )


def test_arms_compose() -> None:
    (arm,) = arms_of(["window@1024+sharpdraft@512:slope=4+sinks@4+drafts@3"], {"": BASE})
    assert arm.settings == DraftSettings(
        FixedSlope(512, slope=4), Window(1024, sinks=4), FixedLength(3)
    )
    (arm,) = arms_of(["sharpdraft+window@90"], {"": BASE})
    assert arm.settings == DraftSettings(BASE.scale, Window(90))


def test_arms_of_several_drafters() -> None:
    other = DraftSettings(FixedSlope(50), length=FixedLength(3))
    found = arms_of(("frozen", "ar", "sharpdraft"), {"one": BASE, "two": other})
    assert found == (
        AR,
        Arm("one:frozen", "one"),
        Arm("one:sharpdraft", "one", BASE),
        Arm("two:frozen", "two"),
        Arm("two:sharpdraft", "two", other),
    )
    assert arms_of(("frozen",), {"one": BASE}) == (Arm("frozen", "one"),)
    assert arms_of(("ar",), {}) == (AR,)


def test_drafts_of_arms_that_do_not_say_how_many() -> None:
    own = replace(BASE, length=FixedLength(3))
    names = ("ar", "frozen", "frozen+drafts@2", "sharpdraft")
    drafts = [arm.settings.drafts for arm in arms_of(names, {"": own}, drafts=4)]
    assert drafts == [None, 4, 2, 4]
    assert [arm.settings.drafts for arm in arms_of(names, {"": own})] == [None, None, 2, 3]


@pytest.mark.parametrize(
    "name",
    [
        "",
        "AR",
        "sharp",
        "fixed",
        "fixed@",
        "fixed@0",
        "fixed@-1",
        "fixed@1.2.3",
        "sharpdraft@16",
        "sharpdraft@1.5",
        "sharpdraft@x",
        "frozen@2",
        "window@0",
        "window@1.5",
        "window",
        "ar ",
    ],
)
def test_arms_that_do_not_exist(name: str) -> None:
    with pytest.raises(SharpDraftError) as caught:
        arms_of([name], {"": BASE})
    assert f"arm '{name.strip()}'" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("froze", "arm 'froze': unknown; known are ar, frozen, sharpdraft, "),
        ("ar+window@9", "arm 'ar' in 'ar+window@9': unknown"),
        ("window@9+window@10", "arm 'window@10' in 'window@9+window@10': view is named twice"),
        ("fixed@2+sharpdraft", "scale is named twice"),
        ("sinks@4", "sinks need a window"),
        ("window@9+sinks@0", "arm 'sinks@0' in"),
    ],
)
def test_compositions_that_make_no_sense(name: str, message: str) -> None:
    with pytest.raises(SharpDraftError) as caught:
        arms_of(["ar", name], {"": BASE})
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_an_arm_that_is_named_twice() -> None:
    with pytest.raises(SharpDraftError, match="arm 'frozen' is named twice"):
        arms_of(["frozen", "ar", "frozen"], {"": BASE})
