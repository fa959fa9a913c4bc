"""EAGLE-3 and PARD drafters from outside: against their definition run plainly with transformers,
on one loop.

tests/test_vllm.py compares both with vLLM.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from conftest import POSITIONS, PROMPT, VOCAB, Checkpoints, Run, Tiny, check_one_line, propose
from sharpdraft import FixedSlope, SharpDraftError, scale_queries
from sharpdraft.adapters.attach import attach
from sharpdraft.decode.session import Session, replay
from sharpdraft.drafters import load_drafter
from sharpdraft.drafters.eagle3 import Eagle3
from sharpdraft.drafters.eagle3 import save as save_eagle3
from sharpdraft.drafters.pard import Pard
from sharpdraft.method.scale import Policy
from sharpdraft.model.causal_lm import CausalLM

LOW = FixedSlope(9, slope=0.7, top_k=4, max_scale=8.0)
SIZE, INNER, HEADS, KV, DIM = 32, 48, 4, 2, 8
VARIANTS: dict[str, dict[str, Any]] = {
    "eagle 3": {},
    "eagle 3.1": {"fc_norm": True, "norm_output": True},
    "normed residual, norm before fusion": {
        "norm_before_residual": True,
        "eagle_config": {"norm_before_fc": True},
    },
    "reduced vocabulary": {"draft_vocab_size": 40},
}


def eagle_config(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": SIZE,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": DIM,
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": 1e-6,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "draft_vocab_size": VOCAB,
    } | changes


def eagle_tensors(config: dict[str, Any], target: CausalLM, seed: int = 3) -> dict[str, Tensor]:
    """Random weights under the published names, norms too; the head is the target's, so that some
    guesses are right."""
    rng = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> Tensor:
        return 0.35 * torch.randn(shape, generator=rng)

    def norm(size: int) -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=rng)

    count = config["draft_vocab_size"]
    kept = torch.arange(VOCAB)[5 : 5 + count] if count < VOCAB else torch.arange(VOCAB)
    attn, mlp = "midlayer.self_attn", "midlayer.mlp"
    tensors = {
        "fc.weight": matrix(SIZE, 3 * SIZE),
        f"{attn}.q_proj.weight": matrix(HEADS * DIM, 2 * SIZE),
        f"{attn}.k_proj.weight": matrix(KV * DIM, 2 * SIZE),
        f"{attn}.v_proj.weight": matrix(KV * DIM, 2 * SIZE),
        f"{attn}.o_proj.weight": matrix(SIZE, HEADS * DIM),
        f"{mlp}.gate_proj.weight": matrix(INNER, SIZE),
        f"{mlp}.up_proj.weight": matrix(INNER, SIZE),
        f"{mlp}.down_proj.weight": matrix(SIZE, INNER),
        "norm.weight": norm(SIZE),
        "midlayer.input_layernorm.weight": norm(SIZE),
        "midlayer.hidden_norm.weight": norm(SIZE),
        "midlayer.post_attention_layernorm.weight": norm(SIZE),
        "lm_head.weight": target.head.weight[kept].clone(),
    }
    if config.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": norm(SIZE) for i in range(3)}
    if (config.get("eagle_config") or {}).get("norm_before_fc"):
        tensors["input_norm.weight"] = norm(3 * SIZE)
    if count < VOCAB:
        tensors["d2t"] = kept - torch.arange(count)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, kept, True)
    return tensors


def plain_chain(
    config: dict[str, Any],
    w: dict[str, Tensor],
    tiny: Tiny,
    text: list[int],
    count: int,
    policy: Policy | None,
) -> list[int]:
    """EAGLE-3 by its definition, with nothing cached: the whole row sequence anew for every
    draft."""
    eps, size = config["rms_norm_eps"], (SIZE,)

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], w[name], eps)

    with torch.inference_mode():
        states = tiny.model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        taps = [states[i] for i in config["eagle_aux_hidden_state_layer_ids"]]
        if config.get("fc_norm"):
            taps = [
                F.rms_norm(tap, size, w[f"fc_norm.{i}.weight"], eps) for i, tap in enumerate(taps)
            ]
        fused = torch.cat(taps, -1)
        if "input_norm.weight" in w:
            fused = norm(fused, "input_norm.weight")
        hidden = (fused @ w["fc.weight"].T)[0]
        tokens = list(text[1:])
        rotary = LlamaRotaryEmbedding(
            LlamaConfig(**{k: v for k, v in config.items() if k != "architectures"})
        )
        drafts: list[int] = []
        while len(drafts) < count:
            n = len(tokens)
            normed = norm(hidden, "midlayer.hidden_norm.weight")
            embedded = norm(tiny.target.embedding[tokens], "midlayer.input_layernorm.weight")
            row = torch.cat((embedded, normed), -1)
            q, k, v = (
                (row @ w[f"midlayer.self_attn.{p}_proj.weight"].T)
                .view(1, n, -1, DIM)
                .transpose(1, 2)
                for p in "qkv"
            )
            q, k = apply_rotary_pos_emb(q, k, *rotary(hidden, torch.arange(n)[None]))
            if policy is not None:
                q = scale_queries(q, policy.gain(torch.arange(1, n + 1))[None, None])
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            mixed = mixed.transpose(1, 2).reshape(n, -1) @ w["midlayer.self_attn.o_proj.weight"].T
            out = mixed + (normed if config.get("norm_before_residual") else hidden)
            x = norm(out, "midlayer.post_attention_layernorm.weight")
            gate, up = (x @ w[f"midlayer.mlp.{p}_proj.weight"].T for p in ("gate", "up"))
            out = out + (F.silu(gate) * up) @ w["midlayer.mlp.down_proj.weight"].T
            final = norm(out, "norm.weight")
            draft = int((final[-1] @ w["lm_head.weight"].T).argmax())
            draft += int(w["d2t"][draft]) if "d2t" in w else 0
            drafts.append(draft)
            tokens.append(draft)
            hidden = torch.cat((hidden, (final if config.get("norm_output") else out)[-1:]))
    return drafts


@pytest.mark.parametrize("policy", [None, LOW], ids=["frozen", "scaled"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_eagle_drafts_what_its_definition_drafts(
    llama: Tiny, variant: str, policy: Policy | None
) -> None:
    config = eagle_config(**VARIANTS[variant])
    tensors = eagle_tensors(config, llama.target)
    session = Session(llama.target, Eagle3(config, tensors, llama.target))
    varied = set()
    for length in (2, 3, 20, 60, 61):
        session.rewind(0)
        session.read(llama.text[:length])
        session.rewind(length)
        session.drafts.length = length - 1
        drafts = propose(
            session.drafter, session.drafts, llama.text[length - 1], 4, policy
        ).tolist()
        assert drafts == plain_chain(config, tensors, llama, llama.text[:length], 4, policy)
        varied.add(tuple(drafts))
    assert len(varied) > 2


def make_pard(seed: int = 0, vocab: int = VOCAB, positions: int = 512) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=SIZE,
        intermediate_size=INNER,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV,
        max_position_embeddings=positions,
        initializer_range=0.4,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()


def pard_of(tiny: Tiny, seed: int = 0) -> tuple[Pard, LlamaForCausalLM]:
    model = make_pard(seed)
    with torch.no_grad():
        model.lm_head.weight.copy_(tiny.model.lm_head.weight)
    return Pard(CausalLM(model), VOCAB - 1, tiny.target), model


@pytest.mark.parametrize("policy", [None, LOW], ids=["frozen", "scaled"])
def test_pard_drafts_what_transformers_says_at_its_masks(
    llama: Tiny, policy: Policy | None
) -> None:
    drafter, model = pard_of(llama)
    cache = drafter.new_cache(POSITIONS)
    varied = set()
    for length, count in ((1, 3), (20, 5), (21, 1), (60, 5)):
        drafter.observe([cache], [llama.text[cache.length : length - 1]])
        drafts = propose(drafter, cache, llama.text[length - 1], count, policy).tolist()
        with torch.inference_mode(), attach(model, policy):
            ids = torch.tensor([llama.text[:length] + [VOCAB - 1] * (count - 1)])
            expected = model(ids).logits[0, -count:].argmax(-1).tolist()
        assert drafts == expected
        varied.add(tuple(drafts))
    assert len(varied) > 2


@pytest.fixture(params=["eagle3", "pard"])
def family(request: pytest.FixtureRequest, llama: Tiny) -> Callable[[], Any]:
    if request.param == "pard":
        return lambda: pard_of(llama)[0]
    config = eagle_config(fc_norm=True, norm_output=True)
    return lambda: Eagle3(config, eagle_tensors(config, llama.target), llama.target)


@pytest.mark.parametrize("policy", [None, LOW], ids=["frozen", "scaled"])
def test_output_is_the_targets_whatever_is_drafted(
    llama: Tiny, family: Callable[[], Any], policy: Policy | None
) -> None:
    session = Session(llama.target, family(), policy, block=5)
    rounds = list(session.generate(llama.text[:PROMPT], 120))
    assert session.tokens == llama.text[: PROMPT + 120]
    accepted = [r.accepted for r in rounds[1:]]
    assert max(accepted) > 0, "a drafter that is never right shows nothing"
    # Turns, arms and a rewind on one cache write what a fresh session writes, with the same rounds.
    session.rewind(PROMPT + 30)
    session.drafting = False
    list(session.generate([llama.text[PROMPT + 30]], 5))
    session.drafting = True
    session.rewind(PROMPT + 20)
    again = list(session.generate(llama.text[PROMPT + 20 : PROMPT + 40], 60))
    fresh = Session(llama.target, family(), policy, block=5)
    expected = list(fresh.generate(llama.text[: PROMPT + 40], 60))
    assert [(r.tokens, r.accepted) for r in again] == [(r.tokens, r.accepted) for r in expected]


def test_another_text_on_a_used_cache(llama: Tiny, family: Callable[[], Any]) -> None:
    session, fresh = (Session(llama.target, family(), block=5) for _ in range(2))
    list(session.generate(llama.text[:PROMPT], 60))
    session.rewind(0)
    other = llama.text[PROMPT : 2 * PROMPT + 9][::-1]
    again, expected = (list(s.generate(other, 60)) for s in (session, fresh))
    assert [(r.tokens, r.accepted) for r in again] == [(r.tokens, r.accepted) for r in expected]


def test_replay_is_what_a_live_run_does(llama: Tiny, family: Callable[[], Any]) -> None:
    """Of other policies too, and it leaves the caches as they were."""
    live: dict[str, list[tuple[int, int]]] = {}
    for name, policy in (("frozen", None), ("low", LOW)):
        session = Session(llama.target, family(), policy, block=4)
        rounds = list(session.generate(llama.text[:PROMPT], 100))[1:]
        live[name] = [(r.context, r.accepted) for r in rounds]
    masses: list[Tensor] = []
    reader = Session(llama.target, family(), block=4)
    reader.read(llama.text[: PROMPT + 100])
    reader.tokens = llama.text[: PROMPT + 100]
    for _ in range(2):
        for name, policy in (("frozen", None), ("low", LOW)):
            found = replay(reader, PROMPT, policy, lambda layer, mass: masses.append(mass))
            assert [(r.context, r.accepted) for r in found] == live[name]
    assert live["low"] != live["frozen"]
    assert all(
        mass.shape[0] == HEADS and bool(((mass > 0) & (mass <= 1.0001)).all()) for mass in masses
    )


# Checkpoints


def write_eagle(
    folder: Path, layout: str, config: dict[str, Any], tensors: dict[str, Tensor]
) -> Path:
    folder.mkdir()
    if layout == "safeailab":
        save_eagle3(folder, config, tensors)
    elif layout == "pytorch_model.bin":
        torch.save(tensors, folder / "pytorch_model.bin")
        (folder / "config.json").write_text(json.dumps(config))
    else:
        named = {k.replace("midlayer.", "layers.0."): v.contiguous() for k, v in tensors.items()}
        save_file(named, str(folder / "model.safetensors"))
        ours = (
            "architectures",
            "eagle_aux_hidden_state_layer_ids",
            "draft_vocab_size",
            "fc_norm",
            "norm_output",
        )
        outer = {k: v for k, v in config.items() if k in ours} | {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "norm_before_residual": False,
            "speculators_config": {"proposal_methods": [{"speculative_tokens": 3}]},
            "transformer_layer_config": {k: v for k, v in config.items() if k not in ours},
        }
        (folder / "config.json").write_text(json.dumps(outer))
    return folder


@pytest.mark.parametrize("layout", ["safeailab", "pytorch_model.bin", "speculators"])
def test_eagle_layouts(llama: Tiny, tmp_path: Path, layout: str) -> None:
    config = eagle_config(draft_vocab_size=40, fc_norm=True)
    tensors = eagle_tensors(config, llama.target)
    loaded = load_drafter(write_eagle(tmp_path / "drafter", layout, config, tensors), llama.target)
    assert isinstance(loaded, Eagle3) and loaded.taps == (0, 1, 2)
    assert loaded.block_size == (4 if layout == "speculators" else 6)
    for drafter in (loaded, Eagle3(config, tensors, llama.target)):
        session = Session(llama.target, drafter, block=4)
        rounds = list(session.generate(llama.text[:PROMPT], 40))
        if drafter is loaded:
            expected = rounds
    assert [r.tokens for r in rounds] == [r.tokens for r in expected]


def test_pard_checkpoint(llama: Tiny, tmp_path: Path) -> None:
    model = make_pard()
    model.config.pard_token = VOCAB - 1
    model.save_pretrained(tmp_path)
    loaded = load_drafter(tmp_path, llama.target)
    assert isinstance(loaded, Pard) and loaded.mask_token == VOCAB - 1
    cache = loaded.new_cache(POSITIONS)
    loaded.observe([cache], [llama.text[:19]])
    own = Pard(CausalLM(model), VOCAB - 1, llama.target)
    other = own.new_cache(POSITIONS)
    own.observe([other], [llama.text[:19]])
    assert torch.equal(
        propose(loaded, cache, llama.text[19], 5), propose(own, other, llama.text[19], 5)
    )


EAGLE_ERRORS: dict[str, tuple[Callable[[dict[str, Any], dict[str, Tensor]], Any], str]] = {
    "hidden size": (lambda c, t: c.update(hidden_size=64), "hidden size is 64"),
    "vocabulary": (lambda c, t: c.update(vocab_size=99), "vocabulary size is 99"),
    "layers read": (
        lambda c, t: c.update(eagle_aux_hidden_state_layer_ids=[1, 2, 9]),
        "outputs of layers",
    ),
    "embedding read": (
        lambda c, t: c.update(eagle_aux_hidden_state_layer_ids=[0, 1, 2]),
        "outputs of layers",
    ),
    "two layers": (lambda c, t: c.update(num_hidden_layers=2), "has 2 layers"),
    "lacking": (
        lambda c, t: t.pop("midlayer.hidden_norm.weight"),
        "lacks 1 tensors, first layers.0.hidden_norm",
    ),
    "shape": (lambda c, t: t.update({"fc.weight": torch.ones(SIZE, SIZE)}), "fc.weight has shape"),
    "unknown": (
        lambda c, t: t.update({"midlayer.self_attn.q_norm.weight": torch.ones(8)}),
        "does not know, first",
    ),
    "map": (
        lambda c, t: (c.update(draft_vocab_size=VOCAB - 1), t.update(_map())),
        "outside the target's vocabulary",
    ),
    "no map": (lambda c, t: c.update(draft_vocab_size=VOCAB - 1), "lacks"),
    "nonsense": (
        lambda c, t: c.update(num_attention_heads="many"),
        "not one of an EAGLE-3 checkpoint",
    ),
}


def _map() -> dict[str, Tensor]:
    return {"d2t": torch.full((VOCAB - 1,), 7), "lm_head.weight": torch.ones(VOCAB - 1, SIZE)}


@pytest.mark.parametrize("error", EAGLE_ERRORS)
def test_eagle_checkpoints_that_do_not_fit(llama: Tiny, error: str) -> None:
    change, message = EAGLE_ERRORS[error]
    config = eagle_config()
    tensors = eagle_tensors(config, llama.target)
    change(config, tensors)
    with pytest.raises(SharpDraftError, match=message):
        Eagle3(config, tensors, llama.target)


def test_pard_checkpoints_that_do_not_fit(llama: Tiny, tmp_path: Path) -> None:
    with pytest.raises(SharpDraftError, match="vocabulary size is 50"):
        Pard(CausalLM(make_pard(vocab=50)), 3, llama.target)
    with pytest.raises(SharpDraftError, match="pard_token is 64"):
        Pard(CausalLM(make_pard()), VOCAB, llama.target)
    make_pard().save_pretrained(tmp_path)
    with pytest.raises(SharpDraftError, match="has no pard_token"):
        Pard.load(tmp_path, llama.target)
    short = Pard(CausalLM(make_pard(positions=30)), 3, llama.target)
    session = Session(llama.target, short, block=5)
    with pytest.raises(SharpDraftError, match="has 30 positions"):
        list(session.generate(llama.text[:PROMPT], 100))


# Side by side


@pytest.fixture
def three(saved: Checkpoints, llama: Tiny, tmp_path: Path) -> dict[str, Path]:
    """A drafter of each family for the saved target, whose weights are the tiny Llama's."""
    config = eagle_config(fc_norm=True, norm_output=True)
    save_eagle3(tmp_path / "eagle", config, eagle_tensors(config, llama.target))
    model = make_pard()
    model.config.pard_token = VOCAB - 1
    model.save_pretrained(tmp_path / "pard")
    for name in ("eagle", "pard"):
        shutil.copy(saved.drafter / "sharpdraft.json", tmp_path / name)
    (tmp_path / "drafter").symlink_to(saved.drafter)
    return {name: tmp_path / name for name in ("drafter", "eagle", "pard")}


def test_drafters_side_by_side_draft_what_they_draft_alone(
    run: Run, saved: Checkpoints, three: dict[str, Path], tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        '{"name": "a", "turns": ["w9", "w10 w11", "w40 w41"]}\n{"name": "b", "prompt": "w30"}\n'
    )
    options = (
        "--target",
        saved.target,
        "--prompts",
        prompts,
        "--answer-tokens",
        25,
        "--reference",
        40,
    )
    arms = ("--arms", "ar,frozen,sharpdraft", "--replay", "frozen,fixed@1.3", "--mass-every", 5)

    def rows(drafters: str, out: Path) -> list[dict[str, Any]]:
        result = run("bench", *options, *arms, "--drafter", drafters, "--out", out, "--json")
        assert result.code == 0, result.err
        assert json.loads(result.out)["differences"] == []
        return [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()[1:]]

    together = rows(",".join(map(str, three.values())), tmp_path / "together")
    assert list(together[0]["arms"]) == [
        "ar",
        *(f"{n}:{a}" for n in three for a in ("frozen", "sharpdraft")),
    ]
    different = set()
    for name, folder in three.items():
        alone = rows(str(folder), tmp_path / f"alone-{name}")
        for one, all_ in zip(alone, together, strict=True):
            assert one["tokens"] == all_["tokens"]
            for place, kinds in (
                ("arms", ("frozen", "sharpdraft")),
                ("replayed", ("frozen", "fixed@1.3")),
            ):
                for kind in kinds:
                    mine, theirs = one[place][kind], all_[place][f"{name}:{kind}"]
                    assert mine["rounds"] == theirs["rounds"]
                    # Rounds of other lengths wrote the Keys, in another order of additions.
                    for own, other in zip(
                        mine.get("mass", []), theirs.get("mass", []), strict=True
                    ):
                        assert own == pytest.approx(other, abs=1e-5)
            different.add(json.dumps(one["arms"]["frozen"]["rounds"]))
    assert len(different) > len(together), (
        "the drafters must draft differently for this to say anything"
    )
    cells = json.loads(run("bench", *options, *arms, "--drafter", ",".join(map(str, three.values())), "--out",
                           tmp_path / "together", "--json").out)["cells"]  # fmt: skip
    names = [cell["arm"] for cell in cells]
    assert names == [
        "ar",
        *(f"{n}:{a}" for n in three for a in ("frozen", "sharpdraft", "fixed@1.3")),
    ]
    gains = {cell["arm"] for cell in cells if cell["gain"] is not None}
    assert gains == {f"{n}:{a}" for n in three for a in ("sharpdraft", "fixed@1.3")}


def test_drafters_of_one_name_or_with_a_window_are_refused(
    run: Run, saved: Checkpoints, three: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "prompts.txt").write_text("w9\n")
    options = ("bench", "--target", saved.target, "--prompts", tmp_path / "prompts.txt")
    both = f"{three['drafter']},{three['eagle']}"
    check_one_line(run(*options, "--drafter", f"{both},{three['eagle']}"), "names must differ")
    check_one_line(run(*options, "--drafter", both, "--arms", "window@40"), "one at a time")
    check_one_line(run(*options, "--drafter", "eagle3"), "no eagle3 drafter comes with")
