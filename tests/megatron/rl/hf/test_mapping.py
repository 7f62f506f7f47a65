"""How tensors lie in a parameter, against loops that place one row at a time."""

import pytest
import torch
from torch import Tensor

from megatron.rl.hf.mapping import GATE_UP, QKV, Sizes, WeightTable

HEAD, GROUPS, QUERIES, HIDDEN = 4, 6, 3, 5
SIZES = Sizes(
    hidden=HIDDEN,
    ffn=8,
    query=GROUPS * QUERIES * HEAD,
    key=GROUPS * HEAD,
    head=HEAD,
    vocab=10,
)


def qkv_by_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows = []
    for group in range(GROUPS):
        for query in range(QUERIES):
            first = (group * QUERIES + query) * HEAD
            rows += [q[first + channel] for channel in range(HEAD)]
        for tensor in (k, v):
            rows += [tensor[group * HEAD + channel] for channel in range(HEAD)]
    return torch.stack(rows)


@pytest.mark.parametrize("trailing", [(), (HIDDEN,)], ids=["bias", "weight"])
def test_qkv_lies_group_by_group(trailing: tuple[int, ...]) -> None:
    q = torch.randn(SIZES.query, *trailing)
    k, v = torch.randn(2, SIZES.key, *trailing)
    parameter = QKV.join([q, k, v], SIZES)
    assert torch.equal(parameter, qkv_by_rows(q, k, v))
    for got, expected in zip(QKV.divide(parameter, SIZES), (q, k, v), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("tp_size", [1, 2, 3, 6])
def test_a_shard_of_qkv_is_made_of_the_same_shards_of_q_k_and_v(tp_size: int) -> None:
    q = torch.randn(SIZES.query, HIDDEN)
    k, v = torch.randn(2, SIZES.key, HIDDEN)
    whole = qkv_by_rows(q, k, v).chunk(tp_size)
    for rank in range(tp_size):
        shards = [tensor.chunk(tp_size)[rank] for tensor in (q, k, v)]
        assert torch.equal(QKV.join(shards, SIZES), whole[rank])
        for got, expected in zip(QKV.divide(whole[rank], SIZES), shards, strict=True):
            assert torch.equal(got, expected)


def test_gate_comes_before_up() -> None:
    gate, up = torch.randn(2, 8, HIDDEN)
    parameter = GATE_UP.join([gate, up], SIZES)
    assert torch.equal(parameter[:8], gate)
    assert torch.equal(parameter[8:], up)
    for got, expected in zip(GATE_UP.divide(parameter, SIZES), (gate, up), strict=True):
        assert torch.equal(got, expected)


ARCHITECTURE = {
    "num_layers": 3,
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 8,
    "vocab_size": 50,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "untie_embeddings_and_output_weights": True,
}


def test_a_middle_stage_has_its_layers_only() -> None:
    shapes = WeightTable.of(ARCHITECTURE).tensors([1], first=False, last=False)
    assert shapes == {
        "model.layers.1.input_layernorm.weight": (16,),
        "model.layers.1.self_attn.q_proj.weight": (32, 16),
        "model.layers.1.self_attn.k_proj.weight": (16, 16),
        "model.layers.1.self_attn.v_proj.weight": (16, 16),
        "model.layers.1.self_attn.o_proj.weight": (16, 32),
        "model.layers.1.post_attention_layernorm.weight": (16,),
        "model.layers.1.mlp.gate_proj.weight": (24, 16),
        "model.layers.1.mlp.up_proj.weight": (24, 16),
        "model.layers.1.mlp.down_proj.weight": (16, 24),
    }


@pytest.mark.parametrize(
    ("change", "extra"),
    [
        (
            {"add_qkv_bias": True},
            {
                "self_attn.q_proj.bias": (32,),
                "self_attn.k_proj.bias": (16,),
                "self_attn.v_proj.bias": (16,),
            },
        ),
        (
            {"qk_layernorm": True},
            {"self_attn.q_norm.weight": (8,), "self_attn.k_norm.weight": (8,)},
        ),
        (
            {"add_bias_linear": True},
            {
                "self_attn.q_proj.bias": (32,),
                "self_attn.k_proj.bias": (16,),
                "self_attn.v_proj.bias": (16,),
                "self_attn.o_proj.bias": (16,),
                "mlp.gate_proj.bias": (24,),
                "mlp.up_proj.bias": (24,),
                "mlp.down_proj.bias": (16,),
            },
        ),
    ],
    ids=["qwen2", "qwen3", "llama with biases"],
)
def test_each_architecture_adds_its_own_tensors(
    change: dict[str, bool], extra: dict[str, tuple[int, ...]]
) -> None:
    plain = WeightTable.of(ARCHITECTURE).tensors([2], first=False, last=False)
    shapes = WeightTable.of(ARCHITECTURE | change).tensors([2], first=False, last=False)
    assert {name: shapes[name] for name in shapes.keys() - plain.keys()} == {
        f"model.layers.2.{name}": shape for name, shape in extra.items()
    }


@pytest.mark.parametrize("untied", [True, False])
def test_the_last_stage_has_an_output_weight_of_its_own_or_the_embedding(untied: bool) -> None:
    architecture = ARCHITECTURE | {"untie_embeddings_and_output_weights": untied}
    shapes = WeightTable.of(architecture).tensors([], first=False, last=True)
    output = "lm_head.weight" if untied else "model.embed_tokens.weight"
    assert shapes == {"model.norm.weight": (16,), output: (50, 16)}
