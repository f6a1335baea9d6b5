"""`python -m lit_qrl.cli` is `lit-qrl`."""

from lit_qrl.cli.main import main

main()
