# SPDX-License-Identifier: Apache-2.0
"""What sglang_e2e does without SGLang and without a GPU: its configurations and commands, the model's files, the plain
model and the faults that it finds, how servers start and end, and the comparison.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import struct
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_e2e import client, configurations, model, plain, report, servers
from sglang_e2e.__main__ import earlier_reference, main
from vllm_e2e import launch, models, weights
from vllm_e2e.control import ROUNDING
from vllm_e2e.runs import FAULTS

SHAPE = models.Shape(hidden=256, layers=2, experts=8, topk=2, inner=32, heads=2, kv_heads=1)
CPU = torch.device("cpu")
# A server that answers as SGLang does: a token's successor is the next number, and each log-probability is -1. With
# graphs it ends at its start, with dp it never is ready, in normal mode it never answers a request.
STAND_IN = """
import http.server, json, sys, time
words = dict(zip(sys.argv, sys.argv[1:]))
if "--cuda-graph-max-bs-decode" in words:
    print("crossdock: uses the stand-in")
    sys.exit("RuntimeError: no memory")
time.sleep(60 if "--attn-dp-size" in words else 0)
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, content):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())
    def do_GET(self):
        self.answer(None)
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(60 if words.get("--deepep-mode") == "normal" else 0)
        ids, count = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        pairs = [[None if place == 0 else -1.0, token, None] for place, token in enumerate(ids)]
        meta = {"input_token_logprobs": pairs} if body.get("return_logprob") else {}
        self.answer({"output_ids": [ids[-1] + 1 + place for place in range(count)], "meta_info": meta})
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer.request_queue_size = 64
http.server.ThreadingHTTPServer(("127.0.0.1", int(words["--port"])), Handler).serve_forever()
"""


# ---- configurations


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("deepep", "the base is 'deepep', allowed: ref, refdg, ll, normal, auto, v2"),
        ("ll+sbo", "the flag is 'sbo', allowed: graph, dp, nocumem"),
        ("normal+graph", "allowed with graph: all other bases"),
        ("ref+nocumem", "allowed: ll, normal, auto, v2"),
        ("ll+dp+dp", "a flag is there twice"),
    ],
)
def test_a_wrong_configuration_names_the_word_and_what_is_allowed(text: str, message: str) -> None:
    with pytest.raises(ValueError, match="CONFIGURATION") as caught:
        configurations.parse(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lll"], "CONFIGURATION 'lll': the base is 'lll', allowed: ref"),
        (["--ranks", "1"], "argument --ranks: is '1', allowed: whole numbers of at least 2"),
        (["--ranks", "3"], "--ranks is 3, allowed with --model small: divisors of its 16 heads and 128 experts"),
        (["--together", "0"], "argument --together: is '0', allowed: whole numbers of at least 1"),
        (["--together", "2", "ref", "ref"], "--together is 2, allowed where a CONFIGURATION is there twice: 1"),
        (["--layers", "x"], "argument --layers: is 'x', allowed: whole numbers of at least 1"),
        (["--model", "big"], "invalid choice: 'big'"),
    ],
)
def test_wrong_arguments(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*words, "--dry-run"])
    assert message in capsys.readouterr().err


def test_a_dry_run_prints_a_command_per_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ref", "ll+graph", "v2+dp", "--work", str(tmp_path), "--ranks", "4", "--dry-run"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    plain_words, ll, v2 = (words[words.index(sys.executable) :] for words in lines)
    for words in lines:
        assert "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK=256" in words[: words.index(sys.executable)]
    for words in plain_words, ll, v2:
        assert words[1:5] == ["-m", "crossdock", "run", "--as-deep-ep"] and words[6:8] == ["-m", "sglang.launch_server"]
        assert words[words.index("--tp") + 1] == "4" and f"{tmp_path}/model-small-4" in words
    assert "--moe-a2a-backend" not in plain_words and plain_words[-2:] == ["--cuda-graph-backend-decode", "disabled"]
    assert "--moe-a2a-backend deepep --deepep-mode low_latency" in " ".join(ll)
    assert "--cuda-graph-max-bs-decode" in ll and ll[ll.index("--chunked-prefill-size") + 1] == "256"
    assert "--attn-dp-size 4 --moe-a2a-backend deepep_v2 --moe-runner-backend deep_gemm" in " ".join(v2)
    assert list(tmp_path.iterdir()) == []


def test_without_sglang_nothing_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec("sglang") is not None:
        pytest.skip("SGLang is installed: skipped")
    with pytest.raises(SystemExit, match="2"):
        main(["ref", "--work", str(tmp_path)])
    assert "pip install sglang==0.5.23" in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_the_environment_keeps_what_the_user_has_set(tmp_path: Path) -> None:
    run = configurations.parse("ll")
    assert configurations.environment(run, tmp_path, {})["NCCL_EP_TIMEOUT_MS"] == "600000"
    found = configurations.environment(run, tmp_path, {"NCCL_EP_TIMEOUT_MS": "9", "HOME": "/home"})
    assert (found["NCCL_EP_TIMEOUT_MS"], found["HOME"]) == ("9", "/home")
    assert found["SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"] == "256" and "NCCL_CUMEM_ENABLE" not in found
    assert configurations.environment(configurations.parse("ll+nocumem"), tmp_path, {})["NCCL_CUMEM_ENABLE"] == "0"


# ---- the model


def read(file: Path) -> dict[str, torch.Tensor]:
    """As the format of safetensors says."""
    content = bytearray(file.read_bytes())
    (length,) = struct.unpack("<Q", content[:8])
    found, end = {}, 0
    for name, about in json.loads(content[8 : 8 + length]).items():
        begin, end = (8 + length + offset for offset in about["data_offsets"])
        found[name] = torch.frombuffer(content[begin:end], dtype=torch.bfloat16).view(about["shape"])
    assert (8 + length) % 8 == 0 and end == len(content)
    return found


def test_files_have_the_weights_under_hugging_face_s_names(tmp_path: Path) -> None:
    assert not model.is_there(tmp_path, SHAPE)
    total = model.write(tmp_path, SHAPE, CPU)
    assert model.is_there(tmp_path, SHAPE) and not model.is_there(tmp_path, dataclasses.replace(SHAPE, layers=1))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = {file: read(tmp_path / file) for file in set(index["weight_map"].values())}
    found = {name: tensor for tensors in files.values() for name, tensor in tensors.items()}
    assert index["weight_map"] == {name: file for file, tensors in files.items() for name in tensors}
    assert total == index["metadata"]["total_size"] == sum(2 * tensor.numel() for tensor in found.values())
    assert len(found) == 3 + SHAPE.layers * (9 + 3 * SHAPE.experts)
    made = weights.Weights(SHAPE, is_fp8=False).expert(1, 5, CPU)
    own = "model.layers.1.mlp.experts.5."
    assert torch.equal(torch.cat([found[own + "gate_proj.weight"], found[own + "up_proj.weight"]]), made.w13)
    assert torch.equal(found[own + "down_proj.weight"], made.w2)
    assert found["model.layers.0.self_attn.o_proj.weight"].shape == (256, 256)


def test_planted_faults_are_above_the_limit() -> None:
    """Also in a single text, and each on average, too."""
    found = plain.calibration(SHAPE, 2, CPU, client.random_prompts((12,) * 4, seed=2))
    assert set(found["changes"]) == {ROUNDING, *FAULTS} and len(found["scores"]) == 4 and len(found["scores"][0]) == 11
    limit, least = report.score_limit(found), report.least_fault(found)
    assert 0 < limit.mean < least.mean and 0 < limit.most < least.most


# ---- servers


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(launch, "command_of", lambda *words: [sys.executable, "-S", "-c", STAND_IN, *words[2:]])
    monkeypatch.setattr(servers, "STACKS_S", 0)
    monkeypatch.setattr(launch, "FIRST_PORT", 26000)  # a run on this machine has the first ones
    return tmp_path


def run(text: str, logs: Path, start_s: float = 60, run_s: float = 60) -> dict[str, Any]:
    limits = servers.Limits(start_s, run_s)
    [found] = servers.run_group([configurations.parse(text)], Path("model"), 2, logs, limits)
    assert not launch.own_processes(logs / text.replace("+", "-"))
    return found


def test_a_server_is_asked_and_ended(logs: Path) -> None:
    found = run("ref", logs)
    assert (found["word"], found["launcher"]) == ("ok", [])
    assert [len(one) for one in found["tokens"]] == [client.ANSWER] * (client.ALONE + len(client.LENGTHS))
    assert found["scores"] == [[-1.0] * (client.TEXT - 1)] * client.TEXTS
    assert set(found["tokens_per_s"]) == {"1", "32"} and 0 < found["ready_s"] < found["warm_s"]
    assert earlier_reference(logs, Path("model")) == found and earlier_reference(logs, Path("other")) is None


def test_a_server_that_ends_says_why(logs: Path) -> None:
    found = run("ll+graph", logs)
    assert found["word"] == "at its start: RuntimeError: the server ended with code 1"
    assert (found["telling"], found["launcher"]) == (["RuntimeError: no memory"], ["uses the stand-in"])


def test_a_server_ends_whose_time_is_over(logs: Path) -> None:
    begin = time.monotonic()
    assert run("ll+dp", logs, start_s=1)["word"] == "at its start: TimeoutError: the server was not ready within 1 s"
    assert run("normal", logs, start_s=2)["word"].startswith("at the first requests: TimeoutError")
    assert time.monotonic() - begin < 30


def test_servers_start_together_and_are_measured_one_after_the_other(
    logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that does not start holds up no other."""
    events: list[str] = []
    monkeypatch.setattr(client, "warm_up", lambda _: events.append("warm"))

    def measure(one: client.Client) -> dict[str, Any]:
        events.extend(["begins", str(one.answer([7], 1)), "ends"])
        return {"tokens": []}

    monkeypatch.setattr(client, "measure", measure)
    group = [configurations.parse(text) for text in ("ref", "ll+graph", "v2")]
    found = servers.run_group(group, Path("model"), 2, logs, servers.Limits(60, 60))
    assert [one["run"] for one in found] == ["ref", "ll+graph", "v2"]
    assert [one["word"].split(":")[0] for one in found] == ["ok", "at its start", "ok"]
    assert events == ["warm", "warm", "begins", "[8]", "ends", "begins", "[8]", "ends"]
    for one in found:
        folder = logs / one["run"].replace("+", "-")
        assert json.loads((folder / "result.json").read_text()) == one and not launch.own_processes(folder)


def test_lines_that_tell_are_few_and_without_noise(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(
        "[2026 TP0] UserWarning: Error\n[a] RuntimeError: one\n[b] RuntimeError: one\n  File x\nNCCL WARN two\nlast\n"
    )
    assert servers.telling(log) == ["RuntimeError: one", "NCCL WARN two"]
    log.write_text("one\ntwo\n")
    assert servers.telling(log, most=1) == ["two"]


# ---- the comparison

CALIBRATION = {"scores": [[-2.0, -3.0]], "changes": {ROUNDING: [0.01, 0.1], "rank": [0.2, 2.0], "weight": [0.3, 1.0]}}


def result(text: str, scores: list[float | None], tokens: list[int]) -> dict[str, Any]:
    made: dict[str, Any] = {"run": text, "word": "ok", "ready_s": 9.0, "warm_s": 20.0}
    return made | {"tokens": [tokens], "scores": [scores], "tokens_per_s": {"1": 50.0, "32": 900.0}}


REFERENCE = result("ref", [-2.0, -3.0], [1, 2])


def failures(own: dict[str, Any], reference: dict[str, Any] | None = REFERENCE) -> list[str]:
    [row] = report.rows_of([own], reference, CALIBRATION)
    return row.failures


def test_equal_answers_are_right() -> None:
    assert failures(REFERENCE) == [] and failures(result("ll", [-2.05, -3.0], [1, 2])) == []


def test_one_other_token_is_found() -> None:
    assert failures(result("ll", [-2.0, -3.0], [1, 3])) == ["1 of 2 tokens are not the reference's"]


@pytest.mark.parametrize(("score", "most"), [(-2.3, "0.300"), (-2.1, "0.100"), (None, "inf"), (math.nan, "inf")])
def test_other_log_probabilities_are_found(score: float | None, most: str) -> None:
    """Above the limit of one (2.83 times 0.1) or of their mean (2.83 times 0.01), or no number."""
    [message] = failures(result("ll", [score, -3.0], [1, 2]))
    assert f"up to {most}, above 0.0283 and 0.283" in message


def test_what_failed_or_has_no_reference_is_named() -> None:
    assert failures({"run": "ll", "word": "not run"}) == ["not run"]
    assert failures(REFERENCE, None) == ["there is no reference to compare it with"]


def test_the_table_has_all_of_it() -> None:
    wrong = {"run": "normal", "word": "at its start: x", "telling": ["an error"], "launcher": ["NCCL is 2.30.7"]}
    rows = report.rows_of([REFERENCE, result("ll", [-2.05, -3.0], [1, 2]), wrong], REFERENCE, CALIBRATION)
    lines = report.table(rows, CALIBRATION).splitlines()
    assert lines[3].split(" | ")[1:5] == ["ok    ", "2 of 2      ", "0.0250 / 0.050    ", "0.0250 / 0.050  "]
    assert "FAILED normal: at its start: x" in lines and "    | an error" in lines
    assert "crossdock run, normal: NCCL is 2.30.7" in lines
    assert any(
        line.endswith(
            "(0.0100 / 0.100); the planted fault that changes least, in one row of a text in each MoE "
            "layer: 0.2000 / 1.000"
        )
        for line in lines
    )
