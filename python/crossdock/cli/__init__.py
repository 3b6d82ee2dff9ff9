# SPDX-License-Identifier: Apache-2.0
"""The commands of python -m crossdock, one per module: add_arguments(parser) and main(options)."""
