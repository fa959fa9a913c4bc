"""How kernels are built, and life without them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sharpdraft import FixedSlope, Session
from sharpdraft.model.causal_lm import CausalLM
from sharpdraft.model.kernels import build, library
from support.families import drafter_of
from support.tiny import Tiny


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("family", ["none", "dflash", "eagle3", "pard"])
def test_the_same_is_written_without_kernels(
    family: str, llama: Tiny, without_kernels: None
) -> None:
    plain = replace(llama, target=CausalLM.of(llama.model))
    session = Session(plain.target, drafter_of(family, plain), FixedSlope(33))
    assert [t for r in session.generate(llama.text[:25], 60) for t in r.tokens] == llama.text[25:85]


@pytest.mark.parametrize("fault", ["no compiler", "a compiler that fails"])
def test_a_machine_that_cannot_build_them_says_so_and_goes_on(
    fault: str,
    tiny: Tiny,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bad = tmp_path / "cxx"
    bad.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho sorry, no >&2; exit 1\n')
    bad.chmod(0o755)
    monkeypatch.setenv(
        "CXX", str(bad) if fault == "a compiler that fails" else str(tmp_path / "absent")
    )
    monkeypatch.setenv("SHARPDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "library", library.__wrapped__)
    with caplog.at_level(logging.WARNING):
        session = Session(tiny.target)
        assert [t for r in session.generate(tiny.text[:25], 5) for t in r.tokens] == tiny.text[
            25:30
        ]
    assert ("no C++ compiler" if fault == "no compiler" else "sorry, no") in caplog.text
    assert not list((tmp_path / "cache").rglob("*.so"))


@pytest.mark.usefixtures("compiled")
def test_they_are_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARPDRAFT_CACHE", str(tmp_path))
    assert library.__wrapped__(8) is not None
    (built,) = tmp_path.rglob("*.so")
    made = built.stat().st_mtime_ns
    assert library.__wrapped__(8) is not None
    assert [path.stat().st_mtime_ns for path in tmp_path.rglob("*.so")] == [made]
