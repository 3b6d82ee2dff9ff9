# SPDX-License-Identifier: Apache-2.0
"""A tokenizer without which a server does not start: token 17 is the text "t17"."""

from __future__ import annotations

import json
from pathlib import Path

from vllm_e2e.models import VOCABULARY


def write(model: Path) -> None:
    whitespace = {"type": "WhitespaceSplit"}
    words = {f"t{token}": token for token in range(VOCABULARY)}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": whitespace,
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "t0"},
    }
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0", "eos_token": "t1"}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
