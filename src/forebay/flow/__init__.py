"""Everything that decides: plan, ledger, admission, queues, mixing, simulation. Imports no torch."""
