"""Diagnostics: `flywheel doctor` checks an installation, `flywheel audit` compares the ledger with its sources."""
