"""OTLP/HTTP: an endpoint that stores spans in an inbox, which the Studio reader reads. Replies are unknown here."""
