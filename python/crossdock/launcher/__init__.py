# SPDX-License-Identifier: Apache-2.0
"""What makes unchanged programs use this package: crossdock-run (its command is crossdock.cli.run), take_over_nccl_ep
and install_as_deep_ep. The package itself uses own_library, which makes sure of its own library, libraries, loaded and
plugin."""
