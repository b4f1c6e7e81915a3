"""Plan the training of Llama-3-8B on a machine that could never hold it.

The parameters are fake: they have shapes and types, but no memory. The plan is for bfloat16 weights and
AdamW states, one sequence of 4096 tokens. Prints what a step needs and what the plan makes of it.

    python examples/plan_llama.py [--budget 80GB] [--layers N] [--quick]
"""

import argparse
import resource
import sys
import time

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig, LlamaForCausalLM

from remat import InfeasibleBudgetError, StepProtocol, plan_checkpoints
from remat.passes import Plan

TOKENS = 4096


def fake_llama(layers: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """Llama-3-8B's shapes, with as many layers as asked for, and one sequence; all without memory."""
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        use_cache=False,
    )
    with FakeTensorMode():
        model: nn.Module = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
        ids = torch.zeros(1, TOKENS, dtype=torch.long)
    return model.train(), {"input_ids": ids, "labels": ids}


def report(plan: Plan, seconds: float) -> None:
    """Print the plan's figures."""
    print(f"already on the device        {_gb(plan.resident_bytes)}")
    print(f"peak of a step as it is      {_gb(plan.baseline_peak_bytes)}")
    print(f"least peak that is possible  {_gb(plan.least_peak_bytes)}")
    print(f"budget                       {_gb(plan.budget_bytes)}")
    print(f"peak of the plan             {_gb(plan.peak_bytes)}")
    print(f"extra time of the plan       {plan.overhead:8.2%}  (predicted, {plan.cost_model})")
    print(f"no plan needs less than      {plan.lower_bound:8.2%}  ({plan.status})")
    print(f"tensors saved / made again   {len(plan.saved)} / {len(plan.recomputed)}")
    # ru_maxrss is in kibibytes on Linux.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"planned in {seconds:.0f} s; this process never held more than {peak / 1e9:.2f} GB")


def _gb(size: int) -> str:
    return f"{size / 1e9:8.2f} GB  {size / 2**30:8.2f} GiB"


def main() -> int:
    """Plan and print; return the exit status."""
    parser = argparse.ArgumentParser(description="Plan Llama-3-8B without its weights")
    parser.add_argument("--budget", help="default: 80GB; with --quick 14GB")
    parser.add_argument("--layers", type=int, help="default: 32; with --quick 1")
    parser.add_argument("--device", default="h100", help="whose speed predicts the overhead")
    parser.add_argument("--quick", action="store_true", help="a model of one layer")
    arguments = parser.parse_args()
    budget = arguments.budget or ("14GB" if arguments.quick else "80GB")
    model, batch = fake_llama(arguments.layers or (1 if arguments.quick else 32))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"Llama-3, {parameters / 1e9:.2f} billion parameters, bfloat16, 1 x {TOKENS} tokens\n")
    start = time.perf_counter()
    try:
        plan = plan_checkpoints(
            model,
            budget,
            (),
            batch,
            optimizer="adamw",
            protocol=StepProtocol(outputs_held=False),  # loss = model(**batch).loss
            cost_model=arguments.device,
        )
    except InfeasibleBudgetError as error:
        print(error)
        return 1
    report(plan, time.perf_counter() - start)
    return 0


if __name__ == "__main__":
    sys.exit(main())
