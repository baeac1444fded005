"""What all tables belong to, and the one that says which version they are."""

from __future__ import annotations

from sqlalchemy import Column, MetaData, Table, Text

metadata = MetaData()

meta = Table("meta", metadata, Column("key", Text, primary_key=True), Column("value", Text, nullable=False))
