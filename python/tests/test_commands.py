# SPDX-License-Identifier: Apache-2.0
"""python -m crossdock: every command runs, checks, and says what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from crossdock.__main__ import main
from crossdock.cli import doctor, gpus
from crossdock.launcher import gpu_links

SMALL = ["--ranks", "2", "--hidden", "32", "--experts", "4", "--topk", "2"]


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_demo_and_its_heat_map(backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "demo.json"
    assert main(["demo", *SMALL, "--backend", backend, "--tokens", "8", "--steps", "3", "--json", str(report)]) == 0
    assert "PASS" in capsys.readouterr().out
    rows = json.loads(report.read_text())["rows_from_to"]
    assert sum(map(sum, rows)) == 2 * 3 * 8 * 2
    assert main(["plot", str(report), str(tmp_path / "demo.svg")]) == 0
    assert (tmp_path / "demo.svg").stat().st_size > 1000


def test_bench_and_its_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "bench.json"
    assert main(["bench", *SMALL, "--tokens", "1,8", "--iterations", "3", "--json", str(report)]) == 0
    assert "tokens per rank" in capsys.readouterr().out
    assert main(["plot", str(report), str(tmp_path / "bench.png")]) == 0
    assert (tmp_path / "bench.png").stat().st_size > 1000


def pretend_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, **answers: str) -> None:
    """answers: what it prints, by a word of its arguments."""
    tool = folder / "nvidia-smi"
    cases = "".join(f'*"{word}"*) printf "{text}" ;; ' for word, text in answers.items())
    tool.write_text(f'#!/bin/sh\ncase "$*" in {cases}*) exit 1 ;; esac\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def test_doctor_says_how_gpus_are_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pair once, with its fastest link and what is used there."""

    def matrix(*states: str) -> str:
        rows = [f" GPU{gpu}\\t" + "\\t".join(row.split()) + "\\t\\n" for gpu, row in enumerate(states)]
        return " \\tGPU0\\tGPU1\\tGPU2\\t\\n" + "".join(rows) + "\\nLegend:\\n  X    = Self\\n"

    linked, apart = matrix("X OK OK", "OK X OK", "OK OK X"), matrix("X NS NS", "NS X NS", "NS NS X")
    pretend_nvidia_smi(tmp_path, monkeypatch, **{"p2p n": linked, "p2p r": linked})
    assert gpu_links.links() == [("NVLink", f"all 3 GPUs: {gpu_links.LINKS[0][2]}")]
    some = matrix("X OK NS", "OK X NS", "NS NS X")
    pretend_nvidia_smi(tmp_path, monkeypatch, **{"p2p n": some, "p2p r": linked})
    assert gpu_links.links() == [
        ("NVLink", f"GPUs 0-1: {gpu_links.LINKS[0][2]}"),
        ("PCIe peer access", f"GPUs 0-2, 1-2: {gpu_links.LINKS[1][2]}"),
    ]
    pretend_nvidia_smi(tmp_path, monkeypatch, **{"p2p n": apart, "p2p r": some})
    assert gpu_links.links() == [
        ("PCIe peer access", f"GPUs 0-1: {gpu_links.LINKS[1][2]}"),
        ("no peer access", f"GPUs 0-2, 1-2: {gpu_links.NO_LINK[1]}"),
    ]
    speeds = {
        "nvlink": "".join(
            f"GPU {gpu}: NVIDIA H200 (UUID: GPU-0)\\n" + 18 * "\\t Link 0: 26.562 GB/s\\n" for gpu in range(3)
        ),
        "pcie.link": "0, 5, 16\\n1, 4, 16\\n2, 5, 8\\n",
    }
    pretend_nvidia_smi(tmp_path, monkeypatch, **{"p2p n": some, "p2p r": apart}, **speeds)
    assert gpu_links.links() == [
        ("NVLink", f"GPUs 0-1: {gpu_links.LINKS[0][2]}, at most 478 GB/s each way"),
        ("no peer access", f"GPUs 0-2, 1-2: {gpu_links.NO_LINK[1]}, at most 32 GB/s each way"),
    ]
    pretend_nvidia_smi(tmp_path, monkeypatch, **{"p2p n": " \\tGPU0\\t\\n GPU0\\tX\\t\\n", "p2p r": " GPU0\\tX\\t\\n"})
    assert gpu_links.links() == [("links", "one GPU")]


@pytest.mark.parametrize(
    ("capability", "architectures", "said"),
    [
        ("9.0", "90", "ok: machine code of sm_90"),
        ("10.3", "90, 100f", "ok: machine code of sm_100f"),
        ("8.9", "80", "ok: machine code of sm_80"),
        ("9.0", "80-for-90", "ok: machine code of sm_90"),
        ("12.0", "80, 90-virtual", "ok: PTX of compute_90, which the driver compiles"),
        ("8.0", "86", "no code in this build (it has 86): build with CROSSDOCK_CUDA_ARCHITECTURES=80"),
        ("10.0", "90", "no code in this build (it has 90): build with CROSSDOCK_CUDA_ARCHITECTURES=100f"),
        ("11.0", "90a, 100f-virtual", "no code in this build (it has 90a, 100f-virtual): build with "),
        ("7.5", "90", "too old: compute capability 8.0 or newer is needed"),
        ("9.0", None, "this build of Crossdock has no GPU backend"),
    ],
)
def test_doctor_says_whether_there_is_code_for_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capability: str, architectures: str | None, said: str
) -> None:
    pretend_nvidia_smi(tmp_path, monkeypatch, compute_cap=f"0, NVIDIA X, {capability}\\n")
    ((name, line),) = gpus.devices(architectures)
    assert name == "GPU 0"
    assert line.startswith(f"NVIDIA X, compute capability {capability}: {said}")


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    found = capsys.readouterr().out
    assert "libnccl_ep.so" in found
    assert "CPU backends      works" in found


@pytest.mark.parametrize(
    ("has_cuda", "version", "said"),
    [
        (False, (2, 18, 3), "2.18.3 (libnccl.so.2); this build of Crossdock does not use it"),
        (True, (2, 18, 3), "2.18.3 (libnccl.so.2), too old: 2.30.4 or newer is needed for GPUs"),
        (True, (2, 30, 4), "2.30.4 (libnccl.so.2)"),
    ],
)
def test_doctor_judges_nccl_where_it_is_used(
    monkeypatch: pytest.MonkeyPatch, has_cuda: bool, version: tuple[int, int, int], said: str
) -> None:
    monkeypatch.setattr(doctor.ep, "has_cuda", has_cuda)
    monkeypatch.setattr(doctor.nccl, "version", lambda: ".".join(map(str, version)))
    monkeypatch.setattr(doctor.nccl, "file", lambda: "libnccl.so.2")
    monkeypatch.setattr(doctor.nccl, "is_new_enough", lambda: version >= (2, 30, 4))
    assert doctor._nccl() == said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dmo"], "there is no command 'dmo'. Did you mean 'demo'?"),
        (["xyzzy"], "there is no command 'xyzzy'. --help lists them"),
        (["bench", "--tokens", "1,a"], "argument --tokens: 'a' is not a whole number of 1 or more"),
        (["bench", "--iterations", "0"], "argument --iterations: '0' is not a whole number of 1 or more"),
        (["demo", "--steps", "0"], "argument --steps: '0' is not a whole number of 1 or more"),
        (["demo", "--seed", "-1"], "argument --seed: '-1' is not a whole number of 0 or more"),
        (["demo", "--rnaks", "2"], "unrecognized arguments: --rnaks 2. Did you mean '--ranks'?"),
    ],
)
def test_typing_errors(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("report", "picture", "message"),
    [
        ('{"rows_from_to": [[1, 2], [3, 4]]}', "x.xyz", "x.xyz, allowed extensions: ."),
        ('{"rows_from_to": [[1, 2], [3, 4]]}', "x", "x, allowed extensions: ."),
        ('{"rows_from_to": [[1, 2], [3, 4]]}', "missing/x.svg", "missing/x.svg: No such file or directory"),
        ('{"results": [{"cells": 1}]}', "x.svg", "report.json is not as demo or bench writes it: KeyError('tokens')"),
        ('{"rows_from_to": []}', "x.svg", "report.json is not as demo or bench writes it: "),
        ("[1, 2]", "x.svg", "report.json has neither rows_from_to (a demo's) nor results (a benchmark's)"),
        ("3", "x.svg", "report.json has neither rows_from_to"),
    ],
)
def test_plots_that_cannot_be_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], report: str, picture: str, message: str
) -> None:
    (tmp_path / "report.json").write_text(report)
    assert main(["plot", str(tmp_path / "report.json"), str(tmp_path / picture)]) == 2
    assert message in capsys.readouterr().err


def test_a_report_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = str(tmp_path / "missing" / "report.json")
    assert main(["demo", *SMALL, "--steps", "1", "--json", report]) == 2
    assert f"crossdock: {report}: No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plot", "missing.json", "x.png"], "missing.json cannot be read"),
        (["demo", "--ranks", "3", "--experts", "4"], "num_experts is 4, allowed: positive multiples of the 3 ranks"),
        (["demo", "--ranks", "0"], "num_ranks is 0"),
        (["demo", "--ranks", "99999999999"], "num_ranks is 99999999999, allowed: 1..4096"),
        (["demo", "--hidden", "-4"], "max_token_bytes is -16, allowed: 0..4294967295"),
        (["a2sgd-study", "--workers", "4,0"], "--workers is 4,0, allowed: a list of numbers from 1 on"),
        (["a2sgd-study", "--seeds", "0"], "--seeds is 0, allowed: 1 and more"),
        (["bench", "--topk", "99"], "num_topk is 99"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "last_line"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("import crossdock; crossdock.Communicator.create_threads(0)", "InvalidArgument: num_ranks is 0"),
        ("raise SystemExit(7)", ""),
    ],
)
def test_a_program_s_errors_are_its_own(program: str, last_line: str, tmp_path: Path) -> None:
    """With their traceback, and without advice that is not about them."""
    script = tmp_path / "program.py"
    script.write_text(program)
    command = [sys.executable, "-m", "crossdock", "run", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert "crossdock[tools]" not in done.stderr
    if last_line:
        assert done.returncode == 1
        assert f'File "{script}", line 1' in done.stderr
        assert last_line in done.stderr.splitlines()[-1]
    else:
        assert done.returncode == 7


def test_demo_and_bench_need_nothing_but_numpy() -> None:
    missing = "import sys; sys.modules |= dict.fromkeys(('matplotlib', 'rich', 'torch'))"
    bench = ["bench", *SMALL, "--tokens", "1", "--iterations", "1"]
    for command in (["demo", *SMALL, "--steps", "1"], bench, ["doctor"]):
        code = f"{missing}; from crossdock.__main__ import main; sys.exit(main({command!r}))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr


def test_missing_tools_are_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plot", __file__, "x.png"]) == 2
    assert "pip install 'crossdock[tools]'" in capsys.readouterr().err


def test_a_missing_torch_is_named_once(tmp_path: Path) -> None:
    """With the advice of the module that needs it, and not with another beside it."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "crossdock", "run", "--as-deep-ep", "-m", "json.tool", "--help"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2
    assert "pip install 'crossdock[torch]'" in done.stderr and done.stderr.count("pip install") == 1
