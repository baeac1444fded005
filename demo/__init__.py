"""The demo: a tiny policy, the traffic it answers and the judge that checks it."""
