# SPDX-License-Identifier: Apache-2.0
"""The package's sources: no tensor takes its device or type from torch's defaults, which belong to the program."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "crossdock"
WITHOUT_DEVICE = {"frombuffer"}  # in host memory, always
FACTORIES = WITHOUT_DEVICE | {
    *(
        "arange",
        "as_tensor",
        "asarray",
        "bartlett_window",
        "blackman_window",
        "empty",
        "empty_permuted",
        "empty_strided",
    ),
    *(
        "eye",
        "full",
        "hamming_window",
        "hann_window",
        "kaiser_window",
        "linspace",
        "logspace",
        "normal",
        "ones",
        "rand",
    ),
    *("randint", "randn", "randperm", "range", "scalar_tensor", "sparse_coo_tensor", "tensor", "tril_indices"),
    *("triu_indices", "zeros"),
}
# Constructors of types and tensors, which take both from the defaults alone.
CONSTRUCTORS = ("Tensor", "ByteTensor", "DoubleTensor", "FloatTensor", "HalfTensor", "IntTensor", "LongTensor")


def faults_of(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        owner, name = node.func.value, node.func.attr
        if not (isinstance(owner, ast.Name) and owner.id == "torch"):
            continue
        given = {keyword.arg for keyword in node.keywords}
        needed = {"dtype"} if name in WITHOUT_DEVICE else {"dtype", "device"}
        if name in CONSTRUCTORS:
            yield f"line {node.lineno}: torch.{name}"
        elif name in FACTORIES and not needed <= given:
            yield f"line {node.lineno}: torch.{name} without {', '.join(sorted(needed - given))}"


def test_factories_are_told_device_and_type() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 50
    faults = [f"{file.relative_to(PACKAGE)}, {fault}" for file in files for fault in faults_of(file.read_text())]
    assert faults == []


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("torch.tensor([1])", "torch.tensor without device, dtype"),
        ("f(x=torch.zeros(1, device=d))", "torch.zeros without dtype"),
        ("torch.frombuffer(b)", "torch.frombuffer without dtype"),
        ("torch.Tensor(3)", "torch.Tensor"),
    ],
)
def test_the_check_finds(source: str, fault: str) -> None:
    [found] = faults_of(source)
    assert found == f"line 1: {fault}"


def test_torch_has_no_other_factories() -> None:
    """torch's own list of functions that a default device changes."""
    torch = pytest.importorskip("torch", reason="torch is not installed: skipped")
    from torch.utils._device import _device_constructors

    names = {
        function.__name__ for function in _device_constructors() if getattr(torch, function.__name__, None) is function
    }
    assert {name for name in names if not name.startswith(("sparse_", "fft_", "empty_quantized"))} <= FACTORIES
