"""Rules of the gate: one file a rule, each a frozen dataclass, a pure function of stored evidence."""
