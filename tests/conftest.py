"""Tiny targets and drafters that every test can afford, and a drafter that knows what comes next.

A random drafter next to never guesses right. These targets prefer a handful of tokens, so that a
random drafter on the same head guesses every number of tokens right now and then; where more is
needed, `Oracle` guesses as told.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from sharpdraft import cli
from sharpdraft.drafters.base import likeliest
from sharpdraft.drafters.dflash import DFlash, save
from sharpdraft.method.scale import Policy
from sharpdraft.model.cache import KVCache
from sharpdraft.model.causal_lm import CausalLM
from sharpdraft.model.kernels import library

# Built, or missed and said so, before any test looks at what is printed.
for _lanes in (8, 16):
    library(_lanes)

VOCAB = 64
POSITIONS = 256
PROMPT = 20
BLOCK = 6


@dataclass(frozen=True)
class Tiny:
    """A random target, and a text of which all behind the first PROMPT tokens is its greedy choice.

    Any `text[:n]` with n >= PROMPT is thus a prompt whose answer is `text[n:]`.
    """

    model: Any
    target: CausalLM
    text: list[int]


def make_model(family: str, **changes: Any) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": POSITIONS,
        "initializer_range": 0.4,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    } | changes
    torch.manual_seed(0 if family == "llama" else 1)
    model: Any = (
        LlamaForCausalLM(LlamaConfig(**sizes))
        if family == "llama"
        else Qwen3ForCausalLM(Qwen3Config(**sizes))
    )
    preferred = 5 if family == "llama" else 8
    with torch.no_grad():
        model.lm_head.weight[:10] *= 0.1
        model.lm_head.weight[10 + preferred :] *= 0.1
        model.lm_head.weight[10] *= 2
    return model.eval()


def continuation(model: Any, tokens: Sequence[int], count: int, **options: Any) -> list[int]:
    """What transformers writes greedily behind `tokens`."""
    ids = torch.tensor([list(tokens)])
    with torch.inference_mode():
        # Without the mask, transformers would guess one from the padding token, which may well be
        # in `tokens`.
        mask = torch.ones_like(ids)
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=count,
            pad_token_id=0,
            **options,
        )
    return out[0, len(tokens) :].tolist()


def make_tiny(family: str) -> Tiny:
    model = make_model(family)
    seed = (
        4 if family == "llama" else 6
    )  # Of those tried, what makes for varied texts and accepted lengths.
    prompt = torch.randint(
        0, VOCAB, (PROMPT,), generator=torch.Generator().manual_seed(seed)
    ).tolist()
    text = prompt + continuation(model, prompt, 180)
    with torch.inference_mode():
        top = model(torch.tensor([text])).logits[0, PROMPT:].topk(2).values
    # Differences in the order of additions must not be able to change the text.
    assert float((top[:, 0] - top[:, 1]).min()) > 1e-3
    return Tiny(model, CausalLM(model), text)


@pytest.fixture(scope="session")
def llama() -> Tiny:
    return make_tiny("llama")


@pytest.fixture(scope="session")
def qwen3() -> Tiny:
    return make_tiny("qwen3")


@pytest.fixture(scope="session", params=["llama", "qwen3"])
def tiny(request: pytest.FixtureRequest) -> Tiny:
    return request.getfixturevalue(request.param)


def drafter_config(**changes: Any) -> dict[str, Any]:
    """config.json of a drafter for the tiny targets, as published ones have it."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 8,
        "max_position_embeddings": POSITIONS,
        "num_target_layers": 4,
        "block_size": BLOCK,
        "dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": 3},
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    } | changes


def drafter_tensors(config: dict[str, Any], seed: int = 1) -> dict[str, Tensor]:
    """Random weights under the published names; norms too, where leaving one out would otherwise
    not show."""
    size, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, len(config["dflash_config"]["target_layer_ids"]) * size),
        "hidden_norm.weight": (size,),
        "norm.weight": (size,),
    }
    for i in range(config["num_hidden_layers"]):
        shapes |= {
            f"layers.{i}.self_attn.q_proj.weight": (q, size),
            f"layers.{i}.self_attn.k_proj.weight": (kv, size),
            f"layers.{i}.self_attn.v_proj.weight": (kv, size),
            f"layers.{i}.self_attn.o_proj.weight": (size, q),
            f"layers.{i}.self_attn.q_norm.weight": (dim,),
            f"layers.{i}.self_attn.k_norm.weight": (dim,),
            f"layers.{i}.mlp.gate_proj.weight": (inner, size),
            f"layers.{i}.mlp.up_proj.weight": (inner, size),
            f"layers.{i}.mlp.down_proj.weight": (size, inner),
            f"layers.{i}.input_layernorm.weight": (size,),
            f"layers.{i}.post_attention_layernorm.weight": (size,),
        }
    rng = torch.Generator().manual_seed(seed)
    return {
        name: 0.4 * torch.randn(shape, generator=rng)
        if len(shape) > 1
        else 1 + 0.2 * torch.randn(shape, generator=rng)
        for name, shape in shapes.items()
    }


def make_drafter(target: CausalLM, seed: int = 1, **changes: Any) -> DFlash:
    config = drafter_config(**changes)
    return DFlash(config, drafter_tensors(config, seed), target)


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """No file may grow beyond `room` bytes: what writes then meets is what it meets on a full
    disk."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class Oracle:
    """Drafts the known text, but never at the positions in `wrong`; notes the positions it was
    shown."""

    def __init__(
        self, text: Sequence[int], wrong: Sequence[int] = (), block_size: int = BLOCK
    ) -> None:
        self.text, self.wrong, self.block_size, self.longest_block = (
            text,
            set(wrong),
            block_size,
            block_size,
        )
        self.taps = (1,)
        self.policies: list[Policy | None] = []

    def new_cache(self, capacity: int) -> KVCache:
        return KVCache(1, 1, 1, capacity + self.block_size)

    def observe(
        self, caches: Sequence[KVCache], tokens: Sequence[Sequence[int]], features: Sequence[Tensor]
    ) -> None:
        (tapped,) = features
        assert tapped.shape[1] == sum(map(len, tokens))
        for cache, own in zip(caches, tokens, strict=True):
            assert list(own) == list(self.text[cache.length : cache.length + len(own)])
            cache.length += len(own)

    def catch_up(self, caches: Sequence[KVCache], policies: Sequence[Policy | None]) -> None:
        pass

    def propose(
        self,
        caches: Sequence[KVCache],
        anchors: Sequence[int],
        count: int,
        policies: Sequence[Policy | None],
        picks: Sequence[Any],
        probe: Any = None,
    ) -> Tensor:
        drafts = []
        for cache, anchor in zip(caches, anchors, strict=True):
            first = cache.length + 1
            assert anchor == self.text[first - 1]
            drafts.append(
                [(self.text[at] + (at in self.wrong)) % VOCAB for at in range(first, first + count)]
            )
        self.policies.extend(policies)
        return torch.tensor(drafts)


def propose(
    drafter: Any,
    cache: Any,
    anchor: int,
    count: int,
    policy: Policy | None = None,
    probe: Any = None,
) -> Tensor:
    """The drafts of a single request, int64 [count]."""
    drafts: Tensor = drafter.propose([cache], [anchor], count, [policy], [likeliest], probe)[0]
    return drafts


# Checkpoints on disk, and the command line

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Checkpoints:
    model: Any
    tokenizer: Any
    target: Path
    drafter: Path


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    folder = tmp_path_factory.mktemp("checkpoints")
    model = make_model("llama")
    model.config.eos_token_id = model.generation_config.eos_token_id = 2
    model.save_pretrained(folder / "target")
    words = ["<unk>", "<|im_start|>", "<|im_end|>", "<mask>", "user", "assistant"]
    words += [f"w{i}" for i in range(len(words), VOCAB)]
    plain = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    plain.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, bos_token="<|im_start|>", eos_token="<|im_end|>", unk_token="<unk>"
    )
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder / "target")
    save(folder / "drafter", drafter_config(), drafter_tensors(drafter_config()))
    (folder / "drafter" / "sharpdraft.json").write_text(
        json.dumps({"policy": {"kind": "fixed_slope", "reference": 40}})
    )
    return Checkpoints(model, tokenizer, folder / "target", folder / "drafter")


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """The command line in this process: exit code, stdout, stderr."""

    def call(*args: object, stdin: str = "") -> Result:
        monkeypatch.setattr(sys, "argv", ["sharpdraft", *map(str, args)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        monkeypatch.chdir(tmp_path)
        capsys.readouterr()
        code: Any = 0
        try:
            cli.main()
        except SystemExit as exit_:
            code = exit_.code or 0
        said = capsys.readouterr()
        return Result(code, said.out, said.err)

    return call


def check_one_line(result: Result, *parts: str) -> None:
    assert result.code == 1
    assert result.out == ""
    assert (
        result.err.startswith("error: ")
        and result.err.count("\n") == 1
        and result.err.endswith("\n")
    )
    for part in parts:
        assert part in result.err
