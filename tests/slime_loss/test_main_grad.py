"""The weight's gradient in main_grad: the protocol of megatron-core's linear layers."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slime_loss import RLHead
from tests.slime_loss.head_packs import CONFIGS, HEAD, PACKS, VOCAB, make_pack
from tests.slime_loss.reference_log_probs import EXACT

WAYS = {"fused": HEAD, "recomputed": replace(HEAD, recompute_loss_function=True)}


def hooked(weight: Tensor, *, zero_out: bool | None) -> Tensor:
    """A parameter with main_grad, and what megatron-core's DDP does once its gradient is there."""
    parameter = torch.nn.Parameter(weight.detach().clone())
    parameter.main_grad = torch.full(
        weight.shape, 0.5, dtype=torch.promote_types(weight.dtype, torch.float32)
    )
    parameter.grad_added_to_main_grad = False
    if zero_out is not None:
        parameter.zero_out_wgrad = zero_out

    def after_backward(one: Tensor) -> None:
        if not one.grad_added_to_main_grad or getattr(one, "zero_out_wgrad", False):
            one.main_grad.add_(one.grad)
        one.grad = None

    parameter.register_post_accumulate_grad_hook(after_backward)
    return parameter


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("tied", [False, True])
def test_main_grad_gets_the_gradient_and_that_of_a_tied_embedding(
    way: object, config: object, tied: bool
) -> None:
    pack = make_pack(PACKS["usual"])
    loss = RLHead(way, config, vocab_size=VOCAB)(pack.hidden, pack.weight, pack.batch).loss
    elsewhere = pack.weight.square().sum() if tied else 0.0
    of_hidden, of_weight = torch.autograd.grad(3 * loss + elsewhere, (pack.hidden, pack.weight))

    head = RLHead(way, config, vocab_size=VOCAB, accumulate_into_main_grad=True)
    weight = hooked(pack.weight, zero_out=tied or None)
    loss = head(pack.hidden, weight, pack.batch).loss
    elsewhere = weight.square().sum() if tied else 0.0
    (3 * loss + elsewhere).backward()
    assert weight.grad_added_to_main_grad
    torch.testing.assert_close(weight.main_grad, 0.5 + of_weight, **EXACT)
    torch.testing.assert_close(pack.hidden.grad, of_hidden, **EXACT)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_low_precision_is_summed_in_float32(way: object) -> None:
    pack = make_pack(PACKS["usual"], dtype=torch.bfloat16)
    weight = hooked(pack.weight, zero_out=None)
    weight.main_grad.zero_()
    head = RLHead(way, CONFIGS["entropy"], vocab_size=VOCAB, accumulate_into_main_grad=True)
    head(pack.hidden, weight, pack.batch).loss.backward()
    plain = RLHead(way, CONFIGS["entropy"], vocab_size=VOCAB)
    plain(pack.hidden, pack.weight, pack.batch).loss.backward()
    assert weight.main_grad.dtype == torch.float32
    assert torch.equal(weight.main_grad.bfloat16(), pack.weight.grad)
    assert not torch.equal(weight.main_grad, pack.weight.grad.float())


def test_a_weight_without_main_grad_or_gradient_is_left_to_autograd() -> None:
    pack = make_pack(PACKS["usual"])
    head = RLHead(HEAD, CONFIGS["metric"], vocab_size=VOCAB, accumulate_into_main_grad=True)
    loss = head(pack.hidden, pack.weight, pack.batch).loss
    (of_weight,) = torch.autograd.grad(loss, pack.weight)
    assert of_weight.abs().max() > 0
    frozen = hooked(pack.weight, zero_out=None).requires_grad_(False)
    head(pack.hidden, frozen, pack.batch).loss.backward()
    assert not frozen.grad_added_to_main_grad
    assert torch.equal(frozen.main_grad, torch.full_like(frozen, 0.5))
