# SPDX-License-Identifier: Apache-2.0
"""The experiment of docs/a2sgd.md: python -m crossdock a2sgd-study."""
