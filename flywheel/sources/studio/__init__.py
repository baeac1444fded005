"""AgentScope Studio databases, read and never written: rows become spans, spans traces, traces agent replies."""
