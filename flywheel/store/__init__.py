"""Flywheel's own state: one database that is the authority on everything.

The functions of this package take a SQLAlchemy connection, so that several of them can share one transaction;
`Store` runs them. Nothing here knows Studio, judges or servers.
"""
