# SPDX-License-Identifier: Apache-2.0
"""The committed measurements: how they are stored, and the tables and pictures that the documents show of them."""
