# SPDX-License-Identifier: Apache-2.0
"""vLLM end to end on GPUs, over Crossdock's DeepEP classes: pack, run, compare.

Where there is a network, with the Python package for the other machine's Python and its library for GPUs:

    python tests/engines/vllm_e2e pack FOLDER --crossdock PACKAGE

makes parts of at most 60 MiB. Where there are GPUs, with Python 3.12, torch 2.11.0 for CUDA 13 and transformers:

    python3 FOLDER/part1/unpack.py HOME FOLDER/part1 FOLDER/part2 ...
    python3 HOME/programs/vllm_e2e run --plan first --logs LOGS

runs each line of the plan on all ranks and prints a table.
"""
