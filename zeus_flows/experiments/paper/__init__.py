"""The paper's results, computed anew from traces, each held against what was published."""
