"""The echo device: what it declares, how its troubles show, and that it computes what the default operations do."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest
import torch
from anycore_echo import Script, read_script, spec
from anycore_echo.device import Echo
from installed import ECHO

from anycore.contract.backend import Limits, StepOutput
from anycore.contract.batch import Batch, Samples, Sampling
from anycore.contract.ops import Ops

LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=32, block_size=0, blocks=0)


def batch(*ids: int) -> Batch:
    return Batch(
        input_ids=torch.tensor(ids),
        positions=torch.arange(len(ids)),
        query_lens=[len(ids)],
        context_lens=[0],
        output_rows=torch.tensor([len(ids) - 1]),
        causal=True,
    )


def step(batch: Batch, sampling: Sampling | None) -> StepOutput:
    """A model that always says 7."""
    rows = torch.ones(len(batch.output_rows), 8)
    return StepOutput(rows, Samples(ids=torch.tensor([7]), finite=torch.tensor([True])))


def test_the_script_is_read_from_the_environment() -> None:
    script = read_script({"ANYCORE_ECHO": '{"devices": 3, "lacks": ["attention"], "api": [2, 0]}'})
    assert script == Script(devices=3, lacks=("attention",), api=(2, 0))
    assert read_script({}) == Script()


def test_devices_memory_and_versions_are_as_scripted() -> None:
    script = Script(devices=2, chip="90", memory_total=2**30, memory_free=2**20, driver="13.0")
    probe = spec(script).probe()
    assert [(d.index, d.name, d.chip, d.memory) for d in probe.devices] == [
        (0, "Echo 0", "90", 2**30),
        (1, "Echo 1", "90", 2**30),
    ]
    assert probe.versions["driver"] == "13.0"
    memory = Echo(script, 1).memory
    assert (memory.total(), memory.free()) == (2**30, 2**20)


def test_versions_are_compared_as_numbers() -> None:
    assert spec(Script(driver="12.10", driver_needed="12.9")).probe().available
    assert not spec(Script(driver="9.9", driver_needed="12.1")).probe().available


def test_operations_are_the_defaults() -> None:
    torch.manual_seed(0)
    ops, x, weight = Echo(Script(), 0).ops, torch.randn(3, 8), torch.randn(8)
    for ours, theirs in zip(ops.rms_norm(x, weight, 1e-6), Ops().rms_norm(x, weight, 1e-6), strict=True):
        assert torch.equal(ours, theirs)
    q, k = torch.randn(3, 2, 4), torch.randn(3, 1, 4)
    assert torch.equal(
        ops.attention(q, k, k, None, batch(1, 2, 3), 0.5), Ops().attention(q, k, k, None, batch(1, 2, 3), 0.5)
    )


def test_h05_an_operation_without_a_kernel_fails_naming_it_and_the_chip() -> None:
    echo = Echo(Script(chip="75", lacks=("rms_norm",)), 0)
    with pytest.raises(NotImplementedError, match="there is no rms_norm kernel for chip 75"):
        echo.ops.rms_norm(torch.ones(1, 2), torch.ones(2), 1e-6)
    assert torch.equal(echo.ops.activation(torch.ones(1), "relu"), torch.ones(1))


def test_h06_an_emulated_operation_is_right_and_counted() -> None:
    echo = Echo(Script(emulates=("rms_norm",)), 0)
    x, weight = torch.randn(2, 4), torch.ones(4)
    for _ in range(3):
        normed, _ = echo.ops.rms_norm(x, weight, 1e-6)
    assert torch.equal(normed, Ops().rms_norm(x, weight, 1e-6)[0])
    assert echo.fallbacks == {"rms_norm": 3}
    assert Echo(Script(), 0).fallbacks == {}


def test_the_model_answers_unless_the_input_is_to_be_repeated() -> None:
    def ids(script: Script) -> list[int]:
        output = Echo(script, 0).optimize(step, LIMITS)(batch(3, 4, 5), None)
        assert output.samples is not None
        return output.samples.ids.tolist()

    assert ids(Script()) == [7]
    assert ids(Script(repeat=True)) == [5]


def test_the_device_is_lost_in_the_step_that_the_script_names() -> None:
    run = Echo(Script(fail_at_step=3), 0).optimize(step, LIMITS)
    run(batch(1), None)
    run(batch(1), None)
    with pytest.raises(RuntimeError, match="device lost in step 3"):
        run(batch(1), None)


def test_h10_a_step_may_give_no_numbers() -> None:
    run = Echo(Script(nan_at_step=2), 0).optimize(step, LIMITS)
    outputs = [run(batch(1), None) for _ in range(3)]
    assert [bool(output.rows.isfinite().all()) for output in outputs] == [True, False, True]
    assert [bool(output.samples.finite.all()) for output in outputs if output.samples] == [True, False, True]


def test_the_readme_uses_fields_that_exist() -> None:
    used = set(re.findall(r'"(\w+)":', (ECHO / "README.md").read_text()))
    assert used
    assert used <= {field.name for field in fields(Script)}
