"""The stand-in's operators have the arguments that op-plugin declares for them.

Source: op_plugin/config/op_plugin_functions.yaml of Ascend/op-plugin, branch 7.3.0.
"""

from __future__ import annotations

import inspect

import pytest

from tests.npu_standin import load

# name -> arguments; those after * are given by keyword
DECLARED = {
    "npu_fusion_attention": (
        "query key value head_num input_layout pse padding_mask atten_mask scale keep_prob "
        "pre_tockens next_tockens inner_precise prefix actual_seq_qlen actual_seq_kvlen "
        "sparse_mode gen_mask_parallel sync softmax_layout sink"
    ),
    "npu_fusion_attention_grad": (
        "query key value dy head_num input_layout * pse padding_mask atten_mask softmax_max "
        "softmax_sum softmax_in attention_in scale_value keep_prob pre_tockens next_tockens "
        "inner_precise seed offset numels prefix actual_seq_qlen actual_seq_kvlen sparse_mode "
        "gen_mask_parallel sync softmax_layout sink"
    ),
    "npu_rms_norm": "self gamma epsilon",
    "npu_rms_norm_backward": "dy self gamma rstd",
    "npu_swiglu": "self dim",
    "npu_rotary_mul": "self r1 r2 rotary_mode",
    "npu_scaled_masked_softmax": "x mask scale fixed_triu_mask",
    "npu_apply_adam_w": (  # its outputs var, m, v are one argument in Python
        "beta1_power beta2_power lr weight_decay beta1 beta2 epsilon grad max_grad_norm amsgrad "
        "maximize * out"
    ),
    "npu_moe_token_permute": "tokens indices num_out_tokens padded_mode",
    "npu_moe_token_unpermute": "permuted_tokens sorted_indices probs padded_mode restore_shape",
}
OUTPUTS = {"npu_fusion_attention": 7, "npu_fusion_attention_grad": 5, "npu_apply_adam_w": 3}
MODULES = [load("attention"), load("operators")]


def operator(name: str) -> inspect.Signature:
    (found,) = [getattr(module, name) for module in MODULES if hasattr(module, name)]
    return inspect.signature(found, eval_str=True)


@pytest.mark.parametrize("name", DECLARED)
def test_arguments_are_those_that_op_plugin_declares(name: str) -> None:
    signature = operator(name)
    found: list[str] = []
    for argument in signature.parameters.values():
        if argument.kind is argument.KEYWORD_ONLY and "*" not in found:
            found.append("*")
        found.append(argument.name)
    assert " ".join(found) == DECLARED[name]


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_are_as_many_as_op_plugin_declares(name: str) -> None:
    assert len(operator(name).return_annotation.__args__) == OUTPUTS[name]


def test_keywords_of_the_grouped_product_are_declared() -> None:
    known = {
        "x", "weight", "bias", "group_list", "split_item", "group_type", "group_list_type",
        "unsupported",
    }  # fmt: skip
    assert set(operator("npu_grouped_matmul").parameters) == known
