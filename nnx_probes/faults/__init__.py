"""The fault benchmark: known faults in small real programs, and healthy programs that must stay quiet."""
