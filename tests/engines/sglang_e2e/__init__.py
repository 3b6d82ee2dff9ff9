# SPDX-License-Identifier: Apache-2.0
"""SGLang end to end on GPUs, over Crossdock's DeepEP classes.

On a machine with at least two GPUs, with `pip install sglang==0.5.23` and Crossdock's package:

    python tests/engines/sglang_e2e ref ll normal v2 ll+graph

writes a model with random weights, starts a server for each configuration, one after the other, or several at once
(--together), asks all of them the same over HTTP, and compares their answers with those of the first `ref`, which uses
no deep_ep.
"""
